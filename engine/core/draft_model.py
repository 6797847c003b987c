"""Drafts tokens with a second, smaller model, which has weights and a KV cache of its own.

The draft model draws with the same noise as the draw that it predicts. So where both models give the same
distribution, a draft is accepted at any temperature.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.batch_state import Rows
from engine.core.kv_cache import KVCache
from engine.executor import Runner, size_pools
from engine.models import load_model
from engine.step import Ints
from engine.types import LoadError

CATCH_UP = (
    512  # tokens of prompts that it reads during one step of the model, which so never waits long for it
)


class Assistant:
    """See `speculation.Drafter`. The engine thread owns it."""

    def __init__(self, runner: Runner, kv: KVCache, rows: Rows, *, max_len: int, confidence: float) -> None:
        """rows: those of the model that is helped. max_len: tokens that the draft model can read."""
        self._runner = runner
        self._kv = kv
        self._rows = rows.twin()
        self._max_len = max_len
        self._confidence = confidence

    def draft(self, rows: Rows, slots: Ints, wanted: Ints) -> None:
        """See `Drafter.draft`; none for a sequence that it still reads, or is not sure of."""
        draft_rows = self._rows
        self._part(rows)
        fits = rows.num_tokens[slots] + wanted <= self._max_len
        slots, wanted = slots[fits], wanted[fits]
        draft_rows.num_tokens[slots] = rows.num_tokens[slots]
        # what was computed after the last token were rejected drafts; that token's own logits are needed
        draft_rows.num_computed[slots] = np.minimum(
            draft_rows.num_computed[slots], draft_rows.num_tokens[slots] - 1
        )
        if self._kv.has_windows:
            for slot in slots.tolist():
                self._kv.trim(slot, int(draft_rows.num_computed[slot]))
        left = wanted
        while len(slots):
            drawn = self._step(slots)
            left = left[np.isin(slots, drawn)] - 1
            slots = drawn
            rows.num_drafts[slots] += 1
            slots, left = slots[left > 0], left[left > 0]

    def finds(self, rows: Rows, slots: Ints) -> bool:
        """See `Drafter.finds`: a model can always draft."""
        return True

    def _step(self, slots: Ints) -> Ints:
        """One token more for each slot; returns those that got one that it is sure of."""
        draft_rows = self._rows
        due = draft_rows.num_tokens[slots] - draft_rows.num_computed[slots]
        counts = np.minimum(due, np.maximum(0, CATCH_UP - (np.cumsum(due) - due)))
        room = [
            count > 0 and self._kv.grow(slot, computed + count)
            for slot, computed, count in zip(
                slots.tolist(), draft_rows.num_computed[slots].tolist(), counts.tolist(), strict=True
            )
        ]
        slots, counts = slots[room], counts[room]
        if not len(slots):
            return slots
        plan = draft_rows.plan(self._kv, slots, counts)
        plan = replace(plan, draw=replace(plan.draw, logprobs=np.zeros(len(plan.draw.noise), np.int64)))
        forwarded = self._runner.forward(plan)
        result = self._runner.draw(forwarded, plan, np.zeros(0, np.int64), np.zeros((0, 0), np.int32))
        draft_rows.num_computed[slots] += counts
        drawing = slots[plan.num_draws > 0]
        for row in result.failed:
            self._forget(int(drawing[row]))
        chances = np.exp([result.logprobs[row].logprob for row in range(len(drawing))])
        threshold = np.where(
            draft_rows.confidence[drawing] < 0, self._confidence, draft_rows.confidence[drawing]
        )
        sure = chances >= threshold  # NaN never is
        draft_rows.append(drawing[sure], result.ids[sure])
        return drawing[sure]

    def _part(self, rows: Rows) -> None:
        """Free what is held for slots that have changed hands."""
        draft_rows = self._rows
        for slot in np.flatnonzero((draft_rows.tenure != rows.tenure) & (self._kv.num_blocks > 0)).tolist():
            self._kv.release(slot)
        draft_rows.num_computed[draft_rows.tenure != rows.tenure] = 0
        draft_rows.tenure[:] = rows.tenure

    def _forget(self, slot: int) -> None:
        """Forget what was computed for a slot, because it is NaN."""
        self._runner.clear(self._kv.release(slot, forget=True))
        self._rows.num_computed[slot] = 0

    def check_integrity(self) -> None:
        """Raise AssertionError when its blocks do not add up."""
        self._kv.check_integrity(np.flatnonzero(self._kv.num_blocks).tolist())


@torch.inference_mode()
def open_assistant(config: EngineConfig, helped: Runner, rows: Rows, *, max_model_len: int) -> Assistant:
    """Load the draft model of a configuration for the model that it helps, with KV in what memory is left.

    max_model_len: of the model that is helped. Raises LoadError when the draft model cannot be served, or
    does not know all tokens.
    """
    config = config.for_draft_model(CATCH_UP)
    model = load_model(config, helped.device)
    if model.spec.vocab_size < helped.vocab_size:
        raise LoadError(
            f"the draft model {config.model} knows {model.spec.vocab_size} tokens, "
            f"the model {helped.vocab_size}"
        )
    sizes = size_pools(model, config, helped.device)
    runner = Runner(model, config, sizes, vocab_size=helped.vocab_size, device=helped.device)
    runner.progress = helped.progress  # the engine moves when either does
    kv = KVCache(model.spec.groups, sizes.num_blocks, config.block_size, config.max_num_seqs, max_model_len)
    max_len = min(sizes.max_len, max_model_len)
    return Assistant(runner, kv, rows, max_len=max_len, confidence=config.assistant_confidence_threshold)
