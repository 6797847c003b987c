"""Attention over a CPU's paged cache by the C++ library, for models whose other layers torch computes.

It also lays a step's plan out as the library takes it, for whole forwards too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu import MOST_DIM, STRIP, Batch, Cache, Group, Library, Scoring
from engine.kernels.cpu import Attention as AttentionCall
from engine.models import Attention, ModelSpec
from engine.step import StepPlan


def unfit(spec: ModelSpec, kv_dtype: torch.dtype) -> str | None:
    """Why the library cannot attend for a model whose keys and values are kept as `kv_dtype`; None where it
    can."""
    if spec.dtype not in (torch.float32, torch.bfloat16):
        return f"the model computes in {_named(spec.dtype)}, and not in float32 or bfloat16"
    if kv_dtype not in (spec.dtype, torch.int8):
        return f"keys and values are kept in {_named(kv_dtype)}"
    for dim in (group.head_dim for group in spec.groups):
        if dim > MOST_DIM or dim % STRIP:
            return f"heads of the model have {dim} numbers, which is no multiple of {STRIP} up to {MOST_DIM}"
    return None


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cache_for_library(k_cache: Tensor, v_cache: Tensor, head_dim: int) -> Any:
    """A layer's caches, as `kernels.new_pool` makes them; the structure does not keep them alive."""
    _, block_size, kv_heads, _ = k_cache.shape
    return Cache(
        keys=k_cache.data_ptr(),
        values=v_cache.data_ptr(),
        block_stride=k_cache.stride(0),
        head_stride=k_cache.stride(2),
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        in_bytes=k_cache.dtype is torch.int8,
    )


class PlanForLibrary:
    """A plan's sequences, and where their tokens' keys and values are, as the library takes them."""

    def __init__(self, plan: StepPlan, windows: Sequence[int | None]) -> None:
        """windows: of each layer group."""
        self._held: list[NDArray[np.generic]] = []  # what the structures point to
        self.groups = [
            Group(
                tables=self.at(tables),
                slot_blocks=self.at(blocks),
                width=tables.shape[1],
                window=window or 0,
            )
            for tables, blocks, window in zip(plan.block_tables, plan.slot_blocks, windows, strict=True)
        ]
        self.batch = Batch(
            query_start=self.at(plan.query_start),
            positions=self.at(plan.positions),
            slot_offsets=self.at(plan.slot_offsets),
            sequences=len(plan.seq_lens),
            tokens=len(plan.token_ids),
        )

    def at(self, array: NDArray[np.generic]) -> int:
        """Where an array lies, which is kept as long as this is."""
        self._held.append(np.ascontiguousarray(array))
        return self._held[-1].ctypes.data


class CpuAttention:
    """Attends for a model; `layers` as the runner has them. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        library: Library,
        spec: ModelSpec,
        layers: Sequence[tuple[int, Tensor, Tensor]],
        *,
        deterministic: bool,
    ) -> None:
        self._library = library
        self._dtype = spec.dtype
        self._deterministic = deterministic
        self._windows = [group.window for group in spec.groups]
        self._layers = [
            (group, cache_for_library(k_cache, v_cache, spec.groups[group].head_dim))
            for group, k_cache, v_cache in layers
        ]
        self._kept = layers  # the structures point there

    def of(self, plan: StepPlan, moved: Callable[[], None]) -> Attention:
        """What a model calls in the step of a plan; `moved` is told of each layer."""
        return partial(self._attend, PlanForLibrary(plan, self._windows), moved)

    def _attend(
        self,
        plan: PlanForLibrary,
        moved: Callable[[], None],
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        moved()
        group, cache = self._layers[layer]
        queries, keys, values = (part.to(self._dtype).contiguous() for part in (q, k, v))
        out = torch.empty_like(queries)
        own_sinks = None if sinks is None else sinks.float().contiguous()
        given = AttentionCall(
            queries=queries.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            out=out.data_ptr(),
            heads=queries.shape[1],
            is_bf16=self._dtype is torch.bfloat16,
            alone=self._deterministic,
            scoring=Scoring(
                sinks=None if own_sinks is None else own_sinks.data_ptr(), scale=scale, softcap=softcap or 0.0
            ),
        )
        self._library.attend(given, cache, plan.batch, plan.groups[group])
        return out.to(q.dtype)
