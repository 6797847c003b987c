"""Computes a native decoder's forward on a GPU with fused kernels, 7 to 10 launches a layer.

With few rows the norms, gates and sums go into the matrix products; with many, the library multiplies. Given
`PLAIN`, the same forward runs on torch bodies anywhere, and is compared with the decoder's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from engine.kernels import GroupStep
from engine.kernels.triton import reference
from engine.models import Fp8, Layer, Linear, Plain, run_layers, unadapted

if TYPE_CHECKING:
    from engine.models import NativeDecoder


@dataclass(frozen=True, slots=True)
class Ops:
    """One body of every op; `few` says for how many rows and which weights `linear` is the better product."""

    add_norm: Callable[..., Tensor]
    gate: Callable[[Tensor], Tensor]
    rotate_and_store: Callable[..., Tensor]
    store_kv: Callable[..., None]
    attention: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    few: Callable[[int, Tensor], bool]
    lay_out: Callable[..., None]


PLAIN = Ops(
    reference.add_norm,
    reference.gate,
    reference.rotate_and_store,
    reference.store_kv,
    reference.paged_attention,
    reference.linear,
    lambda num_rows, weight: num_rows <= 8,
    reference.lay_out,
)


def triton_ops() -> Ops:
    """The Triton bodies; imports Triton."""
    from engine.kernels.triton import attention, fused, inputs, thin

    return Ops(
        fused.add_norm,
        fused.gate,
        fused.rotate_and_store,
        fused.store_kv,
        attention.paged_attention,
        thin.linear,
        thin.fits,
        inputs.lay_out,
    )


@dataclass(frozen=True, slots=True)
class Paged:
    """A step's attention by kernels (`models.Attention`): each layer's group and caches, and the groups'
    metadata.

    `num_decodes`: so many sequences, at the beginning, have one query each; None: all have.
    """

    ops: Ops
    groups: Sequence[GroupStep]
    layers: Sequence[tuple[int, Tensor, Tensor]]
    num_decodes: int | None = None

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        group, k_cache, v_cache = self.layers[layer]
        step = self.groups[group]
        self.ops.store_kv(k, v, k_cache, v_cache, step.slot_blocks, step.slot_offsets)
        return self.ops.attention(
            q,
            k_cache,
            v_cache,
            step,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            num_decodes=self.num_decodes,
        )


class FusedDecoder:
    """A native decoder's forward by kernels."""

    def __init__(self, model: NativeDecoder, ops: Ops, num_positions: int) -> None:
        """Positions up to `num_positions` are served: each has a row of cosines and sines."""
        self.model = model
        self.ops = ops
        self._cosines, self._sines = model.rotation_table(num_positions)
        # one matrix of each kind, where all are of kinds that the few-row product reads
        maps = model.maps()
        readable = [linear for linear in maps if isinstance(linear, Plain | Fp8)]
        self._kinds = {linear.weight.dtype: linear.weight for linear in readable}
        self._has_thin = len(readable) == len(maps)

    def forward(self, token_ids: Tensor, positions: Tensor, paged: Paged, logits_at: Tensor | None) -> Tensor:
        """`NativeDecoder.forward`; without `logits_at` every token's logits."""
        model = self.model
        assert isinstance(model.embedding, Tensor)
        x = F.embedding(token_ids, model.embedding)
        few = self._has_thin and all(self.ops.few(len(x), weight) for weight in self._kinds.values())
        if model.adapters is not None and model.adapters.shares:
            few = False  # their products come between what the few-row kernel takes in one
        attend = partial(self._attend, positions, paged)
        weights = model.layers, model.final_norm, model.head
        if few:
            return run_layers(_FewRows(self.ops, model.shape.norm_eps, attend), *weights, x, logits_at)
        return run_layers(_ManyRows(self.ops, model.shape.norm_eps, attend), *weights, x, logits_at)

    def _attend(self, positions: Tensor, paged: Paged, i: int, layer: Layer, heads: Tensor) -> Tensor:
        """See `Operations.attend`."""
        shape = self.model.shape
        group, k_cache, v_cache = paged.layers[i]
        step = paged.groups[group]
        q = self.ops.rotate_and_store(
            heads.view(len(heads), -1, shape.head_dim),
            layer.qk_norm,
            shape.norm_eps,
            self._cosines,
            self._sines,
            positions,
            k_cache,
            v_cache,
            step.slot_blocks,
            step.slot_offsets,
        )
        mixed = self.ops.attention(
            q, k_cache, v_cache, step, scale=self.model.scale, num_decodes=paged.num_decodes
        )
        return mixed.view(len(mixed), -1)


Attend = Callable[[int, Layer, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _FewRows:
    """Operations whose norms, gates and sums go into the products; see `models.Operations`."""

    ops: Ops
    eps: float
    attend: Attend

    def begin(self, embedded: Tensor) -> Tensor:
        return embedded

    def project(self, stream: Tensor, norm: Tensor, linear: Linear) -> Tensor:
        return self.ops.linear(stream, **_weights(linear), norm=norm, eps=self.eps)

    def project_gated(self, stream: Tensor, norm: Tensor, linear: Linear) -> Tensor:
        return self.ops.linear(stream, **_weights(linear), norm=norm, eps=self.eps, gated=True)

    def add(self, stream: Tensor, x: Tensor, linear: Linear) -> Tensor:
        return self.ops.linear(x, **_weights(linear), residual=stream)

    def select(self, stream: Tensor, at: Tensor) -> Tensor:
        return stream[at]


Pending = tuple[Tensor, Tensor | None]  # the residual, and what is yet to be added to it


@dataclass(frozen=True, slots=True)
class _ManyRows:
    """Operations with products by the library; a sum goes into the norm that follows it."""

    ops: Ops
    eps: float
    attend: Attend

    def begin(self, embedded: Tensor) -> Pending:
        return embedded, None

    def project(self, stream: Pending, norm: Tensor, linear: Linear) -> Tensor:
        residual, pending = stream
        return linear(self.ops.add_norm(pending, residual, norm, self.eps))  # changes the residual

    def project_gated(self, stream: Pending, norm: Tensor, linear: Linear) -> Tensor:
        return self.ops.gate(self.project(stream, norm, linear))

    def add(self, stream: Pending, x: Tensor, linear: Linear) -> Pending:
        residual, _ = stream  # what was pending has been added by the product's norm
        return residual, linear(x)

    def select(self, stream: Pending, at: Tensor) -> Pending:
        residual, pending = stream
        return residual[at], None if pending is None else pending[at]


def _weights(linear: Linear) -> dict[str, Tensor | None]:
    """What the few-row product takes of a map."""
    linear = unadapted(linear)
    assert isinstance(linear, Plain | Fp8)
    scale = linear.scale if isinstance(linear, Fp8) else None
    return {"weight": linear.weight, "bias": linear.bias, "scale": scale}
