"""Replays decode steps as captured CUDA graphs: one launch instead of some hundreds.

The shapes of a graph are fixed. So a batch is padded to the next captured size with rows of length 0, which
read and write nothing, and block tables have room for the longest sequence. A token that was drawn on the
device, and that the host has not read yet, is named in the plan by -1 - its row in the last draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.executor.fused_forward import Ops
from engine.kernels import GroupStep
from engine.models import Adapters
from engine.step import StepPlan

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# a step: token ids, positions, the groups' metadata -> logits
Step = Callable[[Tensor, Tensor, list[GroupStep]], Tensor]
# makes a function's work repeatable: what repeats it, and where its result will be
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


def cuda_capture() -> Capture:
    """Capture as CUDA graphs that share their memory: they never run at the same time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled and libraries awake before the capture
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = run()
        return graph.replay, out

    return capture


def call_capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """What stands in for a graph where there is none: the same function over the same buffers."""
    out = run().clone()
    return lambda: out.copy_(run()), out


def buckets_for(max_seqs: int) -> tuple[int, ...]:
    """The buckets that batches of up to `max_seqs` need."""
    enough = next((i for i, bucket in enumerate(BUCKETS) if bucket >= max_seqs), len(BUCKETS) - 1)
    return BUCKETS[: enough + 1]


@dataclass(frozen=True, slots=True)
class Captured:
    """One bucket's step: what runs it again, and its logits [bucket, V]."""

    replay: Callable[[], object]
    logits: Tensor


class DecodeGraphs:
    """Every bucket's graph over one set of buffers. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        step: Step,
        ops: Ops,
        last_ids: Tensor,
        *,
        windows: Sequence[int | None],
        max_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        capture: Capture,
        adapters: Adapters | None = None,
    ) -> None:
        """Capture all buckets. `last_ids`: where the last draw's are; `windows`: those of the layer groups;
        `max_blocks`: of one sequence; `adapters`: those that the step may have.
        """
        self.buckets = buckets_for(max_seqs)
        most = self.buckets[-1]
        self._ops = ops
        self._block_size = block_size

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids, self._positions = ints(most), ints(most)
        self._seq_lens, self._slot_offsets = ints(most), ints(most)
        self._slot_blocks = [ints(most) - 1 for _ in windows]
        self._tables = [ints(most, max_blocks, dtype=torch.int32) for _ in windows]
        self._query_start = torch.arange(most + 1, device=device)
        self._last_ids = last_ids
        self._adapters = ints(most)
        room = most * (3 + len(windows) * max_blocks)
        self._packed = ints(room, dtype=torch.int32)
        # one is read by the copy of the step that runs while the other is filled for the next
        self._staged = [
            torch.zeros(room, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._captured: dict[tuple[int, bool], Captured] = {}
        for bucket in reversed(self.buckets):  # the largest first: the others fit into its memory
            # a step without adapters has graphs of its own, and pays nothing for them
            for adapted in (False,) if adapters is None else (False, True):

                def run(bucket: int = bucket, adapted: bool = adapted) -> Tensor:
                    if adapters is not None:
                        adapters.choose_on_device(self._adapters[:bucket] if adapted else None)
                    groups = [self._group(g, bucket, window) for g, window in enumerate(windows)]
                    return step(self._token_ids[:bucket], self._positions[:bucket], groups)

                self._captured[bucket, adapted] = Captured(*capture(run))

    def takes(self, plan: StepPlan) -> bool:
        """Whether a step is a plain decode: one query a sequence, and logits of each and of nothing else."""
        num_rows = len(plan.seq_lens)
        return num_rows == len(plan.token_ids) == len(plan.logits_at) <= self.buckets[-1] and not len(
            plan.prompt_targets
        )

    def run(self, plan: StepPlan) -> Tensor:
        """Launch a step that this `takes`: logits [B, V], good until the bucket's next step."""
        num_rows = len(plan.seq_lens)
        bucket = next(bucket for bucket in self.buckets if bucket >= num_rows)
        width = plan.block_tables[0].shape[1]
        columns = 3 + len(plan.block_tables) * width
        self._staged.reverse()
        staged = self._staged[0][: num_rows * columns]
        packed = staged.numpy().reshape(num_rows, columns)
        packed[:, 0], packed[:, 1] = plan.token_ids, plan.seq_lens
        np.concatenate(plan.block_tables, axis=1, out=packed[:, 2:-1])
        packed[:, -1] = plan.adapters
        on_device = self._packed[: num_rows * columns].copy_(staged, non_blocking=True).view(num_rows, -1)
        for g, (blocks, tables) in enumerate(zip(self._slot_blocks, self._tables, strict=True)):
            self._ops.lay_out(
                self._token_ids[:bucket],
                self._positions[:bucket],
                self._seq_lens[:bucket],
                self._slot_offsets[:bucket],
                blocks[:bucket],
                tables[:bucket],
                on_device,
                self._last_ids,
                2 + g * width,
                width,
                self._block_size,
            )
        adapted = bool(plan.adapters.any())
        if adapted:
            self._adapters[:num_rows] = on_device[:, -1]
        captured = self._captured[bucket, adapted]
        captured.replay()
        return captured.logits[:num_rows]

    def _group(self, g: int, bucket: int, window: int | None) -> GroupStep:
        return GroupStep(
            block_tables=self._tables[g][:bucket],
            query_start=self._query_start[: bucket + 1],
            seq_lens=self._seq_lens[:bucket],
            slot_blocks=self._slot_blocks[g][:bucket],
            slot_offsets=self._slot_offsets[:bucket],
            window=window,
        )
