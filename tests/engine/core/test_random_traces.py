"""What holds of the scheduler whoever comes, waits, pauses and leaves: random traces, no model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engine.core.batch_state import PROMPT_LOGPROBS_CHUNK
from engine.core.prefill_budget import Pace
from engine.core.scheduler import Batch
from tests.support.scheduling import Bench

NUM_REQUESTS = 20
MOST_STEPS = 20_000


class Trace:
    """Requests of one or several owners and priorities, in a pool that may be too small for all of them."""

    def __init__(self, seed: int, *, crowded: bool) -> None:
        self._draw = draw = random.Random(seed)
        self._crowded = crowded
        self._length = 600 if crowded else 1500
        self.bench = Bench(
            num_blocks=draw.choice((152, 300, 600)) if crowded else 6000,
            budget=draw.choice((8, 16, 64, 300) if crowded else (24, 64)),  # or more than may decode,
            max_seqs=draw.choice((2, 4, 16)) if crowded else 2 * NUM_REQUESTS,
            max_len=self._length,
        )
        self.scheduler = self.bench.scheduler
        self.scheduler.pace = Pace(self.scheduler._budget)
        self._step_s, self._token_s = draw.choice((2e-3, 50e-3)), draw.choice((1e-6, 1e-4, 4e-3))
        self._rate = draw.choice((0.02, 0.2, 0.9))
        self._made = self._stuck = 0
        self.live: set[int] = set()

    def run(self) -> None:
        """Until all have ended; the first one goes on decoding until it is the last."""
        for _ in range(MOST_STEPS):
            self._come_and_go()
            if self._made == NUM_REQUESTS and self.live <= {1}:
                return
            before = self._short_prompts()
            batch = self.scheduler.schedule()
            if batch is not None:
                self._check(batch)
                self._book(batch)
            if not self._crowded:
                self._check_progress(before)
            for sequence in list(self.scheduler._live.values()):
                if sequence.credit <= 0 and self._draw.random() < 0.3:
                    self.scheduler.credit(sequence.handle, 10 - sequence.credit)
        raise AssertionError(f"{self.live} do not end")

    def _come_and_go(self) -> None:
        draw, scheduler = self._draw, self.scheduler
        while self._made < NUM_REQUESTS and (self._made < 2 or draw.random() < self._rate):
            self._add()
        if not self._crowded:
            return
        if draw.random() < 0.02 and (leaves := draw.choice([0, *self.live - {1}])):
            self._end(leaves)
        if draw.random() < 0.01:
            scheduler.limit_step(draw.choice((scheduler._most // 2, scheduler._most)))
        if draw.random() < 0.03 and scheduler.running:
            draw.choice(scheduler.running).credit = 0

    def _add(self) -> None:
        draw = self._draw
        self._made += 1
        fields: dict[str, Any] = {}
        if self._crowded and self._made > 1:
            fields = {"owner": draw.choice("aaab"), "weight": draw.choice((0.5, 1.0, 3.0))}
            fields["priority"] = draw.choice((-1, 0, 0, 0, 1))
            fields["sampling"] = {"prompt_logprobs": 2 if draw.random() < 0.15 else None}
        is_long = self._made == 2 or draw.random() < 0.2
        length = draw.randint(self._length // 2, self._length - 12) if is_long else draw.randint(1, 40)
        prompt = [5000 + self._made] * (3 if self._made == 1 else length)
        for _ in range(draw.choice((1, 1, 1, 2, 5)) if fields else 1):  # choices of one prompt
            max_tokens = draw.choice((1, 4, 30)) if self._made > 1 else self._length
            self.live.add(self.bench.add(prompt, max_tokens=max_tokens, **fields))

    def _end(self, handle: int) -> None:
        self.scheduler.finish(self.bench.sequence(handle))
        self.live.remove(handle)

    def _short_prompts(self) -> dict[int, int]:
        """How much is computed of those that are not long, and could have tokens."""
        rows, scheduler = self.scheduler.rows, self.scheduler
        computed = {s.handle: int(rows.num_computed[s.slot]) for s in scheduler.running if not s.first_sent}
        if (head := scheduler.waiting.peek()) is not None:
            computed[head.handle] = 0
        live = {handle: scheduler.find(handle) for handle in computed}
        return {
            handle: computed[handle]
            for handle, each in live.items()
            if each is not None and not scheduler._is_long(each, len(each.tokens) - computed[handle])
        }

    def _check(self, batch: Batch) -> None:
        counts = batch.counts.tolist()
        assert min(counts) > 0 and sum(counts) <= self.scheduler._budget
        assert len({sequence.handle for sequence in batch.sequences}) == len(counts)
        rows = zip(batch.sequences, counts, strict=True)
        scored = [count for sequence, count in rows if sequence.wants_prompt_logprobs and count > 1]
        assert sum(scored) <= PROMPT_LOGPROBS_CHUNK

    def _check_progress(self, before: dict[int, int]) -> None:
        """Of short prompts, one at least goes on in every second step: they are not held up by long ones."""
        now = self._short_prompts()
        self._stuck = self._stuck + 1 if before and before.items() <= now.items() else 0
        assert self._stuck < 2, f"{before} wait"

    def _book(self, batch: Batch) -> None:
        draw, rows = self._draw, self.scheduler.rows
        num_tokens = int(batch.counts.sum())
        seconds = max(self._step_s, self._token_s * num_tokens) * draw.choice((1, 1, 1, 1.1, 1.5))
        self.scheduler.took(batch, seconds)
        decodes = np.array([sequence.began is not None for sequence in batch.sequences])
        self.scheduler.computed(batch, np.where(decodes, batch.counts - 1, 0))  # no draft comes true
        for sequence in batch.sequences:
            if rows.num_computed[sequence.slot] < rows.num_tokens[sequence.slot]:
                continue
            rows.append(np.array([sequence.slot]), np.array([1]))
            sequence.first_sent = True
            sequence.credit = max(sequence.credit, 1)
            left = self._length - int(rows.num_tokens[sequence.slot])
            if rows.num_tokens[sequence.slot] >= sequence.limit:
                self._end(sequence.handle)
            elif left > 5 and draw.random() < 0.1:
                rows.num_drafts[sequence.slot] = draw.randint(1, 4)
        if draw.random() < 0.1:
            self.scheduler.check_integrity()


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_within_the_budget_of_each_step(seed: int, crowded: bool) -> None:
    Trace(seed, crowded=crowded).run()
