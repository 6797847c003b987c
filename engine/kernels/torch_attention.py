"""Paged attention over a flattened batch, computed by torch.

The queries of several sequences, in prefill and decode, attend causally to a paged cache, with grouped heads,
and optionally a sliding window, a softcap or sinks. The Triton kernel takes the same `GroupStep` and ignores
its tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.fp8 import FP8, raw, read_into, to_fp8
from engine.kernels.large_pages import large_pages
from engine.step import LayerGroup

TILE_BYTES = 4 << 20  # of gathered K (and as much V): about what stays in the cache between gather and use
MASK_ELEMENTS = 4 << 20  # queries x keys of one prefill tile, where it needs a mask
PIECE = 128  # queries whose scores are computed together, so that they stay in the cache,
SCORE_BYTES = 8 << 20  # if need be of one group of heads after another


@dataclass(frozen=True, slots=True)
class Tile:
    """Work of the torch body: `rows` sequences with one query each, or one sequence with several.

    `tokens` are the queries' places in the batch; `pieces` [rows * Hkv * n] what to gather: one head of one
    block each, numbered block * Hkv + head; of the gathered keys `skip..skip + num_keys` are used. `mask`
    [rows, 1, 1, num_keys] or [queries, num_keys] is added to the scores; None: the queries are the last of
    the keys, and each sees those up to itself.
    """

    tokens: Tensor | slice
    rows: int
    pieces: Tensor
    skip: int
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One step's metadata for one layer group; tensors are on the device.

    block_tables [B, W] int32, query_start [B + 1], seq_lens [B] (after this step), slot_blocks and
    slot_offsets [T].
    """

    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    slot_blocks: Tensor
    slot_offsets: Tensor
    window: int | None
    tiles: tuple[Tile, ...] = ()


@dataclass(slots=True)
class Workspace:
    """Reused buffers for gathered blocks: fresh ones of this size would cost a page fault every 4 KiB."""

    buffers: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape, with the dtype and device of `like`."""
        size = math.prod(shape)
        held = self.buffers.get(name)
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            held = torch.empty(size, dtype=like.dtype, device=like.device)
            self.buffers[name] = held
        return held[:size].view(shape)


def _kept_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that one head of a token takes in a pool. With int8 these are bytes: one for each
    number, and the four of the float by which they are multiplied."""
    return head_dim + 4 if dtype is torch.int8 else head_dim


def token_bytes(group: LayerGroup, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers of a group, kept as `dtype`."""
    return 2 * len(group.layers) * group.num_kv_heads * _kept_dim(group.head_dim, dtype) * dtype.itemsize


def new_pool(
    num_blocks: int,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A cache of zeros, [num_blocks, num_layers, 2 (K, V), block_size, Hkv, D as it is kept].

    On a GPU one block is contiguous over all layers: it can move between tiers in one piece. On a CPU it lies
    as the torch body gathers it: layer by layer, and in a block head by head. In int8, of which the C++
    kernels alone know, a block's head has the numbers of all its tokens first, and then their factors.
    """
    head_dim = _kept_dim(head_dim, dtype)
    if device.type != "cpu":
        shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype, device=device)
    shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
    return large_pages(shape, dtype).permute(2, 0, 1, 4, 3, 5)


def memory_of(pool: Tensor, blocks: slice) -> list[Tensor]:
    """The memory of some blocks of a CPU's pool: one stretch for each layer's K and V."""
    as_kept = pool.permute(1, 2, 0, 4, 3, 5)
    return [kept[blocks] for layer in as_kept for kept in layer]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, step: GroupStep) -> None:
    """Store k and v [T, Hkv, D] in the cache [num_blocks, block_size, Hkv, D]."""
    if k_cache.dtype is FP8:
        k, v, k_cache, v_cache = raw(to_fp8(k)), raw(to_fp8(v)), raw(k_cache), raw(v_cache)
    k_cache.index_put_((step.slot_blocks, step.slot_offsets), k)
    v_cache.index_put_((step.slot_blocks, step.slot_offsets), v)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: GroupStep,
    workspace: Workspace,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from q [T, Hq, D] to the cached keys of each query's own sequence, itself included.

    Returns [T, Hq, D].

    k_cache, v_cache [num_blocks, block_size, Hkv, D], of q's type or fp8, any strides; softcap bounds the
    scores by a tanh; sinks [Hq] are scores that take part in the softmax and have no value.
    """
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for tile in step.tiles:
        keys = gather(k_cache, tile, workspace, "k", q)
        values = gather(v_cache, tile, workspace, "v", q)
        queries = q[tile.tokens].view(-1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim)
        if tile.rows == len(queries):  # [rows, Hkv, G, D]: the heads of a group stand where queries do
            heads_at = 2
        else:  # [Hkv, G, queries, D] against keys that the heads of a group share
            heads_at = 1
            queries = queries.permute(1, 2, 0, 3)
            keys = keys.transpose(0, 1).expand(-1, queries.shape[1], -1, -1)
            values = values.transpose(0, 1).expand(-1, queries.shape[1], -1, -1)
        if softcap is not None or sinks is not None:
            mixed = _written_out(queries, keys, values, tile.mask, heads_at, scale, softcap, sinks)
        elif heads_at == 2:
            mixed = _decode(queries, keys, values, tile.mask, scale)
        elif tile.mask is None:
            mixed = _causal(queries, keys, values, scale, workspace)
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=tile.mask, scale=scale)
        if heads_at == 1:
            mixed = mixed.permute(2, 0, 1, 3)
        out[tile.tokens] = mixed.reshape(-1, q.shape[1], head_dim)
    return out


def gather(cache: Tensor, tile: Tile, workspace: Workspace, name: str, like: Tensor) -> Tensor:
    """The keys or values [rows, Hkv, num_keys, D] that a tile uses, copied together, with the dtype of
    `like`.

    Quick where a block's heads lie apart and blocks lie one after the other, as `new_pool` makes them.
    """
    heads = raw(cache).transpose(1, 2)
    num_heads, block_size, head_dim = heads.shape[1:]
    if heads.is_contiguous():
        room = workspace.get(f"{name} as kept", (len(tile.pieces), block_size * head_dim), heads)
        found = torch.index_select(heads.view(-1, block_size * head_dim), 0, tile.pieces, out=room)
    else:
        found = heads[tile.pieces // num_heads, tile.pieces % num_heads]
    if cache.dtype is FP8:
        found = read_into(workspace.get(name, found.shape, like), found.view(FP8))
    found = found.view(tile.rows, num_heads, -1, head_dim)
    return found[:, :, tile.skip : tile.skip + tile.num_keys]


def _decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q [rows, Hkv, G, D], one query a row, over all keys [rows, Hkv, S, D].

    Plain products of many small matrices: for so few queries the fused op takes twice the time in bf16.
    """
    shape = q.shape
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    if mask is None:
        scores = torch.baddbmm(q.new_zeros(()), q, k.transpose(1, 2), beta=0, alpha=scale)
    else:
        mask = mask[:, 0].expand(-1, shape[1], -1).reshape(len(q), 1, -1)
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), v).view(shape)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, workspace: Workspace) -> Tensor:
    """Attention of the last queries q [Hkv, G, n, D] over keys [Hkv, G, S, D] that a group's heads share,
    each up to itself, without a mask.

    Keys before the first query are seen by all; those from there on causally; the two parts are weighed by
    their sums (log-sum-exp), as flash attention weighs its blocks.
    """
    past = k.shape[2] - q.shape[2]
    if q.device.type == "cpu" and q.dtype is torch.bfloat16 and multiplies_bfloat16():
        return _in_pieces(q, k[:, 0], v[:, 0], scale, workspace)
    if past == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if q.device.type != "cpu":  # elsewhere a kernel takes this body's place; this is only its reference
        return F.scaled_dot_product_attention(q, k, v, attn_mask=_later_hidden(q, k), scale=scale)
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before, before_sum = flash(q, k[:, :, :past], v[:, :, :past], scale=scale)
    own, own_sum = flash(q, k[:, :, past:], v[:, :, past:], 0.0, True, scale=scale)
    whole = torch.logaddexp(before_sum, own_sum)
    mixed: Tensor = before * (before_sum - whole).exp()[..., None] + own * (own_sum - whole).exp()[..., None]
    return mixed.to(q.dtype)


def _in_pieces(q: Tensor, k: Tensor, v: Tensor, scale: float, workspace: Workspace) -> Tensor:
    """`_causal` for bfloat16 on a CPU, over keys [Hkv, S, D]: `PIECE` queries after another, with plain
    products, where the fused op takes three times as long.
    """
    num_heads, group, num, head_dim = q.shape
    out = torch.empty_like(q)
    for at in range(0, num, PIECE):
        own = min(PIECE, num - at)
        end = k.shape[1] - num + at + own  # keys that the last of these queries sees
        later = torch.full((own, own), -math.inf, dtype=q.dtype).triu_(1)
        size = max(1, SCORE_BYTES // (group * own * end * q.itemsize))
        for first in range(0, num_heads, size):
            heads = slice(first, first + size)
            queries = q[heads, :, at : at + own].flatten(1, 2)
            keys, values = k[heads, :end], v[heads, :end]
            shape = (len(queries), group * own, end)
            scores = workspace.get("scores", shape, q)
            torch.baddbmm(q.new_zeros(()), queries, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
            scores.view(-1, group, own, end)[..., end - own :] += later
            weights = torch.softmax(scores, dim=-1, out=workspace.get("weights", shape, q))
            out[heads, :, at : at + own] = torch.bmm(weights, values).view(-1, group, own, head_dim)
    return out


@lru_cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; else plain products of it are slow.

    oneDNN says so of every CPU with AVX-512, but on those that lack the instructions for bfloat16 it takes
    five times as long as in float32.
    """
    onednn: Any = torch.backends.mkldnn
    told = onednn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(told and (torch.cpu._is_avx512_bf16_supported() or not torch.cpu._is_avx512_supported()))


def _later_hidden(q: Tensor, k: Tensor) -> Tensor:
    """An additive mask [n, S] for queries that are the last n of S keys."""
    shape = (q.shape[2], k.shape[2])
    hidden = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1 + shape[1] - shape[0])
    return _additive(~hidden, q.dtype)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads_at: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention step by step, for what the fused op lacks; a piece of the queries at a time if it can."""
    if sinks is not None:
        sinks = sinks.float().view((1, q.shape[1], -1, 1) if heads_at == 2 else (*q.shape[:2], 1, 1))
    if mask is not None or heads_at == 2:
        return _weigh(q, k, v, mask, scale, softcap, sinks)
    num, past = q.shape[2], k.shape[2] - q.shape[2]
    size = max(16, MASK_ELEMENTS // k.shape[2])
    mixed = []
    for at in range(0, num, size):
        queries, end = q[:, :, at : at + size], past + min(at + size, num)
        keys, values = k[:, :, :end], v[:, :, :end]
        mixed.append(_weigh(queries, keys, values, _later_hidden(queries, keys), scale, softcap, sinks))
    return torch.cat(mixed, dim=2)


def _weigh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores in f32, softmax, mixed values; `sinks` broadcasts against the scores but for the keys."""
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return torch.matmul(weights.to(v.dtype), v)


def make_tiles(
    tables: NDArray[np.int32],
    query_start: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    *,
    block_size: int,
    num_kv_heads: int,
    window: int | None,
    block_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tile, ...]:
    """Cut a step into tiles: sequences with one query together (by length, so that little is padded), others
    alone.

    block_bytes: size of one block's K in one layer, as it is computed with.
    """
    counts = np.diff(query_start)
    starts = seq_lens - counts  # the first query's position
    lows = np.zeros_like(starts) if window is None else np.maximum(0, starts - window + 1)
    spans = -(-seq_lens // block_size) - lows // block_size
    to_device = _to_device(device)
    tiles = []

    ones = np.flatnonzero(counts == 1)
    ones = ones[np.argsort(spans[ones], kind="stable")]
    at = 0
    while at < len(ones):
        end = at + 1
        while end < len(ones) and (end + 1 - at) * spans[ones[end]] * block_bytes <= TILE_BYTES:
            end += 1
        tiles.append(
            _decode_tile(
                ones[at:end], tables, query_start, seq_lens, lows, block_size, num_kv_heads, dtype, to_device
            )
        )
        at = end

    for row in np.flatnonzero(counts > 1).tolist():
        tiles += _prefill_tiles(
            tables[row],
            int(query_start[row]),
            int(starts[row]),
            int(counts[row]),
            block_size,
            num_kv_heads,
            window,
            dtype,
            to_device,
        )
    return tuple(tiles)


def _decode_tile(
    rows: NDArray[np.int64],
    tables: NDArray[np.int32],
    query_start: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    lows: NDArray[np.int64],
    block_size: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    to_device: Callable[[NDArray[np.generic]], Tensor],
) -> Tile:
    """The tile of `rows`, sequences with one query each, shortest first; `lows`: their first keys."""
    firsts = lows[rows] // block_size
    spans = -(-seq_lens[rows] // block_size) - firsts
    blocks = firsts[:, None] + np.arange(spans[-1])
    # after a row's last block the same block is read again, and masked
    blocks = np.minimum(blocks, (firsts + spans - 1)[:, None])
    skip, num_keys, mask = 0, int(spans[-1]) * block_size, None
    if len(rows) == 1:
        skip = int(lows[rows[0]] - firsts[0] * block_size)
        num_keys = int(seq_lens[rows[0]] - lows[rows[0]])
    else:
        key_at = firsts[:, None] * block_size + np.arange(num_keys)
        seen = (key_at < seq_lens[rows, None]) & (key_at >= lows[rows, None])
        mask = _additive(to_device(seen), dtype)[:, None, None, :]
    tokens = to_device(query_start[rows])
    pieces = to_device(pieces_of(tables[rows[:, None], blocks], num_kv_heads))
    return Tile(tokens, len(rows), pieces, skip, num_keys, mask)


def pieces_of(blocks: NDArray[np.int32], num_kv_heads: int) -> NDArray[np.int64]:
    """What to gather for blocks [rows, n], as `Tile.pieces`: head after head, a head's blocks in turn."""
    return (blocks[:, None] * np.int64(num_kv_heads) + np.arange(num_kv_heads)[:, None]).ravel()


def _prefill_tiles(
    table: NDArray[np.int32],
    token: int,
    start: int,
    count: int,
    block_size: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
    to_device: Callable[[NDArray[np.generic]], Tensor],
) -> list[Tile]:
    """Tiles of one sequence's `count` queries from position `start`: one, or with a window pieces whose masks
    stay small."""
    end = start + count
    if window is None or window >= end:
        pieces = to_device(pieces_of(table[None, : -(-end // block_size)], num_kv_heads))
        return [Tile(slice(token, token + count), 1, pieces, 0, end, None)]
    tiles = []
    piece = max(16, MASK_ELEMENTS // (window + count))
    for at in range(0, count, piece):
        num = min(piece, count - at)
        query_at = start + at + np.arange(num)[:, None]
        low = max(0, start + at - window + 1)
        first, end = low // block_size, start + at + num
        key_at = np.arange(low, end)[None]
        mask = None  # a lone query sees all of its keys
        if num > 1:
            mask = _additive(to_device((key_at <= query_at) & (key_at > query_at - window)), dtype)
        pieces = to_device(pieces_of(table[None, first : -(-end // block_size)], num_kv_heads))
        tokens = slice(token + at, token + at + num)
        tiles.append(Tile(tokens, 1, pieces, low - first * block_size, end - low, mask))
    return tiles


def _to_device(device: torch.device) -> Callable[[NDArray[np.generic]], Tensor]:
    def move(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return move


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
