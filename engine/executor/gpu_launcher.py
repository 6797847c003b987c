"""Launches steps on a GPU: as a captured graph where one fits the plan, else kernel by kernel.

Drawn tokens stay on the device, so that the next step can be launched before the host has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.executor.cuda_graphs import Capture, DecodeGraphs, call_capture, cuda_capture
from engine.executor.fused_forward import PLAIN, FusedDecoder, Ops, Paged, triton_ops
from engine.kernels import GroupStep
from engine.models import Model, NativeDecoder
from engine.step import DrawPlan, Ints, StepPlan, no_draws

WARM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a device brings: bodies of the ops, a way to repeat work, and a draw of its own
    (`sampler.Pick`)."""

    ops: Ops
    capture: Capture
    pick: Callable[[Tensor, DrawPlan], Tensor] | None


def kernels_for(device: torch.device) -> Kernels | None:
    """The kernels of a device; None where torch's own bodies are the better ones."""
    if device.type != "cuda":
        return None
    from engine.kernels.triton import sampling

    return Kernels(triton_ops(), cuda_capture(), sampling.pick)


STAND_IN = Kernels(PLAIN, call_capture, None)
"""The same way through torch bodies: how this path is tried without a GPU."""


class Launcher:
    """Computes plans by kernels. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        model: Model,
        layers: Sequence[tuple[int, Tensor, Tensor]],
        kernels: Kernels,
        *,
        block_size: int,
        max_seqs: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        """Captures the decode steps of batches of up to `max_seqs`; `layers`: each one's group and caches."""
        self.kernels = kernels
        self._model = model
        self._layers = layers
        self._block_size = block_size
        self._device = device
        self._fused = FusedDecoder(model, kernels.ops, max_len) if isinstance(model, NativeDecoder) else None
        self._graphs: DecodeGraphs | None = None
        self._last_ids = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        # what other models do in their forward, a graph may not be able to repeat
        if self._fused is not None:
            self._graphs = DecodeGraphs(
                lambda ids, positions, groups: self._forward(ids, positions, groups, None, None),
                kernels.ops,
                self._last_ids,
                windows=[group.window for group in model.spec.groups],
                max_seqs=max_seqs,
                max_blocks=-(-max_len // block_size),
                block_size=block_size,
                device=device,
                capture=kernels.capture,
                adapters=model.adapters,
            )

        self._warm_up()

    def _warm_up(self) -> None:
        """Launch what no graph has launched: kernels are compiled now, and not while a request waits."""
        for counts in ([1], [1, WARM_TOKENS]):
            plan = self._made_up(np.array(counts))
            logits = self.compute(plan)
            if self.kernels.pick is not None:
                ones, zeros = np.ones(len(counts), np.float32), np.zeros(len(counts), np.int64)
                draw = replace(plan.draw, temperature=ones, top_p=ones, min_p=ones, top_k=zeros + 1)
                self.kernels.pick(logits.float(), replace(draw, noise=zeros, draw_index=zeros))

    def _made_up(self, counts: Ints) -> StepPlan:
        """A plan of sequences that begin, with so many tokens each."""
        num_tokens, ends = int(counts.sum()), np.cumsum(counts)
        zeros, none = np.zeros(num_tokens, np.int64), np.zeros(0, np.int64)
        groups = self._model.spec.groups
        table = np.zeros((len(counts), -(-WARM_TOKENS // self._block_size)), np.int32)
        return StepPlan(
            token_ids=zeros,
            positions=zeros,
            query_start=np.concatenate(([0], ends)),
            seq_lens=counts,
            adapters=np.zeros_like(counts),
            block_tables=(table,) * len(groups),
            slot_blocks=(zeros - 1,) * len(groups),
            slot_offsets=zeros,
            num_draws=np.ones_like(counts),
            logits_at=ends - 1,
            draw=no_draws(),
            prompt_targets=none,
            prompt_counts=(),
            prompt_top=0,
        )

    def compute(self, plan: StepPlan) -> Tensor:
        """Launch a plan's forward: logits [R + P, rows of the embedding]."""
        if self._graphs is not None and self._graphs.takes(plan):
            return self._graphs.run(plan)
        if self._model.adapters is not None:
            self._model.adapters.choose(np.repeat(plan.adapters, np.diff(plan.query_start)))
        several = np.flatnonzero(np.diff(plan.query_start) != 1)
        num_decodes = int(several[0]) if len(several) else len(plan.seq_lens)
        query_start, seq_lens = self._move(plan.query_start), self._move(plan.seq_lens)
        offsets = self._move(plan.slot_offsets)
        groups = [
            GroupStep(self._move(tables), query_start, seq_lens, self._move(blocks), offsets, group.window)
            for tables, blocks, group in zip(
                plan.block_tables, plan.slot_blocks, self._model.spec.groups, strict=True
            )
        ]
        ids = self._move(plan.token_ids)
        if (plan.token_ids < 0).any():  # drawn, and not read by the host yet
            ids = torch.where(ids < 0, self._last_ids[(-1 - ids).clamp(min=0)], ids)
        return self._forward(ids, self._move(plan.positions), groups, num_decodes, self._move(plan.logits_at))

    def remember(self, ids: Tensor) -> None:
        """Keep what was drawn for the next step; none where a sequence drew several times."""
        if len(ids) <= len(self._last_ids):
            self._last_ids[: len(ids)] = ids

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor,
        groups: list[GroupStep],
        num_decodes: int | None,
        logits_at: Tensor | None,
    ) -> Tensor:
        paged = Paged(self.kernels.ops, groups, self._layers, num_decodes)
        if self._fused is not None:
            return self._fused.forward(ids, positions, paged, logits_at)
        assert logits_at is not None
        return self._model.forward(ids, positions, paged, logits_at)

    def _move(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
