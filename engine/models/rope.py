"""Rotary position embeddings: inverse frequencies by scaling type, and the rotation itself.

The formulas are those of transformers' `modeling_rope_utils`, with which the tests compare them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Frequencies [head_dim / 2] in f32, and the factor that cosines and sines are scaled by.

    `dynamic` is plain here: it changes only beyond the positions a model was made for, which are never
    served.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope["rope_theta"] ** exponents)
    kind = rope["rope_type"]
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain, 1.0


def _llama3(plain: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelength = 2 * math.pi / plain
    context = rope["original_max_position_embeddings"]
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wavelength > context / low, plain / factor, plain)
    medium = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(medium, between, stretched)


def _yarn(plain: Tensor, rope: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolation of low frequencies, and a temperature on the attention."""
    base, context = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope["factor"]
    attention = rope.get("attention_factor")
    if attention is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = (
            _mscale(factor, mscale) / _mscale(factor, mscale_all)
            if mscale and mscale_all
            else _mscale(factor)
        )

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = (high - low) or 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span, 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), float(attention)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] by cos and sin [T, 1, D]: the first half of D pairs with the second.

    `sin` has the sign of its place: minus in the first half, for the second's part in it.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
