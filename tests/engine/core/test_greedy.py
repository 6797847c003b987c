"""Invariant 8: greedy tokens equal the plain transformers forward, whatever the batch, chunk size,
preemption, prefix hits or resumption.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.types import SamplingParams
from tests.support.checkpoints import oracle_greedy
from tests.support.driver import Driver, greedy

KERNELS = ["llama-32", "mistral-32", "qwen2-windows-32", "qwen3-64"]  # as a CPU's own kernels take them
NATIVE = [
    "llama",
    "llama31",
    "llama-dynamic",
    "mistral",
    "qwen2",
    "qwen2-windows",
    "qwen3",
    "qwen3-yarn",
    "qwen3-linear",
    *KERNELS,
]
FOUR = ["llama", "mistral", "qwen2", "qwen2-windows", "qwen3", *KERNELS]
Find = Callable[[str], Path]

LENGTHS = (1, 2, 15, 16, 17, 33, 61, 90)
COUNT = 12


def prompts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(256) for _ in range(length)) for length in lengths]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NATIVE)
def test_a_mixed_batch_equals_the_oracle(checkpoint: Find, name: str) -> None:
    folder = checkpoint(name)
    driver = Driver(folder, max_num_batched_tokens=48, num_blocks=100)
    handles = [driver.submit(prompt, greedy(COUNT)) for prompt in prompts()]
    driver.run()
    expected = [oracle_greedy(folder, prompt, COUNT) for prompt in prompts()]
    assert [driver.tokens(handle) for handle in handles] == expected
    assert len(set(expected)) == len(expected)  # the checkpoint is not one that always says the same


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("chunk", [1, 7, 16, 29, 512])
def test_chunked_prefill_equals_the_oracle(checkpoint: Find, name: str, chunk: int) -> None:
    folder = checkpoint(name)
    driver = Driver(folder, max_num_batched_tokens=chunk, num_blocks=100)
    prompt = prompts()[-1]
    assert driver.generate(prompt, greedy(COUNT)) == oracle_greedy(folder, prompt, COUNT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("block_size", [4, 16])
def test_preemption_equals_the_oracle(checkpoint: Find, name: str, block_size: int) -> None:
    folder = checkpoint(name)
    # five sequences begin in five blocks, and every one of them comes to need three
    driver = Driver(folder, num_blocks=5, max_model_len=4 * block_size, block_size=block_size)
    several = prompts(4, (block_size - 2,) * 5)
    count = block_size + 5
    handles = [driver.submit(prompt, greedy(count)) for prompt in several]
    driver.run()
    for prompt, handle in zip(several, handles, strict=True):
        assert driver.tokens(handle) == oracle_greedy(folder, prompt, count)
    assert driver.loop.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("name", FOUR)
def test_prefix_hits_equal_the_oracle(checkpoint: Find, name: str) -> None:
    folder = checkpoint(name)
    driver = Driver(folder, num_blocks=100)
    shared = prompts(1, (70,))[0]
    for tail in ((), (5,), (5, 6, 7), prompts(2, (40,))[0]):
        prompt = shared + tail
        handle = driver.submit(prompt, greedy(COUNT))
        driver.run()
        assert driver.tokens(handle) == oracle_greedy(folder, prompt, COUNT)
        cached = driver.outputs[handle][0].cached_tokens
        assert cached == (64 if tail else 0)


@pytest.mark.parametrize("name", FOUR)
def test_the_same_prompt_many_times_at_once_is_computed_once(checkpoint: Find, name: str) -> None:
    folder = checkpoint(name)
    driver = Driver(folder, num_blocks=200, max_num_batched_tokens=32)
    prompt = prompts(3, (81,))[0]
    handles = [driver.submit(prompt, greedy(COUNT)) for _ in range(5)]
    driver.run()
    assert {driver.tokens(handle) for handle in handles} == {oracle_greedy(folder, prompt, COUNT)}
    assert [driver.outputs[handle][0].cached_tokens for handle in handles] == [0, 80, 80, 80, 80]


@pytest.mark.parametrize("name", FOUR)
def test_resuming_behind_a_prefix_equals_the_oracle(checkpoint: Find, name: str) -> None:
    folder = checkpoint(name)
    prompt = prompts()[4]
    whole = oracle_greedy(folder, prompt, COUNT)
    driver = Driver(folder, num_blocks=100)
    for cut in range(1, len(whole)):
        rest = driver.generate(prompt, greedy(COUNT), prefix=(whole[: cut // 2], whole[cut // 2 : cut]))
        assert whole[:cut] + rest == whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUR)
def test_random_schedules_equal_the_oracle(checkpoint: Find, name: str) -> None:
    """Requests that come, go and share prefixes at random, in a pool too small for them."""
    folder = checkpoint(name)
    rng = random.Random(name)
    pool = prompts(7, (3, 16, 18, 35, 64, 80))
    driver = Driver(
        folder,
        num_blocks=22,
        max_model_len=128,
        max_num_batched_tokens=rng.choice((9, 24, 100)),
        max_num_seqs=5,
    )
    alive: dict[int, tuple[int, ...]] = {}
    ended: dict[int, tuple[int, ...]] = {}
    for _ in range(150):
        if rng.random() < 0.25:
            prompt = rng.choice(pool)
            alive[driver.submit(prompt, greedy(COUNT), owner=rng.choice("ab"))] = prompt
        if alive and rng.random() < 0.06:
            handle = rng.choice(list(alive))
            driver.abort(handle)
            del alive[handle]
        driver.step()
        ended |= {handle: alive.pop(handle) for handle in list(alive) if _ended(driver, handle)}
    driver.run()
    ended |= alive
    assert len(ended) > 10
    for handle, prompt in ended.items():
        assert driver.tokens(handle) == oracle_greedy(folder, prompt, COUNT)
    used = [pool.num_blocks - pool.num_available for pool in driver.loop.scheduler.kv.pools]
    assert used == [0] * len(used)


def _ended(driver: Driver, handle: int) -> bool:
    return bool(driver.outputs[handle]) and driver.outputs[handle][-1].finish is not None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUR)
def test_sampled_tokens_do_not_depend_on_the_schedule(checkpoint: Find, name: str) -> None:
    """In f32 a seed draws the same whatever the chunks, the neighbours, preemption and prefix hits."""
    several = prompts(5, (5, 14, 14, 30, 31, 47))
    params = [
        SamplingParams(seed=i, max_tokens=20, temperature=0.9, top_p=p, top_k=k, presence_penalty=penalty)
        for i, (p, k, penalty) in enumerate([(1.0, 0, 0.0), (0.9, 0, 0.5), (1.0, 8, 0.0)] * 2)
    ]
    found = set()
    for settings in (
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 11},
        {"max_num_batched_tokens": 500, "block_size": 8},
        {"num_blocks": 6, "max_model_len": 72},
    ):
        driver = Driver(checkpoint(name), **{"num_blocks": 60, **settings})
        handles = [driver.submit(prompt, own) for prompt, own in zip(several, params, strict=True)]
        driver.run()
        found.add(tuple(driver.tokens(handle) for handle in handles))
    assert len(found) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("who", [{"priority": -1}, {"owner": "quiet"}])
def test_whoever_makes_room_goes_on_with_the_same_tokens(
    checkpoint: Find, name: str, who: dict[str, Any]
) -> None:
    """Sampled and greedy rows of one owner fill the batch; an urgent request, or one of another owner, takes
    a slot of theirs."""
    several = prompts(6, (5, 14, 31, 47))
    params = [
        SamplingParams(seed=i, max_tokens=60, temperature=0.9 * (i > 0), ignore_eos=True) for i in range(4)
    ]
    crowd = {"priority": 1, "owner": "crowd"} | {key: "crowd" for key in who if key == "owner"}
    rank = {"priority": crowd["priority"]} | who

    def run(*, beside: bool) -> tuple[list[tuple[int, ...]], Driver]:
        driver = Driver(checkpoint(name), num_blocks=60, max_num_seqs=4)
        handles = [driver.submit(own, each, **crowd) for own, each in zip(several, params, strict=True)]
        for round in range(3):
            for _ in range(3):
                driver.step()
            if beside:
                other = driver.submit(prompts(round + 7, (20,))[0], greedy(3), **rank)
                for _ in range(6):
                    driver.step()
                assert _ended(driver, other)
        driver.run()
        return [driver.tokens(handle) for handle in handles], driver

    expected, _ = run(beside=False)
    found, driver = run(beside=True)
    assert driver.loop.scheduler.counters.preemptions >= 2
    assert found == expected
