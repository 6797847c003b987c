"""Rows 18, 19: inside of the engine. KV that runs out, allocations that fail, one row that raises.

Owns these faults at the engine's door, on the shipped model. Refuses to know: servers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from engine import (
    Constraint,
    GenerateRequest,
    LocalEngine,
    ReaderParams,
    RequestFailed,
    SamplingParams,
    Text,
    ToolShape,
)
from engine.backends.generation import Generation
from engine.core.batch_state import noise_key
from tests.chaos.clients import CHECKPOINT
from tests.chaos.report import Form, Report, row
from tests.chaos.work import PROMPTS

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
    except (RequestFailed, UnicodeError) as failure:
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
    "an exception for one row: sampler (NaN logits), grammar, detokenizer",
    "only that request fails",
    short=False,
)
async def one_row(form: Form, report: Report) -> None:
    """One of several requests is hit at a random token; the others say what they say without it."""
    draw, rounds = form.draw("rows"), form.of(1, 12)
    num_failed = 0
    async with engine_with() as engine:
        for _ in range(rounds):
            requests = await asked(engine, draw, 12)
            want = await all_told(engine, requests)
            for fault in (_not_finite, _bad_grammar, _bad_text):
                victim, step = draw.randrange(len(requests)), draw.randrange(1, 6)
                hit = list(requests)
                undo = fault(engine, hit, victim, step)
                got = await all_told(engine, hit)
                undo()
                await engine.settled()
                failed = [n for n, each in enumerate(got) if isinstance(each, str)]
                report.holds(failed == [victim], f"{fault.__name__}: {failed} failed instead of {victim}")
                same = [n for n in range(len(requests)) if n != victim and got[n] != want[n]]
                report.holds(not same, f"{fault.__name__}: {same} said something else")
                num_failed += 1
            report.holds(await all_told(engine, requests) == want, "a fault left something behind")
    report.figure(
        f"{num_failed} failures in a batch of 12; each failed alone, its neighbours' texts were as ever"
    )


def _not_finite(engine: LocalEngine, requests: list[GenerateRequest], victim: int, step: int) -> Any:
    """The logits of one row, known by the key of its noise, are NaN at one step."""
    runner: Any = engine._loop.runner
    draw, left = runner.draw, step
    key = noise_key(requests[victim].sampling.seed, requests[victim].choice, requests[victim].generation)

    def drawing(forwarded: Any, plan: Any, *rest: Any) -> Any:
        nonlocal left
        for drawn in (plan.draw.noise == key).nonzero()[0]:
            left -= 1
            if left == 0:
                forwarded.logits[drawn] = math.nan
        return draw(forwarded, plan, *rest)

    runner.draw = drawing
    return lambda: setattr(runner, "draw", draw)


class _Broken:
    """A grammar that cannot say what may follow."""

    stopped = False

    def fill(self, mask: Any) -> None:
        raise ValueError("out of fuel")


def _bad_grammar(engine: LocalEngine, requests: list[GenerateRequest], victim: int, step: int) -> Any:
    """The grammar of one row raises at its first token."""
    matcher = engine._matcher

    async def broken(*_: object) -> Any:
        return _Broken(), False

    engine._matcher = broken  # type: ignore[method-assign]
    requests[victim] = replace(requests[victim], constraint=Constraint("calls", (ToolShape("f", "{}"),)))
    return lambda: setattr(engine, "_matcher", matcher)


def _bad_text(engine: LocalEngine, requests: list[GenerateRequest], victim: int, step: int) -> Any:
    """The detokenizer of one row raises at one chunk."""
    read = Generation.read
    left = step
    requests[victim] = replace(requests[victim], id="victim")

    def reading(self: Generation, outputs: Any) -> Any:
        nonlocal left
        if self._request.id == "victim":
            left -= 1
            if left == 0:
                raise UnicodeError("no such text")
        return read(self, outputs)

    Generation.read = reading  # type: ignore[method-assign]
    return lambda: setattr(Generation, "read", read)
