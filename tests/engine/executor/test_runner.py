"""A runner owes nothing to those before it: to sequences that had its blocks, to engines that set threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.executor import Forwarded
from engine.kernels import FP8, own_threads, raw
from engine.step import StepPlan
from tests.engine.core.test_greedy import prompts
from tests.support.driver import Driver, greedy

COUNT = 8


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"deterministic": True}),
        ("qwen3", {"kv_cache_dtype": "fp8"}),
        ("gemma2", {"prefix_caching": False}),
        ("llama-32", {}),  # by a CPU's own kernels, where it has any
        ("mistral-32", {}),
    ],
    ids=str,
)
def test_blocks_full_of_nan_are_as_good_as_new(
    checkpoint: Callable[[str], Path], name: str, settings: dict[str, Any]
) -> None:
    def run(driver: Driver) -> list[tuple[int, ...]]:
        handles = [driver.submit(prompt, greedy(COUNT)) for prompt in prompts()]
        driver.run()
        return [driver.tokens(handle) for handle in handles]

    given: dict[str, Any] = {"max_num_batched_tokens": 48, "num_blocks": 100, **settings}
    expected = run(Driver(checkpoint(name), **given))
    assert all(expected)
    driver = Driver(checkpoint(name), **given)
    with torch.inference_mode():
        for pool in driver.loop.runner.pools:
            raw(pool).fill_(0x7F if pool.dtype is FP8 else math.nan)
    assert run(driver) == expected


def test_threads_of_an_engine_are_not_those_of_anothers_latest_step(
    checkpoint: Callable[[str], Path],
) -> None:
    before = torch.get_num_threads()
    own_threads.cache_clear()
    try:
        torch.set_num_threads(3)
        first = Driver(checkpoint("qwen3"), num_blocks=100, num_threads=None)
        first.generate(prompts()[0], greedy(2))
        assert torch.get_num_threads() == 1  # so small are its steps
        Driver(checkpoint("qwen3"), num_blocks=100, num_threads=2)
        second = Driver(checkpoint("qwen3"), num_blocks=100, num_threads=None)
        assert first.loop.runner.threads_for(1 << 30) == second.loop.runner.threads_for(1 << 30) == 3
    finally:
        torch.set_num_threads(before)
        own_threads.cache_clear()


def test_a_turn_behind_a_long_history_is_shared(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few tokens it has: each of them attends to all that was before."""
    before, shared = torch.get_num_threads(), list[tuple[int, int]]()
    own_threads.cache_clear()
    try:
        torch.set_num_threads(2)
        driver = Driver(checkpoint("qwen3"), num_blocks=100, num_threads=None)
        forward = driver.loop.runner.forward

        def watched(plan: StepPlan) -> Forwarded:
            made = forward(plan)
            shared.append((len(plan.token_ids), torch.get_num_threads()))
            return made

        monkeypatch.setattr(driver.loop.runner, "forward", watched)
        driver.generate(prompts()[0], greedy(3))
        assert {threads for _, threads in shared} == {1}
        shared.clear()
        monkeypatch.setattr("engine.executor.runner.ATTENDED_BYTES_PER_S", 1.0)
        driver.generate((*prompts()[0], 5, 6, 7), greedy(3))
        assert [threads for _, threads in shared] == [2 if tokens > 1 else 1 for tokens, _ in shared]
        assert len({threads for _, threads in shared}) == 2
    finally:
        torch.set_num_threads(before)
        own_threads.cache_clear()
