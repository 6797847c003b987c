"""The interface that every model has towards the runner, native families and the general tier alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.cpu import Library
from engine.models.lora import Adapters, Place, Stack
from engine.step import LayerGroup
from engine.vision import Sight


@dataclass(frozen=True)
class ModelSpec:
    """What the rest of the engine needs to know of a loaded model.

    `vocab_size` counts rows of the embedding; `max_positions` is where the positions end that it was made
    for, and `shortened` says in words why that is less than config.json has (empty: it is not); `groups`
    partition the layers by the kind of KV they keep; `adapters`: name and fingerprint of those
    beside it, numbered from 1. `fingerprint` names the weights, and `arithmetic` what is computed with
    them: keys and values that were saved on disk are read only where both are the same.

    The arithmetic is no part of the fingerprint, because an interrupted run fails where that has changed. An
    upgrade may change the arithmetic, and a run can go on with another one: all of its tokens are computed
    again.
    """

    architecture: str
    vocab_size: int
    max_positions: int
    num_parameters: int
    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    fingerprint: bytes
    arithmetic: bytes = b""
    shortened: str = ""
    adapters: tuple[tuple[str, bytes], ...] = ()


class Attention(Protocol):
    """What a model calls once a layer: stores `k` and `v` in the paged cache and attends over it."""

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
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        ...


class Model(Protocol):
    """A decoder over flattened tokens; it holds weights and no state of any request."""

    spec: ModelSpec
    adapters: Adapters | None  # told before each forward which of its tokens are under which
    library: Library | None  # of a CPU with kernels of our own
    sight: Sight | None  # told before each forward what its tokens show; None: the model reads text alone

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logits_at: Tensor
    ) -> Tensor:
        """token_ids [T], positions [T], logits_at [R] (indices into T) -> logits [R, vocab_size]."""
        ...

    def places(self) -> dict[str, Place]:
        """The linear maps that adapters can add to, by the paths that transformers gives their modules."""
        ...

    def adapt(self, adapters: Adapters, stacks: Mapping[str, Stack]) -> None:
        """Serve adapters from now on: `stacks` by `Place.map`."""
        ...
