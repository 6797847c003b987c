"""The CPU's own kernels: products as torch's, whatever the layout, the rows, the processor and the threads;
whole steps; and what happens where they cannot be built.
"""

from __future__ import annotations

import io
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import Quantization
from engine.executor import runner
from engine.executor.block_memory import to_eight_bits
from engine.kernels import large_pages as memory
from engine.kernels import sampler
from engine.kernels.cpu import library, panels
from engine.kernels.cpu.library import GROUP, PANEL, Library, Map
from engine.kernels.cpu.panels import Panels
from engine.kernels.large_pages import LARGE, Reserve, large_pages, touch
from engine.kernels.torch_attention import Workspace, memory_of, new_pool, write_kv
from engine.models.decoder import NativeDecoder
from engine.models.linear import make_linear
from engine.step import DrawPlan, plain_draws
from engine.tiny import CHECKPOINT
from engine.types import LoadError
from tests.support.driver import Driver, greedy
from tests.support.kernels import PROCESSORS, need_kernels

Find = Callable[[str], Path]
KINDS: list[tuple[torch.dtype, Quantization]] = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "int4"),
]
# below a panel; panels that are not whole; more inputs than one block of them
SHAPES = [(32, 64), (200, 96), (130, 2112)]
ROWS = (0, 1, 2, 5, 6, 7, 16, 40, 300)


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=list(PROCESSORS))
def kernels(request: pytest.FixtureRequest) -> Library:
    need_kernels(request.param)
    return library.build(request.param)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(
    kernels: Library, weight: Tensor, bias: Tensor | None, kind: Quantization, gated: bool = False
) -> Panels:
    found = make_linear(weight, bias, kind, Workspace(), kernels, gated=gated)
    assert isinstance(found, Panels)
    return found


def draw_plan(rows: int, **fields: NDArray[np.generic]) -> DrawPlan:
    """Rows at temperature 1 with noise of their own, but for these fields."""
    noise, index = np.arange(rows) * 987654321987654321 - 2**62, np.arange(rows) * 7
    return replace(plain_draws(rows), **{"noise": noise, "draw_index": index, **fields})


def masks_of(rows: Sequence[int], vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Random masks for these rows."""
    shape = (len(rows), -(-vocabulary // 32))
    return np.array(rows, np.int64), np.random.default_rng(5).integers(-(2**31), 2**31, shape).astype(
        np.int32
    )


def both_draws(
    kernels: Library, scores: Tensor, plan: DrawPlan, mask_rows: NDArray[np.int64], masks: NDArray[np.int32]
) -> NDArray[np.int64]:
    """What is drawn, which is what torch draws; and so are peaks (under bias or penalties: which are finite),
    and what was allowed. The scores are as they were."""
    drawn, before = sampler.draw(scores, plan, mask_rows, masks), scores.numpy().copy()
    ids, peak, allowed = sampler.draw_here(scores.numpy(), plan, mask_rows, masks, kernels.draw)
    assert np.array_equal(scores.numpy(), before, equal_nan=True)
    assert np.array_equal(ids, drawn.ids.numpy())
    assert np.array_equal(np.isfinite(peak), np.isfinite(drawn.peak.numpy()))
    if not (len(plan.bias_rows) or len(plan.penalized)):
        assert np.array_equal(peak, drawn.peak.numpy(), equal_nan=True)
    assert np.array_equal(allowed, np.ones(len(ids)) if drawn.allowed is None else drawn.allowed.numpy())
    return ids


@pytest.mark.sampled(3)
@pytest.mark.parametrize("vocabulary", [1, 5, 1003, 40_000])
def test_a_draw_that_kernels_look_at_first_is_that_of_torch(kernels: Library, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    plan = draw_plan(8, temperature=np.array([1, 1, 0.3, 0, 2, 1, 0, 0.7], np.float32))
    for scale, offset in ((0.0, 0.0), (0.1, 0.0), (3.0, -20.0), (50.0, 0.0), (3.0, 1e6)):
        scores = torch.randn(8, vocabulary, generator=generator) * scale + offset
        scores[::2, 1::3] = float("-inf")
        scores = torch.cat((scores, scores + 1e9), dim=1)[:, :vocabulary]  # rows that lie apart
        for rows in ([], [1, 3, 4], range(8)):
            mask_rows, masks = masks_of(rows, vocabulary)
            masks[:, 0] |= 1  # no row without any token
            both_draws(kernels, scores, plan, mask_rows, masks)


def test_filters_penalties_and_bias_go_the_same_way_beside_rows_without(kernels: Library) -> None:
    scores = random(6, 1003, dtype=torch.float32) * 3
    mask_rows, masks = masks_of([0, 2], 1003)
    filtered = draw_plan(
        6,
        top_k=np.array([0, 5, 0, 2000, 0, 0]),
        top_p=np.array([1, 1, 0.5, 1, 1, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0.2, 0], np.float32),
    )
    both_draws(kernels, scores, filtered, mask_rows, masks)
    biased = replace(
        filtered,
        bias_rows=np.array([1, 3, 5]),  # one is of a token that is penalized, too
        bias_ids=np.array([3, 8, 1002]),
        bias_values=np.array([-np.inf, 2.5, 30], np.float32),
        penalized=np.array([2, 3]),
        repetition=np.array([1.5, 1], np.float32),
        presence=np.array([0, 0.5], np.float32),
        frequency=np.array([0, 0.5], np.float32),
        history_rows=np.array([0, 1, 1]),
        history_ids=np.array([7, 8, 8]),
        history_is_output=np.array([False, True, True]),
    )
    assert both_draws(kernels, scores, biased, mask_rows, masks)[5] == 1002


def test_penalties_are_those_of_torch() -> None:
    draw, rows, vocabulary = np.random.default_rng(4), 12, 503
    penalized = np.array([0, 2, 3, 7, 11])
    lengths = [0, 3, 900, 40, 41]
    plan = draw_plan(
        rows,
        penalized=penalized,
        repetition=np.array([1.3, 1, 1.7, 0.5, 1], np.float32),
        presence=np.array([0, 0.7, -0.3, 2, 0.1], np.float32),
        frequency=np.array([0.1, 0, 0.3, -1, 0.9], np.float32),
        history_rows=np.repeat(np.arange(5), lengths),
        history_ids=draw.integers(0, vocabulary, sum(lengths)),
        history_is_output=draw.random(sum(lengths)) < 0.6,
    )
    scores = random(rows, vocabulary, dtype=torch.float32) * 3
    found = scores.numpy().copy()
    sampler._penalize_here(found, plan)
    expected = scores.clone()
    sampler._penalize(expected, plan)
    assert np.array_equal(found, expected.numpy())
    assert np.array_equal((found != scores.numpy()).any(axis=1).nonzero()[0], penalized[1:])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 20.0])
def test_filters_leave_what_torch_leaves(kernels: Library, scale: float) -> None:
    draw, rows = np.random.default_rng(9), 96
    plan = draw_plan(
        rows,
        temperature=draw.choice([0.2, 0.7, 1, 1.5], rows).astype(np.float32),
        top_k=draw.choice([0, 1, 2, 20, 700, 3000, 50_000], rows),
        top_p=draw.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1], rows).astype(np.float32),
        min_p=draw.choice([0, 0, 0.05, 0.5], rows).astype(np.float32),
    )
    scores = random(rows, 40_000, dtype=torch.float32) * scale
    if not scale:  # equals: torch may take any of them, but with the highest noise where all are taken
        plan = replace(plan, top_k=np.zeros(rows, np.int64), top_p=np.ones(rows, np.float32))
    mask_rows, masks = masks_of(range(0, rows, 3), 40_000)
    both_draws(kernels, scores, plan, mask_rows, masks)


def test_of_equals_the_first_are_left(kernels: Library) -> None:
    plan = draw_plan(64, top_k=np.full(64, 3), noise=np.arange(64) ** 3)
    found = kernels.draw(np.zeros((64, 1003), np.float32), plan, np.full(64, -1), np.zeros((0, 0), np.int32))
    assert {*found["ids"][:, 0].tolist()} == {0, 1, 2}
    halved = replace(plan, top_k=np.zeros(64, np.int64), top_p=np.full(64, 0.5, np.float32))
    found = kernels.draw(np.zeros((64, 8), np.float32), halved, np.full(64, -1), np.zeros((0, 0), np.int32))
    assert {*found["ids"][:, 0].tolist()} == {0, 1, 2, 3}


def test_most_draws_have_one_contender_and_some_have_several_or_too_many(kernels: Library) -> None:
    no_masks = np.full(64, -1), np.zeros((0, 0), np.int32)
    plan, counts = draw_plan(64), set[int]()
    for scale, offset, vocabulary in ((3, 0, 1003), (0, 1e6, 1003), (0, 300, 5)):
        scores = (random(64, vocabulary, dtype=torch.float32) * scale + offset).numpy()
        found = kernels.draw(scores, plan, *no_masks)
        counts |= {*found["count"].tolist()}
        if scale == 3:
            assert (found["count"] == 1).sum() > 60
    assert {0, 1, 2} <= counts


def test_biases_of_one_score_add_up_and_those_of_no_score_are_none(kernels: Library) -> None:
    scores, plan = random(3, 50, dtype=torch.float32), draw_plan(3)
    biased = replace(
        plan,
        bias_rows=np.array([0, 0, 1, 1, 2, 2]),
        bias_ids=np.array([7, 7, 8, 8, 50, -1]),
        bias_values=np.array([20, 20, 100, -np.inf, 100, 100], np.float32),
    )
    both = replace(biased, **{name: getattr(biased, name)[:4] for name in ("bias_rows", "bias_ids")})
    drawn = both_draws(kernels, scores, replace(both, bias_values=biased.bias_values[:4]), *masks_of([], 50))
    assert drawn[0] == 7 and drawn[1] != 8
    here = sampler.draw_here(scores.numpy(), biased, *masks_of([], 50), kernels.draw)[0]
    assert np.array_equal(here, drawn)


def test_bias_that_bans_every_token_is_told_as_that(kernels: Library) -> None:
    bans = np.full(5, -np.inf, np.float32)
    plan = replace(draw_plan(1), bias_rows=np.zeros(5, np.int64), bias_ids=np.arange(5), bias_values=bans)
    _, peak, allowed = sampler.draw_here(np.zeros((1, 5), np.float32), plan, *masks_of([], 5), kernels.draw)
    assert np.isfinite(peak).all() and not allowed.any()


def test_what_is_banned_altogether_or_no_number_is_told(kernels: Library) -> None:
    scores = torch.zeros(4, 100)
    scores[1, 50], scores[2], scores[3] = float("nan"), float("-inf"), float("inf")
    plan, rows = draw_plan(4), np.array([0])
    none = np.zeros((1, 4), np.int32)
    _, peak, allowed = sampler.draw_here(scores.numpy(), plan, rows, none, kernels.draw)
    assert allowed.tolist()[0] is False
    assert np.isfinite(peak).tolist() == [True, False, False, False]


def held(linear: Panels) -> Tensor:
    """The matrix that a map multiplies by, read by the rows of the identity."""
    bare = Panels(
        linear.kind,
        linear.weight,
        linear.scale,
        None,
        linear.places,
        linear.inputs,
        linear.outputs,
        linear.dtype,
        linear.library,
    )
    return bare(torch.eye(linear.inputs, dtype=linear.dtype)).T.contiguous()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [False, True])
def test_panels_multiply_as_rows_do(
    kernels: Library, dtype: torch.dtype, kind: Quantization, shape: tuple[int, int], gated: bool
) -> None:
    weight = random(*shape, dtype=dtype)
    linear = made(kernels, weight, random(shape[0], dtype=dtype, seed=1), kind, gated)
    assert linear.bias is not None
    bias = random(shape[0], dtype=dtype, seed=1).double()
    matrix = held(linear).double()
    exact = 1e-4 if kernels.together and dtype is torch.bfloat16 else 0.0  # bfloat16 itself rounds by 1.6e-3
    kept = {"none": exact, "int8": 0.012, "int4": 0.12}[kind]
    assert (matrix - weight.double()).norm() <= kept * weight.double().norm() + 1e-12
    tolerance = 1e-5 if dtype is torch.float32 else 0.01
    for rows in ROWS:
        x = random(rows, shape[1], dtype=dtype, seed=2)
        residual = random(rows, shape[0], dtype=dtype, seed=3)
        expected = x.double() @ matrix.T + bias
        for found, whole in ((linear(x), expected), (linear(x, residual), expected + residual.double())):
            assert found.dtype is dtype and found.shape == whole.shape
            assert (
                rows == 0 or ((found.double() - whole).abs() <= tolerance * (whole.abs() + whole.std())).all()
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(
    kernels: Library, dtype: torch.dtype, kind: Quantization
) -> None:
    linear = made(kernels, random(200, 2112, dtype=dtype), random(200, dtype=dtype), kind)
    x = random(1200, 2112, dtype=dtype, seed=2)  # many: another way of rounding shows in few of them
    whole = linear(x)
    threads = torch.get_num_threads()
    try:
        for rows in (1, 2, 3, 4, 5, 6, 7, 257, 400, 1200):  # all heights of a tile
            torch.set_num_threads(1 if rows < 100 else rows // 200)
            assert torch.equal(torch.cat([linear(part) for part in x.split(rows)]), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["none", "int8"])
def test_sums_of_the_largest_numbers_do_not_overflow(kernels: Library, kind: Quantization) -> None:
    """As whole numbers they come near to the largest of 32 bits."""
    signs = torch.where(random(PANEL, 1, dtype=torch.float32) > 0, 1.0, -1.0)
    for weight, number in ((1.0, 1.0), (2.0**60, 2.0**-60), (2.0**-20, 2.0**20)):
        linear = made(kernels, (weight * signs).bfloat16().repeat(1, 2112), None, kind)
        for rows in (1, 7):
            found = linear(torch.full((rows, 2112), number, dtype=torch.bfloat16)).float()
            assert (found - 2112 * weight * number * signs.T).abs().max() < 0.01 * 2112 * weight * number


def test_a_number_far_above_the_others_does_not_hide_them(kernels: Library) -> None:
    """Beside it each loses less than bfloat16 loses of the large one; in other blocks they lose nothing."""
    beside, apart = random(2, PANEL, 512, dtype=torch.bfloat16).unbind()
    beside[:, :256] = beside[:, 384:] = beside[:, 300] = 0
    apart[:, 256:384] = 0
    x = random(3, 512, dtype=torch.bfloat16, seed=2)
    x[:, 300] = 4000.0
    for weight, lost in ((beside, 127**0.5 * 4000 * 2**-9), (apart, 0.0)):
        exact = x.double() @ weight.double().T
        error = (made(kernels, weight, None, "none")(x).double() - exact).abs().mean()
        assert error <= 0.5 * lost + 2**-9 * exact.abs().mean()


@pytest.mark.parametrize("middle", [32, 40])  # of whole halves of panels, and not
def test_gates_are_computed_with_the_product(kernels: Library, middle: int) -> None:
    weight = random(2 * middle, 64, dtype=torch.float32)
    linear = made(kernels, weight, None, "none", gated=True)
    x = 6 * random(9, 64, dtype=torch.float32, seed=2)
    out = torch.empty(9, middle)
    kernels.product((Map * 1)(linear.map(gated=True)), np.array([0, len(x)]), x, None, out)
    left, right = (x.double() @ weight.double().T).chunk(2, dim=-1)
    expected = F.silu(left) * right
    assert left.min() < -90 and left.max() > 90, "where an exponential overflows, or is nothing"
    assert ((out.double() - expected).abs() <= 2e-3 + 1e-4 * expected.abs()).all()


@pytest.mark.parametrize(("dtype", "kind"), [KINDS[0], KINDS[1], KINDS[2]])
def test_an_embedding_is_read_from_the_panels(
    kernels: Library, dtype: torch.dtype, kind: Quantization
) -> None:
    weight = random(130, 64, dtype=dtype)
    linear = made(kernels, weight, None, kind)
    at = torch.tensor([0, 63, 64, 129, 5, 5])
    assert torch.equal(linear.rows(at), held(linear)[at])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(kernels: Library, value: float) -> None:
    linear = made(kernels, random(64, 64, dtype=torch.bfloat16), None, "none")
    x = random(7, 64, dtype=torch.bfloat16, seed=2)
    clean = linear(x)
    x[3, 5] = value
    found = linear(x)
    assert not found[3].isfinite().any()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(found[others], clean[others])


def test_shapes_without_panels_are_left_to_torch(kernels: Library) -> None:
    assert not panels.fits(random(64, 63, dtype=torch.bfloat16))
    assert not panels.fits(random(64, 64, dtype=torch.float16))
    for inputs, kind in ((48, torch.int8), (GROUP, torch.int16)):  # groups of four bits fit, or do not
        linear = made(kernels, random(PANEL, inputs, dtype=torch.bfloat16), None, "int4")
        assert linear.weight.dtype is kind


# ------------------------------------------------------------------------------------------------------------
# In a model


def scores_of(
    folder: Path, lengths: Sequence[int], *, by_torch: bool, dtype: str = "bfloat16", **settings: Any
) -> Tensor:
    """The log probabilities of all tokens of prompts of these lengths, which are computed at once."""
    driver = Driver(folder, dtype=dtype, cpu_kernels=not by_torch, num_blocks=100, **settings)
    assert (driver.loop.runner.fused is None) is by_torch
    prompts = [tuple((7 * i + 3 * j) % 290 for j in range(n)) for i, n in enumerate(lengths)]
    handles = [driver.submit(prompt, greedy(2, prompt_logprobs=1)) for prompt in prompts]
    driver.run()
    outputs = [out for handle in handles for out in driver.outputs[handle]]
    found = torch.tensor([row.logprob for out in outputs for row in out.prompt_logprobs or ()])
    assert len(found) == sum(lengths) - len(lengths)
    return found


def need_the_scores_of_torch(folder: Path, dtype: str, lengths: Sequence[int], **settings: Any) -> None:
    """The log probabilities of prompts of these lengths are those of torch."""
    exact = scores_of(folder, lengths, by_torch=True, dtype="float32", **settings)
    error = (scores_of(folder, lengths, by_torch=False, dtype=dtype, **settings) - exact).abs()
    if dtype == "float32":
        assert error.max() < 1e-3
    else:  # two ways of rounding, neither of which is much the better
        rounded = scores_of(folder, lengths, by_torch=True, dtype=dtype, **settings)
        assert error.mean() < 1.25 * (rounded - exact).abs().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama-32", "mistral-32", "qwen2-windows-32", "qwen3-64", "qwen3-strips"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("march", ["native", "cooperlake", "haswell"])
def test_a_whole_step_is_that_of_torch(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, march: str
) -> None:
    """In chunks beside sequences that decode; "strips" fits tiles in all of its widths."""
    need_kernels(march)
    monkeypatch.setattr("engine.models.loader.open_library", lambda: library.build(march))
    need_the_scores_of_torch(checkpoint(name), dtype, (1, 200, 17, 64, 3), max_num_batched_tokens=150)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_whole_step_of_few_bits_is_that_of_torch(checkpoint: Find, quantization: Quantization) -> None:
    """The same weights of few bits: two ways of rounding differ no more than they do of whole weights."""
    need_kernels()
    folder, lengths = checkpoint("qwen3-strips"), (1, 200, 17, 64, 3)
    differences = [
        scores_of(folder, lengths, by_torch=False, **settings)
        - scores_of(folder, lengths, by_torch=True, **settings)
        for settings in ({"quantization": quantization}, {})
    ]
    few, whole = (difference.abs().mean() for difference in differences)
    assert few < 1.5 * whole


@pytest.mark.parametrize("name", ["mistral-32", "qwen2-windows-32", "qwen3-64", "qwen3-strips"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_to_many_keys_is_that_of_torch(checkpoint: Find, name: str, dtype: str) -> None:
    """More than pass as one block, in chunks that begin in a later one; windows hide whole blocks."""
    need_kernels()
    need_the_scores_of_torch(checkpoint(name), dtype, (480, 90), max_num_batched_tokens=300)


@pytest.mark.parametrize("times", [20, 400])
@pytest.mark.parametrize("name", ["qwen3-64", "qwen3-strips"])
def test_some_keys_may_score_far_higher_than_others(
    checkpoint: Find, tmp_path: Path, name: str, times: int
) -> None:
    """Later ones by more than a weight can hold, when what was summed before counts nothing; or by so much
    that all others count little each, and together as much."""
    need_kernels()
    steep = tmp_path / "steep"
    shutil.copytree(checkpoint(name), steep)
    weights = load_file(steep / "model.safetensors")
    for each in weights:
        if each.endswith("q_norm.weight"):
            weights[each] = weights[each] * times
    save_file(weights, steep / "model.safetensors", metadata={"format": "pt"})
    need_the_scores_of_torch(steep, "bfloat16", (480, 90), max_num_batched_tokens=300)


def likely_next(folder: Path, count: int, *, by_torch: bool, dtype: str, **settings: Any) -> list[Tensor]:
    """The log probabilities of all tokens at the first `count` places behind prompts that go on by one token
    each: three behind 128 tokens, and as many behind other 128, behind these and 128 more, behind 288, and
    behind 480 that begin with those 288. They are computed in one step."""
    driver = Driver(folder, dtype=dtype, cpu_kernels=not by_torch, num_blocks=300, **settings)
    assert (driver.loop.runner.fused is None) is by_torch
    long = [(3 * i + i * i // 7) % 290 for i in range(480)]
    other = [(5 * i + 1) % 290 for i in range(128)]
    begins = [other, long[:128], [*long[:128], *other], long[:288], long]
    for begin in begins:
        driver.generate(begin, greedy(1))
    sampling = greedy(count, logprobs=driver.loop.runner.vocab_size)
    handles = [driver.submit([*begin, last], sampling) for begin in begins for last in (5, 100, 250)]
    assert driver.step() and all(len(driver.tokens(handle)) == 1 for handle in handles)
    driver.run()
    rows = [row for handle in handles for out in driver.outputs[handle] for row in out.logprobs]
    assert len(rows) == count * len(handles)
    scores = [dict(zip(row.top_ids, row.top_logprobs, strict=True)) for row in rows]
    return [torch.tensor([values[token] for token in sorted(values)]) for values in scores]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama-32", "qwen2-windows-32", "qwen3-64", "qwen3-strips"])
@pytest.mark.parametrize("march", ["native", "cooperlake", "haswell"])
def test_keys_that_sequences_have_in_common_are_read_for_each(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch, name: str, march: str
) -> None:
    need_kernels(march)
    monkeypatch.setattr("engine.models.loader.open_library", lambda: library.build(march))
    folder = checkpoint(name)
    exact = torch.stack(likely_next(folder, 3, by_torch=True, dtype="float32"))
    found = torch.stack(likely_next(folder, 3, by_torch=False, dtype="float32"))
    assert (found - exact).abs().max() < 1e-3
    apart = torch.stack(likely_next(folder, 3, by_torch=False, dtype="float32", deterministic=True))
    assert (apart - exact).abs().max() < 1e-3 and not torch.equal(
        found, apart
    )  # they are read together, then
    exact = exact[::3]  # tokens may differ where numbers are rounded, but for the first
    errors = [
        (torch.stack(likely_next(folder, 1, by_torch=by_torch, dtype="bfloat16")) - exact).abs().mean()
        for by_torch in (False, True)
    ]
    assert errors[0] < 1.25 * errors[1]


def kept_in_bytes(x: Tensor) -> Tensor:
    """x [..., D] as it comes back from a cache that keeps it as int8."""
    shares, factors = to_eight_bits(x.float().flatten(0, -2).numpy())
    return torch.from_numpy(shares * factors).view(x.shape).to(x.dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama-32", "qwen2-windows-32", "qwen3-64", "qwen3-strips"])
@pytest.mark.parametrize("march", ["native", "cooperlake", "skylake-avx512", "haswell"])
def test_keys_and_values_that_are_kept_in_bytes_are_read_as_such(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch, name: str, march: str
) -> None:
    """Prompts in chunks, sequences that decode, alone and behind common keys: as torch computes them with
    keys and values that were rounded before they were kept."""
    need_kernels(march)
    monkeypatch.setattr("engine.models.loader.open_library", lambda: library.build(march))
    folder, lengths = checkpoint(name), (1, 200, 17, 64, 3, 480)

    def scores(*, by_torch: bool, dtype: str = "float32", **settings: Any) -> Tensor:
        own = scores_of(
            folder, lengths, by_torch=by_torch, dtype=dtype, max_num_batched_tokens=150, **settings
        )
        return torch.cat([own, *likely_next(folder, 1, by_torch=by_torch, dtype=dtype, **settings)])

    def write_rounded(k: Tensor, v: Tensor, *rest: Any) -> None:
        write_kv(kept_in_bytes(k), kept_in_bytes(v), *rest)

    exact = scores(by_torch=True)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "write_kv", write_rounded)
        rounded = scores(by_torch=True)
        in_bfloat16 = scores(by_torch=True, dtype="bfloat16")
    error = (rounded - exact).abs().mean()
    for deterministic in (False, True):
        found = scores(by_torch=False, kv_cache_dtype="int8", deterministic=deterministic)
        # a number between two shares may become either of them
        assert (found - rounded).abs().mean() < 0.05 * error
    found = scores(by_torch=False, dtype="bfloat16", kv_cache_dtype="int8")
    assert (found - exact).abs().mean() < 1.25 * (in_bfloat16 - exact).abs().mean()


def test_bytes_hold_more_tokens_and_need_the_kernels(checkpoint: Find) -> None:
    need_kernels()
    folder, settings = checkpoint("qwen3-64"), {"dtype": "bfloat16", "kv_cache_bytes": 1 << 20}
    whole, bytewise = (
        Driver(folder, kv_cache_dtype=kind, **settings).loop.runner for kind in ("auto", "int8")
    )
    assert bytewise.kv_dtype is torch.int8 and bytewise.pools[0].dtype is torch.int8
    assert max(bytewise.kv_bytes, whole.kv_bytes) <= 1 << 20
    assert len(bytewise.pools[0]) > 1.8 * len(whole.pools[0])
    a_block, in_bytes = (own.kv_bytes / len(own.pools[0]) for own in (whole, bytewise))
    assert in_bytes * 128 == a_block * 68, "a head of 64 numbers takes 68 bytes"
    refused: Mapping[str, tuple[str, dict[str, Any]]] = {
        "have 16 numbers, which is no multiple of 32": ("gemma2", {}),
        r"the kernels for a CPU \(cpu_kernels\) are off": ("qwen3-64", {"cpu_kernels": False}),
        "computes in float16": ("qwen3-64", {"dtype": "float16"}),
        "have 16 numbers, which is no multiple of 32 up to 256": ("qwen3", {}),
    }
    for why, (name, fields) in refused.items():
        with pytest.raises(LoadError, match=f"int8 cannot be had: .*{why}"):
            Driver(checkpoint(name), kv_cache_dtype="int8", **fields)


def test_the_shipped_model_runs_by_them_and_holds_its_embedding_once() -> None:
    driver = Driver(CHECKPOINT, vocab_size=3072, kv_cache_bytes=16 << 20)
    need_kernels()
    assert driver.loop.runner.fused is not None
    model: Any = driver.loop.runner.model
    assert model.embedding is model.head


def test_shapes_that_int4_does_not_fit_are_said(checkpoint: Find, caplog: pytest.LogCaptureFixture) -> None:
    need_kernels()
    driver = Driver(checkpoint("qwen3"), quantization="int4")  # its widths are 48 and 80
    assert isinstance(driver.loop.runner.model, NativeDecoder)
    assert isinstance(driver.loop.runner.model.layers[0].down, Panels)
    assert "int8 instead of int4" in caplog.text


def test_progress_is_told_from_within_a_step() -> None:
    driver = Driver(CHECKPOINT, vocab_size=3072, kv_cache_bytes=16 << 20)
    need_kernels()
    progress = driver.loop.runner.progress
    driver.submit((1, 2, 3), greedy(4))
    driver.step()
    first = progress.at
    driver.step()
    assert first is not None and progress.at is not None and progress.at > first
    progress.at = None
    assert progress.at is None


# ------------------------------------------------------------------------------------------------------------
# Building


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has kernels, and has never compiled them; where it will keep them. Nothing is computed
    by what is compiled here, which need not be fast."""
    need_kernels()
    monkeypatch.setattr(library, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in library.FLAGS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "antiphon"


def test_it_is_compiled_once(anew: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.engine")
    library.build()
    kept = list(anew.iterdir())
    assert len(kept) == 1 and anew.stat().st_mode & 0o777 == 0o700
    library.build()
    assert list(anew.iterdir()) == kept
    assert caplog.text.count("compiled in") == 1


def test_a_folder_that_others_write_to_is_not_trusted(anew: Path) -> None:
    anew.mkdir(mode=0o777)
    anew.chmod(0o777)
    library.build()
    assert not list(anew.iterdir())


def test_where_nothing_can_be_kept_nothing_is_left_behind(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert library.open_library.__wrapped__() is not None
    assert not list(tmp_path.iterdir())


def test_a_kept_file_in_pieces_is_made_anew(anew: Path) -> None:
    library.build()
    (kept,) = anew.iterdir()
    whole = kept.stat().st_size
    kept.unlink()  # what is loaded is not written into
    kept.write_bytes(b"")
    library.build()
    assert list(anew.iterdir()) == [kept] and kept.stat().st_size == whole


def test_a_part_of_a_kept_file_is_not_even_loaded(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To load it would end the process, so nothing is compiled or loaded here."""
    loaded: list[bytes] = []

    def compile(command: list[str]) -> None:
        Path(command[command.index("-o") + 1]).write_bytes(bytes(range(256)) * 64)

    monkeypatch.setattr(library, "_call", compile)
    monkeypatch.setattr(library, "_load", lambda path: loaded.append(path.read_bytes()))
    library.build()
    (kept,) = anew.iterdir()
    whole = kept.read_bytes()
    for torn in (b"", whole[:4096], whole[:-1], whole[:4096] + bytes(len(whole) - 4096)):
        kept.write_bytes(torn)
        library.build()
        assert kept.read_bytes() == whole
    assert loaded == [whole] * 5


def test_a_compiler_that_leaves_out_the_functions_is_none(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "empty.cpp").touch()
    monkeypatch.setattr(library, "SOURCE", tmp_path / "empty.cpp")
    assert library.open_library.__wrapped__() is None
    assert "antiphon_forward" in caplog.text
    assert not list(anew.iterdir())


def test_torch_is_found_in_a_folder_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = "7f00-7f01 r-xp 00000000 fe:00 1234    /home/of me/torch/lib/libgomp.so.1\n"
    monkeypatch.setattr(library, "open", lambda path: io.StringIO(loaded), raising=False)
    assert library._openmp() == "/home/of me/torch/lib/libgomp.so.1"


def test_a_compiler_that_cannot_be_read_is_none(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    assert library.open_library.__wrapped__() is None
    assert "No closing quotation" in caplog.text


def test_without_a_compiler_torch_computes(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("engine.models.loader.open_library", library.open_library.__wrapped__)
    driver = Driver(CHECKPOINT, vocab_size=3072, kv_cache_bytes=16 << 20)
    assert driver.loop.runner.fused is None
    assert "none of no-such-compiler was found" in caplog.text and "g++" in caplog.text
    assert len(driver.generate((1, 2, 3), greedy(4))) == 4


def test_a_compiler_that_fails_is_quoted(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "FLAGS", ("--no-such-flag",))
    assert library.open_library.__wrapped__() is None
    assert "no-such-flag" in caplog.text
    assert not list(anew.iterdir())


# ------------------------------------------------------------------------------------------------------------
# Memory


def test_large_memory_begins_at_a_page_and_is_zero() -> None:
    tensor = large_pages((3, LARGE), torch.uint8)
    assert tensor.data_ptr() % LARGE == 0 and not tensor.any()
    small = large_pages((3, 5), torch.bfloat16)
    assert small.shape == (3, 5) and small.dtype is torch.bfloat16 and not small.any()


def test_touching_changes_nothing() -> None:
    pool = new_pool(64, 2, 16, 2, 32, torch.float32, torch.device("cpu"))
    pool[:] = 1
    stretches = memory_of(pool, slice(3, 13))
    assert len(stretches) == 4 and all(each.is_contiguous() and len(each) == 10 for each in stretches)
    touch(stretches)
    assert torch.equal(pool, torch.ones_like(pool))


def test_a_reserve_is_taken_ahead_of_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        "engine.kernels.large_pages.touch", lambda stretches: taken.extend(stretches[0].tolist())
    )
    units = torch.arange(100)
    reserve = Reserve(lambda part: [units[part]], 100, 8)
    assert taken == list(range(8))
    for count in range(101):
        reserve.uses(count)
        assert min(100, 4 * count / 3) <= len(taken) <= max(8, 2 * count), "ahead, and no more than twice"
    assert taken == list(range(100)), "each once"


def test_little_memory_is_left_to_those_who_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", lambda _: asked.append("madvise"))
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * LARGE - 1)
    memory._touch([large_pages((LARGE,), torch.uint8)])
    assert asked == []


def test_of_a_small_model_little_is_taken_before_its_use(checkpoint: Callable[[str], Path]) -> None:
    runner = Driver(checkpoint("qwen3"), kv_cache_bytes=1 << 30).loop.runner
    weights = runner.model.spec.num_parameters * runner.model.spec.dtype.itemsize
    assert runner.kv_taken == 4 * weights < runner.kv_bytes


def test_a_container_s_limit_is_the_memory_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CONTAINER", ((tmp_path, "most", "used"),))
    machine = memory.free_memory()
    assert machine > 64 << 20
    (tmp_path / "used").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {1 << 20}\ninactive_file {1 << 20}\nslab 7\n")
    for said, free in (("max", machine), (str(65 << 20), 64 << 20), ("4096", 0)):
        (tmp_path / "most").write_text(said + "\n")
        assert memory.free_memory() == pytest.approx(free, rel=0.2)  # the machine's own varies
