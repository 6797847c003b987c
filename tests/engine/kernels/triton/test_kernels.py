"""Every Triton kernel computes what its torch body does; without a GPU under Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import sampler
from engine.kernels.fp8 import FP8, quantize_rows, to_fp8
from engine.kernels.torch_attention import GroupStep
from engine.kernels.triton import reference
from engine.step import DrawPlan, plain_draws

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)

from engine.kernels.triton import attention, fused, inputs, sampling, thin  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies no bf16


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs one program after the other, and rounds to eight bits without their carry."""
    if INTERPRETED:
        from triton.runtime import interpreter

        by_hand = interpreter._convert_float  # type: ignore[attr-defined]

        def convert(value: Any, source: Any, target: Any, mode: Any) -> Any:
            if str(target) == "fp8e4nv" and str(source) == "fp32":
                return to_fp8(torch.from_numpy(value).cpu()).view(torch.uint8).numpy()
            return by_hand(value, source, target, mode)

        monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(attention, "MAX_SEGMENTS", 2)
    monkeypatch.setattr(sampling, "PIECE", 32)
    with DEVICE:
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cpu").to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------
# Attention


def paged(
    counts: list[int], lengths: list[int], *, block_size: int, num_kv: int, head_dim: int, dtype: torch.dtype
) -> tuple[GroupStep, Tensor, Tensor]:
    """A step over a cache whose blocks are scattered and whose unused places are not numbers."""
    width = -(-max(lengths) // block_size)
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    num_blocks = sum(-(-length // block_size) for length in lengths) + 1
    order = (
        torch.randperm(num_blocks, generator=torch.Generator("cpu").manual_seed(3), device="cpu")
        .int()
        .to(DEVICE)
    )
    pool = torch.full((num_blocks, 3, 2, block_size, num_kv, head_dim), float("nan")).to(dtype)
    k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
    at = 0
    for row, length in enumerate(lengths):
        own = -(-length // block_size)
        tables[row, :own] = order[at : at + own]
        at += own
        for position in range(length):
            block = int(tables[row, position // block_size])
            k_cache[block, position % block_size] = random(num_kv, head_dim, seed=position).to(dtype)
            v_cache[block, position % block_size] = random(num_kv, head_dim, seed=-position).to(dtype)
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(counts)))).to(DEVICE)
    nothing = torch.zeros(0, dtype=torch.int64)
    return GroupStep(tables, starts, torch.tensor(lengths), nothing, nothing, None), k_cache, v_cache


def attends(
    counts: list[int],
    lengths: list[int],
    *,
    group: int = 2,
    num_kv: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    step, k_cache, v_cache = paged(
        counts, lengths, block_size=block_size, num_kv=num_kv, head_dim=head_dim, dtype=dtype
    )
    step = replace(step, window=window)
    q = random(sum(counts), num_kv * group, head_dim, dtype=dtype)
    sink = random(num_kv * group) if sinks else None
    decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    given: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": sink}
    expected = reference.paged_attention(q, k_cache, v_cache, step, **given)
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for position in range(length - count - window + 1 if window else 0):  # another sequence's by now
            block = int(step.block_tables[row, position // block_size])
            k_cache[block, position % block_size] = v_cache[block, position % block_size] = float("nan")
    found = attention.paged_attention(q, k_cache, v_cache, step, **given, num_decodes=decodes)
    close(found, expected, dtype)


def test_decode_rows_of_any_length_share_one_launch() -> None:
    attends([1, 1, 1], [1, 9, 150], num_kv=1)


def test_prefill_chunks_and_decodes_mix() -> None:
    attends([1, 1, 5, 70, 3], [7, 70, 5, 71, 30], num_kv=1)


def test_a_place_that_nobody_uses_gets_zeros() -> None:
    step, k_cache, v_cache = paged([1, 1], [5, 1], block_size=4, num_kv=1, head_dim=16, dtype=torch.float32)
    step = replace(step, seq_lens=torch.tensor([5, 0]))
    out = attention.paged_attention(random(2, 2, 16), k_cache, v_cache, step, scale=1.0)
    assert out[0].abs().min() > 0
    assert (out[1] == 0).all()


@pytest.mark.parametrize(
    "given",
    [
        {"window": 6},
        {"window": 70},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 6, "softcap": 2.0, "sinks": True},
        {"group": 7, "num_kv": 1},
        {"group": 1, "num_kv": 3, "head_dim": 24, "block_size": 6},
        {"dtype": HALF, "head_dim": 64},
    ],
    ids=str,
)
def test_variants_of_attention(given: dict[str, Any]) -> None:
    attends([1, 1, 12], [3, 75, 20], **given)


def test_with_enough_sequences_the_keys_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SEGMENTS", 1)
    attends([1, 1], [9, 80], sinks=True)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_keys_may_be_kept_in_eight_bits(dtype: torch.dtype) -> None:
    step, k_cache, v_cache = paged([1, 9], [9, 9], block_size=4, num_kv=1, head_dim=16, dtype=FP8)
    q = random(10, 2, 16, dtype=dtype)
    given: dict[str, Any] = {"scale": 1.0, "softcap": 3.0, "sinks": random(2)}
    step = replace(step, window=6)
    expected = reference.paged_attention(q, k_cache, v_cache, step, **given)
    wide = reference.paged_attention(q, k_cache.to(dtype), v_cache.to(dtype), step, **given)
    close(expected, wide, dtype)
    close(attention.paged_attention(q, k_cache, v_cache, step, **given, num_decodes=1), expected, dtype)


# ------------------------------------------------------------------------------------------------------------
# Between the products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [True, False])
def test_sum_and_norm(adds: bool, dtype: torch.dtype) -> None:
    residual, weight = random(3, 48, dtype=dtype), random(48, dtype=dtype, seed=1)
    x = random(3, 48, dtype=dtype, seed=2) if adds else None
    other = residual.clone()
    close(fused.add_norm(x, residual, weight, 1e-6), reference.add_norm(x, other, weight, 1e-6), dtype)
    close(residual, other, dtype)


def test_gate() -> None:
    close(fused.gate(random(3, 160)), reference.gate(random(3, 160)))


@pytest.mark.parametrize("kept", [torch.float32, FP8])
@pytest.mark.parametrize("norm", ["none", "heads", "one"])
def test_rotation_writes_keys_and_values_into_their_slots(norm: str, kept: torch.dtype) -> None:
    num_q, num_kv, head_dim = 6, 2, 24
    heads = random(4, num_q + 2 * num_kv, head_dim)
    heads[0, -1, :4] = torch.tensor([1e4, -1e4, 450.0, 0.001])  # beyond what eight bits hold
    weight = {
        "none": None,
        "heads": random(num_q + num_kv, head_dim),
        "one": random(num_q + num_kv, 1).expand(-1, head_dim),
    }[norm]
    cosines, sines = random(9, head_dim // 2), random(9, head_dim // 2, seed=1)
    slots = (torch.tensor([3, 0, -1, 3]), torch.tensor([1, 3, 0, 2]))
    positions = torch.tensor([5, 0, 8, 6])

    def run(body: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        pool = torch.zeros(4, 2, 4, num_kv, head_dim, dtype=kept)
        q = body(heads, weight, 1e-5, cosines, sines, positions, pool[:, 0], pool[:, 1], *slots)
        return q, pool.float()

    found, expected = run(fused.rotate_and_store), run(reference.rotate_and_store)
    close(found[0], expected[0])
    if kept is FP8:  # rounding may part what is equal to a few bits: by one step of eight
        assert ((found[1] - expected[1]).abs() <= expected[1].abs() / 8 + 2e-3).all()
        assert (found[1] != expected[1]).sum() <= 2
        assert found[1].abs().max() == 448
    else:
        close(found[1], expected[1])


@pytest.mark.parametrize("kept", [torch.float32, FP8])
def test_keys_and_values_are_stored_where_they_belong(kept: torch.dtype) -> None:
    k, v = random(3, 3, 24), random(3, 3, 24, seed=1) * 300
    slots = (torch.tensor([2, -1, 0]), torch.tensor([0, 0, 3]))
    pools = [torch.zeros(3, 2, 4, 3, 24, dtype=kept) for _ in range(2)]
    fused.store_kv(k, v, pools[0][:, 0], pools[0][:, 1], *slots)
    reference.store_kv(k, v, pools[1][:, 0], pools[1][:, 1], *slots)
    assert torch.equal(pools[0].float(), pools[1].float())
    assert pools[0].float().isfinite().all() and pools[0].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_become_eight_bits_with_a_scale_each(dtype: torch.dtype) -> None:
    x = random(3, 72, dtype=dtype)
    x[0] *= 1000
    x[1] = 0
    (found, scales), (expected, scales_expected) = fused.quantize_rows(x), quantize_rows(x)
    close(scales, scales_expected)
    assert torch.equal(found.float(), expected.float())
    assert found[2].float().abs().max() == 448 and not found[1].float().any()


# ------------------------------------------------------------------------------------------------------------
# Products of few rows


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "parts",
    ["", "bias", "norm", "gated", "residual", "bias norm gated residual"],
    ids=lambda name: name or "bare",
)
def test_few_rows(parts: str, rows: int, dtype: torch.dtype) -> None:
    outputs, width = 44, 72
    given: dict[str, Any] = {"gated": "gated" in parts, "eps": 1e-6}
    if "norm" in parts:
        given["norm"] = random(width, dtype=dtype, seed=5)
    if "residual" in parts:
        given["residual"] = random(rows, outputs // (2 if given["gated"] else 1), dtype=dtype)
    bias = random(outputs, dtype=dtype) if "bias" in parts else None
    x, weight = random(rows, width, dtype=dtype), random(outputs, width, dtype=dtype) * 0.1
    found = thin.linear(x, weight, bias, **given)
    expected = reference.linear(x, weight, bias, **given)
    close(found, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_times_eight_bits(gated: bool, rows: int, dtype: torch.dtype) -> None:
    weight, scale = quantize_rows(random(44, 72) * torch.linspace(0.01, 0.2, 44)[:, None])
    x, bias = random(rows, 72, dtype=dtype), random(44, dtype=dtype)
    given: dict[str, Any] = {"scale": scale[:, 0], "norm": random(72, dtype=dtype), "eps": 1e-6}
    found = thin.linear(x, weight, bias, **given, gated=gated)
    expected = reference.linear(x, weight, bias, **given, gated=gated)
    close(found, expected, dtype)
    whole = (weight.float() * scale).to(dtype)
    close(expected, reference.linear(x, whole, bias, norm=given["norm"], eps=1e-6, gated=gated), HALF)


# ------------------------------------------------------------------------------------------------------------
# Inputs


def test_inputs_are_laid_out_and_drawn_tokens_looked_up() -> None:
    packed = torch.tensor([[7, 6, 3, 1, 9], [-2, 1, 8, 0, 4]], dtype=torch.int32)
    last_ids = torch.tensor([11, 12])

    def run(body: Callable[..., None]) -> list[Tensor]:
        buffers = [torch.full((4,), 77) for _ in range(5)]
        tables = torch.full((4, 3), 77, dtype=torch.int32)
        body(*buffers, tables, packed, last_ids, 2, 2, 4)
        return [*buffers, tables[:2, :2]]

    found = run(inputs.lay_out)
    assert [buffer.tolist() for buffer in found] == [
        [7, 12, 0, 0],
        [5, 0, 0, 0],
        [6, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 8, -1, -1],
        [[3, 1], [8, 0]],
    ]
    assert all(torch.equal(*pair) for pair in zip(found, run(reference.lay_out), strict=True))


# ------------------------------------------------------------------------------------------------------------
# Draws


def plan(rows: int, **given: float) -> DrawPlan:
    """A plan of rows that all have the same numbers and each its own noise."""
    plain = replace(
        plain_draws(rows),
        noise=np.arange(rows, dtype=np.int64) * 0x1234567887654321 + 5,
        draw_index=np.arange(rows, dtype=np.int64) % 3,
    )
    same = {name: np.full_like(getattr(plain, name), value) for name, value in given.items()}
    return replace(plain, **same)


def kernel_draw(logits: Tensor, own: DrawPlan) -> list[int]:
    ids: list[int] = sampling.pick(logits, own).tolist()
    return ids


def torch_draw(logits: Tensor, own: DrawPlan) -> list[int]:
    ids: list[int] = sampler.draw(logits, own, np.zeros(0, np.int64), np.zeros((0, 0), np.int32)).ids.tolist()
    return ids


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 5, "temperature": 3.0},
        {"top_k": 60, "temperature": 3.0},
        {"top_p": 0.3},
        {"top_p": 0.9, "temperature": 2.0},
        {"top_p": 1e-9},
        {"min_p": 0.2, "temperature": 2.0},
        {"min_p": 0.1, "top_p": 0.5, "temperature": 3.0},
        {"top_k": 20, "top_p": 0.5, "temperature": 3.0},
        {"top_k": 3, "top_p": 0.95, "temperature": 3.0},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 2.0},
    ],
    ids=str,
)
def test_draws_are_those_of_the_torch_body(given: dict[str, float]) -> None:
    logits = random(2, 150) * 3
    own = plan(2, **given)
    assert kernel_draw(logits, own) == torch_draw(logits, own)


def test_each_row_has_its_own_numbers() -> None:
    logits = random(4, 150) * 3
    own = replace(
        plan(4),
        temperature=np.array([0.0, 1.0, 2.0, 0.7], np.float32),
        top_k=np.array([0, 0, 4, 2]),
        top_p=np.array([1.0, 0.4, 1.0, 0.9], np.float32),
    )
    assert kernel_draw(logits, own) == torch_draw(logits, own)


def test_of_equal_scores_the_lower_ids_are_kept() -> None:
    logits = torch.zeros(8, 40)
    logits[:, 30:] = 1.0
    drawn = kernel_draw(logits, plan(8, top_k=2, temperature=5.0))
    assert set(drawn) == {30, 31}


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's
def test_banned_tokens_are_never_drawn_and_no_row_goes_beyond_the_vocabulary() -> None:
    logits = torch.full((3, 50), float("-inf"))
    logits[0, 7] = -3.0
    logits[2] = float("nan")
    drawn = kernel_draw(logits, plan(3, top_p=0.9, top_k=4, min_p=0.1))
    assert drawn[0] == 7
    assert all(0 <= token < 50 for token in drawn)
