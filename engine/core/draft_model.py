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
