"""Attention by the CPU's own kernels for models whose other layers torch computes, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.executor.cpu_attention import CpuAttention
from engine.kernels import new_pool
from engine.kernels.cpu import Library
from engine.kernels.cpu.library import build
from engine.models import ModelSpec
from engine.step import LayerGroup
from tests.engine.kernels.test_torch_attention import plain
from tests.support.driver import Driver, greedy
from tests.support.kernels import PROCESSORS, need_kernels

Find = Callable[[str], Path]
BLOCK = 16
SCALE = 0.3
# tokens before a step and in it: alone, in pieces, with the first blocks in common, behind much
LENGTHS = [(0, 1), (3, 1), (0, 40), (150, 1), (150, 1), (700, 1), (30, 200), (0, 7)]
CAPS_AND_SINKS = [(None, False), (2.0, False), (None, True), (2.0, True)]


@pytest.fixture(scope="module", params=list(PROCESSORS))
def kernels(request: pytest.FixtureRequest) -> Library:
    need_kernels(request.param)
    return build(request.param)


def spec(dtype: torch.dtype, kv_heads: int, dim: int, window: int | None) -> ModelSpec:
    group = LayerGroup((0,), kv_heads, dim, window)
    return ModelSpec("Test", 300, 1000, 1, (group,), dtype, b"")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 32), (4, 1, 96), (70, 1, 64), (4, 4, 256)])
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize(("softcap", "with_sinks"), CAPS_AND_SINKS)
def test_it_is_attention(
    kernels: Library,
    deterministic: bool,
    kept: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    """Step by step over the same sequences: everything before the step, then what the step adds."""
    dtype = torch.bfloat16 if kept is torch.int8 else kept
    generator, rng = torch.Generator().manual_seed(5), np.random.default_rng(5)
    totals = [before + count for before, count in LENGTHS]
    width = -(-max(totals) // BLOCK)
    tables = rng.permutation(len(LENGTHS) * width).astype(np.int32).reshape(len(LENGTHS), width)
    tables[4, :8] = tables[3, :8]  # 128 tokens in common
    pool = new_pool(tables.size, 1, BLOCK, kv_heads, dim, kept, torch.device("cpu"))
    layers = [(0, pool[:, 0, 0], pool[:, 0, 1])]
    attend = CpuAttention(kernels, spec(dtype, kv_heads, dim, window), layers, deterministic=deterministic)

    def random(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, dim, generator=generator).to(dtype)

    q, k, v = ([random(total, count) for total in totals] for count in (heads, kv_heads, kv_heads))
    for own in (k, v):
        own[4][:128] = own[3][:128]
    sinks = torch.randn(heads, generator=generator).to(dtype) if with_sinks else None

    def step(ranges: list[tuple[int, int]]) -> torch.Tensor:
        counts = [end - begin for begin, end in ranges]
        rows = np.repeat(np.arange(len(ranges)), counts)
        positions = np.concatenate([np.arange(begin, end) for begin, end in ranges])
        plan: Any = SimpleNamespace(
            query_start=np.concatenate([[0], np.cumsum(counts)]),
            positions=positions,
            slot_offsets=positions % BLOCK,
            seq_lens=np.array([end for _, end in ranges]),
            token_ids=positions,
            block_tables=(tables,),
            slot_blocks=(tables[rows, positions // BLOCK].astype(np.int64),),
        )
        given = [
            torch.cat([own[b:e] for own, (b, e) in zip(part, ranges, strict=True)]) for part in (q, k, v)
        ]
        return attend.of(plan, lambda: None)(0, *given, scale=SCALE, softcap=softcap, sinks=sinks)

    step([(0, before) for before, _ in LENGTHS])
    found = step([(before, before + count) for before, count in LENGTHS])
    expected = torch.cat(
        [
            plain(q[i][before:], k[i], v[i], before, window, SCALE, softcap, sinks)
            for i, (before, _) in enumerate(LENGTHS)
        ]
    )
    error = (found.double() - expected).abs().max().item()
    assert error < {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.int8: 0.1}[kept]


def test_keys_and_values_in_bytes_are_for_any_model(checkpoint: Find) -> None:
    need_kernels()
    prompt = tuple(range(10, 90))
    for name in ("gemma2-32", "gpt_oss-32"):
        whole, bytewise = (
            Driver(checkpoint(name), dtype="bfloat16", num_blocks=40, kv_cache_dtype=kind)
            for kind in ("auto", "int8")
        )
        assert bytewise.loop.runner.kv_dtype is torch.int8
        assert bytewise.loop.runner.kv_bytes < 0.6 * whole.loop.runner.kv_bytes
        for driver in (whole, bytewise):
            assert len(driver.generate(prompt, greedy(12))) == 12
