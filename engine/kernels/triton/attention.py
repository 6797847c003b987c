"""Paged attention in Triton: one kernel for prefill, decode and mixed batches.

It computes what `engine.kernels.torch_attention` computes. A program takes the query heads that share one KV
head as rows of one matrix ([queries x heads of the group]), so each key is read once for all of them. With
few programs the keys of a query are cut into a fixed number of segments and merged by a second kernel: how
many depends on the number of sequences alone, so that one captured graph serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.torch_attention import GroupStep

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SEGMENTS = 32
H100_PROCESSORS = 132


@triton.jit
def _find_piece(query_start, num_seqs, QUERIES: tl.constexpr):
    """Which sequence this program computes queries of, and which piece of them; late pieces begin first.

    Late pieces of a prompt see the most keys. Sequence s has its pieces from query_start[s] // QUERIES + s
    on: room for a broken one each.
    """
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // QUERIES - tl.load(query_start) // QUERIES + middle <= place:
            low = middle
        else:
            high = middle
    return low, place - (tl.load(query_start + low) // QUERIES - tl.load(query_start) // QUERIES + low)


@triton.jit
def _share_of(segment, num_tiles, SEGMENTS: tl.constexpr):
    """The first of a segment's tiles of keys, and the one after its last."""
    share = (num_tiles + SEGMENTS - 1) // SEGMENTS
    first_tile = segment * share
    return first_tile, tl.minimum(first_tile + share, num_tiles)


@triton.jit
def _begin_softmax(sinks, head, is_query, segment, SINKS: tl.constexpr, ROWS: tl.constexpr):
    """Peak and sum before any key: those of a sink, which belongs to the first segment."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        own_sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        peak = tl.where(segment == 0, own_sink, peak)
        total = tl.where(segment == 0, tl.full([ROWS], 1.0, tl.float32), total)
    return peak, total


@triton.jit
def _mask(scores, key, is_key, position, softcap, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr):
    """Scores [ROWS, KEYS] as powers of two, minus infinity for keys that a query must not see."""
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # its tanh
    seen = is_key[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (position[:, None] - key[None, :] < WINDOW)
    return tl.where(seen, scores * LOG2_E, float("-inf"))


@triton.jit
def _weigh(scores, peak):
    """A running softmax takes scores [ROWS, KEYS]: the new peak, their weights, the old weights' decay."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # a row that has seen nothing yet has no peak to subtract
    level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, tl.exp2(scores - level[:, None]), tl.exp2(peak - level)


@triton.jit
def _store_segment(partial, peaks, sums, at, dim, is_query, is_dim, peak, total, mixed, is_used, HEAD_DIM):
    """What one segment of the keys gave: `_merge` puts segments together."""
    tl.store(peaks + at, peak, mask=is_query)
    tl.store(sums + at, total, mask=is_query)
    if is_used:
        tl.store(
            partial + at[:, None] * HEAD_DIM + dim[None, :], mixed, mask=is_query[:, None] & is_dim[None, :]
        )


# a step's metadata begin anywhere in their tensors: no variant of the kernel for each place
@triton.jit(
    do_not_specialize=["num_seqs", "table_row"],
    do_not_specialize_on_alignment=["tables", "query_start", "seq_lens"],
)
def _attend(
    out,
    partial,
    peaks,
    sums,
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    seq_lens,
    sinks,
    num_seqs,
    scale,
    softcap,
    q_token,
    q_head,
    kv_block,
    kv_offset,
    kv_head,
    table_row,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DECODE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    own_head = tl.program_id(1)
    segment = tl.program_id(2)
    if DECODE:
        row = tl.program_id(0)
        piece = 0
    else:
        row, piece = _find_piece(query_start, num_seqs, QUERIES)
    token = tl.load(query_start + row).to(tl.int32)
    num_queries = tl.load(query_start + row + 1).to(tl.int32) - token
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    first = piece * QUERIES
    if first >= num_queries:
        return

    lane = tl.arange(0, ROWS)
    query = first + lane // GROUP
    head = own_head * GROUP + lane % GROUP
    is_query = (lane < QUERIES * GROUP) & (query < num_queries)
    position = seq_len - num_queries + query
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    queries = tl.load(
        q + (token + query).to(tl.int64)[:, None] * q_token + head[:, None] * q_head + dim[None, :],
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    )

    low = 0
    if WINDOW > 0:  # blocks before that key may be another sequence's by now
        low = tl.maximum(seq_len - num_queries + first - WINDOW + 1, 0)
    begin = low // KEYS * KEYS
    end = tl.minimum(seq_len, seq_len - num_queries + first + QUERIES)
    first_tile, last_tile = _share_of(segment, tl.maximum((end - begin + KEYS - 1) // KEYS, 0), SEGMENTS)
    peak, total = _begin_softmax(sinks, head, is_query, segment, SINKS, ROWS)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)

    for tile in range(first_tile, last_tile):
        key = begin + tile * KEYS + tl.arange(0, KEYS)
        is_key = (key >= low) & (key < end)
        block = tl.load(tables + row.to(tl.int64) * table_row + key // BLOCK_SIZE, mask=is_key, other=0)
        at = block.to(tl.int64) * kv_block + (key % BLOCK_SIZE) * kv_offset + own_head * kv_head
        keys = tl.load(
            k_cache + at[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        ).to(queries.dtype)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        scores = _mask(scores, key, is_key, position, softcap, SOFTCAP, WINDOW)
        peak, weights, decay = _weigh(scores, peak)
        total = total * decay + tl.sum(weights, 1)
        values = tl.load(
            v_cache + at[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        ).to(queries.dtype)
        mixed = tl.dot(weights.to(queries.dtype), values, acc=mixed * decay[:, None], input_precision="ieee")

    to = (token + query).to(tl.int64) * NUM_HEADS + head
    if SEGMENTS == 1:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + to[:, None] * HEAD_DIM + dim[None, :],
            mixed.to(out.dtype.element_ty),
            mask=is_query[:, None] & is_dim[None, :],
        )
    else:
        to = to * SEGMENTS + segment
        is_used = first_tile < last_tile
        _store_segment(partial, peaks, sums, to, dim, is_query, is_dim, peak, total, mixed, is_used, HEAD_DIM)


@triton.jit
def _merge(
    out,
    partial,
    peaks,
    sums,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)  # token x head
    segment = tl.arange(0, SEGMENTS)
    dim = tl.arange(0, PADDED_DIM)
    peak = tl.load(peaks + at * SEGMENTS + segment)
    total = tl.load(sums + at * SEGMENTS + segment)
    highest = tl.max(peak, 0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(peak - level)
    # a segment without keys has written no values (a sink alone has a peak)
    parts = tl.load(
        partial + (at * SEGMENTS + segment)[:, None] * HEAD_DIM + dim[None, :],
        mask=(peak != float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    whole = tl.sum(weight * total, 0)
    mixed = tl.sum(weight[:, None] * parts, 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + at * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a launch is cut: rows of queries x heads, keys of a tile, warps, stages, segments of the keys."""

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int
    segments: int = 1
    decode: bool = False  # a piece is a sequence


def cut_decode(num_seqs: int, num_kv_heads: int, group: int, head_dim: int, itemsize: int) -> Cut:
    """The cut for sequences with one query each: enough segments that twice the processors are busy."""
    segments, programs = 1, num_seqs * num_kv_heads
    while programs * segments < 2 * H100_PROCESSORS and segments < MAX_SEGMENTS:
        segments *= 2
    keys = 64 if head_dim * itemsize <= 256 else 32
    rows = max(16, triton.next_power_of_2(group))
    return Cut(1, rows, keys, 4, 3, segments, decode=True)


def cut_prefill(group: int, head_dim: int, itemsize: int) -> Cut:
    """The cut for sequences with several queries. Products in f32 take registers: their tiles are small."""
    wide = head_dim * itemsize > 256
    rows, keys = (32, 32 if head_dim <= 64 else 16) if itemsize == 4 else (64, 32) if wide else (128, 64)
    rows = max(rows, triton.next_power_of_2(group))
    return Cut(rows // group, rows, keys, 8, 2 if wide else 3)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: GroupStep,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_decodes: int | None = None,
) -> Tensor:
    """`engine.kernels.torch_attention.paged_attention` on a GPU: q [T, Hq, D] -> [T, Hq, D]; reads no tiles.

    `num_decodes`: that many sequences, at the beginning, have one query each; None: all have. The caches may
    hold a narrower type (fp8) than the queries; their last axis is contiguous, and both are laid out alike.
    A sequence of length 0 (padding) gets zeros.
    """
    num_seqs = len(step.seq_lens)
    decodes = num_seqs if num_decodes is None else num_decodes
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_kv_heads, head_dim = k_cache.shape[2:]
    group = q.shape[1] // num_kv_heads
    if decodes:
        cut = cut_decode(decodes, num_kv_heads, group, head_dim, q.element_size())
        _launch(out, q, k_cache, v_cache, step, 0, decodes, decodes, cut, scale, softcap, sinks)
    if decodes < num_seqs:
        cut = cut_prefill(group, head_dim, q.element_size())
        pieces = (len(q) - decodes) // cut.queries + num_seqs - decodes + 1
        _launch(out, q, k_cache, v_cache, step, decodes, num_seqs, pieces, cut, scale, softcap, sinks)
    return out


def _launch(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: GroupStep,
    first: int,
    last: int,
    pieces: int,
    cut: Cut,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Attention of the sequences first..last of a step."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == q.stride(2) == 1
    partial = peaks = sums = out  # not touched without segments
    if cut.segments > 1:  # then every query is a sequence of its own
        shape = (len(q), q.shape[1], cut.segments)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        peaks = torch.empty(shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    padded = triton.next_power_of_2(head_dim)
    _attend[(pieces, num_kv_heads, cut.segments)](
        out,
        partial,
        peaks,
        sums,
        q,
        k_cache,
        v_cache,
        step.block_tables[first:],
        step.query_start[first:],
        step.seq_lens[first:],
        out if sinks is None else sinks,
        last - first,
        scale,
        1.0 if softcap is None else softcap,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        step.block_tables.stride(0),
        NUM_HEADS=q.shape[1],
        GROUP=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        BLOCK_SIZE=k_cache.shape[1],
        WINDOW=step.window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        DECODE=cut.decode,
        SEGMENTS=cut.segments,
        QUERIES=cut.queries,
        ROWS=cut.rows,
        KEYS=cut.keys,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if cut.segments > 1:
        num = (last - first) * q.shape[1]  # they are the first tokens of the step
        _merge[(num,)](out, partial, peaks, sums, head_dim, padded, cut.segments, num_warps=4)
