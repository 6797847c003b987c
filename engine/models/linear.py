"""Linear maps: the layouts that their weights can have in memory, and the choice of one for a matrix.

The layouts are plain, oneDNN's blocks, int8, int4, and those of `fp8` and of the CPU kernels.

One row reads every weight to use it once, so the memory sets its time. Blocks are read at about twice the
rate of plain rows, and fewer bits are fewer bytes. With many rows the arithmetic sets the time, and bits that
must be unpacked for every row are dear: then the matrix is unpacked first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import Quantization
from engine.kernels import Workspace
from engine.kernels.cpu import Library, Panels, panels
from engine.models.fp8 import make_fp8

GROUP = 32  # inputs that share a scale in int4
SMALL = 2 << 20  # bytes of an f32 matrix that stays in the cache: blocks gain one row nothing there
INT8_ROWS = 24  # from so many rows on the matrix is unpacked first
INT4_ROWS = 160


class Linear(Protocol):
    """x [T, inputs] -> x W^T [T, outputs], plus a bias if there is one, plus `residual` if it is given."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Weights [outputs, inputs] as they are stored: what every device multiplies by."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return _plus(F.linear(x, self.weight, self.bias), residual)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Weights in oneDNN's own order. `plain`: once more as stored, for one row of a small matrix, whose time
    is that of the call and not of the memory.
    """

    blocks: Tensor
    bias: Tensor | None
    plain: Tensor | None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.plain is not None and len(x) == 1:
            return _plus(F.linear(x, self.plain, self.bias), residual)
        out: Tensor
        if residual is None:
            out = _onednn().default(x, self.blocks, self.bias, "none", [], "")
        else:
            out = _onednn().binary(x, residual, self.blocks, self.bias, "add")
        return out


@dataclass(frozen=True, slots=True)
class Int8:
    """Weights [outputs, inputs] int8, and a scale [outputs]."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    workspace: Workspace

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if len(x) < INT8_ROWS:
            out = torch.ops.aten._weight_int8pack_mm.default(x, self.weight, self.scale)
        else:
            out = F.linear(x, self.workspace.get("weight", self.weight.shape, x).copy_(self.weight))
            out.mul_(self.scale)
        return _plus(_plus(out, self.bias), residual)

    def rows(self, at: Tensor) -> Tensor:
        """Rows [T, inputs] of the matrix as numbers: an embedding that is one with the head."""
        return self.weight[at].to(self.scale.dtype).mul_(self.scale[at, None])


@dataclass(frozen=True, slots=True)
class Int4:
    """Weights [outputs, inputs / 2] as torch packs four bits, and `scales` [inputs / GROUP, outputs, 2]: a
    weight is (bits - 8) * scale + middle.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    workspace: Workspace

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        width = int4_width()
        if len(x) < INT4_ROWS or width is None or len(self.weight) % width:
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
            out = multiply(x, self.weight, GROUP, self.scales)
        else:
            out = x @ self.transposed(width)
        return _plus(_plus(out, self.bias), residual)

    def transposed(self, width: int) -> Tensor:
        """The matrix [inputs, outputs] as numbers, in the workspace; `width` is `int4_width()`."""
        outputs, inputs = self.weight.shape[0], 2 * self.weight.shape[1]
        whole = self.workspace.get("weight", (inputs, outputs), self.scales)
        halves = whole.view(inputs, outputs // width, 2, width // 2)
        held = self.weight.view(torch.int32)  # eight at a time: bytes would go one by one
        for half, bits in enumerate((held & 0x0F0F0F0F, (held >> 4) & 0x0F0F0F0F)):
            rows = bits.view(torch.uint8).view(outputs // width, inputs, width // 2)
            halves[:, :, half] = rows.transpose(0, 1)
        scale, middle = self.scales.unbind(-1)
        low = torch.add(middle, scale, alpha=-8)
        groups = whole.view(-1, GROUP, outputs)
        torch.addcmul(low[:, None], groups, scale.contiguous()[:, None], out=groups)
        return whole


def _plus(out: Tensor, other: Tensor | None) -> Tensor:
    return out if other is None else out.add_(other)


@lru_cache
def _onednn() -> Any:
    return torch.ops.mkldnn._linear_pointwise


# ------------------------------------------------------------------------------------------------------------
# Making them


def make_linear(
    weight: Tensor,
    bias: Tensor | None,
    quantization: Quantization,
    workspace: Workspace,
    library: Library | None = None,
    *,
    gated: bool = False,
) -> Linear:
    """The map of weight [outputs, inputs] and bias [outputs]; `workspace` is for maps of one thread.

    A shape that the groups of int4 do not fit becomes int8. `library`: of a CPU with kernels of our own;
    gated: for them the first half of the outputs are gates of the second.
    """
    if quantization == "fp8":
        return make_fp8(weight, bias, workspace)
    if library is not None and panels.fits(weight):
        return _in_panels(library, weight, bias, quantization, gated)
    if quantization == "int4" and fits_int4(weight):
        return Int4(*_int4(weight), bias, workspace)
    if quantization != "none":
        return Int8(*_int8(weight), bias, workspace)
    if not _has_blocks(weight):
        return Plain(weight, bias)
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, 16)  # any rows but one give the same blocks
    small = weight.dtype is torch.float32 and weight.nbytes <= SMALL
    return Blocked(blocks, bias, weight if small else None)


def _in_panels(
    library: Library, weight: Tensor, bias: Tensor | None, quantization: Quantization, gated: bool
) -> Panels:
    if quantization == "int4" and weight.shape[1] % GROUP == 0:
        bits, scales = _four_bits(weight)
        return panels.pack_int4(library, bits, scales, bias, weight.dtype, gated=gated)
    if quantization != "none":
        return panels.pack_int8(library, *_int8(weight), bias, weight.dtype, gated=gated)
    return panels.pack(library, weight, bias, gated=gated)


def is_int8(linear: Linear) -> bool:
    """Whether a map's weights have eight bits."""
    return isinstance(linear, Int8) or (isinstance(linear, Panels) and linear.weight.dtype is torch.int8)


def fits_int4(weight: Tensor) -> bool:
    """Whether torch has a product in int4 for this shape."""
    return weight.shape[0] % 16 == 0 and weight.shape[1] % GROUP == 0


def _has_blocks(weight: Tensor) -> bool:
    onednn: Any = torch.backends.mkldnn
    if weight.device.type != "cpu" or not onednn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype is torch.float32


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().amax(dim=1).float() / 127).clamp(min=1e-12).to(weight.dtype)
    whole = torch.empty(weight.shape, dtype=torch.int8)
    for at in range(0, len(weight), 4096):  # a piece at a time: an embedding's f32 would be large
        own = slice(at, at + 4096)
        whole[own] = (weight[own].float() / scale[own, None].float()).round_().clamp_(-127, 127)
    return whole, scale


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    bits, scales = _four_bits(weight)
    kept = torch.ops.aten._convert_weight_to_int4pack_for_cpu(bits, 1)
    return kept, scales.transpose(0, 1).contiguous()


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bits [outputs, inputs] int32, and scale and middle [outputs, inputs / GROUP, 2] of every group."""
    groups = weight.to(torch.float32, copy=True).view(len(weight), -1, GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scales = torch.cat(((high - low) / 15, low + (high - low) * (8 / 15)), dim=-1).to(weight.dtype)
    scale, middle = torch.split(scales.float(), 1, dim=-1)  # as rounded, so that the bits make up for it
    bits = groups.sub_(middle).div_(scale.clamp(min=1e-12)).add_(8).round_().clamp_(0, 15).int()
    return bits.view(weight.shape), scales


@lru_cache
def int4_width() -> int | None:
    """Outputs that torch packs side by side, the first half of them in the low bits; None: in another way.

    That depends on the processor's instructions, so torch is asked to pack what is known.
    """
    bits = torch.randint(0, 16, (64, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    found = torch.ops.aten._convert_weight_to_int4pack_for_cpu(bits, 1).view(-1)
    for width in (64, 32):
        rows = bits.view(64 // width, 2, width // 2, 32).permute(1, 0, 3, 2)
        if torch.equal((rows[0] | rows[1] << 4).to(torch.uint8).reshape(-1), found):
            return width
    return None
