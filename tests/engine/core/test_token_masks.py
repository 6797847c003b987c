"""A row whose masks take long sits out steps until its mask is there; the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence

import pytest

from engine import (
    Constraint,
    ConstraintError,
    GenerateRequest,
    LocalEngine,
    ReaderParams,
    SamplingParams,
    Shape,
)
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
        calls, finish = [0], Stepper._finish

        def slow(stepper: Stepper, moves: Sequence[Move]) -> list[Move]:
            if engine._constraints is not None and stepper is engine._constraints.slow:
                calls[0] += 1
                assert free.wait(60)
            return finish(stepper, moves)

        monkeypatch.setattr("engine.core.token_masks.SLOW_MASK_S", 0.0)
        monkeypatch.setattr(Stepper, "_finish", slow)
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


@pytest.mark.parametrize("drafts", [0, 4])
async def test_nobody_waits_for_a_process_that_does_not_answer(drafts: int) -> None:
    """Rows under grammars sit steps out while it says nothing, wherever that finds them, and go on as if
    nothing had been; the others do not notice."""
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=16 << 20, num_assistant_tokens=drafts)
    await engine.start()
    try:
        prompt = await engine.tokenize("Say a number.")
        alone = await tokens(engine, request("a", prompt, DIGITS))
        assert engine._constraints is not None
        worker = engine._constraints.fast._worker
        assert worker is not None
        for stops_at in range(1, 4):
            said: list[int] = []
            async for chunk in engine.generate(request("late", prompt, DIGITS)):
                said += chunk.token_ids
                if len(said) == stops_at:
                    os.kill(worker.process.pid, signal.SIGSTOP)
                    other, new = request("other", prompt, None), request("new", prompt, DIGITS)
                    begun = asyncio.create_task(tokens(engine, new))
                    assert len(await tokens(engine, other)) == 40
                    assert not begun.done()
                    os.kill(worker.process.pid, signal.SIGCONT)
                    assert await begun == alone
            assert said == alone
            engine.check_integrity()
        assert engine._constraints.fast._worker is worker
    finally:
        await engine.close()


async def test_what_takes_all_its_time_is_stepped_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the process for rows that are quick, once; then it has one in which it may take longer."""
    monkeypatch.setattr("engine.structured.isolation.constraints.SLOW_MASK_S", 0.2)
    monkeypatch.setattr("engine.core.token_masks.SLOW_MASK_S", 10.0)
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=16 << 20)
    await engine.start()
    try:
        prompt = await engine.tokenize("Say a number.")
        alone = await tokens(engine, request("a", prompt, DIGITS))
        assert engine._constraints is not None
        workers = [engine._constraints.fast._worker]
        endless = Constraint(answer=Shape("lark", 'start: X NL "\\n"\nNL: /\\n+/\nX: /[a-z]{26}/'))
        for _ in range(2):
            hangs = asyncio.create_task(tokens(engine, request("hangs", prompt, endless)))
            assert await tokens(engine, request("b", prompt, DIGITS)) == alone
            with pytest.raises(ConstraintError, match="following the grammar takes too long"):
                await hangs
            assert await tokens(engine, request("c", prompt, DIGITS)) == alone
            workers.append(engine._constraints.fast._worker)
        first, second, third = workers
        assert first is not second and second is third is not None
        engine.check_integrity()
    finally:
        await engine.close()
