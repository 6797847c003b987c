"""Server processes and their clients, with a record of everything that happened.

A server is started, killed, paused and stopped on a port that stays its own. Clients come back after every
cut with the last number they saw. Both write what they did and saw into a `History`, which the checker
reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tests.chaos.history import History, Json, Read, Seen
from tests.support.forking import READY
from tests.support.schema import lay_schema

ROOT = Path(__file__).parents[2]
START_S = 300.0  # how long a server may take to say that it listens before the harness gives up
PATIENCE_S = 90.0  # how long a client tries before a request counts as one that never finished
PAUSE_S = 0.05

CUT = (aiohttp.ClientError, OSError, TimeoutError)
"""What a client sees of a server that dies."""

TERMINAL = re.compile(rb"^event: response\.(completed|incomplete|failed|cancelled)$", re.MULTILINE)


def free_port(draw: random.Random) -> int:
    """A port that nobody listens on and that the kernel gives to no client, so that it stays free over a
    kill.
    """
    while True:
        port = draw.randrange(12_000, 30_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))
            return port


# ------------------------------------------------------------------------------------------------------------
# Servers


class Server:
    """One server process at a time, on a folder and a port that outlive it.

    flags: of `antiphon serve`, beyond port and data. code: a program to run instead of the server's own. env:
    more of the environment.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        port: int,
        code: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.up = (
            asyncio.Event()
        )  # the process has said that it listens, and nobody has done anything to it since
        self.started_in: list[float] = []  # seconds from each spawn to the line that says that it serves
        self.spawned_at = 0.0
        command = [sys.executable, "-c", code] if code else [READY, "-m", "server.cli"]
        self._argv = [*command, "serve", "--port", str(port), "--data", str(folder), *flags]
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._said: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    async def spawn(self) -> None:
        """Start a process, without waiting for it."""
        await lay_schema(self.folder)
        log = (self.folder / "log.txt").open("ab")
        self.spawned_at = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, cwd=ROOT, env=self._env, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        log.close()

    async def start(self) -> float:
        """Start a process and wait until it serves; seconds that it took."""
        await self.spawn()
        return await self.listening()

    async def listening(self) -> float:
        """Wait until the spawned process serves; seconds since its spawn. AssertionError if it ends."""
        assert self._process is not None and self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        took = time.monotonic() - self.spawned_at
        assert b"listens on" in line, f"the server did not start: {self.log()[-2000:]}"
        self.started_in.append(took)
        self.up.set()
        return took

    def send(self, number: signal.Signals) -> None:
        """A signal. After SIGKILL and SIGSTOP clients wait; after SIGCONT they come back."""
        assert self._process is not None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            self.up.clear()
        self._process.send_signal(number)
        if number == signal.SIGCONT:
            self.up.set()

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.send(signal.SIGKILL)
        await self.ended()

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the process; its exit code."""
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            code = await self._process.wait()
        self.up.clear()
        return code

    @property
    def running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.returncode is None

    def log(self) -> str:
        """What its processes wrote to standard error."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def rss(self) -> int:
        """Resident memory in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    async def close(self) -> None:
        """End the process, however it is."""
        if self.running and self._process is not None:
            self._process.kill()
            await self._process.wait()
        self.up.clear()


@asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    """Servers that are started side by side, and gone afterwards."""
    try:
        await asyncio.gather(*(server.start() for server in servers))
        yield
    finally:
        await asyncio.gather(*(server.close() for server in servers))


# ------------------------------------------------------------------------------------------------------------
# Faults of the disk and the clock


class Faults:
    """Switches of `faults.c` for one server folder; see there for what each does."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        library = build_faults()
        self.env = {"LD_PRELOAD": str(library), "FAULTS": str(folder), "FAULTS_ROOT": str(disk)}

    def on(self, name: str, value: str = "") -> None:
        """Switch a fault on, at once and whole."""
        fresh = self._folder / f"{name}.new"
        fresh.write_text(value)
        fresh.rename(self._folder / name)

    def off(self, name: str) -> None:
        """Switch it off."""
        (self._folder / name).unlink()

    @property
    def shadow(self) -> Path:
        """The folder that holds each file as it was last synced; making it switches that on."""
        path = self._folder / "shadow"
        path.mkdir(exist_ok=True)
        return path


def build_faults() -> Path:
    """The library of faults, compiled once per version. AssertionError where there is no compiler."""
    source = Path(__file__).with_name("faults.c")
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"antiphon-faults-{os.getuid()}-{name}.so"
    if not library.exists():
        assert can_compile(), "a C compiler is needed"
        fresh = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", fresh, source, "-ldl"], check=True)
        fresh.rename(library)
    return library


def can_compile() -> bool:
    """Whether this machine can make the library of faults."""
    return sys.platform == "linux" and shutil.which("cc") is not None


# ------------------------------------------------------------------------------------------------------------
# Clients


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply that is no stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        """The body."""
        found: Json = orjson.loads(self.body)
        return found


class Refused(AssertionError):
    """A reply that no client should get for what it asked."""

    def __init__(self, what: str, status: int, body: bytes) -> None:
        super().__init__(f"{what}: {status} {body[:500]!r}")
        self.status = status
        self.body = body


class Client:
    """One tenant's client of any of some servers; whatever happens to them, it comes back.

    key: its API key. draw: decides which server it asks, and when it reads a stream again from the start.
    """

    def __init__(
        self, servers: Sequence[Server], history: History, draw: random.Random, *, key: str | None = None
    ) -> None:
        self.history = history
        self.num_refused = 0  # how often it was told to come back later
        self._servers = servers
        self._draw = draw
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=PATIENCE_S),
            headers=headers,
            auto_decompress=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def url(self) -> str:
        """A server that is up, waited for."""
        while not (up := [server for server in self._servers if server.up.is_set()]):
            waits = [asyncio.ensure_future(server.up.wait()) for server in self._servers]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return self._draw.choice(up).url

    # -- replies ---------------------------------------------------------------------------------------------

    async def once(
        self, method: str, path: str, body: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One attempt. Raises what is in CUT."""
        url = await self.url()
        async with self._session.request(method, url + path, json=body, headers=headers) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    async def sure(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        key: str | None = None,
        ok: Sequence[int] = (200,),
    ) -> Reply:
        """Attempts until there is an answer that is not "later". key: the same `Idempotency-Key` on each."""
        headers = {"idempotency-key": key} if key else None
        while True:
            try:
                reply = await self.once(method, path, body, headers)
            except CUT:
                await asyncio.sleep(PAUSE_S)
                continue
            if reply.status in ok:
                return reply
            if not self._later(reply.status, reply.headers):
                raise Refused(f"{method} {path}", reply.status, reply.body)
            await asyncio.sleep(PAUSE_S)

    async def get(self, response_id: str) -> Json:
        """A response as it stands; one that has ended is an acknowledgement."""
        found = (await self.sure("GET", f"/v1/responses/{response_id}")).json
        if found["status"] not in ("queued", "in_progress"):
            self.history.of(response_id).acknowledge("ended", found)
        return found

    async def replay(self, response_id: str) -> bytes:
        """The stream of a response that has ended, read once more from the start; not part of its history."""
        return (await self.sure("GET", f"/v1/responses/{response_id}?stream=true")).body

    async def create(self, body: Json, *, key: str | None = None) -> Seen:
        """A response that is not streamed: it has ended, or (background) has begun."""
        found = (await self.sure("POST", "/v1/responses", body, key=key)).json
        seen = self.history.of(found["id"])
        seen.acknowledge("created" if body.get("background") else "ended", found)
        return seen

    async def outputs(self, response_id: str, outputs: Mapping[str, str]) -> None:
        """Tool outputs for a waiting run, until they are acknowledged."""
        listed = [{"call_id": call_id, "output": output} for call_id, output in outputs.items()]
        await self.sure("POST", f"/v1/responses/{response_id}/tool_outputs", {"tool_outputs": listed})
        for each in outputs.items():
            self.history.of(response_id).acknowledge("output", each)

    # -- streams ---------------------------------------------------------------------------------------------

    async def stream(self, body: Json, *, key: str | None = None) -> Seen:
        """A streamed response, read to its end, across every cut.

        A request of which nothing was seen is made again. One that is not stored ends with its connection.
        """
        headers = {"idempotency-key": key} if key else None
        while True:
            read = Read()
            request = self._session.post(
                await self.url() + "/v1/responses", json={**body, "stream": True}, headers=headers
            )
            ended = await self._read(request, read, stored=body.get("store", True))
            if read.response_id is not None:
                seen = self.history.of(read.response_id)
                if not ended and seen.stored:
                    await self.resume(seen)
                return seen
            await asyncio.sleep(PAUSE_S)

    async def resume(self, seen: Seen) -> None:
        """Read a stored response from behind the last event seen to its end, across every cut."""
        while True:
            again = self._draw.random() < 0.1
            read = Read(-1 if again else seen.last)
            url = f"{await self.url()}/v1/responses/{seen.id}?stream=true&starting_after={read.after}"
            if await self._read(self._session.get(url), read, seen):
                return
            await asyncio.sleep(PAUSE_S)

    async def _read(self, request: Any, read: Read, seen: Seen | None = None, *, stored: bool = True) -> bool:
        """One connection's share of a stream; True once there is nothing behind it."""
        if seen is not None:
            seen.reads.append(read)
        try:
            async with request as reply:
                if reply.status != 200:
                    body = await reply.read()
                    if self._later(reply.status, reply.headers):
                        return False
                    raise Refused("stream", reply.status, body)
                async for data in reply.content.iter_any():
                    read.take(data)
                    if seen is None and (response_id := read.response_id) is not None:
                        seen = self.history.of(response_id)
                        seen.stored = stored
                        seen.reads.append(read)
        except CUT:
            return False
        assert not read.data or TERMINAL.search(read.data), "I3 a stream ended as if it were whole"
        return True

    def _later(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether to try again: it was told to, or the server is busy, about to go, or cannot write."""
        later = headers.get("x-should-retry") == "true" or status in (429, 503)
        self.num_refused += later
        return later
