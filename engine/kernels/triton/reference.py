"""The Triton kernels' results, computed by torch: for comparison in tests, and in place of a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.fp8 import FP8, raw, read_into, stored
from engine.kernels.torch_attention import GroupStep


def add_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `fused.add_norm`."""
    if x is not None:
        residual += x
    return F.rms_norm(residual, weight.shape, weight, eps)


def gate(gate_up: Tensor) -> Tensor:
    """See `fused.gate`."""
    left, right = gate_up.chunk(2, dim=-1)
    return F.silu(left) * right


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_blocks: Tensor, slot_offsets: Tensor
) -> None:
    """See `fused.store_kv`."""
    used = slot_blocks >= 0
    at = (slot_blocks[used], slot_offsets[used])
    raw(k_cache)[at] = raw(stored(k[used], k_cache.dtype))
    raw(v_cache)[at] = raw(stored(v[used], v_cache.dtype))


def rotate_and_store(
    heads: Tensor,
    weight: Tensor | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_blocks: Tensor,
    slot_offsets: Tensor,
) -> Tensor:
    """See `fused.rotate_and_store`."""
    num_kv, head_dim = k_cache.shape[2:]
    num_q = heads.shape[1] - 2 * num_kv
    turned, values = heads[:, : num_q + num_kv].float(), heads[:, num_q + num_kv :]
    if weight is not None:
        turned = F.rms_norm(turned, (head_dim,), None, eps) * weight.float()
    cosine, sine = cosines[positions][:, None], sines[positions][:, None]
    first, second = turned.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(
        heads.dtype
    )
    store_kv(turned[:, num_q:], values, k_cache, v_cache, slot_blocks, slot_offsets)
    return turned[:, :num_q].contiguous()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """See `thin.linear`."""
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm, eps)
    if scale is None:
        out = F.linear(x, weight, bias)
    else:
        whole = read_into(torch.empty(weight.shape, dtype=x.dtype, device=x.device), weight)
        out = F.linear(x, whole).mul_(scale)
        if bias is not None:
            out += bias
    if gated:
        out = gate(out)
    return out if residual is None else residual + out


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
    """See `attention.paged_attention`: every query against every block of its table, the rest masked."""
    num_tokens, num_heads = q.shape[:2]
    block_size, num_kv = k_cache.shape[1:3]
    rows = torch.arange(len(step.seq_lens), device=q.device)
    row = torch.repeat_interleave(rows, step.query_start.diff(), output_size=num_tokens)
    # memory after a sequence's end is never read: it may hold anything
    key_at = torch.arange(step.block_tables.shape[1] * block_size, device=q.device)
    held = (key_at < step.seq_lens[:, None])[..., None, None]

    def gathered(cache: Tensor) -> Tensor:
        dense = raw(cache)[step.block_tables.long()].flatten(1, 2)  # [B, S, Hkv, D]
        if cache.dtype is FP8:
            dense = read_into(torch.empty(dense.shape, dtype=q.dtype, device=q.device), dense.view(FP8))
        return dense.masked_fill(~held, 0.0)[row].repeat_interleave(num_heads // num_kv, dim=2)

    scores = torch.einsum("thd,tshd->ths", q, gathered(k_cache)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    tokens = torch.arange(num_tokens, device=q.device)
    position = (step.seq_lens[row] - step.query_start[row + 1] + tokens)[:, None]
    seen = key_at <= position
    if step.window is not None:
        seen &= position - key_at < step.window
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(num_tokens, num_heads)[..., None]), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key_at)].nan_to_num()  # padding
    return torch.einsum("ths,tshd->thd", weights.to(q.dtype), gathered(v_cache))


def lay_out(
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_offsets: Tensor,
    slot_blocks: Tensor,
    tables: Tensor,
    packed: Tensor,
    last_ids: Tensor,
    skip: int,
    width: int,
    block_size: int,
) -> None:
    """See `inputs.lay_out`."""
    used = len(packed)
    for buffer in (token_ids, positions, seq_lens, slot_offsets):
        buffer[used:] = 0
    slot_blocks[used:] = -1
    token, length = packed[:, 0].long(), packed[:, 1].long()
    drawn = last_ids[(-1 - token).clamp(min=0)] if len(last_ids) else token
    token_ids[:used] = torch.where(token < 0, drawn, token)
    position = length - 1
    positions[:used], seq_lens[:used], slot_offsets[:used] = position, length, position % block_size
    own = packed[:, skip : skip + width]
    tables[:used, :width] = own
    slot_blocks[:used] = own.gather(1, (position // block_size)[:, None])[:, 0].long()
