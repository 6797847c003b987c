"""Converts tensors to eight-bit floats (float8_e4m3fn) and back.

Rounding saturates, and rows have a scale each. A device without instructions for such floats only stores
them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
HIGHEST = 448.0


def to_fp8(x: Tensor) -> Tensor:
    """The nearest eight-bit floats; what is beyond them becomes the highest, and NaN stays NaN."""
    return x.clamp(-HIGHEST, HIGHEST).to(FP8)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of `dtype` keeps it."""
    return to_fp8(x) if dtype is FP8 else x.to(dtype)


def raw(x: Tensor) -> Tensor:
    """The same memory as something that every operation moves: bytes, where these are eight-bit floats."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, K] as eight-bit floats and a scale [T, 1] f32 each: the row's largest becomes the highest."""
    whole = x.float()
    scale = (whole.abs().amax(dim=1, keepdim=True) / HIGHEST).clamp(min=1e-12)
    return to_fp8(whole / scale), scale


def read_into(out: Tensor, x: Tensor) -> Tensor:
    """Write eight-bit floats as numbers into `out` of the same shape, exactly, and return it.

    On a CPU torch reads them one by one. Their bits, shifted, are a bfloat16 of another exponent: that takes
    a tenth of the time.
    """
    if x.device.type != "cpu":
        return out.copy_(x)
    wide = out if out.dtype is torch.bfloat16 else torch.empty(x.shape, dtype=torch.bfloat16)
    bits = wide.view(torch.int16)
    bits.copy_(x.view(torch.int8)).mul_(16).bitwise_and_(-0x7810)  # as 0x87f0: the sign, and seven bits
    wide.mul_(2.0**120)
    if x.view(torch.int8).amax() == 127 or x.view(torch.uint8).amax() == 255:  # NaN, which reads as 480
        wide.masked_fill_(wide.abs() > HIGHEST, torch.nan)
    return wide if wide is out else out.copy_(wide)


@lru_cache
def computes_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for eight-bit floats: GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
