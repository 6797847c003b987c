"""Runs step plans on one device, with the model and its KV pools.

A `StepPlan` of plain arrays becomes device tensors; the forward and the draw are two launches, and the drawn
tokens are fetched afterwards.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig
from engine.executor import deterministic as exact
from engine.executor.cpu_attention import CpuAttention, unfit
from engine.executor.cpu_forward import Forward, fits
from engine.executor.gpu_launcher import Launcher, kernels_for
from engine.executor.kv_sizing import PoolSizes
from engine.kernels import (
    GroupStep,
    Reserve,
    Workspace,
    make_tiles,
    memory_of,
    new_pool,
    own_threads,
    paged_attention,
    raw,
    sampler,
    set_threads,
    write_kv,
)
from engine.models import Attention, Model, ModelSpec
from engine.step import Floats, Ints, RowLogprobs, StepPlan

TAKEN = 256 << 20  # bytes of a CPU's pools that are taken before there is any use, see `Reserve`,
TAKEN_WEIGHTS = 4  # but no more than so many times the weights
SMALL_STEP_S = 0.02  # of one core, which computes, and reads weights and the cache, about so fast:
OPERATIONS_PER_S = 1e11
BYTES_PER_S = 3e10
CACHE_BYTES_PER_S = 1.5e10
ATTENDED_BYTES_PER_S = 6.5e10  # of the cache, for each further token of a sequence

NO_TOKEN = "what masks, bans and min_tokens leave is no token"
"""Why a row has failed that asks for too much."""


class Progress:
    """When the device was last seen to move (time.monotonic seconds); None while there is nothing to do."""

    def __init__(self) -> None:
        self.cell = ctypes.c_double()  # for those who move without Python

    @property
    def at(self) -> float | None:
        return self.cell.value or None

    @at.setter
    def at(self, at: float | None) -> None:
        self.cell.value = at or 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew: ids [R]; for rows that failed, why; log probabilities by row where asked for; and
    those of the prompt tokens that were scored, in the plan's order.
    """

    ids: NDArray[np.int64]
    failed: dict[int, str]
    logprobs: dict[int, RowLogprobs]
    prompt_logprobs: list[RowLogprobs]


Scores = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A launched forward.

    made: logits [R + P, V], on the device; as NumPy has them where a CPU's kernels made them, since a tensor
    lets go of the interpreter's lock when it ends, and gets it back late where other threads are busy.
    """

    made: Tensor | Floats

    @property
    def logits(self) -> Tensor:
        """The logits as a tensor."""
        return self.made if isinstance(self.made, Tensor) else torch.from_numpy(self.made)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A launched draw, and the scores of prompt tokens; all of it is on the host once `ready` has come.

    `numbers` [3, R]: ids, highest raw logits, whether any token was allowed. `logprobs` of the rows
    `logprob_rows`, and `scores` of `targets`: as `sampler.score` gives them.
    """

    numbers: Tensor
    logprob_rows: NDArray[np.int64]
    logprobs: Scores | None
    targets: NDArray[np.int64]
    scores: Scores | None
    ready: torch.cuda.Event | None


class StepAttention:
    """What the model calls once a layer (`models.Attention`): this step's cache views and metadata."""

    def __init__(self, runner: Runner, groups: Sequence[GroupStep]) -> None:
        self._runner = runner
        self._groups = groups

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
        runner = self._runner
        runner.progress.at = time.monotonic()
        group, k_cache, v_cache = runner.layers[layer]
        step = self._groups[group]
        write_kv(k, v, k_cache, v_cache, step)
        attend = exact.attention if runner.deterministic else paged_attention
        return attend(q, k_cache, v_cache, step, runner.workspace, scale=scale, softcap=softcap, sinks=sinks)


class Runner:
    """Runs plans on one device. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        sizes: PoolSizes,
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Allocate the KV pools, and on a GPU capture decode steps of up to `config.max_num_seqs` sequences.

        vocab_size: ids that have a text; the embedding's rows beyond them are never drawn. Of the
        configuration: `num_threads` of torch for every step, where None means one for steps that are too
        small to share and torch's own number for others; `deterministic`: see `executor.deterministic`.
        """
        self.model = model
        self.deterministic = config.deterministic
        self.block_size = config.block_size
        self.vocab_size = vocab_size
        self.device = device
        self.progress = Progress()
        self.num_threads = config.num_threads
        self._most_threads = own_threads()
        self.workspace = Workspace()
        self.kv_dtype = sizes.dtype
        self.shortened = sizes.shortened
        self.pools, self.layers = _new_pools(model.spec, sizes, config.block_size, device)
        self.kv_bytes = sum(pool.nbytes for pool in self.pools)
        self._token_bytes = [pool[0].nbytes // self.block_size for pool in self.pools]
        self.kv_taken, self._reserves = self._take_memory()
        self.fused: Forward | None = None
        if fits(model, self.kv_dtype):
            self.fused = Forward(model, self.layers, sizes.max_len, deterministic=config.deterministic)
        self.cpu_attention: CpuAttention | None = None
        if self.fused is None and model.library is not None and unfit(model.spec, self.kv_dtype) is None:
            self.cpu_attention = CpuAttention(
                model.library, model.spec, self.layers, deterministic=config.deterministic
            )
        kernels = None if config.deterministic else kernels_for(device)
        self.launcher: Launcher | None = None
        if kernels is not None:
            self.launcher = Launcher(
                model,
                self.layers,
                kernels,
                block_size=config.block_size,
                max_seqs=config.max_num_seqs,
                max_len=sizes.max_len,
                device=device,
            )

    def _take_memory(self) -> tuple[int, list[Reserve]]:
        """Bytes of the pools that are taken now, and what takes the rest as blocks come into use."""
        if self.device.type != "cpu":
            return self.kv_bytes, []
        spec = self.model.spec
        taken = min(self.kv_bytes, TAKEN, TAKEN_WEIGHTS * spec.num_parameters * spec.dtype.itemsize)
        share = taken / self.kv_bytes
        reserves = [
            Reserve(partial(memory_of, pool), len(pool), math.ceil(share * len(pool))) for pool in self.pools
        ]
        return taken, reserves

    def forward(self, plan: StepPlan) -> Forwarded:
        """Launch the model over a plan; its KV is in the cache afterwards."""
        if self.fused is not None:
            self._prepare(plan)
            return Forwarded(self.fused(plan, self.progress.cell, self.vocab_size))
        if not self.deterministic:
            return Forwarded(self._compute(plan))
        spec = self.model.spec
        logits = torch.empty((len(plan.logits_at), self.vocab_size), dtype=spec.dtype, device=self.device)
        for piece, wanted, at in exact.cut(plan):
            logits[self._move(wanted)] = self._compute(piece)[self._move(at)]
        return Forwarded(logits)

    def _prepare(self, plan: StepPlan) -> None:
        """Take memory for the plan's blocks, choose its threads, and look at its images."""
        for reserve, blocks in zip(self._reserves, plan.slot_blocks, strict=False):
            reserve.uses(int(blocks.max()) + 1)
        if self.device.type == "cpu":
            # torch's sums depend on its threads, so where they must not, the neighbours' lengths do not count
            cached, attended = (0, 0) if self.deterministic else self._bytes_seen(plan)
            set_threads(self.num_threads or self.threads_for(len(plan.token_ids), cached, attended))
        if self.model.sight is not None:
            if self.device.type == "cpu" and plan.images:
                set_threads(self.num_threads or self._most_threads)
            self.model.sight.look(plan, self._moved)

    def _compute(self, plan: StepPlan) -> Tensor:
        self._prepare(plan)
        if self.launcher is not None:
            return self.launcher.compute(plan)[:, : self.vocab_size]
        attention: Attention
        if self.cpu_attention is not None:
            attention = self.cpu_attention.of(plan, self._moved)
        else:
            self._clear_begun(plan)
            attention = StepAttention(self, [self._group_step(plan, g) for g in range(len(self.pools))])
        if self.model.adapters is not None:
            self.model.adapters.choose(np.repeat(plan.adapters, np.diff(plan.query_start)))
        logits = self.model.forward(
            self._move(plan.token_ids),
            self._move(plan.positions),
            attention,
            self._move(plan.logits_at),
        )
        return logits[:, : self.vocab_size]

    def _moved(self) -> None:
        """Say that the device has done something."""
        self.progress.at = time.monotonic()

    def draw(
        self, forwarded: Forwarded, plan: StepPlan, mask_rows: NDArray[np.int64], masks: NDArray[np.int32]
    ) -> StepResult:
        """Draw the plan's tokens and fetch them; `masks` as in `sampler.draw`."""
        if self.fused is None:
            return self.fetch(self.launch_draw(forwarded, plan, mask_rows, masks))
        assert isinstance(forwarded.made, np.ndarray)
        draw, logits, alone = plan.draw, forwarded.made, self.deterministic
        scores, prompt_scores = None, self._prompt_scores(forwarded, plan)
        logits = logits[: len(draw.temperature)]
        ids, peak, allowed = sampler.draw_here(
            logits, draw, mask_rows, masks, self.fused.library.draw, alone=alone
        )
        rows = np.flatnonzero(draw.logprobs >= 0)
        if len(rows):
            drawn, own = torch.from_numpy(ids[rows]), torch.from_numpy(logits[rows])
            scores = sampler.score(own, drawn, int(draw.logprobs.max()), alone=alone)
        return _result(ids, peak, allowed, rows, scores, plan.prompt_targets, prompt_scores)

    def launch_draw(
        self, forwarded: Forwarded, plan: StepPlan, mask_rows: NDArray[np.int64], masks: NDArray[np.int32]
    ) -> Drawing:
        """Launch the plan's draw; a forward launched after it may name a drawn token by -1 - its row."""
        count, logits, alone = len(plan.draw.temperature), forwarded.logits, self.deterministic
        numbers, logprob_rows, logprobs = torch.empty(3, 0), np.zeros(0, np.int64), None
        scores = self._prompt_scores(forwarded, plan)
        if count:
            pick = None if self.launcher is None else self.launcher.kernels.pick
            drawn = sampler.draw(logits[:count], plan.draw, mask_rows, masks, alone=alone, pick=pick)
            if self.launcher is not None:
                self.launcher.remember(drawn.ids)
            allowed = torch.ones_like(drawn.peak) if drawn.allowed is None else drawn.allowed
            numbers = torch.stack((drawn.ids.double(), drawn.peak.double(), allowed.double()))
            numbers = numbers.to("cpu", non_blocking=True)
            logprob_rows = drawn.logprob_rows
            if drawn.logprobs is not None and drawn.top_ids is not None and drawn.top_logprobs is not None:
                logprobs = _home((drawn.logprobs, drawn.top_ids, drawn.top_logprobs))
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        return Drawing(numbers, logprob_rows, logprobs, plan.prompt_targets, scores, ready)

    def _prompt_scores(self, forwarded: Forwarded, plan: StepPlan) -> Scores | None:
        """Those of a plan's `prompt_targets`, whose logits stand behind those of its draws."""
        if not len(plan.prompt_targets):
            return None
        targets = self._move(plan.prompt_targets)
        own = forwarded.logits[len(plan.draw.temperature) :]
        return _home(sampler.score(own, targets, plan.prompt_top, alone=self.deterministic))

    def fetch(self, drawing: Drawing) -> StepResult:
        """Wait for a draw and read it."""
        if drawing.ready is not None:
            drawing.ready.synchronize()
        ids, peak, allowed = drawing.numbers.numpy()
        return _result(
            ids.astype(np.int64),
            peak,
            allowed,
            drawing.logprob_rows,
            drawing.logprobs,
            drawing.targets,
            drawing.scores,
        )

    def narrow(self, forwarded: Forwarded, rows: Sequence[int]) -> Forwarded:
        """The logits of some rows of a forward."""
        which = np.array(rows, np.int64)
        made = forwarded.made
        return Forwarded(made[self._move(which)] if isinstance(made, Tensor) else made[which])

    def clear(self, blocks: Sequence[Sequence[int]]) -> None:
        """Zero blocks, by group: the NaN of a failed row must not reach their next owner."""
        for pool, own in zip(self.pools, blocks, strict=True):
            if own:
                raw(pool)[torch.tensor(list(own), device=self.device)] = 0

    def _clear_begun(self, plan: StepPlan) -> None:
        """Zero the blocks that a plan begins and does not fill. Torch's attention reads whole blocks, and the
        NaN that an earlier owner may have left shows through every mask."""
        begun, filled = plan.slot_offsets == 0, plan.slot_offsets == self.block_size - 1
        for pool, blocks in zip(self.pools, plan.slot_blocks, strict=True):
            for block in np.setdiff1d(blocks[begun], blocks[filled]).tolist():
                raw(pool)[block].zero_()  # one by one: an index of several goes number by number

    def threads_for(self, num_tokens: int, cached: int = 0, attended: int = 0) -> int:
        """Threads that a step of so many tokens is worth, which see so many bytes of the cache. attended: the
        bytes that each token sees, of all but the first of its sequence.

        Small operations gain little from a second core, and lose a scheduler's time slice at each of their
        barriers when that core is busy (with this process's own asyncio loop, say).
        """
        spec = self.model.spec
        computing = 2 * num_tokens * spec.num_parameters / OPERATIONS_PER_S
        reading = spec.num_parameters * spec.dtype.itemsize / BYTES_PER_S
        attending = cached / CACHE_BYTES_PER_S + attended / ATTENDED_BYTES_PER_S
        return 1 if max(computing, reading) + attending < SMALL_STEP_S else self._most_threads

    def _bytes_seen(self, plan: StepPlan) -> tuple[int, int]:
        """Bytes of the cache that a plan's sequences see, and those that their further tokens do."""
        further = np.diff(plan.query_start) - 1
        cached = attended = 0
        for nbytes, group in zip(self._token_bytes, self.model.spec.groups, strict=True):
            seen = plan.seq_lens if group.window is None else np.minimum(plan.seq_lens, group.window)
            cached += nbytes * int(seen.sum())
            attended += nbytes * int(seen @ further)
        return cached, attended

    def _group_step(self, plan: StepPlan, g: int) -> GroupStep:
        group, dtype = self.model.spec.groups[g], self.model.spec.dtype
        if self.deterministic:
            tiles = exact.make_tiles(
                plan.block_tables[g],
                plan.positions,
                block_size=self.block_size,
                num_kv_heads=group.num_kv_heads,
                window=group.window,
                dtype=dtype,
                move=self._move,
            )
        else:
            tiles = make_tiles(
                plan.block_tables[g],
                plan.query_start,
                plan.seq_lens,
                block_size=self.block_size,
                num_kv_heads=group.num_kv_heads,
                window=group.window,
                block_bytes=self.block_size * group.num_kv_heads * group.head_dim * dtype.itemsize,
                dtype=dtype,
                device=self.device,
            )
        return GroupStep(
            block_tables=self._move(plan.block_tables[g]),
            query_start=self._move(plan.query_start),
            seq_lens=self._move(plan.seq_lens),
            slot_blocks=self._move(plan.slot_blocks[g]),
            slot_offsets=self._move(plan.slot_offsets),
            window=group.window,
            tiles=tiles,
        )

    def _move(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _new_pools(
    spec: ModelSpec, sizes: PoolSizes, block_size: int, device: torch.device
) -> tuple[list[Tensor], list[tuple[int, Tensor, Tensor]]]:
    """A pool for each layer group; and for each layer its group, keys and values, as views of the pool."""
    pools: list[Tensor] = []
    views: dict[int, tuple[int, Tensor, Tensor]] = {}
    for g, (group, count) in enumerate(zip(spec.groups, sizes.num_blocks, strict=True)):
        shape = (len(group.layers), block_size, group.num_kv_heads, group.head_dim)
        pool = new_pool(count, *shape, sizes.dtype, device)
        pools.append(pool)
        for i, layer in enumerate(group.layers):
            views[layer] = (g, pool[:, i, 0], pool[:, i, 1])
    return pools, [views[layer] for layer in sorted(views)]


def _home(scores: Scores) -> Scores:
    """On their way to the host."""
    chosen, top_ids, top = (part.to("cpu", non_blocking=True) for part in scores)
    return chosen, top_ids, top


def _read(token_ids: NDArray[np.int64], scores: Scores | None) -> list[RowLogprobs]:
    if scores is None:
        return []
    rows = zip(token_ids.tolist(), *(part.tolist() for part in scores), strict=True)
    return [
        RowLogprobs(token_id, logprob, tuple(ids), tuple(values)) for token_id, logprob, ids, values in rows
    ]


def _result(
    ids: Ints,
    peak: NDArray[np.floating],
    allowed: NDArray[np.generic],
    rows: Ints,
    scores: Scores | None,
    targets: Ints,
    prompt_scores: Scores | None,
) -> StepResult:
    """What was drawn, as the host has it; `rows` are those whose log probabilities are `scores`."""
    logprobs = dict(zip(rows.tolist(), _read(ids[rows], scores), strict=True))
    return StepResult(ids, _failures(peak, allowed), logprobs, _read(targets, prompt_scores))


def _failures(peak: NDArray[np.floating], allowed: NDArray[np.generic]) -> dict[int, str]:
    failed = dict.fromkeys(np.flatnonzero(allowed == 0).tolist(), NO_TOKEN)
    infinite = np.flatnonzero(~np.isfinite(peak)).tolist()
    return failed | dict.fromkeys(infinite, "the model produced logits that are not finite")
