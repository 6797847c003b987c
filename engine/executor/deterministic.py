"""Computes the same numbers for a token whatever else is in its step.

Rounding follows the shape of an operation: a matrix product of one row adds in another order than one of two.
So every forward here has `ROWS` tokens, and every piece of attention `KEYS` keys. Where a row's result does
not depend on its place among the rows either, a token's numbers are a function of the tokens before it alone:
not of the batch, of how a prompt was chunked, or of what was cached. Whether the library's products have that
property is checked at load. The CPU kernels add in one order whatever the shape, and need that check alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import GroupStep, Tile, Workspace, gather, pieces_of
from engine.step import Ints, StepPlan

ROWS = 16  # tokens of a forward: more cost a lone sequence, fewer cost a full batch
KEYS = 128  # at least, of one piece of attention; whole blocks
FLOOR = -1e30  # the log of no weight at all; finite, so that two of them still have a difference


def cut(plan: StepPlan) -> Iterator[tuple[StepPlan, Ints, Ints]]:
    """The plan as plans of `ROWS` tokens in their order, each token a sequence of its own.

    The last is filled up with repetitions of its last token. Each comes with the rows of the whole plan's
    logits that it computes, and where they are among its own `ROWS` (none where none are wanted).
    """
    sequence_of = np.repeat(np.arange(len(plan.seq_lens)), np.diff(plan.query_start))
    for start in range(0, len(plan.token_ids), ROWS):
        tokens = np.minimum(np.arange(start, start + ROWS), len(plan.token_ids) - 1)
        wanted = np.flatnonzero((plan.logits_at >= start) & (plan.logits_at < start + ROWS))
        piece = replace(
            plan,
            token_ids=plan.token_ids[tokens],
            positions=plan.positions[tokens],
            query_start=np.arange(ROWS + 1),
            seq_lens=plan.positions[tokens] + 1,
            adapters=plan.adapters[sequence_of[tokens]],
            block_tables=tuple(table[sequence_of[tokens]] for table in plan.block_tables),
            slot_blocks=tuple(blocks[tokens] for blocks in plan.slot_blocks),
            slot_offsets=plan.slot_offsets[tokens],
            logits_at=np.arange(ROWS if len(wanted) else 0),
        )
        yield piece, wanted, plan.logits_at[wanted] - start


def make_tiles(
    tables: NDArray[np.int32],
    positions: Ints,
    *,
    block_size: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
    move: Callable[[NDArray[np.generic]], Tensor],
) -> tuple[Tile, ...]:
    """The pieces of the keys that the tokens at `positions` [ROWS] see, all of one size, in their order.

    A piece begins at a multiple of its size, so a key is always in the same place of the same piece. Tokens
    of one sequence share what is gathered.
    """
    num = -(-KEYS // block_size)
    lows = np.zeros_like(positions) if window is None else np.maximum(0, positions - window + 1)
    first, last = lows[:, None] // block_size, positions[:, None] // block_size
    if (tables == tables[0]).all():
        tables, own_first, own_last = tables[:1], first.min(keepdims=True), last.max(keepdims=True)
    else:
        own_first, own_last = first, last
    tiles = []
    for piece in range(first.min() // num, last.max() // num + 1):
        # beyond a row's own blocks one of them is read again, and masked
        own = np.clip(piece * num + np.arange(num), own_first, own_last)
        blocks = tables[np.arange(len(tables))[:, None], own]
        key_at = piece * num * block_size + np.arange(num * block_size)
        seen = (key_at <= positions[:, None]) & (key_at >= lows[:, None])
        mask = move(np.where(seen, np.float32(0), np.float32(-np.inf))).to(dtype)[:, None, None]
        pieces = move(pieces_of(blocks, num_kv_heads))
        tiles.append(Tile(slice(None), len(tables), pieces, 0, num * block_size, mask))
    return tuple(tiles)


def attention(
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
    """`paged_attention` for [ROWS, Hq, D], piece after piece of the keys, each weighed by its sum.

    A piece of which a row sees nothing leaves that row as it was, to the bit.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    queries = q.view(ROWS, num_kv_heads, -1, head_dim)
    mixed = total = None
    if sinks is not None:
        total = sinks.float().view(1, num_kv_heads, -1).expand(ROWS, -1, -1)
        mixed = torch.zeros(queries.shape, device=q.device)
    for tile in step.tiles:
        keys = gather(k_cache, tile, workspace, "k", q).expand(ROWS, -1, -1, -1)
        values = gather(v_cache, tile, workspace, "v", q).expand(ROWS, -1, -1, -1)
        assert tile.mask is not None
        own, own_total = _attend(queries, keys, values, tile.mask, scale, softcap)
        own_total = (own_total + tile.mask[:, :, 0].amax(dim=-1, keepdim=True)).clamp(min=FLOOR)
        if mixed is None or total is None:
            mixed, total = own.float(), own_total
            continue
        whole = torch.logaddexp(total, own_total)
        mixed = mixed * (total - whole).exp()[..., None] + own * (own_total - whole).exp()[..., None]
        total = whole
    assert mixed is not None
    return mixed.to(q.dtype).view(ROWS, -1, head_dim)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """What q [ROWS, Hkv, G, D] sees of k and v [ROWS, Hkv, S, D], and the log of its weights' sum, f32.

    Where a row sees nothing the values are 0 and the sum is any finite number.
    """
    if q.device.type == "cpu" and softcap is None:
        fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, total = fused(q, k, v, attn_mask=mask, scale=scale)
        return mixed, total
    # Keys that rows share are a view without strides, and a product of other strides adds in another order.
    k, v = k.contiguous(), v.contiguous()
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    peak = scores.amax(dim=-1, keepdim=True).clamp(min=FLOOR)
    weights = (scores - peak).exp()
    total = weights.sum(dim=-1, keepdim=True).clamp(min=1.0)  # the peak itself weighs 1
    mixed = torch.matmul(weights.to(v.dtype), v).float() / total
    return mixed, (peak + total.log())[..., 0]
