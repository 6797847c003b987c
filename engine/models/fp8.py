"""Linear maps of eight-bit floats: half the memory of bfloat16, and on a GPU half the reads.

Checkpoints whose matrices are stored as eight-bit floats are read here, too, and those whose experts are
stored as four-bit ones, as gpt-oss has them (MXFP4, of the Open Compute Project).

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
from engine.models.checkpoint import BLOCKS, Checkpoint
from engine.types import LoadError

SCALES = ("_scale_inv", "_scale", "_scales")  # ends of the names of a matrix's scales
# of activations and of the cache, which are not rounded here
UNUSED_SCALES = (".input_scale", ".k_scale", ".v_scale")
# floats of four bits, of two for the exponent and one for the mantissa: what they are without their sign
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127  # of the power of two that 32 of them have together
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
    """How a checkpoint's matrices of few bits read: of eight-bit floats `block` is what shares a scale (rows,
    columns), where that is neither a row nor the whole matrix.
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

    def take_all(self, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors of a checkpoint by their names in a model, those of few bits as numbers of `dtype`."""
        tensors: dict[str, Tensor] = {}
        for name in checkpoint.names():
            if name.endswith(BLOCKS):
                whole = name.removesuffix(BLOCKS)
                parts = checkpoint.take(name), checkpoint.take(f"{whole}_scales")
                tensors[whole] = numbers_of_blocks(whole, *parts).to(dtype)
            elif not (name.endswith(UNUSED_SCALES) or _has_matrix(checkpoint, name)):
                tensors[name] = self.take(checkpoint, name).to(dtype)
        return tensors


def numbers_of_blocks(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [experts, outputs, n, 16] uint8, of two numbers each, the first in the low bits, with scales
    [experts, outputs, n] uint8 -> [experts, inputs, outputs] bfloat16, which holds every such number exactly.

    Raises LoadError for tensors that do not fit together.
    """
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.ndim != 4:
        raise LoadError(f"{name} is not stored as blocks of four-bit floats")
    if blocks.shape[:-1] != scales.shape:
        shapes = f"{list(blocks.shape)}, and scales of shape {list(scales.shape)}"
        raise LoadError(f"{name} has blocks of shape {shapes}")
    values = torch.tensor([*MAGNITUDES, *(-own for own in MAGNITUDES)], dtype=torch.bfloat16)
    pairs = torch.cartesian_prod(values, values).flip(1)  # of each byte: its low bits are the first number
    experts, outputs, *_ = blocks.shape
    whole = torch.empty(experts, blocks.shape[2] * blocks.shape[3] * 2, outputs, dtype=torch.bfloat16)
    for own, block, scale in zip(whole, blocks, scales, strict=True):  # one by one: their numbers are large
        numbers = pairs[block.int()].flatten(-2)
        exponents = (scale.int() - EXPONENT_BIAS)[..., None]
        own.copy_(torch.ldexp(numbers.float(), exponents).flatten(1).T)
    return whole


def _has_matrix(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is the scales of another one."""
    of = [name.removesuffix(end) for end in SCALES if name.endswith(end)]
    return any(whole in checkpoint or whole + BLOCKS in checkpoint for whole in of)


AS_NUMBERS = Stored()
MXFP4 = Stored((1, 32))


def how_stored(config: dict[str, Any], architecture: str) -> Stored:
    """What config.json says of eight-bit matrices; raises LoadError for a quantization that is not read."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is None:
        return AS_NUMBERS
    method = quantization.get("quant_method", "unknown")
    if method == "fp8" and quantization.get("fmt", "e4m3") == "e4m3":
        return Stored(tuple(quantization.get("weight_block_size") or (1, 1)))
    if method == "mxfp4":
        return MXFP4
    if method == "compressed-tensors":
        kinds = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
        method = f"compressed-tensors {quantization.get('format')}"
        if kinds and all((kind.get("type"), kind.get("num_bits")) == ("float", 8) for kind in kinds):
            kind = kinds[0]
            return Stored(tuple(kind.get("block_structure") or (1, kind.get("group_size") or 1)))
    raise LoadError(
        f"{architecture} is quantized by {method}, which is not read; load the unquantized checkpoint, "
        "or one in fp8 (quant_method fp8, or compressed-tensors with float weights of 8 bits) or mxfp4"
    )
