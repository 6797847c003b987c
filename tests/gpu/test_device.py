"""The engine on a GPU, kernels and graphs included: the oracle's tokens, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.types import SamplingParams
from tests.engine.checkpoints import make_checkpoint, oracle_greedy
from tests.engine.driver import Driver, greedy

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

Find = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Find:
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return find


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Pools take most of what is free: the last engine's must be gone."""
    yield
    torch.cuda.empty_cache()


def prompt(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 290, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def open_driver(folder: Path, **settings: object) -> Driver:
    return Driver(folder, **{"device": "cuda", "dtype": "float32", "kv_cache_bytes": 64 << 20, **settings})


@pytest.mark.parametrize(
    "name", ["llama", "llama31", "mistral", "qwen2-windows", "qwen3", "qwen3-yarn", "gemma2", "gpt_oss"]
)
def test_greedy_tokens_are_those_of_the_oracle(checkpoint: Find, name: str) -> None:
    folder = checkpoint(name)
    driver = open_driver(folder, max_num_seqs=16, max_num_batched_tokens=64)
    prompts = [prompt(3 + 7 * i % 60, i) for i in range(25)]
    handles = [driver.submit(ids, greedy(10)) for ids in prompts]
    driver.run()
    found = [driver.tokens(handle) for handle in handles]
    assert found == [oracle_greedy(folder, tuple(ids), 10) for ids in prompts]


def test_sampled_tokens_do_not_depend_on_neighbours(checkpoint: Find) -> None:
    folder = checkpoint("qwen3")
    sampling = SamplingParams(seed=5, max_tokens=24, temperature=0.9, top_k=30, top_p=0.9, min_p=0.01)

    def run(count: int) -> list[tuple[int, ...]]:
        driver = open_driver(folder)
        handles = [driver.submit(prompt(6, seed), sampling) for seed in range(count)]
        driver.run()
        return [driver.tokens(handle) for handle in handles]

    assert run(9)[0] == run(1)[0]


def test_a_steady_step_never_waits_for_the_device_to_be_idle(checkpoint: Find) -> None:
    driver = open_driver(checkpoint("qwen3"), num_assistant_tokens=0)
    plain = SamplingParams(seed=1, max_tokens=40, temperature=0.8, top_p=0.9, ignore_eos=True)
    penalized = SamplingParams(
        seed=1, max_tokens=40, temperature=0.0, frequency_penalty=0.5, logit_bias=((3, 2.0),), ignore_eos=True
    )
    handles = [driver.submit(prompt(6, seed), own) for seed, own in enumerate([plain, penalized, plain])]
    for _ in range(5):
        driver.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            driver.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    driver.run()
    assert [len(driver.tokens(handle)) for handle in handles] == [40, 40, 40]
