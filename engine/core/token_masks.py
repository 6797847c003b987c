"""The token masks of one step's rows.

Owns: which rows of a step need one, also behind drafts, which are made before their step, and what becomes of
a grammar that fails. Refuses to know: how a grammar makes its mask (`grammar`), tensors, schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.core.batch_state import Rows
from engine.core.sequences import Sequence
from engine.step import Ints

if TYPE_CHECKING:
    from engine.structured import Matcher

SLOW_MASK_S = 0.002
"""Seconds of a processor: after a mask that took longer, the next is made beforehand, beside the steps."""


def make_masks(
    drawing: list[Sequence], draws: list[int], rows: Rows, width: int
) -> tuple[Ints, NDArray[np.int32], dict[int, str]]:
    """Rows under a grammar, their masks [M, width] (32 tokens a word), and why a row could not have one.

    draws: how many rows each sequence has; those behind its first are masked as if its drafts had come.
    """
    firsts = accumulate(draws, initial=0)
    owned = [each for each in zip(drawing, firsts, draws, strict=False) if each[0].matcher is not None]
    own_rows = [row for _, first, count in owned for row in range(first, first + count)]
    masks = np.full((len(own_rows), width), -1, np.int32)
    failed: dict[int, str] = {}
    at = 0
    for sequence, first, count in owned:
        own, at = masks[at : at + count], at + count
        matcher, known = sequence.matcher, rows.num_tokens[sequence.slot]
        assert matcher is not None
        drafts = rows.tokens[sequence.slot, known : known + count - 1].tolist()
        for ahead, mask in enumerate(own):
            if ahead == 1:
                matcher = matcher.fork()
            if ahead and not _follow(matcher, drafts[ahead - 1], sequence.stop_ids):
                break  # nothing that is drawn behind it counts
            try:
                _fill(sequence, matcher, mask)
            except Exception as error:  # one grammar's failure is that row's
                mask[:] = -1
                failed[first + ahead] = f"the grammar failed: {error}"
                break
    return np.array(own_rows, np.int64), masks, failed


def make_ahead(sequence: Sequence, width: int, executor: Executor, wake: Callable[[], None]) -> None:
    """Begin a slow mask as soon as it can be: the sequence sits out steps until it is there; then `wake`."""
    matcher = sequence.matcher
    assert matcher is not None

    def make() -> tuple[NDArray[np.int32], float]:
        mask, began = np.zeros(width, np.int32), time.thread_time()
        matcher.fill(mask)
        return mask, time.thread_time() - began

    sequence.mask = executor.submit(make)
    sequence.mask.add_done_callback(lambda _: wake())


def _fill(sequence: Sequence, matcher: Matcher, mask: NDArray[np.int32]) -> None:
    """A row's mask, and whether the next one of this sequence had better be made beforehand."""
    made, sequence.mask = sequence.mask, None
    if made is None:
        began = time.thread_time()
        matcher.fill(mask)
        took = time.thread_time() - began
    else:
        mask[:], took = made.result()
    sequence.slow = took > SLOW_MASK_S


def _follow(matcher: Matcher, draft: int, stops: frozenset[int]) -> bool:
    """Take a draft; False where it cannot come, or ends the sequence."""
    if draft in stops:
        return False
    try:
        matcher.advance(draft)
    except Exception:  # should this token be drawn, the sequence's own matcher says the same
        return False
    return not matcher.stopped
