"""The engine on a GPU, kernels and graphs included: the oracle's tokens, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.fp8 import computes_fp8
from engine.kernels.torch_attention import Workspace
from engine.models.fp8 import make_fp8
from engine.types import SamplingParams
from tests.support.adapters import RECIPES, make_adapter
from tests.support.checkpoints import make_checkpoint, oracle_greedy, oracle_logits
from tests.support.driver import Driver, greedy

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from engine.kernels.triton import thin

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


def test_a_step_serves_any_mix_of_adapters_without_waiting(checkpoint: Find, tmp_path: Path) -> None:
    base = checkpoint("qwen3")
    made = {name: make_adapter(recipe, base, tmp_path / name) for name, recipe in RECIPES.items()}
    lora = {name: folder / "adapter" for name, folder in made.items()}
    folders: dict[str | None, Path] = {None: base}
    folders |= {name: folder / "merged" for name, folder in made.items()}
    driver = open_driver(base, lora=lora, max_num_seqs=16, num_assistant_tokens=0)
    names = list(folders)
    asked = [(prompt(3 + 17 * i % 90, i), names[i % len(names)]) for i in range(16)]
    handles = [driver.submit(ids, greedy(30, ignore_eos=True), adapter=name) for ids, name in asked]
    for _ in range(5):
        driver.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            driver.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    driver.run()
    for handle, (ids, name) in zip(handles, asked, strict=True):
        expected = oracle_greedy(folders[name], tuple(ids), 10)
        assert driver.tokens(handle)[: len(expected)] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8", "dtype": "bfloat16"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "dtype": "bfloat16"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "dtype": "bfloat16", "deterministic": True},
    ],
    ids=str,
)
def test_in_eight_bits_a_text_scores_as_it_should(checkpoint: Find, settings: dict[str, Any]) -> None:
    if not computes_fp8(torch.device("cuda", 0)):
        pytest.skip("a GPU without eight-bit floats")
    folder, ids = checkpoint("qwen3"), prompt(90, 4)
    driver = open_driver(folder, max_num_seqs=16, max_num_batched_tokens=32, **settings)
    handles = [driver.submit(ids, greedy(12, ignore_eos=True, prompt_logprobs=0)) for _ in range(3)]
    driver.run()
    assert [len(driver.tokens(handle)) for handle in handles] == [12] * 3
    scored = [row for output in driver.outputs[handles[0]] for row in output.prompt_logprobs or ()]
    exact = torch.log_softmax(oracle_logits(folder, tuple(ids)), -1)[range(89), torch.tensor(ids[1:])]
    both = torch.stack((exact, torch.tensor([row.logprob for row in scored])))
    assert torch.corrcoef(both)[0, 1] > 0.8


def test_eight_bits_are_multiplied_as_they_are_widened() -> None:
    device = torch.device("cuda", 0)
    if not computes_fp8(device):
        pytest.skip("a GPU without eight-bit floats")
    generator = torch.Generator(device).manual_seed(0)
    weight, x = (torch.randn(size, 256, device=device, generator=generator).bfloat16() for size in (512, 40))
    own = make_fp8(weight, weight[:, 0].clone(), Workspace())
    assert own.quantize is not None
    expected = replace(own, quantize=None)(x)
    for rows in (1, 5, 16, 17, 40):
        assert (own(x[:rows]) - expected[:rows]).norm() < 0.05 * expected[:rows].norm()
    thinly = thin.linear(x[:5], own.weight, own.bias, scale=own.scale)
    torch.testing.assert_close(thinly, expected[:5], rtol=0.02, atol=0.1)
