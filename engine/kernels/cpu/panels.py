"""Linear maps whose weights lie in panels, which is how the C++ kernels read them.

A panel holds 64 outputs; weights are kept as they are computed with, or in eight or four bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.library import GROUP, PANEL, Library, Map
from engine.kernels.large_pages import large_pages

AS_COMPUTED, INT8, INT4, INT16 = 0, 1, 2, 3
HALF = PANEL // 2


@dataclass(frozen=True, slots=True)
class Panels:
    """A map of `outputs`, in panels of `PANEL`; `scale` and `bias` f32, in the panels' order.

    weight: as computed [panels, inputs / pair, PANEL, pair], of a pair of inputs in bfloat16 and one in
    float32; int8 likewise, of pairs, with scale [panels * PANEL]; four bits [panels, inputs / 2, HALF] int16,
    of which the n-th four bits are of outputs 16 n to 16 n + 15 and both inputs, with scale [panels,
    inputs / GROUP, 2, PANEL] (scale, middle); bfloat16 as whole numbers int16, of pairs, with scale [panels,
    inputs / `library.together`, PANEL]. `places` [outputs]: where each output is among those of the panels;
    None: in their order, which gates and what they gate are not.
    """

    kind: int
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    places: Tensor | None
    inputs: int
    outputs: int
    dtype: torch.dtype
    library: Library

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        outputs = self.outputs if self.places is None else len(self.weight) * PANEL
        out = x.new_empty(len(x), outputs)
        residual = None if residual is None else residual.contiguous()
        added, rows = residual if self.places is None else None, np.array([0, len(x)])
        self.library.product((Map * 1)(self.map()), rows, x.contiguous(), added, out)
        if self.places is None:
            return out
        out = out[:, self.places]
        return out if residual is None else out.add_(residual)

    def rows(self, at: Tensor) -> Tensor:
        """Rows [T, inputs] of the matrix as numbers: an embedding that is one with the head."""
        found = self.weight[at // PANEL, :, at % PANEL].flatten(1)
        if self.scale is None:
            return found
        if self.kind == INT16:
            of_blocks = self.scale[at // PANEL, :, at % PANEL]
            scale = of_blocks.repeat_interleave(self.library.together, dim=1)[:, : self.inputs]
        else:
            scale = self.scale[at, None]
        return (found.float() * scale).to(self.dtype)

    def map(self, *, gated: bool = False) -> Any:
        """This map as the library takes it, which lives as long as this one is held. Gates that are not told
        to be `gated` come out as they lie in the panels.
        """
        panels = len(self.weight)
        outputs = self.outputs // 2 if gated else self.outputs if self.places is None else panels * PANEL
        return Map(
            weight=self.weight.data_ptr(),
            scale=None if self.scale is None else self.scale.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            kind=self.kind,
            inputs=self.inputs,
            outputs=outputs,
            panels=panels,
            gated=gated,
            adapters=None,
        )


class PanelsOfExperts:
    """Several maps of one shape and kind, none of them gated, of which each takes some of the rows."""

    def __init__(self, panels: Sequence[Panels]) -> None:
        self.panels = panels
        self.count = len(panels)
        self._maps = (Map * len(panels))(*(each.map() for each in panels))

    def __call__(self, begins: NDArray[np.int64], x: Tensor) -> Tensor:
        """x [T, inputs], of which map i takes the rows `begins[i]` to `begins[i + 1]` -> [T, outputs]."""
        first = self.panels[0]
        out = x.new_empty(len(x), first.outputs)
        first.library.product(self._maps, begins, x.contiguous(), None, out)
        return out


def fits(weight: Tensor) -> bool:
    """Whether a matrix [outputs, inputs] can lie in panels."""
    if weight.device.type != "cpu" or not weight.is_contiguous():
        return False
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0)


def pack(library: Library, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Panels:
    """weight [outputs, inputs] as it is, or as whole numbers where that is faster; gated: its first half are
    gates of the second.
    """
    order, at = _order(len(weight), gated)
    outputs, inputs = weight.shape
    biases = _in_order(bias, order)
    if library.together and weight.dtype is torch.bfloat16:
        panels = len(order) // PANEL
        whole = large_pages((panels, inputs // 2, PANEL, 2), torch.int16)
        scale = large_pages((panels, -(-inputs // library.together), PANEL), torch.float32)
        library.pack_whole(weight.contiguous(), order, whole, scale)
        return Panels(INT16, whole, scale, biases, at, inputs, outputs, weight.dtype, library)
    pair = 2 if weight.dtype is torch.bfloat16 else 1
    held = _panels(library, weight, order, pair)
    return Panels(AS_COMPUTED, held, None, biases, at, inputs, outputs, weight.dtype, library)


def pack_int8(
    library: Library, whole: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, *, gated: bool
) -> Panels:
    """whole [outputs, inputs] int8, inputs even, with scale [outputs]."""
    order, at = _order(len(whole), gated)
    held = _panels(library, whole, order, 2)
    scales = _in_order(scale, order)
    return Panels(INT8, held, scales, _in_order(bias, order), at, whole.shape[1], len(whole), dtype, library)


def pack_int4(
    library: Library, bits: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, gated: bool
) -> Panels:
    """bits [outputs, inputs] of 0 to 15, inputs whole groups, with scales [outputs, inputs / GROUP, 2]."""
    order, at = _order(len(bits), gated)
    outputs, inputs = bits.shape
    whole = bits.to(torch.uint8)[order.clamp(min=0)]
    words = whole.view(-1, 4, PANEL // 4, inputs // 2, 2).permute(0, 3, 2, 4, 1).int()
    words = words[..., 0] | words[..., 1] << 4 | words[..., 2] << 8 | words[..., 3] << 12
    held = large_pages((len(order) // PANEL, inputs // 2, HALF), torch.int16)
    held.copy_(words.flatten(2))  # the highest bit becomes the sign: only the bits are read
    own = torch.where(order[:, None, None] < 0, 0.0, scales.float()[order.clamp(min=0)])
    own = own.view(-1, PANEL, inputs // GROUP, 2).permute(0, 2, 3, 1).contiguous()
    return Panels(INT4, held, own, _in_order(bias, order), at, inputs, outputs, dtype, library)


def _order(outputs: int, gated: bool) -> tuple[Tensor, Tensor | None]:
    """Which output each place of the panels has (-1: none), and where each output is, if not in order."""
    if not gated:
        order = torch.full((-(-outputs // PANEL) * PANEL,), -1)
        order[:outputs] = torch.arange(outputs)
        return order, None
    half = outputs // 2
    gates = torch.full((-(-half // HALF) * HALF,), -1)
    gates[:half] = torch.arange(half)
    gates = gates.view(-1, HALF)
    order = torch.cat((gates, torch.where(gates < 0, -1, gates + half)), dim=1).flatten()
    at = torch.empty(outputs, dtype=torch.int64)
    used = order >= 0
    at[order[used]] = used.nonzero()[:, 0]
    return order, at


def _panels(library: Library, weight: Tensor, order: Tensor, pair: int) -> Tensor:
    shape = (len(order) // PANEL, weight.shape[1] // pair, PANEL, pair)
    held = large_pages(shape, weight.dtype)
    library.pack(weight.contiguous(), order, held, pair)
    return held


def _in_order(values: Tensor | None, order: Tensor) -> Tensor | None:
    if values is None:
        return None
    return torch.where(order < 0, 0.0, values.float()[order.clamp(min=0)])
