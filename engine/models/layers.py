"""What a native decoder is made of, and in which order its parts are computed.

The order is written here once, in terms of a few operations: torch's own and a GPU's fused kernels are two
implementations of these (`models.decoder`, `executor.fused_forward`). The C++ forward of a CPU takes the same
`Layer` and goes through it in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from engine.models.linear import Linear

MAPS = ("qkv", "o", "gate_up", "down")  # the linear maps of a layer, as `LAYER_PACKING` names them

Stream = TypeVar("Stream")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; its linear maps hold their biases, scales and adapters themselves."""

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [Hq + Hkv, 1 or D]: the q and the k norm's weight, repeated for their heads
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def maps(self) -> dict[str, Linear]:
        """The linear maps, by the names of `MAPS`."""
        return {name: getattr(self, name) for name in MAPS}


class Operations(Protocol[Stream]):
    """What a layer does, in pieces that can be computed in one go.

    `Stream` is the residual stream of T tokens, [T, hidden_size], in whatever form suits: sums may be pending
    in it. Norms are RMS norms.
    """

    def begin(self, embedded: Tensor) -> Stream:
        """The stream that begins with these embeddings [T, hidden_size], which it may change."""
        ...

    def project(self, stream: Stream, norm: Tensor, linear: Linear) -> Tensor:
        """The product of the normed stream, [T, outputs]; sums that were pending are done afterwards."""
        ...

    def project_gated(self, stream: Stream, norm: Tensor, linear: Linear) -> Tensor:
        """As `project`, of gates and what they gate: silu(first half) * second half, [T, outputs / 2]."""
        ...

    def attend(self, i: int, layer: Layer, heads: Tensor) -> Tensor:
        """Rotate and store what layer `i` projected, and attend: [T, (Hq + 2 Hkv) D] -> [T, Hq D]."""
        ...

    def add(self, stream: Stream, x: Tensor, linear: Linear) -> Stream:
        """The stream plus the product of x [T, inputs]; a `project` of that stream came before."""
        ...

    def select(self, stream: Stream, at: Tensor) -> Stream:
        """The stream of the tokens `at` [R] alone."""
        ...


def run_layers(
    operations: Operations[Stream],
    layers: Sequence[Layer],
    final_norm: Tensor,
    head: Linear,
    embedded: Tensor,
    logits_at: Tensor | None,
) -> Tensor:
    """A decoder's logits [R, V] for the tokens `logits_at`; None: for all of the embedded ones."""
    stream = operations.begin(embedded)
    for i, layer in enumerate(layers):
        heads = operations.project(stream, layer.attention_norm, layer.qkv)
        stream = operations.add(stream, operations.attend(i, layer, heads), layer.o)
        middle = operations.project_gated(stream, layer.mlp_norm, layer.gate_up)
        stream = operations.add(stream, middle, layer.down)
    if logits_at is not None:
        stream = operations.select(stream, logits_at)
    return operations.project(stream, final_norm, head)
