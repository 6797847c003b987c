"""A forward in the pieces that kernels fuse: the computation of `models.decoder`, in 7 to 10 launches a
layer.

Owns: which kernels a step is made of, and what they read of a step. Refuses to know: requests, graphs, how a
kernel works. With `PLAIN` the same pieces run anywhere; that is how they are tested against the decoder's own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import GroupStep
from engine.kernels.triton import reference
from engine.models import Adapted, Fp8, Linear, Plain

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
        positions = torch.arange(num_positions, dtype=torch.float32, device=model.frequencies.device)
        angles = positions[:, None] * model.frequencies
        self._cosines, self._sines = angles.cos() * model.rope_scale, angles.sin() * model.rope_scale
        maps = [
            model.head,
            *(each for own in model.layers for each in (own.qkv, own.o, own.gate_up, own.down)),
        ]
        # one matrix of each kind, where all are of kinds that the few-row product reads
        found = [_unadapted(each) for each in maps]
        self._kinds = {each.weight.dtype: each.weight for each in found if isinstance(each, Plain | Fp8)}
        self._has_thin = all(isinstance(each, Plain | Fp8) for each in found)

    def forward(self, token_ids: Tensor, positions: Tensor, paged: Paged, logits_at: Tensor | None) -> Tensor:
        """`NativeDecoder.forward`; without `logits_at` every token's logits."""
        model = self.model
        assert isinstance(model.embedding, Tensor)
        x = F.embedding(token_ids, model.embedding)
        few = self._has_thin and all(self.ops.few(len(x), weight) for weight in self._kinds.values())
        if model.adapters is not None and model.adapters.shares:
            few = False  # their products come between what the few-row kernel takes in one
        return (self._few if few else self._many)(x, positions, paged, logits_at)

    def _few(self, residual: Tensor, positions: Tensor, paged: Paged, logits_at: Tensor | None) -> Tensor:
        """Norms, gates and sums go into the products."""
        model, linear, eps = self.model, self.ops.linear, self.model.shape.norm_eps
        for i, layer in enumerate(model.layers):
            heads = linear(residual, **_read(layer.qkv), norm=layer.attention_norm, eps=eps)
            mixed = self._attend(i, heads, positions, paged)
            residual = linear(mixed, **_read(layer.o), residual=residual)
            middle = linear(residual, **_read(layer.gate_up), norm=layer.mlp_norm, eps=eps, gated=True)
            residual = linear(middle, **_read(layer.down), residual=residual)
        if logits_at is not None:
            residual = residual[logits_at]
        return linear(residual, **_read(model.head), norm=model.final_norm, eps=eps)

    def _many(self, residual: Tensor, positions: Tensor, paged: Paged, logits_at: Tensor | None) -> Tensor:
        """Products by the library; a sum goes into the norm that follows it."""
        model, ops, eps = self.model, self.ops, self.model.shape.norm_eps
        x = None  # what is yet to be added to the residual
        for i, layer in enumerate(model.layers):
            heads = layer.qkv(ops.add_norm(x, residual, layer.attention_norm, eps))
            x = layer.o(self._attend(i, heads, positions, paged))
            x = layer.down(ops.gate(layer.gate_up(ops.add_norm(x, residual, layer.mlp_norm, eps))))
        if logits_at is not None:
            residual, x = residual[logits_at], None if x is None else x[logits_at]
        return model.head(ops.add_norm(x, residual, model.final_norm, eps))

    def _attend(self, i: int, heads: Tensor, positions: Tensor, paged: Paged) -> Tensor:
        """Queries, keys and values of layer i -> what its heads saw, [T, Hq * D]."""
        layer, shape = self.model.layers[i], self.model.shape
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


def _read(linear: Linear) -> dict[str, Tensor | None]:
    """What the few-row product takes of a map."""
    linear = _unadapted(linear)
    assert isinstance(linear, Plain | Fp8)
    scale = linear.scale if isinstance(linear, Fp8) else None
    return {"weight": linear.weight, "bias": linear.bias, "scale": scale}


def _unadapted(linear: Linear) -> Linear:
    return linear.inner if isinstance(linear, Adapted) else linear
