"""Linear maps of eight-bit floats: half the memory of bfloat16, and on a GPU half the reads.

Checkpoints whose matrices are stored as eight-bit floats are read here, too.

A GPU with instructions for such floats multiplies many rows as eight-bit floats too, each row with a scale of
its own; few rows are multiplied as they are, by weights that are widened on the way. Any other device widens
the matrix for every product: that takes less memory, and more time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import FP8, Workspace, computes_fp8, quantize_rows, read_into
from engine.models.checkpoint import Checkpoint
from engine.types import LoadError

PIECE = 1 << 19  # weights that are widened at a time on a CPU: they stay in the cache until they are used

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Fp8:
    """Weights [outputs, inputs] float8_e4m3fn, and a scale [outputs] f32.

    `quantize` makes rows into eight-bit floats where the device multiplies them; None: it does not.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    workspace: Workspace
    quantize: Quantize | None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self._widened(x) if self.quantize is None else self._scaled(x, self.quantize)
        if self.bias is not None:
            out += self.bias
        return out if residual is None else out.add_(residual)

    def _scaled(self, x: Tensor, quantize: Quantize) -> Tensor:
        rows, scale = quantize(x)
        out: Tensor = torch._scaled_mm(
            rows,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale[None],
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return out

    def _widened(self, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape
        piece = max(1, PIECE // inputs) if x.device.type == "cpu" else outputs
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        for at in range(0, outputs, piece):
            own = self.weight[at : at + piece]
            room = self.workspace.get("weight", tuple(own.shape), x)
            out[:, at : at + piece] = F.linear(x, read_into(room, own))
        return out.mul_(self.scale)


def make_fp8(weight: Tensor, bias: Tensor | None, workspace: Workspace) -> Fp8:
    """The map of weight [outputs, inputs], each output with a scale of its own; see `linear.make_linear`."""
    kept = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    for at in range(0, len(weight), 4096):  # a piece at a time: the f32 of all would be large
        own = slice(at, at + 4096)
        kept[own], own_scale = quantize_rows(weight[own])
        scale[own] = own_scale[:, 0]
    return Fp8(kept, scale, bias, workspace, _quantizer(weight))


def _quantizer(weight: Tensor) -> Quantize | None:
    """None, too, for sizes that the library has no product of."""
    if not computes_fp8(weight.device) or weight.shape[0] % 16 or weight.shape[1] % 16:
        return None
    from engine.kernels.triton import fused

    return fused.quantize_rows


# ------------------------------------------------------------------------------------------------------------
# Checkpoints that store them


@dataclass(frozen=True, slots=True)
class Stored:
    """How a checkpoint's eight-bit matrices read: `block` is what shares a scale (rows, columns), where that
    is neither a row nor the whole matrix.
    """

    block: tuple[int, int] = (1, 1)

    def take(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """`Checkpoint.take`; a matrix of eight-bit floats as numbers, f32."""
        tensor = checkpoint.take(name)
        if tensor.dtype is not FP8:
            return tensor
        scales = f"{name}_scale_inv" if f"{name}_scale_inv" in checkpoint else f"{name}_scale"
        scale = checkpoint.take(scales).float()  # either is multiplied by
        whole = read_into(torch.empty(tensor.shape), tensor)
        rows, columns = tensor.shape
        if scale.numel() == 1:
            return whole.mul_(scale.view(1, 1))
        if scale.numel() == rows and len(scale) == rows:
            return whole.mul_(scale.view(-1, 1))
        high, wide = self.block
        if list(scale.shape) != [-(-rows // high), -(-columns // wide)]:
            raise LoadError(f"{name} has shape {[rows, columns]}, and scales of shape {list(scale.shape)}")
        spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return whole.mul_(spread)


AS_NUMBERS = Stored()


def how_stored(config: dict[str, Any], architecture: str) -> Stored:
    """What config.json says of eight-bit matrices; raises LoadError for a quantization that is not read."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is None:
        return AS_NUMBERS
    method = quantization.get("quant_method", "unknown")
    if method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3":
        return Stored(tuple(quantization.get("weight_block_size") or (1, 1)))
    if method == "compressed-tensors":
        kinds = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
        method = f"compressed-tensors {quantization.get('format')}"
        if kinds and all((kind.get("type"), kind.get("num_bits")) == ("float", 8) for kind in kinds):
            kind = kinds[0]
            return Stored(tuple(kind.get("block_structure") or (1, kind.get("group_size") or 1)))
    raise LoadError(
        f"{architecture} is quantized by {method}, which is not read; load the unquantized checkpoint, "
        "or one in fp8 (quant_method fp8, or compressed-tensors with float weights of 8 bits)"
    )
