"""Which WebSockets are open: how many, what went over them, and their end when the process drains."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

MAX_KEPT_BYTES = 256 << 20
"""What the sockets of this process together keep of responses that are not stored."""


class OpenSocket(Protocol):
    """One open WebSocket."""

    def go_away(self) -> None:
        """Take no new work, end what is under way, and close then."""


class OpenSockets:
    """The open WebSockets of one process."""

    def __init__(self, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._open: set[OpenSocket] = set()
        self._none = asyncio.Event()
        self._none.set()
        self._draining = False
        self.num_received = 0
        self.num_sent = 0
        self.kept = KeptBytes(max_kept_bytes)

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, socket: OpenSocket) -> None:
        """A socket was accepted."""
        self._open.add(socket)
        self._none.clear()
        if self._draining:  # it was let in just before
            socket.go_away()

    def closed(self, socket: OpenSocket) -> None:
        """A socket is gone."""
        self._open.discard(socket)
        if not self._open:
            self._none.set()

    def drain(self) -> None:
        """Have all of them go away, also those that are yet to be opened."""
        self._draining = True
        for socket in tuple(self._open):
            socket.go_away()

    async def all_closed(self) -> None:
        """Wait until none is open."""
        await self._none.wait()

    def readings(self) -> dict[str, float]:
        """For metrics."""
        return {
            "connections": len(self._open),
            "frames_received_total": self.num_received,
            "frames_sent_total": self.num_sent,
            "kept_bytes": self.kept.num_bytes,
        }


class KeptBytes:
    """What is kept in memory by several that share a limit: what was used longest ago goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[object, tuple[int, Callable[[], None]]] = OrderedDict()
        self.num_bytes = 0

    def keep(self, key: object, num_bytes: int, drop: Callable[[], None]) -> None:
        """Count what is kept under a key. drop: called when it has to go for the sake of others."""
        self.let_go(key)
        self._held[key] = num_bytes, drop
        self.num_bytes += num_bytes
        while self.num_bytes > self._limit:
            oldest, (_, drop_it) = next(iter(self._held.items()))
            self.let_go(oldest)
            drop_it()

    def used(self, key: object) -> None:
        """What is kept under a key was needed just now."""
        self._held.move_to_end(key)

    def let_go(self, key: object) -> None:
        """Nothing is kept under a key any more."""
        num_bytes, _ = self._held.pop(key, (0, None))
        self.num_bytes -= num_bytes
