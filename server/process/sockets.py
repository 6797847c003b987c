"""The listening socket: accepts connections up to a limit, and turns away those beyond it with a 503.

A process that has used up its descriptors cannot open its database's files either, so connections leave some
over. They are counted where they are accepted: by the time a protocol hears of its connection, a burst of
others can have taken every descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections import deque
from collections.abc import Callable

from server.errors import ApiError
from server.process.seat import HandedConnections
from server.process.tls import Tls

log = logging.getLogger("antiphon")

RESERVED = 128
"""Descriptors that are not for clients: the database's connections and files, the engine's devices,
webhooks, and those that are being turned away."""

FEWEST = 16
"""Connections that are taken even where that many descriptors are not left."""

ENOUGH = 1 << 20
"""What the limit is raised to where the hard limit is none."""

BATCH = 64
"""Connections accepted before the event loop goes on with other work."""

PAUSE_S = 0.2
"""How long nothing is accepted after there was no descriptor for it."""

TURNED_AWAY_S = 1.0
MAX_TURNED_AWAY = 32
"""How long, and how many at once, refused connections stay open for their clients to read why."""


def raise_descriptor_limit() -> None:
    """Raise the process's limit of open descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # macOS has another limit, which it tells nobody
            log.warning("the limit of open descriptors stays at %d: %s", soft, error)


def room(*, each: int = 1) -> int:
    """How many connections the limit of descriptors leaves room for, `each` of which takes so many."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = ENOUGH
    in_use = len(os.listdir("/dev/fd"))
    return max(FEWEST, (limit - in_use - RESERVED) // each)


class Listener:
    """Accepts from one listening socket, up to a number of open connections. It stands where uvicorn has an
    asyncio.Server."""

    def __init__(
        self,
        sock: socket.socket | HandedConnections,
        protocol: Callable[[], asyncio.Protocol],
        *,
        num_open: Callable[[], int],
        max_open: int,
        tls: Tls | None = None,
        handshake_timeout_s: float = 15.0,
    ) -> None:
        """num_open: connections that protocols have taken over and not lost yet. handshake_timeout_s: how
        long a client may take until it can be understood, where there is TLS."""
        self._sock = sock
        self._protocol = protocol
        self._num_open = num_open
        self._max_open = max_open
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._turned_away: deque[socket.socket] = deque()
        self._full = False
        self._closed = False
        self._num_accepted = 0
        self._listen()

    def close(self) -> None:
        """Accept no more; connections stay."""
        self._closed = True
        self._loop.remove_reader(self._sock)
        while self._turned_away:
            self._turned_away.popleft().close()

    def report(self) -> None:
        """Tell who hands out connections, where somebody does, how many of them are closed by now."""
        if isinstance(self._sock, HandedConnections):
            held = self._num_open() + len(self._opening) + len(self._turned_away)
            self._sock.report_closed(self._num_accepted - held)

    async def wait_closed(self) -> None:
        """Wait until connections that were accepted before have their protocols."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                conn, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                log.error("no connection can be accepted for now: %s", error.strerror)
                self._loop.remove_reader(self._sock)
                self._loop.call_later(PAUSE_S, self._listen)
                return
            conn.setblocking(False)
            self._num_accepted += 1
            if self._num_open() + len(self._opening) < self._max_open:
                self._full = False
                task = self._loop.create_task(self._open(conn))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
            else:
                self._turn_away(conn)

    async def _open(self, conn: socket.socket) -> None:
        try:
            conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._protocol, conn)
            else:
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    conn,
                    ssl=self._tls.context,
                    ssl_handshake_timeout=self._handshake_timeout_s,
                )
        except OSError:  # gone again, or no TLS
            conn.close()

    def _turn_away(self, conn: socket.socket) -> None:
        """Say 503 and close, a little later: closing at once would take the answer from its reader."""
        if not self._full:
            self._full = True
            log.warning("%d connections are open, which is the most; others are turned away", self._max_open)
        with contextlib.suppress(OSError):
            if self._tls is None:
                conn.send(_FULL)
            conn.shutdown(socket.SHUT_WR)
        self._turned_away.append(conn)
        self._loop.call_later(TURNED_AWAY_S, self._forget, conn)
        if len(self._turned_away) > MAX_TURNED_AWAY:
            self._turned_away.popleft().close()

    def _forget(self, conn: socket.socket) -> None:
        if conn in self._turned_away:
            self._turned_away.remove(conn)
            conn.close()


def _full() -> bytes:
    error = ApiError(503, "Too many connections are open. Try again shortly.", code="too_many_connections")
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"retry-after: 1\r\ncontent-length: {len(error.body())}\r\n\r\n"
    )
    return head.encode() + error.body()


_FULL = _full()
