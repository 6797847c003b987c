"""Matrix products of up to `MOST_ROWS` rows, which read the weights once, at the pace of the memory.

A product includes what stands before and after it: the RMS norm of its input, the scales of its weights,
bias, gate, and the sum with a residual. The norm costs no pass of its own: its weight is multiplied into the
input, its root mean square is a factor of the result, and the squares are added up along with the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fp8 import FP8, computes_fp8

MOST_ROWS = 8


@triton.jit
def _line(weight, x, at, is_out, k, inside, WIDTH: tl.constexpr):
    """Products of one row of the input with a tile of the weights [outputs, k]."""
    tile = tl.load(
        weight + at[:, None] * WIDTH + k[None, :],
        mask=is_out[:, None] & inside[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    return tile.to(tl.float32) * x[None, :]


@triton.jit
def _one_row(
    out,
    x,
    weight,
    scales,
    bias,
    norm,
    residual,
    eps,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    own = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = own < OUTPUTS
    at = own.to(tl.int64)
    sums = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    others = tl.zeros([BLOCK_OUT, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < WIDTH
        value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
        sums += _line(weight, value, at, is_out, k, inside, WIDTH)
        if GATED:
            others += _line(weight, value, at + OUTPUTS, is_out, k, inside, WIDTH)
    result = tl.sum(sums, 1)
    other = tl.sum(others, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        result *= scale
        other *= scale
    if SCALED:
        result *= tl.load(scales + own, mask=is_out, other=0.0)
        if GATED:
            other *= tl.load(scales + OUTPUTS + own, mask=is_out, other=0.0)
    if BIAS:
        result += tl.load(bias + own, mask=is_out, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias + OUTPUTS + own, mask=is_out, other=0.0).to(tl.float32)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * other
    if RESIDUAL:
        result += tl.load(residual + own, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out + own, result.to(out.dtype.element_ty), mask=is_out)


@triton.jit
def _few_rows(
    out,
    x,
    weight,
    scales,
    bias,
    norm,
    residual,
    num_rows,
    eps,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, 16)  # what the matrix units take at least
    is_row = row < num_rows
    own = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = own < OUTPUTS
    at = own.to(tl.int64)[None, :] * WIDTH
    sums = tl.zeros([16, BLOCK_OUT], tl.float32)
    others = tl.zeros([16, BLOCK_OUT], tl.float32)
    squares = tl.zeros([16], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < WIDTH
        value = tl.load(
            x + row[:, None] * WIDTH + k[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        if NORM:
            exact = value.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            factor = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
            value = (exact * factor[None, :]).to(value.dtype)
        tile = tl.load(
            weight + at + k[:, None],
            mask=is_out[None, :] & inside[:, None],
            other=0.0,
            eviction_policy="evict_first",
        )
        sums = tl.dot(value, tile.to(value.dtype), acc=sums, input_precision="ieee")
        if GATED:
            tile = tl.load(
                weight + at + OUTPUTS * WIDTH + k[:, None],
                mask=is_out[None, :] & inside[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
            others = tl.dot(value, tile.to(value.dtype), acc=others, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(squares / WIDTH + eps)[:, None]
        sums *= scale
        others *= scale
    if SCALED:
        sums *= tl.load(scales + own, mask=is_out, other=0.0)[None, :]
        if GATED:
            others *= tl.load(scales + OUTPUTS + own, mask=is_out, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias + own, mask=is_out, other=0.0).to(tl.float32)[None, :]
        if GATED:
            others += tl.load(bias + OUTPUTS + own, mask=is_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * others
    to = row[:, None] * OUTPUTS + own[None, :]
    inside_out = is_row[:, None] & is_out[None, :]
    if RESIDUAL:
        sums += tl.load(residual + to, mask=inside_out, other=0.0).to(tl.float32)
    tl.store(out + to, sums.to(out.dtype.element_ty), mask=inside_out)


def fits(num_rows: int, weight: Tensor) -> bool:
    """Whether so many rows are few, and the weights read here; not in f16, whose range a residual times a
    norm's weight may leave.
    """
    read = weight.dtype in (torch.bfloat16, torch.float32) or (
        weight.dtype is FP8 and computes_fp8(weight.device)
    )
    return num_rows <= MOST_ROWS and read


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
    """x [M, K] (RMS-normed with weight `norm` [K]) times weight [N, K], plus bias [N], plus residual.

    `scale` [N]: what the products are multiplied by; then the weights are eight-bit floats. `gated`: the SiLU
    of the first half of the outputs times the second. -> [M, N or N / 2]; residual is of that shape.
    """
    num_rows, width = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and num_rows <= 16
    assert residual is None or residual.is_contiguous()
    out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    nothing = out  # for what is not there
    rest = (
        nothing if scale is None else scale,
        nothing if bias is None else bias,
        nothing if norm is None else norm,
        nothing if residual is None else residual,
    )
    flags = {
        "OUTPUTS": outputs,
        "WIDTH": width,
        "SCALED": scale is not None,
        "BIAS": bias is not None,
        "NORM": norm is not None,
        "GATED": gated,
        "RESIDUAL": residual is not None,
    }
    if num_rows == 1:
        # about one program a processor at the narrowest; long lines keep enough bytes in flight
        block = 4 if outputs <= 2048 else 8
        size = min(1024 if block == 4 else 512, triton.next_power_of_2(width))
        grid = (triton.cdiv(outputs, block),)
        _one_row[grid](
            out, x, weight, *rest, eps, **flags, BLOCK_OUT=block, BLOCK_K=size, num_warps=4, num_stages=4
        )
        return out
    block = 16 if outputs <= 4096 else 32
    size = max(16, min(256 if x.element_size() == 2 else 128, triton.next_power_of_2(width)))
    _few_rows[(triton.cdiv(outputs, block),)](
        out,
        x,
        weight,
        *rest,
        num_rows,
        eps,
        **flags,
        BLOCK_OUT=block,
        BLOCK_K=size,
        num_warps=4,
        num_stages=4 if not gated else 3,
    )
    return out
