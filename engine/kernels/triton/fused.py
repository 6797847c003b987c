"""The operations between two matrix products, each in one pass over memory.

They are the residual sum with its RMS norm; the norms of queries and keys with their rotation and the write
into the cache; and the gate. Everything is computed in f32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fp8 import FP8, HIGHEST

HEADS = 16  # at a time, for one token


@triton.jit
def _stored(value, cache, HIGHEST: tl.constexpr):
    """What a cache keeps of numbers: eight-bit floats saturate."""
    if HIGHEST > 0:
        value = tl.clamp(value.to(tl.float32), -HIGHEST, HIGHEST, propagate_nan=tl.PropagateNan.ALL)
    return value.to(cache.dtype.element_ty)


@triton.jit
def _add_norm(
    out, residual, x, weight, eps, row_stride, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(residual + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * row_stride + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x [T, H] to `residual` [T, H] in place, if there is one, and return the sum's RMS norm times
    weight.
    """
    rows, width = residual.shape
    assert residual.stride(1) == 1 and (x is None or x.is_contiguous())
    out = torch.empty((rows, width), dtype=residual.dtype, device=residual.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        out,
        residual,
        residual if x is None else x,
        weight,
        eps,
        residual.stride(0),
        WIDTH=width,
        ADD=x is not None,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )
    return out


@triton.jit
def _gate(out, gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, value.to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of gate_up [T, 2 I] times the second: [T, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _gate[(rows, triton.cdiv(width, block))](out, gate_up, WIDTH=width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _quantize_rows(out, scales, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HIGHEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / HIGHEST, 1e-12)
    tl.store(scales + row, scale)
    tl.store(out + row * WIDTH + at, _stored(value / scale, out, HIGHEST), mask=inside)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`engine.kernels.fp8.quantize_rows` for x [T, K]."""
    assert x.is_contiguous()
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _quantize_rows[(len(x),)](out, scales, x, x.shape[1], block, HIGHEST, num_warps=8 if block >= 4096 else 4)
    return out, scales


@triton.jit
def _rotate_and_store(
    out,
    k_cache,
    v_cache,
    heads,
    weight,
    cosines,
    sines,
    positions,
    slot_blocks,
    slot_offsets,
    eps,
    token_stride,
    kv_block,
    kv_offset,
    kv_head,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    WEIGHT_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_HALF)
    is_dim = (dim < HALF)[None, :]
    is_q = (head < NUM_Q)[:, None] & is_dim
    is_turned = (head < NUM_Q + NUM_KV)[:, None]
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None] & is_dim
    at = token * token_stride + head[:, None] * (2 * HALF) + dim[None, :]
    first = tl.load(heads + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + at + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_first, turned_second = first, second
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        own = head[:, None] * WEIGHT_ROW + dim[None, :] * WEIGHT_DIM
        is_weight = is_turned & is_dim
        turned_first *= scale * tl.load(weight + own, mask=is_weight, other=0.0).to(tl.float32)
        own += HALF * WEIGHT_DIM
        turned_second *= scale * tl.load(weight + own, mask=is_weight, other=0.0).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cosines + position * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    sine = tl.load(sines + position * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    first = tl.where(is_turned, turned_first * cosine - turned_second * sine, first)
    second = tl.where(is_turned, turned_second * cosine + turned_first * sine, second)

    to = token * (NUM_Q * 2 * HALF) + head[:, None] * (2 * HALF) + dim[None, :]
    tl.store(out + to, first.to(out.dtype.element_ty), mask=is_q)
    tl.store(out + to + HALF, second.to(out.dtype.element_ty), mask=is_q)

    block = tl.load(slot_blocks + token).to(tl.int64)
    if block >= 0:  # padding has no block
        row = block * kv_block + tl.load(slot_offsets + token).to(tl.int64) * kv_offset
        is_k = inside & (head >= NUM_Q)[:, None] & is_turned
        to = row + (head - NUM_Q)[:, None] * kv_head + dim[None, :]
        kept_first, kept_second = _stored(first, k_cache, HIGHEST), _stored(second, k_cache, HIGHEST)
        tl.store(k_cache + to, kept_first, mask=is_k)
        tl.store(k_cache + to + HALF, kept_second, mask=is_k)
        is_v = inside & (head >= NUM_Q + NUM_KV)[:, None]
        to = row + (head - NUM_Q - NUM_KV)[:, None] * kv_head + dim[None, :]
        tl.store(v_cache + to, kept_first, mask=is_v)
        tl.store(v_cache + to + HALF, kept_second, mask=is_v)


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
    """Norm (where there is a weight) and rotate queries and keys, write keys and values, return the queries.

    heads [T, Hq + 2 Hkv, D]: queries, keys, values; weight [Hq + Hkv, D]; cosines, sines [positions, D / 2]
    f32; caches [blocks, block size, Hkv, D]; a token whose slot_blocks is below 0 writes nothing. -> [T, Hq,
    D].
    """
    num_tokens, num_heads, head_dim = heads.shape
    num_kv = k_cache.shape[2]
    num_q = num_heads - 2 * num_kv
    assert heads.stride(1) == head_dim and heads.stride(2) == 1 and k_cache.stride() == v_cache.stride()
    out = torch.empty((num_tokens, num_q, head_dim), dtype=heads.dtype, device=heads.device)
    size = min(HEADS, triton.next_power_of_2(num_heads))
    _rotate_and_store[(num_tokens, triton.cdiv(num_heads, size))](
        out,
        k_cache,
        v_cache,
        heads,
        heads if weight is None else weight,
        cosines,
        sines,
        positions,
        slot_blocks,
        slot_offsets,
        eps,
        heads.stride(0),
        *k_cache.stride()[:3],
        NUM_Q=num_q,
        NUM_KV=num_kv,
        HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        NORM=weight is not None,
        WEIGHT_ROW=0 if weight is None else weight.stride(0),
        WEIGHT_DIM=0 if weight is None else weight.stride(1),
        HEADS=size,
        HIGHEST=_highest(k_cache),
        num_warps=4,
    )
    return out


def _highest(cache: Tensor) -> float:
    """Where a cache's numbers end; 0: nowhere near."""
    return HIGHEST if cache.dtype is FP8 else 0.0


@triton.jit
def _store_kv(
    k_cache,
    v_cache,
    k,
    v,
    slot_blocks,
    slot_offsets,
    k_token,
    k_head,
    v_token,
    v_head,
    kv_block,
    kv_offset,
    kv_head,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_KV: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(slot_blocks + token).to(tl.int64)
    if block >= 0:
        head = tl.arange(0, PADDED_KV)[:, None]
        dim = tl.arange(0, PADDED_DIM)[None, :]
        inside = (head < NUM_KV) & (dim < DIM)
        offset = tl.load(slot_offsets + token).to(tl.int64)
        to = block * kv_block + offset * kv_offset + head * kv_head + dim
        key = tl.load(k + token * k_token + head * k_head + dim, mask=inside)
        tl.store(k_cache + to, _stored(key, k_cache, HIGHEST), mask=inside)
        value = tl.load(v + token * v_token + head * v_head + dim, mask=inside)
        tl.store(v_cache + to, _stored(value, v_cache, HIGHEST), mask=inside)


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_blocks: Tensor, slot_offsets: Tensor
) -> None:
    """`engine.kernels.torch_attention.write_kv` for k and v [T, Hkv, D]; a slot_blocks < 0 writes nothing."""
    assert k.stride(2) == v.stride(2) == 1 and k_cache.stride() == v_cache.stride()
    _store_kv[(len(k),)](
        k_cache,
        v_cache,
        k,
        v,
        slot_blocks,
        slot_offsets,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        NUM_KV=k.shape[1],
        DIM=k.shape[2],
        PADDED_KV=triton.next_power_of_2(k.shape[1]),
        PADDED_DIM=triton.next_power_of_2(k.shape[2]),
        HIGHEST=_highest(k_cache),
        num_warps=4,
    )
