"""The native decoder: packed weights, and the forward over flattened tokens that serves all native families.

Families differ only in the flags of a `DecoderShape`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import Quantization
from engine.kernels import Workspace
from engine.kernels.cpu import Library, Panels
from engine.models.checkpoint import Checkpoint, require_finite
from engine.models.families import LAYER_PACKING, MODEL_PACKING, DecoderShape, Packed
from engine.models.fp8 import AS_NUMBERS, UNUSED_SCALES, Stored
from engine.models.interface import Attention, ModelSpec
from engine.models.layers import MAPS, Layer, run_layers
from engine.models.linear import Blocked, Int8, Linear, is_int8, make_linear
from engine.models.lora import Adapted, Adapters, Place, Stack, unadapted
from engine.models.rope import inverse_frequencies, rotate
from engine.step import LayerGroup
from engine.types import LoadError
from engine.vision import Sight

log = logging.getLogger("antiphon.engine")

UNUSED = ("rotary_emb.inv_freq", *UNUSED_SCALES)  # ends of names not needed: what is computed anew, and these


class NativeDecoder:
    """A decoder of a native family; see `Model`."""

    def __init__(
        self,
        spec: ModelSpec,
        shape: DecoderShape,
        layers: list[Layer],
        *,
        embedding: Tensor | Int8 | Panels,
        final_norm: Tensor,
        head: Linear,
        library: Library | None = None,
    ) -> None:
        self.spec = spec
        self.library = library
        self.shape = shape
        self.layers = layers
        self.embedding = embedding
        self.final_norm = final_norm
        self.head = head
        self.adapters: Adapters | None = None
        self.sight: Sight | None = None
        frequencies, self.rope_scale = inverse_frequencies(shape.rope, shape.head_dim)
        self.frequencies = frequencies.to(final_norm.device)
        self.scale = shape.head_dim**-0.5

    @classmethod
    def load(
        cls,
        shape: DecoderShape,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
        stored: Stored = AS_NUMBERS,
        library: Library | None = None,
        head: Tensor | None = None,
    ) -> NativeDecoder:
        """Read and pack the weights; raises LoadError when a tensor is missing, misshapen, not finite or left
        over.

        head [outputs, hidden_size]: computed in the place of the language head, which is not read then; its
        weights are never quantized.

        A quantization is of the layers' matrices. The head, which few bits would cost most, is int8 with int8
        and int4, and an embedding that is one with it too; with fp8 it stays as it is. `library`: as in
        `make_linear`.
        """

        def pack(row: Packed, prefix: str = "") -> Tensor:
            parts = []
            for source, axes in row.sources.items():
                parts.append(stored.take(checkpoint, prefix + source))
                expected = [shape.axes[axis] for axis in axes.split()]
                if list(parts[-1].shape) != expected:
                    shape_found = list(parts[-1].shape)
                    raise LoadError(
                        f"{prefix}{source} has shape {shape_found}, config.json makes it {expected}"
                    )
            # a single part may be the file itself, mapped: a copy outlives a file that is replaced
            whole = parts[0].clone() if len(parts) == 1 else torch.cat(parts)
            whole = whole.to(device=device, dtype=dtype)
            own = torch.split(whole, [len(part) for part in parts])
            for source, part in zip(row.sources, own, strict=True):
                require_finite(prefix + source, part)
            return whole

        workspace = Workspace()
        layers = []
        for i in range(len(shape.windows)):
            present = (row for row in LAYER_PACKING if row.name not in shape.absent)
            packed = {row.name: pack(row, f"model.layers.{i}.") for row in present}
            layers.append(_layer(shape, packed, quantization, workspace, library))
        tied = head is None and (shape.tied or "lm_head.weight" not in checkpoint)
        unread = tied or head is not None
        weights = {row.name: pack(row) for row in MODEL_PACKING if not (unread and row.name == "head")}
        embedding: Tensor | Int8 | Panels = weights["embedding"]
        of_head: Quantization = "int8" if quantization in ("int8", "int4") and head is None else "none"
        rows = weights.get("head", weights["embedding"])
        if head is not None:
            rows = head.to(device=device, dtype=dtype).contiguous()
        last = make_linear(rows, None, of_head, workspace, library)
        if tied and isinstance(last, Int8 | Panels):
            embedding = last
        elif tied and isinstance(last, Blocked):
            twice = weights["embedding"].nbytes / 2**20
            log.info("the embedding is held twice, the second time as the head reads it: %.0f MiB", twice)
        if quantization == "int4":
            _say_what_is_not_int4(layers)
        _check_all_used(shape, checkpoint, unread)
        spec = ModelSpec(
            architecture=shape.architecture,
            vocab_size=shape.vocab_size,
            max_positions=shape.max_positions,
            num_parameters=checkpoint.num_parameters,
            groups=_groups(shape),
            dtype=dtype,
            fingerprint=checkpoint.fingerprint() + (b"" if quantization == "none" else quantization.encode()),
        )
        final_norm = weights["final_norm"]
        return cls(
            spec, shape, layers, embedding=embedding, final_norm=final_norm, head=last, library=library
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """See `Model.forward`."""
        operations = _TorchOperations(self, positions, attention)
        embedded = self.embed(token_ids)
        return run_layers(operations, self.layers, self.final_norm, self.head, embedded, logits_at)

    def rotation_table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [num_positions, D / 2], f32, of the positions from 0."""
        positions = torch.arange(num_positions, dtype=torch.float32, device=self.frequencies.device)
        return self._rotation(positions)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.frequencies
        return angles.cos() * self.rope_scale, angles.sin() * self.rope_scale

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, D] of positions [T], as `rotate` takes them, computed in f32."""
        cos, sin = (part[:, None] for part in self._rotation(positions))
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)

    def maps(self) -> list[Linear]:
        """Every linear map, without its adapters: those of the layers, and the head."""
        inside = [unadapted(linear) for layer in self.layers for linear in layer.maps.values()]
        return [*inside, unadapted(self.head)]

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings [T, hidden_size] of tokens [T]; new memory."""
        if isinstance(self.embedding, Tensor):
            return F.embedding(token_ids, self.embedding)
        return self.embedding.rows(token_ids)

    def places(self) -> dict[str, Place]:
        """See `Model.places`."""
        axes_of, places = self.shape.axes, {}
        for row in LAYER_PACKING:
            if row.name not in MAPS:
                continue
            first = 0
            for source, axes in row.sources.items():
                outputs, inputs = (axes_of[axis] for axis in axes.split())
                for i in range(len(self.layers)):
                    path = f"model.layers.{i}.{source.removesuffix('.weight')}"
                    places[path] = Place(f"{i}.{row.name}", inputs, outputs, first)
                first += outputs
        return places

    def adapt(self, adapters: Adapters, stacks: Mapping[str, Stack]) -> None:
        """See `Model.adapt`."""
        self.adapters = adapters
        for i, layer in enumerate(self.layers):
            adapted: dict[str, Any] = {
                name: Adapted(linear, stacks[f"{i}.{name}"], adapters)
                for name, linear in layer.maps.items()
                if f"{i}.{name}" in stacks
            }
            self.layers[i] = replace(layer, **adapted)


class _TorchOperations:
    """Operations of one step by torch; the stream is the residual itself."""

    def __init__(self, decoder: NativeDecoder, positions: Tensor, attention: Attention) -> None:
        self._shape = decoder.shape
        self._scale = decoder.scale
        self._attention = attention
        self._cos, self._sin = decoder.rotation(positions, decoder.final_norm.dtype)

    def begin(self, embedded: Tensor) -> Tensor:
        return embedded

    def project(self, stream: Tensor, norm: Tensor, linear: Linear) -> Tensor:
        return linear(F.rms_norm(stream, norm.shape, norm, self._shape.norm_eps))

    def project_gated(self, stream: Tensor, norm: Tensor, linear: Linear) -> Tensor:
        gate, up = self.project(stream, norm, linear).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def attend(self, i: int, layer: Layer, heads: Tensor) -> Tensor:
        shape = self._shape
        num_qk = shape.num_heads + shape.num_kv_heads
        heads = heads.view(len(heads), -1, shape.head_dim)
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (shape.head_dim,), None, shape.norm_eps) * layer.qk_norm
        qk = rotate(qk, self._cos, self._sin)
        q, k = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
        mixed = self._attention(i, q, k, v, scale=self._scale)
        return mixed.reshape(len(mixed), -1)

    def add(self, stream: Tensor, x: Tensor, linear: Linear) -> Tensor:
        return linear(x, stream)

    def select(self, stream: Tensor, at: Tensor) -> Tensor:
        return stream[at]


def _layer(
    shape: DecoderShape,
    packed: dict[str, Tensor],
    quantization: Quantization,
    workspace: Workspace,
    library: Library | None = None,
) -> Layer:
    def linear(name: str) -> Linear:
        bias, gated = packed.get(f"{name}_bias"), name == "gate_up"
        return make_linear(packed[name], bias, quantization, workspace, library, gated=gated)

    qk_norm = None
    if "q_norm" in packed:
        q = packed["q_norm"].expand(shape.num_heads, shape.head_dim)
        k = packed["k_norm"].expand(shape.num_kv_heads, shape.head_dim)
        qk_norm = torch.cat((q, k))
    return Layer(
        attention_norm=packed["attention_norm"],
        qkv=linear("qkv"),
        qk_norm=qk_norm,
        o=linear("o"),
        mlp_norm=packed["mlp_norm"],
        gate_up=linear("gate_up"),
        down=linear("down"),
    )


def _say_what_is_not_int4(layers: list[Layer]) -> None:
    as_int8 = sorted({name for layer in layers for name, linear in layer.maps.items() if is_int8(linear)})
    if as_int8:
        log.warning("int8 instead of int4, whose groups do not fit their shapes: %s", ", ".join(as_int8))


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


def _check_all_used(shape: DecoderShape, checkpoint: Checkpoint, headless: bool) -> None:
    """Refuse a checkpoint with a tensor that was not used: the family's row does not describe the model,
    whose tokens would be wrong without an error.
    """
    ignored = {"lm_head.weight"} if headless else set()
    left = [name for name in checkpoint.unread() if name not in ignored and not name.endswith(UNUSED)]
    if left:
        raise LoadError(
            f"{shape.architecture} does not use the checkpoint's {left[0]!r} ({len(left)} such tensors)"
        )
