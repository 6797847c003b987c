"""Builds token masks for constrained rows, draft tokens included.

Grammars are stepped in processes of their own (`structured.isolation`). Slow ones have their masks made
before the step that needs them; a grammar that fails ends its own request.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.core.batch_state import Rows
from engine.core.sequences import Sequence
from engine.step import Ints
from engine.structured.isolation import Move, Stepper, ahead, place
from engine.types import ConstraintError, EngineError

SLOW_MASK_S = 0.002
"""Seconds of a processor: after a mask that took longer, the next is made ahead of its step."""


def make_masks(
    drawing: list[Sequence], draws: list[int], rows: Rows, width: int
) -> tuple[Ints, NDArray[np.int32], dict[int, EngineError]]:
    """Rows under a grammar, their masks [M, width] (32 tokens a word), and why a row could not have one.

    draws: how many rows each sequence has; those after its first are masked as if its drafts were accepted.
    """
    firsts = accumulate(draws, initial=0)
    owned = [each for each in zip(drawing, firsts, draws, strict=False) if each[0].matcher is not None]
    own_rows = [row for _, first, count in owned for row in range(first, first + count)]
    masks = np.full((len(own_rows), width), -1, np.int32)
    failed: dict[int, EngineError] = {}
    asked: list[tuple[Sequence, int, Move]] = []
    at = 0
    if owned:
        stepper = _stepper(owned[0][0])
        stepper.collect()
    for sequence, first, count in owned:
        of_sequence, at = masks[at : at + count], at + count
        matcher = sequence.matcher
        assert matcher is not None
        ready, matcher.ready = matcher.ready, None
        if sequence.mask is not None:
            made, sequence.mask = sequence.mask, None
            try:
                of_sequence[0], seconds = made.result()
            except EngineError as error:
                failed[first] = error
                continue
            sequence.slow = seconds > SLOW_MASK_S
            if count == 1:
                continue
        elif ready is not None and (ready.error is not None or (count == 1 and ready.right)):
            sequence.slow = ready.seconds > SLOW_MASK_S
            if ready.error is not None:
                failed[first] = ready.error
            elif ready.masks is not None:
                place(ready.masks, of_sequence)
            continue
        known = rows.num_tokens[sequence.slot]
        drafts = rows.tokens[sequence.slot, known : known + count - 1].tolist()
        end = next((i for i, draft in enumerate(drafts) if draft in sequence.stop_ids), len(drafts))
        asked.append((sequence, first, Move(matcher, drafts=drafts[:end], masks=of_sequence[: end + 1])))
    if asked:
        stepper.run([move for _, _, move in asked])
    for sequence, first, move in asked:
        sequence.slow = move.seconds > SLOW_MASK_S
        if move.error is not None:  # one grammar's failure is that row's
            failed[first] = move.error
        elif move.right < move.num_masks:
            failed[first + move.right] = ConstraintError("the grammar outgrew its limits")
    return np.array(own_rows, np.int64), masks, failed


def make_ahead(
    sequence: Sequence, width: int, executor: ThreadPoolExecutor, wake: Callable[[], None]
) -> None:
    """Begin a slow mask as soon as it can be: the sequence sits out steps until it is there; then `wake`."""
    assert sequence.matcher is not None
    sequence.mask = ahead(sequence.matcher, width, executor)
    sequence.mask.add_done_callback(lambda _: wake())


def take_drawn(drawn: list[tuple[Sequence, list[int], bool]]) -> dict[int, Move]:
    """Have the grammars of sequences take what was drawn for them, all at once; what came of it, by handle.

    Where a sequence goes on without a draft, as its flag says, its next mask is begun at once.
    """
    moves = {
        sequence.handle: Move(
            sequence.matcher, token_ids, drafts=[] if goes_on and not sequence.slow else None
        )
        for sequence, token_ids, goes_on in drawn
        if sequence.matcher is not None
    }
    if moves:
        _stepper(drawn[0][0]).run(list(moves.values()), later=True)
    for move in moves.values():
        if move.error is None and not move.matcher.stopped and move.taken < len(move.token_ids):
            move.error = ConstraintError(f"token {move.token_ids[move.taken]} does not fit the shape")
    return moves


def _stepper(sequence: Sequence) -> Stepper:
    assert sequence.matcher is not None
    return sequence.matcher.grammar.home.fast
