"""Row 12: schemas and grammars that are meant to be expensive, sent while other clients stream.

Measured are how fast each of them is refused, and what it costs the other streams and the memory.
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
from functools import cache
from typing import Any

import httpx

from engine import Shape
from tests.chaos.driver import Server, free_port, serving
from tests.chaos.history import Json
from tests.chaos.pace import measured
from tests.chaos.report import Form, Report, percentile, row
from tests.chaos.scene import KEYS, MINE, THEIRS
from tests.engine.structured.isolation.test_constraints import ENDLESS, KILLERS
from tests.engine.structured.test_shapes import BOMBS, LOOKING

STREAMS, PAUSE_S = 8, 0.1
_FIELDS = {
    "json": "guided_json",
    "choice": "guided_choice",
    "regex": "guided_regex",
    "lark": "guided_grammar",
}
_JSON = ("json", "choice")  # kinds whose source is JSON
_DEADLY = [
    *((name, killer.answer) for name, killer in KILLERS.items() if killer.answer is not None),
    ("an endless text, late", Shape("lark", ENDLESS % 20)),
]
"""What would end or hang the process that compiles or steps it."""

JSON = {"content-type": "application/json"}


@dataclass(slots=True)
class Thrown:
    """What came of the bombs: seconds of each refusal, by bomb; how many did run."""

    refused_s: dict[str, list[float]] = field(default_factory=dict)
    ran: int = 0
    wrong: list[str] = field(default_factory=list)


@row(
    "12",
    "grammar bombs: nested quantifiers, 10,000 `anyOf`, recursive or remote `$ref`, schema flood; "
    "grammars that kill or hang whatever compiles or steps them",
    "400 within 250 ms; neighbours' ITL p99 +<= 10 %; cache bounded",
    short=False,
)
async def bombs(form: Form, report: Report) -> None:
    """Streams beside another tenant's requests, one every 100 ms: each fourth a bomb, each fourth a killer
    (some of which nobody sent before), each fourth with a new schema, each fourth with one that runs for as
    long as it may. Then beside the same without bombs and schemas: what those cost is the difference."""
    pairs, count = form.of(1, 15), form.of(150, 1000)
    draw = form.draw("bombs")
    server = Server(form.folder / "data", "--log-level", "error", *KEYS, port=free_port(draw))
    body = {"input": "Tell me a story.", "max_output_tokens": count, "min_tokens": count}
    thrown, plain, ratios, medians, alone = Thrown(), Thrown(), [], [], []
    for bomb in BOMBS.values():
        _request(_shape(bomb), shaped=True)  # writing a large one would take time from the streams
    async with serving(server), httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        client.headers["authorization"] = f"Bearer {THEIRS}"
        throwing = _throws(draw)
        for _, shape in itertools.islice(_throws(draw), 60):  # what is read or built but once
            await client.post("/v1/chat/completions", content=_request(shape, shaped=True), headers=JSON)
        grown = {True: 0, False: 0}  # the KV cache's pages, and what responses leave, among it
        for number in range(pairs):
            alone.append((await measured(server.url, MINE, STREAMS, count, body))["p99"])
            beside = {}
            for shaped in (number % 2 == 0, number % 2 == 1):
                before = server.rss()
                flood = asyncio.create_task(_flood(client, throwing, thrown if shaped else plain, shaped))
                beside[shaped] = await measured(server.url, MINE, STREAMS, count, body)
                flood.cancel()
                await asyncio.gather(flood, return_exceptions=True)
                grown[shaped] += server.rss() - before
            ratios.append(beside[True]["p99"] / beside[False]["p99"])
            medians.append(beside[True]["p50"] / beside[False]["p50"])
            each = ", ".join(f"{found['p99']:.1f} ({found['p50']:.1f})" for found in beside.values())
            report.so_far(f"p99 (p50) {alone[-1]:.1f} ms alone, {each} beside")
    times = [seconds for each in thrown.refused_s.values() for seconds in each]
    slowest = max(thrown.refused_s, key=lambda name: statistics.median(thrown.refused_s[name]))
    change, more = statistics.median(ratios) - 1, (grown[True] - grown[False]) / 2**20
    refusals = (
        f"{statistics.median(times) * 1000:.0f} ms (median), {percentile(times, 0.99) * 1000:.0f} ms (p99)"
    )
    report.figure(f"{len(times)} refused in {refusals}, slowest {slowest!r}; {thrown.ran} ran")
    each = ", ".join(f"{ratio - 1:+.0%}" for ratio in ratios)
    report.figure(
        f"ITL of {STREAMS} streams beside them, compared with the same requests without bombs and shapes, "
        f"{pairs} pairs: p99 {change:+.0%} (each {each}), median {statistics.median(medians) - 1:+.0%}; "
        f"memory {more:+.0f} MiB"
    )
    report.breaks(thrown.wrong)
    report.holds(more <= 128, f"memory grew by {more:.0f} MiB more than without")
    if form.full:
        worst = statistics.median(thrown.refused_s[slowest])
        report.holds(worst <= 0.25, f"{slowest!r} is refused in {worst * 1000:.0f} ms")
        report.holds(change <= 0.10, f"the neighbours' ITL p99 grew by {change:.0%}")


def _throws(draw: random.Random) -> Iterator[tuple[str, Shape]]:
    """Names of bombs ("" for what may run) and their shapes, without end."""
    while True:
        yield draw.choice([(name, _shape(bomb)) for name, bomb in BOMBS.items()])
        name, killer = draw.choice(_DEADLY)
        if killer.kind == "lark" and "::=" not in killer.source and not draw.randrange(4):
            killer = Shape("lark", f"{killer.source}\n// {draw.randrange(10**9)}")
        yield name, killer
        names = [f"p{draw.randrange(10**9)}" for _ in range(20)]
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        yield "", Shape("json", json.dumps(schema))
        yield "", draw.choice(LOOKING)


def _shape(bomb: Shape | Json) -> Shape:
    return bomb if isinstance(bomb, Shape) else Shape("json", json.dumps(bomb))


@cache
def _request(shape: Shape, *, shaped: bool) -> bytes:
    """The body. Not shaped: as long a prompt, since the model's template shows a schema."""
    content = "Go." if shaped or shape.kind != "json" else f"Go. {shape.source}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 24}
    if shaped and shape.kind == "tags":
        body["structured_outputs"] = {"structural_tag": shape.source}
    elif shaped:
        body[_FIELDS[shape.kind]] = json.loads(shape.source) if shape.kind in _JSON else shape.source
    return json.dumps({**body, "temperature": 1.5}).encode()


async def _flood(
    client: httpx.AsyncClient, throws: Iterator[tuple[str, Shape]], thrown: Thrown, shaped: bool
) -> None:
    """One after another is begun, whatever became of the last; until cancelled. Not `shaped`: those that run,
    without their shapes."""
    async with asyncio.TaskGroup() as group:
        for name, shape in throws:
            if shaped or not name:
                group.create_task(_throw(client, name, shape, thrown, shaped))
            await asyncio.sleep(PAUSE_S)


async def _throw(
    client: httpx.AsyncClient, name: str, shape: Shape, thrown: Thrown, shaped: bool = True
) -> None:
    body = _request(shape, shaped=shaped)
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
