"""A stand-in for the paged cache, for trying a model while it is loaded.

Two short sequences attend densely. The stand-in notes what KV each layer keeps, and refuses layers that ask
for an attention that is not served. It also says how much two sets of logits may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.types import LoadError

# what models hand to their attention besides what is served, and that does not change its result
_HARMLESS = frozenset(
    {
        "attention_mask",
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
NARROW = 3  # a window that hides some of either sequence
TRIAL = ((5, 3, 7, 1, 4, 2, 6, 8), (2, 9, 4, 4, 1))  # two sequences of token ids, short enough for any window
LENGTHS = tuple(len(ids) for ids in TRIAL)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer handed to its attention in the trial run."""

    num_kv_heads: int
    head_dim: int
    window: int | None


class Trial:
    """A stand-in for the paged cache: attends densely, sequence by sequence (those of `TRIAL`, or others of
    `lengths`), and notes what it saw. windows: by layer; a layer without one sees all tokens before its own.
    """

    def __init__(
        self, lengths: Sequence[int] = LENGTHS, windows: Mapping[int, int | None] | None = None
    ) -> None:
        self.seen: dict[int, Seen] = {}
        self._lengths = list(lengths)
        self._windows = windows or {}

    def note(
        self,
        module: torch.nn.Module,
        layer: int,
        key: Tensor,
        value: Tensor,
        window: int | None,
        rest: dict[str, Any],
    ) -> None:
        """Remember a layer's shape; raises LoadError when it asks for something that is not served."""
        kind = type(module).__name__
        if key.shape != value.shape:
            raise LoadError(f"{kind} keeps keys and values of different shapes, which is not served")
        if not getattr(module, "is_causal", True):
            raise LoadError(f"{kind} is not causal")
        unknown = sorted(name for name, given in rest.items() if given is not None and name not in _HARMLESS)
        if unknown:
            raise LoadError(f"{kind} hands {unknown[0]!r} to its attention, which is not served")
        if layer in self.seen:
            raise LoadError(f"{kind} attends twice in layer {layer}")
        self.seen[layer] = Seen(key.shape[1], key.shape[3], window)

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
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        parts = zip(*(torch.split(part, self._lengths) for part in (q, k, v)), strict=True)
        window = self._windows.get(layer)
        return torch.cat([_dense(q, k, v, window, scale, softcap, sinks) for q, k, v in parts])


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    hidden = everywhere.triu(1)
    if window is not None:
        hidden |= everywhere.tril(-window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        own = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, own), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


def tolerance(logits: Tensor, dtype: torch.dtype) -> float:
    """How far logits of a model that computes in `dtype` may be off and still be the same."""
    spread = logits.std().item() if logits.numel() > 1 else 0.0
    return (1e-3 if dtype == torch.float32 else 0.1) * max(spread, 1e-6)
