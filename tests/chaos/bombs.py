"""Row 12: shapes that are meant to be expensive, while others stream.

Owns: the bombs, how fast each is refused, and what neighbours and memory have of them. Refuses to know: why a
bomb is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine import Shape
from tests.chaos.driver import Server, free_port, serving
from tests.chaos.history import Json
from tests.chaos.pace import measured
from tests.chaos.report import Form, Report, percentile, row
from tests.chaos.scene import KEYS, MINE, THEIRS
from tests.engine.test_shapes import BOMBS, LOOKING

STREAMS, PAUSE_S = 8, 0.1
_FIELDS = {"json": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}


@dataclass(slots=True)
class Thrown:
    """What came of the bombs: seconds of each refusal, by bomb; how many did run."""

    refused_s: dict[str, list[float]] = field(default_factory=dict)
    ran: int = 0
    wrong: list[str] = field(default_factory=list)


@row(
    "12",
    "grammar bombs: nested quantifiers, 10,000 `anyOf`, recursive or remote `$ref`, schema flood",
    "400 within 250 ms; neighbours' ITL p99 +<= 10 %; cache bounded",
    short=False,
)
async def bombs(form: Form, report: Report) -> None:
    """Streams alone, then beside bombs: one of another tenant every 100 ms, each third a schema that nobody
    sent before, each third one that runs for as long as it may."""
    pairs, count = form.of(1, 5), form.of(150, 400)
    draw = form.draw("bombs")
    server = Server(form.folder / "data", "--log-level", "error", *KEYS, port=free_port(draw))
    body = {"input": "Tell me a story.", "max_output_tokens": count, "min_tokens": count}
    thrown, ratios, medians = Thrown(), [], []
    async with serving(server), httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        client.headers["authorization"] = f"Bearer {THEIRS}"
        throwing = _throws(draw)
        for _, shape in itertools.islice(_throws(draw), 60):  # what is read or built but once
            await client.post("/v1/chat/completions", json=_request(shape))
        await measured(server.url, MINE, STREAMS, count, body)  # which touches the pages of the KV cache
        before = server.rss()
        for _ in range(pairs):
            alone = await measured(server.url, MINE, STREAMS, count, body)
            flood = asyncio.create_task(_flood(client, throwing, thrown))
            beside = await measured(server.url, MINE, STREAMS, count, body)
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
            ratios.append(beside["p99"] / alone["p99"])
            medians.append(beside["p50"] / alone["p50"])
            report.so_far(f"p99 {alone['p99']:.1f} ms alone, {beside['p99']:.1f} ms beside")
        grown = (server.rss() - before) / 2**20
    times = [seconds for each in thrown.refused_s.values() for seconds in each]
    slowest = max(thrown.refused_s, key=lambda name: statistics.median(thrown.refused_s[name]))
    change = statistics.median(ratios) - 1
    refusals = (
        f"{statistics.median(times) * 1000:.0f} ms (median), {percentile(times, 0.99) * 1000:.0f} ms (p99)"
    )
    report.figure(f"{len(times)} refused in {refusals}, slowest {slowest!r}; {thrown.ran} ran")
    each = ", ".join(f"{ratio - 1:+.0%}" for ratio in ratios)
    report.figure(
        f"ITL of {STREAMS} streams beside them, {pairs} pairs: p99 {change:+.0%} (each {each}), "
        f"median {statistics.median(medians) - 1:+.0%}; memory {grown:+.0f} MiB"
    )
    report.breaks(thrown.wrong)
    report.holds(grown <= 128, f"memory grew by {grown:.0f} MiB")
    if form.full:
        worst = statistics.median(thrown.refused_s[slowest])
        report.holds(worst <= 0.25, f"{slowest!r} is refused in {worst * 1000:.0f} ms")
        report.holds(change <= 0.10, f"the neighbours' ITL p99 grew by {change:.0%}")


def _throws(draw: random.Random) -> Iterator[tuple[str, Shape]]:
    """Names of bombs ("" for what may run) and their shapes, without end."""
    while True:
        yield draw.choice([(name, _shape(bomb)) for name, bomb in BOMBS.items()])
        names = [f"p{draw.randrange(10**9)}" for _ in range(20)]
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        yield "", Shape("json", json.dumps(schema))
        yield "", draw.choice(LOOKING)


def _shape(bomb: Shape | Json) -> Shape:
    return bomb if isinstance(bomb, Shape) else Shape("json", json.dumps(bomb))


def _request(shape: Shape) -> dict[str, Any]:
    source = json.loads(shape.source) if shape.kind == "json" else shape.source
    asked = [{"role": "user", "content": "Go."}]
    return {"messages": asked, "max_tokens": 24, "temperature": 1.5, _FIELDS[shape.kind]: source}


async def _flood(client: httpx.AsyncClient, throws: Iterator[tuple[str, Shape]], thrown: Thrown) -> None:
    """One after another is begun, whatever became of the last; until cancelled."""
    async with asyncio.TaskGroup() as group:
        for name, shape in throws:
            group.create_task(_throw(client, name, shape, thrown))
            await asyncio.sleep(PAUSE_S)


async def _throw(client: httpx.AsyncClient, name: str, shape: Shape, thrown: Thrown) -> None:
    body = json.dumps(_request(shape)).encode()
    began = time.perf_counter()
    reply = await client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    took = time.perf_counter() - began
    if name and reply.status_code == 400:
        thrown.refused_s.setdefault(name, []).append(took)
    elif not name and reply.status_code == 200:
        thrown.ran += 1
    else:
        thrown.wrong.append(f"{name or shape.source[:60]!r}: {reply.status_code} {reply.text[:200]}")
