"""Measures how evenly streams flow, in a process of its own:
`python -m tests.chaos.pace URL KEY STREAMS COUNT [BODY]`.

The program reads many streams at once, and prints the p50 and p99 of the time between the events of one
stream as JSON, in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from tests.chaos.driver import ROOT
from tests.chaos.report import percentile


async def pace(
    url: str, key: str, num_streams: int, count: int, body: dict[str, Any] | None = None
) -> dict[str, float]:
    """Milliseconds between text events, once all streams have begun: until then many requests arrive
    together, and the p99 of all gaps would be that of each stream's first few. Without a body the scripted
    engine counts; the server was started with the pause between its words."""
    first: list[float] = []
    gaps: list[tuple[float, float]] = []  # each with the time at which it began

    async def one(session: aiohttp.ClientSession) -> None:
        asked = {**(body or {"input": f"count {count}"}), "stream": True}
        async with session.post(f"{url}/v1/responses", json=asked) as reply:
            assert reply.status == 200, await reply.text()
            then = None
            async for line in reply.content:
                if line == b"event: response.output_text.delta\n":
                    now = time.perf_counter()
                    if then is None:
                        first.append(now)
                    else:
                        gaps.append((then, now - then))
                    then = now

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers={"authorization": f"Bearer {key}"}
    ) as session:
        await asyncio.gather(*(one(session) for _ in range(num_streams)))
    steady = [gap for began, gap in gaps if began >= max(first)]
    return {"p50": percentile(steady, 0.5) * 1000, "p99": percentile(steady, 0.99) * 1000}


async def measured(
    url: str, key: str, num_streams: int, count: int, body: dict[str, Any] | None = None
) -> dict[str, float]:
    """`pace`, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.pace", url, key, str(num_streams), str(count),
        json.dumps(body),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    found: dict[str, float] = json.loads(out)
    return found


if __name__ == "__main__":
    url, key, streams, count, body = (*sys.argv[1:], "null")[:5]
    print(json.dumps(asyncio.run(pace(url, key, int(streams), int(count), json.loads(body)))))
