"""Rows 18 and 19: faults inside the engine, on the shipped model and without a server.

The KV cache runs out, allocations fail, and one request of a batch raises an exception.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from engine import GenerateRequest, LocalEngine, ReaderParams, RequestFailed, SamplingParams, Text
from tests.chaos.clients import CHECKPOINT
from tests.chaos.report import Form, Report, row
from tests.chaos.work import PROMPTS
from tests.support.injections import INJECTIONS, VICTIM

Told = tuple[tuple[int, ...], str] | str  # tokens and text, or how it failed


@asynccontextmanager
async def engine_with(**settings: Any) -> AsyncIterator[LocalEngine]:
    """A started engine; at the end nothing runs, nothing is held, and its books are right."""
    engine = LocalEngine(CHECKPOINT, num_threads=1, **settings)
    await engine.start()
    try:
        yield engine
        await engine.settled()
        engine.check_integrity()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0), f"left behind: {stats}"
    finally:
        await engine.close()


async def asked(engine: LocalEngine, draw: random.Random, num: int) -> list[GenerateRequest]:
    """Requests of all lengths, sampled with seeds."""
    made = []
    for n in range(num):
        prompt = await engine.tokenize(draw.choice(PROMPTS) + " and then" * draw.randrange(40))
        sampling = SamplingParams(
            seed=draw.randrange(1 << 31), temperature=1.0, max_tokens=draw.randrange(8, 120), ignore_eos=True
        )
        made.append(
            GenerateRequest(id=f"r{n}", prompt_ids=prompt, sampling=sampling, reader=ReaderParams(calls=None))
        )
    return made


async def told(engine: LocalEngine, request: GenerateRequest) -> Told:
    """What a request says, or why it failed."""
    tokens: list[int] = []
    text = ""
    try:
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                tokens += chunk.token_ids
                text += "".join(delta.text for delta in chunk.deltas if isinstance(delta, Text))
    except (RequestFailed, ValueError) as failure:
        return f"failed: {failure}"
    return tuple(tokens), text


async def all_told(engine: LocalEngine, requests: list[GenerateRequest]) -> list[Told]:
    """The same, of many at once."""
    return await asyncio.gather(*(told(engine, request) for request in requests))


@row(
    "18",
    "KV exhausted; allocation fails at random steps",
    "preempt or fail that request only; engine lives; no block leaks; texts as ever",
    short=False,
)
async def exhausted(form: Form, report: Report) -> None:
    """A pool for a fraction of the requests, then one whose every tenth allocation is refused."""
    draw, num = form.draw("kv"), form.of(24, 96)
    async with engine_with() as roomy:
        requests = await asked(roomy, draw, num)
        want = await all_told(roomy, requests)
    async with engine_with(num_blocks=64, max_model_len=1000) as tight:
        report.holds(await all_told(tight, requests) == want, "a small pool changed a text")
        preempted = tight.stats().preemptions_total
        report.holds(preempted > 0, "the pool was never exhausted")
    async with engine_with() as failing:
        kv = failing._loop.scheduler.kv
        grow, refused = kv.grow, 0

        def refusing(slot: int, num_tokens: int) -> bool:
            nonlocal refused
            # Only where somebody else can make room: the scheduler counts on a sequence that is alone.
            if len(failing._loop.scheduler.running) > 1 and draw.random() < 0.1:
                refused += 1
                return False
            return grow(slot, num_tokens)

        kv.grow = refusing  # type: ignore[method-assign]
        report.holds(await all_told(failing, requests) == want, "a failed allocation changed a text")
        again = failing.stats().preemptions_total
    report.figure(
        f"{num} requests in a pool for few: {preempted} preemptions; {refused} allocations refused: {again}"
    )
    report.figure("all texts equal those with room, no block leaked")


@row(
    "19",
    "an exception for one row, at every stage from its admission to its reader",
    "only that request fails, or goes on without the stage",
    short=False,
)
async def one_row(form: Form, report: Report) -> None:
    """One of several requests is hit at a random call; the others say what they say without it."""
    draw, rounds = form.draw("rows"), form.of(1, 12)
    num_hit = num_failed = 0
    async with engine_with() as engine:
        for _ in range(rounds):
            requests = await asked(engine, draw, 12)
            want = await all_told(engine, requests)
            for name, fault in INJECTIONS.items():
                victim, call = draw.randrange(len(requests)), draw.randrange(1, 6)
                hit = list(requests)
                hit[victim] = fault.change(replace(requests[victim], id=VICTIM))
                undo = fault.put(engine, hit[victim], call)
                got = await all_told(engine, hit)
                undo()
                await engine.settled()
                failed = [n for n, each in enumerate(got) if isinstance(each, str)]
                expected = [victim] if fault.fails else []
                report.holds(failed == expected, f"{name}: {failed} failed instead of {expected}")
                same = [n for n in range(len(requests)) if n not in failed and got[n] != want[n]]
                report.holds(not same, f"{name}: {same} said something else")
                num_hit += 1
                num_failed += len(failed)
            report.holds(await all_told(engine, requests) == want, "a fault left something behind")
    report.figure(
        f"{num_hit} exceptions at {len(INJECTIONS)} stages, in batches of 12: {num_failed} requests failed, "
        "each alone; their neighbours' texts were as ever, no block leaked"
    )
