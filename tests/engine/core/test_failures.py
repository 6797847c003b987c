"""An exception for one request ends that request, wherever in a step it comes from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LocalEngine
from engine.types import EngineDead, GenerateRequest, ReaderParams, SamplingParams
from tests.support.driver import Driver, greedy
from tests.support.injections import INJECTIONS, VICTIM, raising

Find = Callable[[str], Path]
NUM = 7


@pytest.fixture
async def engine(checkpoint: Find) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(checkpoint("qwen3"), num_blocks=300, max_num_batched_tokens=64, num_threads=1)
    await engine.start()
    yield engine
    await engine.settled()
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    await engine.close()


def requests() -> list[GenerateRequest]:
    """Prompts of all lengths, drawn at a heat at which texts loop, so that there is something to guess."""
    return [
        GenerateRequest(
            id=f"r{n}",
            prompt_ids=tuple(range(40 + n, 44 + 9 * n)),
            sampling=SamplingParams(seed=n, max_tokens=24, temperature=0.2, ignore_eos=True),
            reader=ReaderParams(dialect=False),
        )
        for n in range(NUM)
    ]


async def told(engine: LocalEngine, request: GenerateRequest) -> tuple[int, ...] | Exception:
    """Its tokens, or how it failed."""
    try:
        return tuple([token async for chunk in engine.generate(request) for token in chunk.token_ids])
    except EngineDead:
        raise
    except Exception as error:
        return error


async def all_told(engine: LocalEngine, asked: list[GenerateRequest]) -> list[tuple[int, ...] | Exception]:
    return await asyncio.gather(*(told(engine, request) for request in asked))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("name", INJECTIONS)
async def test_a_stage_that_raises_for_one_request_fails_that_one(
    engine: LocalEngine, name: str, call: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "antiphon.engine")
    fault, asked, victim = INJECTIONS[name], requests(), 3
    want = await all_told(engine, asked)
    asked[victim] = fault.change(replace(asked[victim], id=VICTIM))
    undo = fault.put(engine, asked[victim], call)
    try:
        got = await all_told(engine, asked)
    finally:
        undo()
    for n, (each, expected) in enumerate(zip(got, want, strict=True)):
        if n == victim and fault.fails:
            assert isinstance(each, Exception), "the fault was not met"
        else:
            assert each == expected
    assert fault.fails or "drafting failed" in caplog.text
    assert await all_told(engine, requests()) == want


@pytest.mark.parametrize("name", ["the plan", "the forward", "the draw", "appending", "scheduling"])
async def test_a_request_alone_that_raises_does_not_end_the_engine(engine: LocalEngine, name: str) -> None:
    fault, asked = INJECTIONS[name], requests()[0]
    want = await told(engine, asked)
    for _ in range(5):
        undo = fault.put(engine, asked, 1)
        assert isinstance(await told(engine, replace(asked, id=VICTIM)), Exception)
        undo()
    assert await told(engine, asked) == want


async def test_what_raises_once_fails_nobody(engine: LocalEngine) -> None:
    want = await all_told(engine, requests())
    runner: Any = engine._loop.runner
    for name in ("forward", "draw"):
        left = 5

        def hits(*_: object) -> bool:
            nonlocal left
            left -= 1
            return left == 0

        undo = raising(runner, name, hits, 1)
        assert await all_told(engine, requests()) == want
        undo()


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: an illegal address")],
)
def test_a_device_that_fails_is_not_asked_again(checkpoint: Find, error: Exception) -> None:
    driver = Driver(checkpoint("qwen3"))
    for _ in range(3):
        driver.submit((1, 2, 3), greedy(4))
    asked = 0

    def broken(*_: object) -> Any:
        nonlocal asked
        asked += 1
        raise error

    driver.loop.runner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        driver.step()
    assert asked == 1


@pytest.mark.parametrize("size", [4, 16])
async def test_ends_longer_than_the_text_are_looked_for(engine: LocalEngine, size: int) -> None:
    sampling = SamplingParams(seed=1, max_tokens=6, max_ngram_size=size)
    one = GenerateRequest(id="r", prompt_ids=(87,), sampling=sampling, reader=ReaderParams(dialect=False))
    assert await told(engine, one) == await told(
        engine, replace(one, sampling=replace(sampling, max_ngram_size=1))
    )
