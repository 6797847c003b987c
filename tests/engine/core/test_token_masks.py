"""A row whose masks take long sits out steps until its mask is there; the others go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from engine import Constraint, GenerateRequest, LocalEngine, ReaderParams, SamplingParams, Shape
from engine.structured.isolation.constraints import Move, Stepper
from engine.tiny import CHECKPOINT

PLAIN = ReaderParams(dialect=False)
DIGITS = Constraint(answer=Shape("regex", "[0-9]{12}"))


def request(name: str, prompt: tuple[int, ...], constraint: Constraint | None) -> GenerateRequest:
    sampling = SamplingParams(seed=3, max_tokens=40, min_tokens=0 if constraint else 40, ignore_eos=True)
    return GenerateRequest(name, prompt, sampling, PLAIN, constraint)


async def tokens(engine: LocalEngine, asked: GenerateRequest) -> list[int]:
    return [token async for chunk in engine.generate(asked) for token in chunk.token_ids]


async def test_the_others_go_on_and_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=16 << 20)
    await engine.start()
    free = threading.Event()
    try:
        prompt = await engine.tokenize("Say a number.")
        alone = await tokens(engine, request("a", prompt, DIGITS))
        calls, run = [0], Stepper.run

        def slow(
            stepper: Stepper, moves: Sequence[Move], *, strict: bool = False, later: bool = False
        ) -> None:
            if strict:
                calls[0] += 1
                assert free.wait(60)
            run(stepper, moves, strict=strict, later=later)

        monkeypatch.setattr("engine.core.token_masks.SLOW_MASK_S", 0.0)
        monkeypatch.setattr(Stepper, "run", slow)
        late = asyncio.create_task(tokens(engine, request("late", prompt, DIGITS)))
        assert len(await tokens(engine, request("other", prompt, None))) == 40
        while not calls[0]:
            await asyncio.sleep(0.001)
        assert len(await tokens(engine, request("another", prompt, None))) == 40
        assert not late.done()
        free.set()
        assert await late == alone
        engine.check_integrity()
    finally:
        free.set()
        await engine.close()
