"""`antiphon serve` in a process of its own, for tests of what a process does and of what its end does."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.forking import READY
from tests.support.running import database

ROOT = Path(__file__).parents[2]


@dataclass
class ServerProcess:
    """A server process that takes requests.

    url: where it says that it listens. banner: the line that says so. log: the lines of its standard error,
    as they come.
    """

    child: asyncio.subprocess.Process
    url: str
    banner: str
    log: list[str] = field(default_factory=list)

    def client(self) -> httpx.AsyncClient:
        """A client of it, for `async with`."""
        return httpx.AsyncClient(base_url=self.url, timeout=60)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        self.child.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end; its exit code."""
        return await asyncio.wait_for(self.child.wait(), 20)

    async def printed(self) -> str:
        """The next line of its standard output."""
        assert self.child.stdout is not None
        return (await asyncio.wait_for(self.child.stdout.readline(), 20)).decode()

    async def logs(self, words: str, *, after: int = 0) -> str:
        """Wait for a line of its log with these words, from the line number `after` on."""
        async with asyncio.timeout(30):
            while (found := next((line for line in self.log[after:] if words in line), None)) is None:
                await asyncio.sleep(0.02)
        return found


def free_port() -> int:
    """A port of loopback that nobody listens on now, of those that the kernel gives nobody who asks for any:
    one of these could be another test's before it is used."""
    while True:
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.randrange(10_000, 32_768)))
            port: int = free.getsockname()[1]
            return port


async def listens(port: int) -> None:
    """Wait until a port of loopback takes connections."""
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


@asynccontextmanager
async def server_process(
    data: Path,
    *flags: str,
    engine: str = "scripted",
    house: Path = ROOT,
    env: Mapping[str, str] | None = None,
    code: str | None = None,
    before: Callable[[], None] | None = None,
) -> AsyncIterator[ServerProcess]:
    """A server on a free port, killed at the end.

    data: its data folder, which names its database where that is on PostgreSQL. house: the folder with its
    packages. env: what its environment has besides. code: Python that it runs in place of `antiphon`'s own
    entry. before: called in the child before it begins.
    """
    if house == ROOT and "--db" not in flags:
        await database(data)
    entry = (sys.executable, "-c", code) if code else (READY, "-m", "server.cli")
    child = await asyncio.create_subprocess_exec(
        *(*entry, "serve", "--engine", engine, "--port", "0", "--data", str(data)),
        *flags,
        cwd=house,
        env={**os.environ, "PYTHONPATH": str(house), **(env or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=before,
    )
    assert child.stdout is not None and child.stderr is not None
    log: list[str] = []

    async def read(stream: asyncio.StreamReader) -> None:
        async for line in stream:
            log.append(line.decode().rstrip("\n"))

    reading = asyncio.create_task(read(child.stderr))
    try:
        banner = (await asyncio.wait_for(child.stdout.readline(), 60)).decode()
        if "listens on" not in banner:
            await reading
            raise AssertionError(f"the server did not start: {banner}{log}")
        yield ServerProcess(child, banner.split("listens on ")[1].split()[0], banner, log)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        await reading
