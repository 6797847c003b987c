"""The place of one server process among several at one port: what it shares with the others.

The process that started them accepts the connections and hands each to the server that has the fewest open.
Metrics are told over sockets in a folder that only this user may enter, so that whichever server is asked can
show those of all.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from server.telemetry import Telemetry

ENGINE = "engine"
"""The name of the engine's process."""

REFUSED = 2
"""The exit code of a process that does not start."""

SIBLING_S = 1.0
"""How long a scrape waits for another process; one that does not answer is missing on the page."""


def server_name(index: int) -> str:
    """The name of a server process, from 0 on."""
    return f"server-{index}"


class HandedConnections:
    """Stands where a process has its listening socket: accepts connections that another one has accepted."""

    def __init__(self, channel: socket.socket) -> None:
        """channel: a stream socket, over which a byte comes with each connection."""
        channel.setblocking(False)
        channel.set_inheritable(False)
        self._channel = channel
        self._num_reported = 0

    def fileno(self) -> int:
        """It is readable when there is a connection."""
        return self._channel.fileno()

    def accept(self) -> tuple[socket.socket, None]:
        """The next connection. Raises BlockingIOError where there is none."""
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not data:
            raise OSError("nobody hands out connections any more")
        os.set_inheritable(descriptors[0], False)
        return socket.socket(fileno=descriptors[0]), None

    def report_closed(self, number: int) -> None:
        """So many of the connections that came so far are closed."""
        if number > self._num_reported:
            with suppress(OSError):  # told at the next time
                self._num_reported += self._channel.send(b"-" * (number - self._num_reported))

    def close(self) -> None:
        """Take no more."""
        self._channel.close()


@dataclass(slots=True)
class Seat:
    """One server process among several. url: where all of them are reached. admin_token: of all of them.
    hosted: whether there is an engine's process behind them."""

    index: int
    num_servers: int
    folder: Path
    url: str
    admin_token: str
    handed: HandedConnections
    hosted: bool = True
    _telling: asyncio.Server | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """What logs and metrics call it."""
        return server_name(self.index)

    @property
    def is_first(self) -> bool:
        """Whether it speaks for all where one is to."""
        return self.index == 0

    @property
    def engine_socket(self) -> Path:
        """Where the engine's process listens."""
        return engine_socket(self.folder)

    @property
    def shelf_socket(self) -> Path:
        """Where the process listens that keeps the models of the file."""
        return shelf_socket(self.folder)

    def announce_database(self, id: str | None) -> None:
        """Tell who started this process which database it has opened."""
        os.write(1, orjson.dumps({"database": id}) + b"\n")

    def announce(self, banner: str) -> None:
        """Tell who started this process that it is ready."""
        announce(banner)

    # -- metrics ---------------------------------------------------------------------------------------------

    async def show_metrics(self, telemetry: Telemetry) -> None:
        """Tell the other processes this one's metrics, when they ask."""
        self._telling = await tell_metrics(self.folder, self.name, telemetry.own_page)

    async def metrics(self, telemetry: Telemetry) -> bytes:
        """One page of all processes. A process that does not answer is missing, and `antiphon_process_up`
        says so."""
        names = [*([ENGINE] if self.hosted else []), *map(server_name, range(self.num_servers))]
        others = [name for name in names if name != self.name]
        told = dict(zip(others, await asyncio.gather(*map(self._ask, others)), strict=True))
        told[self.name] = telemetry.own_page()
        up = "".join(f'antiphon_process_up{{process="{name}"}} {int(bool(told[name]))}\n' for name in names)
        page = await asyncio.to_thread(telemetry.page_of_all, told, self.name)
        help = "# HELP antiphon_process_up Whether a process answers.\n# TYPE antiphon_process_up gauge\n"
        return page + (help + up).encode()

    async def _ask(self, name: str) -> bytes:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(SIBLING_S):
                reader, writer = await asyncio.open_unix_connection(_metrics_socket(self.folder, name))
                try:
                    return await reader.read()
                finally:
                    writer.close()
        return b""

    async def close(self) -> None:
        """Tell the others nothing more."""
        if self._telling is not None:
            self._telling.close()


def engine_socket(folder: Path) -> Path:
    """Where the engine's process listens, for servers of this folder."""
    return folder / "engine.sock"


def shelf_socket(folder: Path) -> Path:
    """Where the models of the file are asked for, by servers of this folder."""
    return folder / "shelf.sock"


def announce(banner: str) -> None:
    """Tell who started this process that it is ready, and what it would print."""
    os.write(1, orjson.dumps({"ready": banner}) + b"\n")


def announce_refusal(*reasons: str) -> int:
    """Tell who started this process why it does not start; returns the exit code that says so. Several
    processes often have the same reason, which only who started them can print once."""
    os.write(1, orjson.dumps({"refused": reasons}) + b"\n")
    return REFUSED


async def tell_metrics(folder: Path, name: str, page: Callable[[], bytes]) -> asyncio.Server:
    """Have a process tell a page of metrics to every process that connects."""

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(page())
            await writer.drain()
        writer.close()

    path = _metrics_socket(folder, name)
    Path(path).unlink(missing_ok=True)
    server = await asyncio.start_unix_server(tell, path)
    os.chmod(path, 0o600)
    return server


def _metrics_socket(folder: Path, name: str) -> str:
    return str(folder / f"metrics-{name}.sock")
