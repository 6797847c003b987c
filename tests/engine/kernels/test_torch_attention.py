"""Paged attention against attention written out, sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kernels import torch_attention as attention
from engine.kernels.fp8 import FP8, raw
from engine.kernels.torch_attention import (
    GroupStep,
    Workspace,
    make_tiles,
    new_pool,
    paged_attention,
    write_kv,
)

CPU = torch.device("cpu")


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [n, Hq, D] at positions start.., k and v [S, Hkv, D] from position 0, in f64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    query_at = start + torch.arange(len(q))[:, None]
    key_at = torch.arange(len(k))[None]
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = torch.softmax(scores, -1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def check(
    lengths: list[tuple[int, int]],
    *,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    heads: tuple[int, int] = (6, 2),
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kept: torch.dtype | None = None,
    seed: int = 0,
    block_by_block: bool = False,
) -> None:
    """lengths: (tokens in the cache already, queries) of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    dim, scale = 16, 0.3
    num_heads, num_kv_heads = heads
    seq_lens = np.array([start + count for start, count in lengths])
    counts = np.array([count for _, count in lengths])
    query_start = np.concatenate(([0], np.cumsum(counts)))
    width = -(-int(seq_lens.max()) // block_size)
    num_blocks = len(lengths) * width + 3
    tables = rng.permutation(num_blocks)[: len(lengths) * width].reshape(len(lengths), width).astype(np.int32)
    pool = new_pool(num_blocks, 3, block_size, num_kv_heads, dim, kept or dtype, CPU)
    if block_by_block:  # as on a GPU
        pool = pool.contiguous()
    k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    keys = [rand(int(n), num_kv_heads, dim) for n in seq_lens]
    values = [rand(int(n), num_kv_heads, dim) for n in seq_lens]
    queries = rand(int(counts.sum()), num_heads, dim)
    sinks = rand(num_heads) if with_sinks else None
    if kept is not None:  # what the cache holds of them
        keys, values = ([own.to(kept).to(dtype) for own in each] for each in (keys, values))

    def step(rows: np.ndarray, positions: np.ndarray, tiles: tuple[attention.Tile, ...]) -> GroupStep:
        return GroupStep(
            block_tables=torch.from_numpy(tables),
            query_start=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(seq_lens),
            slot_blocks=torch.from_numpy(tables[rows, positions // block_size].astype(np.int64)),
            slot_offsets=torch.from_numpy(positions % block_size),
            window=window,
            tiles=tiles,
        )

    rows = np.repeat(np.arange(len(lengths)), seq_lens)
    positions = np.concatenate([np.arange(n) for n in seq_lens])
    write_kv(torch.cat(keys), torch.cat(values), k_cache, v_cache, step(rows, positions, ()))
    if window is not None:  # what has left the window belongs to others by now
        for row, (start, _) in enumerate(lengths):
            for i in range(max(0, start - window + 1) // block_size):
                raw(k_cache)[int(tables[row, i])] = raw(v_cache)[int(tables[row, i])] = 120
    tiles = make_tiles(
        tables,
        query_start,
        seq_lens,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        window=window,
        block_bytes=block_size * num_kv_heads * dim * dtype.itemsize,
        dtype=dtype,
        device=CPU,
    )
    whole = step(rows, positions, tiles)
    got = paged_attention(
        queries, k_cache, v_cache, whole, Workspace(), scale=scale, softcap=softcap, sinks=sinks
    )
    for row, (start, _) in enumerate(lengths):
        own = slice(int(query_start[row]), int(query_start[row + 1]))
        expected = plain(queries[own], keys[row], values[row], start, window, scale, softcap, sinks)
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got[own].double(), expected, atol=tolerance, rtol=tolerance)


LENGTHS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 17])), min_size=1, max_size=7
)


@settings(max_examples=80, deadline=None)
@given(
    LENGTHS,
    st.sampled_from([None, 1, 3, 4, 11]),
    st.sampled_from([(4, 4), (6, 2), (5, 1)]),
    st.integers(0, 99),
)
def test_ragged_batches(
    lengths: list[tuple[int, int]], window: int | None, heads: tuple[int, int], seed: int
) -> None:
    check(lengths, window=window, heads=heads, seed=seed)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.sampled_from([None, 5]), st.booleans(), st.sampled_from([None, 2.0]))
def test_softcap_and_sinks(
    lengths: list[tuple[int, int]], window: int | None, with_sinks: bool, softcap: float | None
) -> None:
    check(lengths, window=window, softcap=softcap, with_sinks=with_sinks)


@pytest.mark.parametrize("window", [None, 6])
def test_any_strides_of_the_cache(window: int | None) -> None:
    check([(30, 1), (7, 1), (0, 9), (12, 4)], window=window, block_by_block=True)


@pytest.mark.parametrize("piece", [1, 3, 128])
def test_bfloat16(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PIECE", piece)
    check([(30, 1), (7, 1), (0, 9), (12, 4)], dtype=torch.bfloat16)


def test_scores_of_long_texts_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(limit: int) -> tuple[torch.Tensor, int]:
        monkeypatch.setattr(attention, "SCORE_BYTES", limit)
        workspace, generator = Workspace(), torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(shape, generator=generator).bfloat16()
            for shape in ((4, 2, 200, 16), (4, 3000, 16), (4, 3000, 16))
        )
        found = attention._in_pieces(q, k, v, 0.25, workspace)
        return found, max(buffer.nbytes for buffer in workspace.buffers.values())

    (few, small), (many, large) = attend(3 << 20), attend(1 << 30)
    assert small <= 3 << 20 < large
    torch.testing.assert_close(few, many)


def test_only_bfloat16_is_multiplied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_in_pieces", None)  # in f16 plain products take ten times as long
    check([(0, 9), (12, 4)], dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_by_block", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_keys_may_be_kept_in_eight_bits(window: int | None, block_by_block: bool, dtype: torch.dtype) -> None:
    lengths = [(30, 1), (7, 1), (0, 9), (12, 4)]
    check(lengths, window=window, block_by_block=block_by_block, dtype=dtype, kept=FP8)
    check(lengths, window=window, softcap=2.0, with_sinks=True, dtype=dtype, kept=FP8)


@pytest.mark.parametrize("window", [None, 6])
def test_small_tiles_and_masks(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(attention, "TILE_BYTES", 3000)
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 100)
    check([(30, 1), (7, 1), (0, 40), (12, 40), (0, 17), (3, 1), (50, 1)], window=window)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(2, 70), st.integers(1, 24), st.booleans())
@example(0, 17, 6, False)  # the last piece has one query
@example(5, 33, 3, True)
def test_prompts_of_any_length_in_pieces_of_any_window(
    start: int, count: int, window: int, with_sinks: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASK_ELEMENTS", 100)
        check([(start, count), (3, 1)], window=window, with_sinks=with_sinks)


def test_a_row_of_zeros_behind_the_end_of_a_sequence_is_not_seen() -> None:
    # rows of one tile are padded to the longest by reading their own last block again
    check([(1, 1), (62, 1)], block_size=16)
