"""Computes a native decoder's whole step on a CPU in one call of the C++ library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.executor.cpu_attention import PlanForLibrary, cache_for_library, unfit
from engine.kernels.cpu import PANEL, Decoder, Group, Layer, LowRank, Panels, Scoring, Step
from engine.models import Adapted, Linear, Model, NativeDecoder, Stack, unadapted
from engine.models import Layer as DecoderLayer
from engine.step import Floats, StepPlan


def fits(model: Model, kv_dtype: torch.dtype) -> TypeGuard[NativeDecoder]:
    """Whether a step of this model, with keys and values kept as `kv_dtype`, can be that call."""
    return (
        isinstance(model, NativeDecoder)
        and all(isinstance(linear, Panels) for linear in model.maps())
        and unfit(model.spec, kv_dtype) is None
    )


def stack_for_library(panels: Panels, stack: Stack, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stack of `count` adapters of a map, as the library takes it: down [count, rank, inputs], up [count,
    panels, rank, PANEL] f32, and the ranks that reach a panel [panels, 2].
    """
    num_panels, rank = len(panels.weight), stack.rank
    whole = torch.zeros(count, rank, panels.outputs)
    for up in stack.ups:
        columns = slice(0, rank) if up.columns is None else up.columns
        whole[:, columns, up.outputs] = up.weight.view(count, -1, up.weight.shape[1])
    spread = torch.zeros(count, rank, num_panels * PANEL)
    spread[:, :, slice(0, panels.outputs) if panels.places is None else panels.places] = whole
    own = spread.view(count, rank, num_panels, PANEL).transpose(1, 2).contiguous()
    reaches = own.ne(0).any(dim=3).any(dim=0)  # [panels, rank]
    ranks = torch.arange(rank)
    first = torch.where(reaches, ranks, rank).amin(dim=1)
    last = torch.where(reaches, ranks + 1, 0).amax(dim=1)
    return stack.down.view(count, rank, panels.inputs), own, torch.stack((first, last), dim=1)


class Forward:
    """Computes plans of a native decoder. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        model: NativeDecoder,
        layers: Sequence[tuple[int, Tensor, Tensor]],
        num_positions: int,
        *,
        deterministic: bool,
    ) -> None:
        """`layers`: each one's group and caches, as `kernels.new_pool` makes them; positions up
        to `num_positions` are served. deterministic: a token's numbers depend on the tokens before it alone.
        """
        assert isinstance(model.head, Panels)
        self.library = model.head.library
        self._model = model
        self._num_outputs = model.head.outputs
        self._deterministic = deterministic
        self._logits = np.empty((0, self._num_outputs), np.float32)
        self._kept: list[Any] = []  # what the structures point to
        self._most_ranks = 0
        shape, embedding = model.shape, model.embedding
        # one that torch holds in eight bits is read by torch; one in panels is the head
        self._embeds = isinstance(embedding, Tensor | Panels)
        cosines, sines = model.rotation_table(num_positions)
        made = [self._layer(layer, *caches) for layer, caches in zip(model.layers, layers, strict=True)]
        self._decoder = Decoder(
            layers=(Layer * len(made))(*made),
            embedding=self._at(embedding.contiguous()) if isinstance(embedding, Tensor) else None,
            final_norm=self._at(model.final_norm),
            cosines=self._at(cosines),
            sines=self._at(sines),
            head=self._map(model.head),
            num_layers=len(layers),
            hidden=shape.hidden_size,
            middle=shape.intermediate_size,
            heads=shape.num_heads,
            most_ranks=self._most_ranks,
            is_bf16=model.spec.dtype is torch.bfloat16,
            scoring=Scoring(sinks=None, scale=model.scale, softcap=0.0),
            eps=shape.norm_eps,
        )
        self._windows = [group.window for group in model.spec.groups]

    def __call__(self, plan: StepPlan, progress: ctypes.c_double, vocab_size: int) -> Floats:
        """The logits f32 of a plan's `logits_at`, [R, vocab_size]; `progress` is told whenever a layer is
        done, in seconds of the monotonic clock. Raises IndexError for a token that the model does not have.
        """
        logits, laid = self._room_for(len(plan.logits_at)), PlanForLibrary(plan, self._windows)
        token_ids = embedded = None
        if self._embeds:
            if plan.token_ids.min() < 0 or plan.token_ids.max() >= self._model.spec.vocab_size:
                raise IndexError("a token is none of the model's")
            token_ids = laid.at(plan.token_ids)
        else:
            embedded = self._model.embed(torch.from_numpy(plan.token_ids))

        adapters = None
        if plan.adapters.any():
            adapters = laid.at(np.repeat(plan.adapters, np.diff(plan.query_start)))
        step = Step(
            groups=(Group * len(laid.groups))(*laid.groups),
            token_ids=token_ids,
            embedded=None if embedded is None else embedded.data_ptr(),
            logits_at=laid.at(plan.logits_at),
            wanted=len(plan.logits_at),
            logits=logits.ctypes.data,
            progress=ctypes.addressof(progress),
            adapters=adapters,
            alone=self._deterministic,
        )
        self.library.forward(self._decoder, laid.batch, step)
        return logits[:, :vocab_size]

    def _room_for(self, rows: int) -> NDArray[np.float32]:
        """Memory for logits [rows, rows of the head]: the last step's, unless somebody still holds that. As
        many megabytes taken anew would cost a step a fault of each page."""
        if len(self._logits) < rows or sys.getrefcount(self._logits) > 2:  # what is cut of it holds it, too
            self._logits = np.empty((rows, self._num_outputs), np.float32)
        return self._logits[:rows]

    def _layer(self, layer: DecoderLayer, group: int, k_cache: Tensor, v_cache: Tensor) -> Any:
        self._kept += [k_cache, v_cache]
        return Layer(
            attention_norm=self._at(layer.attention_norm),
            qk_norm=None if layer.qk_norm is None else self._at(layer.qk_norm.contiguous()),
            mlp_norm=self._at(layer.mlp_norm),
            cache=cache_for_library(k_cache, v_cache, self._model.shape.head_dim),
            group=group,
            **{name: self._map(linear) for name, linear in layer.maps.items()},
        )

    def _map(self, linear: Linear) -> Any:
        inner = unadapted(linear)
        assert isinstance(inner, Panels)
        structure = inner.map(gated=inner.places is not None)
        if isinstance(linear, Adapted):
            down, up, used = stack_for_library(inner, linear.stack, linear.adapters.count)
            rank = down.shape[1]
            self._most_ranks = max(self._most_ranks, rank)
            low_rank = LowRank(down=self._at(down), up=self._at(up), used=self._at(used), rank=rank)
            self._kept.append(low_rank)
            structure.adapters = ctypes.addressof(low_rank)
        return structure

    def _at(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()
