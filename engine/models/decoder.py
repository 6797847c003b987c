"""The native decoder: one computation for all native families.

Owns: packed weights and the forward over flattened tokens. Refuses to know: families by name (flags arrive in
a `DecoderShape`), requests, and how attention reads its cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.blocks import LayerGroup
from engine.models import Attention, ModelSpec
from engine.models.families import LAYER_PACKING, MODEL_PACKING, DecoderShape, Packed
from engine.models.rope import inverse_frequencies, rotate
from engine.types import LoadError
from engine.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map; the place where another layout of the weights (prepacked, quantized) goes."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [Hq + Hkv, 1 or D]: the q and the k norm's weight, repeated for their heads
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class NativeDecoder:
    """A decoder of a native family; see `Model`."""

    def __init__(
        self, spec: ModelSpec, shape: DecoderShape, weights: dict[str, Tensor], layers: list[Layer]
    ) -> None:
        self.spec = spec
        self.shape = shape
        self.layers = layers
        self.embedding = weights["embedding"]
        self.final_norm = weights["final_norm"]
        self.head = Linear(weights["head"])
        frequencies, self.rope_scale = inverse_frequencies(shape.rope, shape.head_dim)
        self.frequencies = frequencies.to(self.embedding.device)
        self.scale = shape.head_dim**-0.5

    @classmethod
    def load(
        cls, shape: DecoderShape, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> NativeDecoder:
        """Read and pack the weights; raises LoadError when a tensor is missing, misshapen or left over."""

        def pack(row: Packed, prefix: str = "") -> Tensor:
            parts = []
            for source, axes in row.sources.items():
                parts.append(checkpoint.take(prefix + source))
                expected = [shape.axes[axis] for axis in axes.split()]
                if list(parts[-1].shape) != expected:
                    found = list(parts[-1].shape)
                    raise LoadError(f"{prefix}{source} has shape {found}, config.json makes it {expected}")
            # a single part may be the file itself, mapped: a copy outlives a file that is replaced
            whole = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
            return whole.to(device=device, dtype=dtype)

        layers = []
        for i in range(len(shape.windows)):
            rows = (row for row in LAYER_PACKING if row.name not in shape.absent)
            layers.append(_layer(shape, {row.name: pack(row, f"model.layers.{i}.") for row in rows}))
        tied = shape.tied or "lm_head.weight" not in checkpoint
        weights = {row.name: pack(row) for row in MODEL_PACKING if not (tied and row.name == "head")}
        if tied:
            weights["head"] = weights["embedding"]
        _check_all_used(shape, checkpoint, tied)
        spec = ModelSpec(
            architecture=shape.architecture,
            vocab_size=shape.vocab_size,
            max_positions=shape.max_positions,
            num_parameters=checkpoint.num_parameters,
            groups=_groups(shape),
            dtype=dtype,
            fingerprint=checkpoint.fingerprint(),
        )
        return cls(spec, shape, weights, layers)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """See `Model.forward`."""
        shape, eps = self.shape, self.shape.norm_eps
        num_qk = shape.num_heads + shape.num_kv_heads
        residual = F.embedding(token_ids, self.embedding)
        cos, sin = self._rotation(positions, residual.dtype)
        for i, layer in enumerate(self.layers):
            x = F.rms_norm(residual, (shape.hidden_size,), layer.attention_norm, eps)
            heads = layer.qkv(x).view(x.shape[0], -1, shape.head_dim)
            qk, v = heads[:, :num_qk], heads[:, num_qk:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (shape.head_dim,), None, eps) * layer.qk_norm
            qk = rotate(qk, cos, sin)
            q, k = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
            x = attention(i, q, k, v, scale=self.scale)
            residual = residual + layer.o(x.reshape(x.shape[0], -1))
            x = F.rms_norm(residual, (shape.hidden_size,), layer.mlp_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            residual = residual + layer.down(F.silu(gate) * up)
        last = F.rms_norm(residual[logits_at], (shape.hidden_size,), self.final_norm, eps)
        return self.head(last)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D / 2] for these positions, computed in f32."""
        angles = (positions[:, None].float() * self.frequencies)[:, None]
        return (angles.cos() * self.rope_scale).to(dtype), (angles.sin() * self.rope_scale).to(dtype)


def _layer(shape: DecoderShape, packed: dict[str, Tensor]) -> Layer:
    qk_norm = None
    if "q_norm" in packed:
        q = packed["q_norm"].expand(shape.num_heads, shape.head_dim)
        k = packed["k_norm"].expand(shape.num_kv_heads, shape.head_dim)
        qk_norm = torch.cat((q, k))
    return Layer(
        attention_norm=packed["attention_norm"],
        qkv=Linear(packed["qkv"], packed.get("qkv_bias")),
        qk_norm=qk_norm,
        o=Linear(packed["o"], packed.get("o_bias")),
        mlp_norm=packed["mlp_norm"],
        gate_up=Linear(packed["gate_up"], packed.get("gate_up_bias")),
        down=Linear(packed["down"], packed.get("down_bias")),
    )


def _groups(shape: DecoderShape) -> tuple[LayerGroup, ...]:
    """Layers with the same window share block tables; full attention comes first."""
    windows = sorted(set(shape.windows), key=lambda window: (window is not None, window or 0))
    return tuple(
        LayerGroup(
            layers=tuple(i for i, own in enumerate(shape.windows) if own == window),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=window,
        )
        for window in windows
    )


def _check_all_used(shape: DecoderShape, checkpoint: Checkpoint, tied: bool) -> None:
    """A tensor that nobody took means that the row does not know the model: its tokens would be quietly
    wrong.
    """
    ignored = {"lm_head.weight"} if tied else set()
    left = [
        name
        for name in checkpoint.unread()
        if name not in ignored and not name.endswith("rotary_emb.inv_freq")
    ]
    if left:
        raise LoadError(
            f"{shape.architecture} does not use the checkpoint's {left[0]!r} ({len(left)} such tensors)"
        )
