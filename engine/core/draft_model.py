"""Guesses by a second, smaller model: its own weights, KV pool and blocks, the same tokens.

Owns: what the draft model has computed of each running sequence, and how far it guesses by itself. Refuses to
know: which sequences should guess (`speculation`), how guesses are checked, queues.

It draws with the noise of the very draws that it foretells, so where the two models are of one mind a guess
holds at any temperature.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from engine.config import EngineSettings
from engine.core.batch_state import Rows
from engine.core.kv_cache import KVCache
from engine.executor import Runner, kv_dtype_for, size_pools
from engine.models import load_model
from engine.step import Ints
from engine.types import LoadError

CATCH_UP = 512  # tokens of a prompt that it reads beside one step of the model, so that nobody waits for it


class Assistant:
    """See `speculation.Drafter`. The engine thread owns it."""

    def __init__(self, runner: Runner, kv: KVCache, rows: Rows, *, max_len: int, confidence: float) -> None:
        """rows: those of the model that is helped. max_len: tokens that the draft model can read."""
        self._runner = runner
        self._kv = kv
        self._own = rows.twin()
        self._max_len = max_len
        self._confidence = confidence

    def draft(self, rows: Rows, slots: Ints, wanted: Ints) -> None:
        """See `Drafter.draft`; none for a sequence that it still reads, or is not sure of."""
        own = self._own
        self._part(rows)
        fits = rows.num_tokens[slots] + wanted <= self._max_len
        slots, wanted = slots[fits], wanted[fits]
        own.num_tokens[slots] = rows.num_tokens[slots]
        # what stands behind were guesses that did not come true; the last token's own logits are needed
        own.num_computed[slots] = np.minimum(own.num_computed[slots], own.num_tokens[slots] - 1)
        if self._kv.has_windows:
            for slot in slots.tolist():
                self._kv.trim(slot, int(own.num_computed[slot]))
        left = wanted
        while len(slots):
            drawn = self._step(slots)
            left = left[np.isin(slots, drawn)] - 1
            slots = drawn
            rows.num_drafts[slots] += 1
            slots, left = slots[left > 0], left[left > 0]

    def finds(self, rows: Rows, slots: Ints) -> bool:
        """See `Drafter.finds`: it finds something always."""
        return True

    def _step(self, slots: Ints) -> Ints:
        """One token more for each slot; returns those that got one that it is sure of."""
        own = self._own
        due = own.num_tokens[slots] - own.num_computed[slots]
        counts = np.minimum(due, np.maximum(0, CATCH_UP - (np.cumsum(due) - due)))
        room = [
            count > 0 and self._kv.grow(slot, computed + count)
            for slot, computed, count in zip(
                slots.tolist(), own.num_computed[slots].tolist(), counts.tolist(), strict=True
            )
        ]
        slots, counts = slots[room], counts[room]
        if not len(slots):
            return slots
        plan = own.plan(self._kv, slots, counts)
        plan = replace(plan, draw=replace(plan.draw, logprobs=np.zeros(len(plan.draw.noise), np.int64)))
        forwarded = self._runner.forward(plan)
        result = self._runner.draw(forwarded, plan, np.zeros(0, np.int64), np.zeros((0, 0), np.int32))
        own.num_computed[slots] += counts
        drawing = slots[plan.num_draws > 0]
        for row in result.failed:
            self._forget(int(drawing[row]))
        chances = np.exp([result.logprobs[row].logprob for row in range(len(drawing))])
        threshold = np.where(own.confidence[drawing] < 0, self._confidence, own.confidence[drawing])
        sure = chances >= threshold  # what is not a number never is
        own.append(drawing[sure], result.ids[sure])
        return drawing[sure]

    def _part(self, rows: Rows) -> None:
        """Free what is held for slots that have changed hands."""
        own = self._own
        for slot in np.flatnonzero((own.tenure != rows.tenure) & (self._kv.num_blocks > 0)).tolist():
            self._kv.release(slot)
        own.num_computed[own.tenure != rows.tenure] = 0
        own.tenure[:] = rows.tenure

    def _forget(self, slot: int) -> None:
        """Begin anew: what was computed is no number."""
        self._runner.clear(self._kv.release(slot, forget=True))
        self._own.num_computed[slot] = 0

    def check_integrity(self) -> None:
        """Raise AssertionError when its blocks do not add up."""
        self._kv.check_integrity(np.flatnonzero(self._kv.num_blocks).tolist())


@torch.inference_mode()
def open_assistant(
    folder: Path,
    helped: Runner,
    rows: Rows,
    *,
    settings: EngineSettings,
    max_model_len: int,
    max_num_seqs: int,
) -> Assistant:
    """Load a draft model beside the model that it helps, with KV in what memory that one left.

    Raises LoadError when it cannot be served, or does not know all tokens.
    """
    model = load_model(
        folder,
        dtype=settings.dtype,
        device=helped.device,
        max_model_len=None,
        cpu_kernels=settings.cpu_kernels,
    )
    if model.spec.vocab_size < helped.vocab_size:
        raise LoadError(
            f"the draft model {folder} knows {model.spec.vocab_size} tokens, the model {helped.vocab_size}"
        )
    kv_dtype = kv_dtype_for(settings.kv_cache_dtype, model, helped.device)
    num_blocks, max_len = size_pools(
        model,
        block_size=settings.block_size,
        kv_dtype=kv_dtype,
        max_model_len=None,
        max_num_seqs=max_num_seqs,
        max_chunk=CATCH_UP,
        device=helped.device,
        kv_cache_bytes=None,
        num_blocks=None,
    )
    runner = Runner(
        model,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        vocab_size=helped.vocab_size,
        device=helped.device,
        max_seqs=max_num_seqs,
        max_len=max_len,
        kv_dtype=kv_dtype,
        num_threads=settings.num_threads,
    )
    runner.progress = helped.progress  # the engine moves when either does
    kv = KVCache(model.spec.groups, num_blocks, settings.block_size, max_num_seqs, max_model_len)
    return Assistant(
        runner,
        kv,
        rows,
        max_len=min(max_len, max_model_len),
        confidence=settings.assistant_confidence_threshold,
    )
