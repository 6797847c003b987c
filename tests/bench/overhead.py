"""What storing costs, beside not storing, in one run: `python -m tests.bench.overhead`.

64 streams of a scripted engine with no model behind it, the client in a process of its own, `store=true` and
`store=false` in turn. Prints the processor time of the event loop's thread per event (it carries the run
loop, the
assembler, the journal, the feed and the sending; with a model the engine's thread shares the processor with
it) and
the throughput of stored streams as a share of that of unstored ones.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from tests.running import live_app

STREAMS = 64
COUNT = 150
PAIRS = 4


async def client(url: str, store: bool) -> None:
    """Read STREAMS streams to their ends at once; prints events and seconds as JSON."""

    async def one(session: aiohttp.ClientSession) -> int:
        body = {"input": f"count {COUNT}", "stream": True, "store": store}
        events = 0
        async with session.post(f"{url}/v1/responses", json=body) as reply:
            async for line in reply.content:
                events += line.startswith(b"event: response.output_text.delta")
        return events

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        events = await asyncio.gather(*(one(session) for _ in range(STREAMS)))
        print(json.dumps({"events": sum(events), "seconds": time.perf_counter() - began}))


async def measure(url: str, store: bool) -> tuple[float, float]:
    """(microseconds of loop thread per event, events per second)."""
    before = time.thread_time()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.overhead", url, str(int(store)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    spent = time.thread_time() - before
    result = json.loads(out)
    return spent / result["events"] * 1e6, result["events"] / result["seconds"]


async def main() -> None:
    """Interleaved pairs; medians."""
    stored: list[tuple[float, float]] = []
    unstored: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with live_app(Path(folder)) as running:
            await measure(running.base_url, True)
            for _ in range(PAIRS):
                stored.append(await measure(running.base_url, True))
                unstored.append(await measure(running.base_url, False))
    for name, rows in (("store=true", stored), ("store=false", unstored)):
        cost, rate = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:12} {cost:6.1f} us of the loop's thread per event, {rate:8.0f} events/s")
    ratio = statistics.median(a[1] / b[1] for a, b in zip(stored, unstored, strict=True))
    print(f"stored streams run at {ratio:.0%} of unstored ones")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(client(sys.argv[1], sys.argv[2] == "1"))
    else:
        asyncio.run(main())
