"""A scheduler without a model: its steps are marked as computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.core.batch_state import Rows
from engine.core.kv_cache import KVCache
from engine.core.messages import Submit
from engine.core.prefill_budget import Pace
from engine.core.scheduler import Batch, Scheduler
from engine.core.sequences import Sequence
from engine.step import LayerGroup
from engine.types import GenerateRequest, SamplingParams


class Fixed(Pace):
    """So many tokens a prompt, whatever steps take."""

    def __init__(self, count: int) -> None:
        super().__init__(2048)
        self._fixed_count = count

    def allowance(self, num_prompts: int, num_decodes: int) -> int:
        return self._fixed_count * num_prompts


class Bench:
    """A scheduler with hand-made steps: every sequence that decodes is given token 1."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        budget: int = 64,
        max_seqs: int = 8,
        max_len: int = 256,
        prefix_caching: bool = True,
    ) -> None:
        self.kv = KVCache([LayerGroup((0,), 1, 8)], [num_blocks], 4, max_seqs, max_len)
        self.scheduler = Scheduler(
            self.kv,
            Rows(max_seqs, max_len),
            max_num_batched_tokens=budget,
            max_model_len=max_len,
            max_undelivered=10,
            eos_token_ids=(0,),
            prefix_caching=prefix_caching,
        )
        self.handle = 0

    def add(self, prompt: int | list[int], **fields: Any) -> int:
        self.handle += 1
        # of different lengths or first tokens, so that nothing is shared unasked
        ids = prompt if isinstance(prompt, list) else [100 + self.handle] * prompt
        sampling = SamplingParams(
            seed=0, max_tokens=fields.pop("max_tokens", 50), **fields.pop("sampling", {})
        )
        request = GenerateRequest(id=str(self.handle), prompt_ids=tuple(ids), sampling=sampling, **fields)
        self.scheduler.add(Submit(self.handle, request))
        return self.handle

    def step(self) -> dict[int, int]:
        """One step: {handle: tokens}."""
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if batch is None:
            return {}
        self.book(batch)
        self.scheduler.check_integrity()
        counts = batch.counts.tolist()
        return {sequence.handle: count for sequence, count in zip(batch.sequences, counts, strict=True)}

    def book(self, batch: Batch) -> None:
        rows = self.scheduler.rows
        self.scheduler.computed(batch)
        done = rows.num_computed[batch.slots] == rows.num_tokens[batch.slots]
        rows.append(batch.slots[done], np.ones(int(done.sum()), np.int64))
        for sequence, own in zip(batch.sequences, done.tolist(), strict=True):
            sequence.first_sent |= own
            sequence.credit -= own

    def sequence(self, handle: int) -> Sequence:
        found = self.scheduler.find(handle)
        assert found is not None
        return found
