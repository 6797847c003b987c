"""A crowd of streams, read by a process of its own that does as little as it can.

`serving` runs the server that they come from, as `antiphon serve` would. `read` runs this module as a
program, which prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop

if TYPE_CHECKING:
    from engine import ScriptedEngine
    from tests.support.running import Running

BEGINNING = b"HTTP/1.1 200"
EVENT = b"event: response.output_text.delta"
ENDS = (b"event: response.completed", b"event: response.incomplete")


@dataclass(frozen=True, slots=True)
class Crowd:
    """What a crowd has read: text deltas, and the seconds from its first request to its last end."""

    events: int
    seconds: float


async def read(
    url: str,
    streams: int,
    prompt: str,
    *,
    store: bool,
    apart_s: float = 0.0,
    fields: Mapping[str, Any] | None = None,
) -> Crowd:
    """Have `streams` streams read to their ends, begun `apart_s` seconds after each other. fields: more of
    each request."""
    argv = (
        sys.executable,
        "-m",
        "benchmarks.crowd",
        url,
        str(streams),
        json.dumps({**(fields or {}), "input": prompt, "stream": True, "store": store}),
        str(apart_s),
    )
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError("the crowd has ended early, and said why")
    return Crowd(**json.loads(out))


@asynccontextmanager
async def serving(engine: ScriptedEngine | None = None) -> AsyncIterator[Running]:
    """A server on SQLite in a new folder, with a scripted engine."""
    from tests.support.running import live_app  # not in the program

    with tempfile.TemporaryDirectory() as folder:
        async with live_app(Path(folder), engine, watched=False) as running:
            gc.freeze()
            yield running


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a benchmark on the loop, with the switch interval and the garbage collection of a server."""
    from server.process.process_ends import tune_process  # not in the program

    tune_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


# ------------------------------------------------------------------------------------------------------------
# The program


class _Stream(asyncio.Protocol):
    """Counts what comes back on one connection."""

    def __init__(self) -> None:
        self._tail, self._begun = b"", False
        self.events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        if not self._begun and not data.startswith(BEGINNING):
            self._fail(f"the server refused: {data.decode(errors='replace')}")
        self._begun = True
        self.events += data.count(EVENT)
        self._tail = data[1 - len(EVENT) :] if EVENT[:1] in data[1 - len(EVENT) :] else b""
        if any(end in data for end in ENDS):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server has closed a stream before its end")

    def _fail(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(why))

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _crowd(url: str, streams: int, body: bytes, apart_s: float) -> None:
    head = (
        "POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    host, port = urlsplit(url).hostname, urlsplit(url).port
    loop = asyncio.get_running_loop()
    began = time.perf_counter()

    async def one(index: int) -> int:
        await asyncio.sleep(index * apart_s)
        transport, stream = await loop.create_connection(_Stream, host, port)
        transport.write(head + body)
        await stream.ended
        transport.close()
        return stream.events

    events = await asyncio.gather(*map(one, range(streams)))
    print(json.dumps({"events": sum(events), "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    url, streams, body, apart_s = sys.argv[1:]
    gc.set_threshold(5_000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_crowd(url, int(streams), body.encode(), float(apart_s)))
