"""Adapters beside the model, in one batch: each request's tokens are those of the model with its adapter
merged into it, whoever else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.executor import runner
from engine.executor.gpu_launcher import STAND_IN
from engine.models import linear, loader
from engine.models.general import GeneralDecoder
from engine.models.lora import LONG, Adapters, Place, Stack, Up, make_stack
from engine.models.peft import LowRank
from engine.types import LoadError
from tests.engine.core.test_greedy import KERNELS, prompts
from tests.support.adapters import RECIPES, Recipe, make_adapter, write_adapter
from tests.support.checkpoints import oracle_greedy, oracle_logits
from tests.support.driver import Driver, greedy

Find = Callable[[str], Path]
COUNT = 10
NAMES = (*RECIPES, None)


@pytest.fixture(scope="session")
def adapters(checkpoint: Find, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """A function from a checkpoint's name to its adapters' folders, by `RECIPES`."""
    made: dict[str, dict[str, Path]] = {}

    def find(name: str) -> dict[str, Path]:
        if name not in made:
            made[name] = {
                each: make_adapter(recipe, checkpoint(name), tmp_path_factory.mktemp(f"{name}-{each}"))
                for each, recipe in RECIPES.items()
            }
        return made[name]

    return find


Made = Callable[[str], dict[str, Path]]


def paths(made: dict[str, Path]) -> dict[str, Path]:
    """What an engine is given."""
    return {name: folder / "adapter" for name, folder in made.items()}


def merged(made: dict[str, Path], base: Path, name: str | None) -> Path:
    """The oracle's folder."""
    return base if name is None else made[name] / "merged"


def run_mixed(driver: Driver, asked: list[tuple[tuple[int, ...], str | None]]) -> list[tuple[int, ...]]:
    """All at once; their tokens in turn."""
    handles = [driver.submit(prompt, greedy(COUNT), adapter=name) for prompt, name in asked]
    driver.run()
    return [driver.tokens(handle) for handle in handles]


def mixed_load() -> list[tuple[tuple[int, ...], str | None]]:
    """Prompts of all lengths, under every adapter and none; two are long enough for products of their own."""
    several = prompts(11, (3, 90, 17, 40, 70, 5, 66, 30))
    return [(prompt, NAMES[i % len(NAMES)]) for i, prompt in enumerate(several)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama31", "mistral", "qwen2-windows", "qwen3", *KERNELS])
def test_a_mixed_batch_equals_the_merged_models(checkpoint: Find, adapters: Made, name: str) -> None:
    base, made = checkpoint(name), adapters(name)
    driver = Driver(base, lora=paths(made), num_blocks=200, max_num_batched_tokens=200)
    asked = mixed_load()
    expected = [oracle_greedy(merged(made, base, own), prompt, COUNT) for prompt, own in asked]
    assert run_mixed(driver, asked) == expected
    alike = [
        oracle_greedy(base, prompt, COUNT) == own for (prompt, _), own in zip(asked, expected, strict=True)
    ]
    assert sum(alike) == 2  # the adapters do something


@pytest.mark.parametrize("chunk", [7, 64, 500])
def test_chunks_and_neighbours_change_nothing(checkpoint: Find, adapters: Made, chunk: int) -> None:
    base, made = checkpoint("qwen3"), adapters("qwen3")
    asked = mixed_load()
    driver = Driver(base, lora=paths(made), num_blocks=200, max_num_batched_tokens=chunk)
    alone = Driver(base, lora=paths(made), num_blocks=200)
    assert run_mixed(driver, asked) == [
        alone.generate(prompt, greedy(COUNT), adapter=own) for prompt, own in asked
    ]


@pytest.mark.parametrize("own", NAMES)
def test_log_probabilities_are_those_of_the_merged_model(
    checkpoint: Find, adapters: Made, own: str | None
) -> None:
    base, made = checkpoint("qwen3"), adapters("qwen3")
    driver = Driver(base, lora=paths(made), num_blocks=200)
    prompt = prompts(3, (80,))[0]
    found = scores(driver, prompt, own)
    assert torch.allclose(found, expected_scores(merged(made, base, own), prompt), atol=2e-4)


def scores(driver: Driver, prompt: tuple[int, ...], adapter: str | None) -> torch.Tensor:
    """Log probabilities of the prompt's tokens behind the first."""
    handle = driver.submit(prompt, greedy(1, prompt_logprobs=0), adapter=adapter)
    driver.run()
    found = driver.outputs[handle][0].prompt_logprobs
    assert found is not None
    return torch.tensor([row.logprob for row in found])


def expected_scores(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    every: torch.Tensor = oracle_logits(folder, prompt).log_softmax(dim=-1)[:-1]
    return every.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def test_adapters_never_share_cached_prefixes(checkpoint: Find, adapters: Made) -> None:
    base, made = checkpoint("qwen3"), adapters("qwen3")
    driver = Driver(base, lora=paths(made), num_blocks=200)
    prompt = prompts(4, (70,))[0]
    for cached in (0, 64):
        for own in NAMES:
            handle = driver.submit(prompt, greedy(COUNT), adapter=own)
            driver.run()
            assert driver.tokens(handle) == oracle_greedy(merged(made, base, own), prompt, COUNT)
            assert driver.outputs[handle][0].cached_tokens == cached


def test_preemption_changes_nothing(checkpoint: Find, adapters: Made) -> None:
    base, made = checkpoint("qwen3"), adapters("qwen3")
    # five sequences begin in five blocks, and every one of them comes to need three
    driver = Driver(base, lora=paths(made), num_blocks=5, max_model_len=64, block_size=16)
    asked = [(prompt, NAMES[i % len(NAMES)]) for i, prompt in enumerate(prompts(4, (14,) * 5))]
    handles = [driver.submit(prompt, greedy(21), adapter=own) for prompt, own in asked]
    driver.run()
    for handle, (prompt, own) in zip(handles, asked, strict=True):
        assert driver.tokens(handle) == oracle_greedy(merged(made, base, own), prompt, 21)
    assert driver.loop.scheduler.counters.preemptions > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("captured", [False, True])
def test_a_draft_model_knows_no_adapters_and_changes_no_token(
    checkpoint: Find, adapters: Made, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    if captured:
        monkeypatch.setattr(runner, "kernels_for", lambda device: STAND_IN)
        monkeypatch.setattr(loader, "open_library", lambda: None)  # whose weights lie as only it reads them
        monkeypatch.setattr(linear, "_has_blocks", lambda weight: False)
    base, made = checkpoint("qwen3"), adapters("qwen3")
    driver = Driver(base, draft=base, lora=paths(made), num_blocks=200, assistant_confidence_threshold=0.0)
    asked = mixed_load()
    expected = [oracle_greedy(merged(made, base, own), prompt, COUNT) for prompt, own in asked]
    assert run_mixed(driver, asked) == expected
    assert driver.loop.scheduler.counters.drafts > 0


def test_deterministic_scores_are_the_same_to_the_bit(checkpoint: Find, adapters: Made) -> None:
    base, made = checkpoint("qwen3"), adapters("qwen3")
    asked = mixed_load()
    settings: dict[str, Any] = {"lora": paths(made), "num_blocks": 200, "deterministic": True}
    sampling = greedy(COUNT, logprobs=0, ignore_eos=True)
    together, alone = Driver(base, **settings), Driver(base, **settings, max_num_batched_tokens=30)

    def drawn(driver: Driver, handle: int) -> list[float]:
        return [row.logprob for output in driver.outputs[handle] for row in output.logprobs]

    handles = [together.submit(prompt, sampling, adapter=own) for prompt, own in asked]
    together.run()
    for handle, (prompt, own) in zip(handles, asked, strict=True):
        single = alone.submit(prompt, sampling, adapter=own)
        alone.run()
        assert drawn(together, handle) == drawn(alone, single)
        assert together.tokens(handle) == alone.tokens(single)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_stand_beside_quantized_weights(
    checkpoint: Find, adapters: Made, quantization: str, tmp_path: Path
) -> None:
    base, made = checkpoint("llama"), adapters("llama")
    driver = Driver(base, lora=paths(made), num_blocks=200, quantization=quantization)
    prompt = prompts(3, (80,))[0]
    plain = expected_scores(base, prompt)
    lost = (scores(driver, prompt, None) - plain).abs().mean()
    for own in RECIPES:
        expected = expected_scores(made[own] / "merged", prompt)
        error = (scores(driver, prompt, own) - expected).abs().mean()
        assert error < 2 * lost  # what the quantization of the weights costs without adapters
        assert error < (expected - plain).abs().mean() / 2


# ------------------------------------------------------------------------------------------------------------
# The way of a GPU


@pytest.mark.parametrize("max_num_batched_tokens", [16, 200])
def test_captured_steps_serve_any_mix(
    checkpoint: Find, adapters: Made, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int
) -> None:
    monkeypatch.setattr(runner, "kernels_for", lambda device: STAND_IN)
    monkeypatch.setattr(loader, "open_library", lambda: None)  # whose weights lie as only it reads them
    monkeypatch.setattr(linear, "_has_blocks", lambda weight: False)
    base, made = checkpoint("qwen3"), adapters("qwen3")
    driver = Driver(
        base,
        lora=paths(made),
        num_blocks=200,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        num_assistant_tokens=0,
    )
    for asked in (mixed_load(), mixed_load()[3:4], [(prompt, None) for prompt, _ in mixed_load()]):
        expected = [oracle_greedy(merged(made, base, own), prompt, COUNT) for prompt, own in asked]
        assert run_mixed(driver, asked) == expected


# ------------------------------------------------------------------------------------------------------------
# The general tier


GENERAL = {
    "gemma2": "sums",
    "phi3": "sums",  # its maps are fused in the checkpoint
    "gpt_neox": "sums",
    "olmo2": "verbs",
}


@pytest.mark.parametrize("name", GENERAL)
def test_the_general_tier_serves_them_too(checkpoint: Find, tmp_path: Path, name: str) -> None:
    base, recipe = checkpoint(name), RECIPES[GENERAL[name]]
    second = Recipe(9, recipe.config, recipe.rank, recipe.scale, recipe.adapts)
    made = {own: make_adapter(each, base, tmp_path / own) for own, each in {"a": recipe, "b": second}.items()}
    driver = Driver(base, lora=paths(made), num_blocks=200, max_num_batched_tokens=150)
    assert isinstance(driver.loop.runner.model, GeneralDecoder)
    asked = [(prompt, ("a", "b", None)[i % 3]) for i, (prompt, _) in enumerate(mixed_load())]
    expected = [oracle_greedy(merged(made, base, own), prompt, COUNT) for prompt, own in asked]
    assert run_mixed(driver, asked) == expected
    assert driver.loop.scheduler.counters.prefix_queries


def test_a_map_that_is_not_given_every_token_is_refused(
    checkpoint: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts are not: whose tokens they are, nobody says."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

    made = make_adapter(RECIPES["verbs"], checkpoint("olmo2"), tmp_path)
    plain = Olmo2MLP.forward
    monkeypatch.setattr(
        Olmo2MLP, "forward", lambda self, x: torch.cat((plain(self, x[:, :5]), plain(self, x[:, 5:])), dim=1)
    )
    with pytest.raises(LoadError, match="is not computed for every token"):
        Driver(checkpoint("olmo2"), lora={"verbs": made / "adapter"})


# ------------------------------------------------------------------------------------------------------------
# The products


@pytest.mark.parametrize("fixed", [False, True])
def test_shares_give_every_token_its_own_adapter(fixed: bool) -> None:
    rng = np.random.default_rng(0)
    count, rank, inputs, outputs = 5, 3, 8, 12
    generator = torch.Generator().manual_seed(0)
    down, up = (torch.randn(count * rank, size, generator=generator) for size in (inputs, outputs))
    adapters = Adapters(count, torch.device("cpu"), fixed=fixed)
    stack = Stack(down, (Up(None, slice(0, outputs), up),), rank)
    for _ in range(60):
        runs = rng.integers(1, rng.choice([2, 5, 2 * LONG]), size=rng.integers(1, 12))
        of_tokens = np.repeat(rng.integers(0, rng.integers(1, count + 1) + 1, size=len(runs)), runs)
        x = torch.randn(len(of_tokens), inputs, generator=generator)
        adapters.choose(of_tokens)
        out = torch.zeros(len(x), outputs)
        stack.add(out, x, adapters.shares)
        expected = torch.zeros(len(x), outputs)
        for row, own in enumerate(of_tokens.tolist()):
            if own:
                at = slice((own - 1) * rank, own * rank)
                expected[row] = x[row] @ down[at].T @ up[at]
        assert torch.allclose(out, expected, atol=1e-5)


def test_parts_of_a_map_add_to_their_own_outputs_alone() -> None:
    generator = torch.Generator().manual_seed(0)

    def matrix(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    q, k, v = (Place("qkv", 8, size, first) for size, first in ((6, 0), (3, 6), (3, 9)))
    of_adapters: list[dict[Place, LowRank]] = [
        {q: LowRank(matrix(2, 8), matrix(6, 2), 0.5), v: LowRank(matrix(4, 8), matrix(3, 4), 2.0)},
        {},
        {v: LowRank(matrix(1, 8), matrix(3, 1), 3.0), k: LowRank(matrix(2, 8), matrix(3, 2), 1.5)},
    ]
    x, of_tokens = matrix(9, 8), np.array([1, 1, 2, 0, 3, 3, 1, 0, 3])
    expected = torch.zeros(9, 12)
    for row, own in enumerate(of_tokens.tolist()):
        for place, low in of_adapters[own - 1].items() if own else ():
            outputs = slice(place.first, place.first + place.outputs)
            expected[row, outputs] = low.scale * (low.up @ (low.down @ x[row]))
    adapters = Adapters(3, torch.device("cpu"), fixed=False)
    adapters.choose(of_tokens)
    for apart in (False, True):
        stack = make_stack(of_adapters, torch.float32, torch.device("cpu"), apart=apart)
        assert len(stack.ups) == (3 if apart else 1)
        out = torch.zeros(9, 12)
        stack.add(out, x, adapters.shares)
        assert torch.allclose(out, expected, atol=1e-5)


def test_what_a_step_does_not_need_it_does_not_compute() -> None:
    adapters = Adapters(6, torch.device("cpu"), fixed=False)

    def shares(*of_tokens: int) -> list[tuple[int, int, int, int, bool]]:
        adapters.choose(np.array(of_tokens))
        return [
            (own.tokens.start, own.tokens.stop, own.adapters.start, own.adapters.stop, own.others is None)
            for own in adapters.shares
        ]

    assert shares(0, 0, 0) == []
    assert shares(2, 2, 2) == [(0, 3, 1, 2, True)]
    assert shares(2, 0, 3) == [(0, 3, 1, 3, False)]
    assert shares(1, 6, 1) == [(0, 3, 0, 1, False), (0, 3, 5, 6, False)]
    assert shares(*[3] * LONG, 1, 2, *[0] * LONG) == [
        (0, LONG, 2, 3, True),
        (LONG, LONG + 2, 0, 2, False),
    ]


def test_an_adapter_that_is_no_number_is_refused(checkpoint: Find, adapters: Made, tmp_path: Path) -> None:
    """It would reach those who are not under it, through the products that they share."""
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = torch.zeros(2, 48), torch.full((96, 2), float("nan"))
    tensors = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
    config = {"r": 2, "lora_alpha": 2, "target_modules": [path.removeprefix("base_model.model.")]}
    folder = write_adapter(tmp_path, tensors, config)
    with pytest.raises(LoadError, match="'broken' has weights that are not finite in float32"):
        Driver(checkpoint("qwen3"), lora={"broken": folder})


def test_an_adapter_of_a_higher_rank_than_is_taken_is_refused(checkpoint: Find, tmp_path: Path) -> None:
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{path}.lora_A.weight": torch.zeros(2, 48), f"{path}.lora_B.weight": torch.ones(96, 2)}
    config = {"r": 2, "lora_alpha": 2, "target_modules": [path.removeprefix("base_model.model.")]}
    folder = write_adapter(tmp_path, tensors, config)
    with pytest.raises(LoadError, match="'high' has the rank 2, and max_lora_rank is 1"):
        Driver(checkpoint("qwen3"), lora={"high": folder}, max_lora_rank=1)
    Driver(checkpoint("qwen3"), lora={"high": folder}, max_lora_rank=2)
