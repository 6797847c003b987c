"""Builds token masks for rows that may not draw every token, draft tokens included.

Grammars are stepped in processes of their own (`structured.isolation`), while the model and the rest of a
step run. A row whose grammar does not answer in time sits out steps until it does; a grammar that fails ends
its own request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.core.batch_state import Rows
from engine.core.sequences import Sequence
from engine.step import Ints
from engine.structured.isolation import Move, Stepper
from engine.types import ConstraintError, EngineError

SLOW_MASK_S = 0.002
"""CPU seconds. A row whose last mask took longer is slow: the process for slow rows makes its next masks."""
WAIT_S = 0.01
"""Seconds by the clock that a step waits for grammars when it needs nothing else."""
ALONE_WAIT_S = 0.05
"""The same where no other row is in the step: on a busy machine, what was computed is not thrown away."""

Masks = tuple[Ints, NDArray[np.int32], dict[int, EngineError], list[int]]


def take_drawn(drawn: list[tuple[Sequence, list[int], bool]], wake: Callable[[], None]) -> dict[int, Move]:
    """Have the grammars of sequences take what was drawn for them; what will come of it, by handle.

    Where a sequence goes on, as its flag says, its next mask is made as well. `wake` is called for what is
    late.
    """
    moves = [
        (sequence, Move(sequence.matcher, token_ids, drafts=[] if goes_on else None, wake=wake))
        for sequence, token_ids, goes_on in drawn
        if sequence.matcher is not None
    ]
    _begin(moves)
    return {sequence.handle: move for sequence, move in moves}


def see_taken(sequences: list[Sequence]) -> None:
    """Wait a little until it is known what the grammars of these have taken."""
    for stepper in _steppers(sequences):
        stepper.settle(_patience(sequences), masks=False)


def ask_masks(drawing: list[Sequence], draws: list[int], rows: Rows, wake: Callable[[], None]) -> None:
    """Have the masks made that this step needs, where `take_drawn` has not seen to it.

    draws: how many rows each sequence has; those after its first are masked as if its drafts were accepted.
    """
    asking: list[tuple[Sequence, Move]] = []
    for sequence, count in zip(drawing, draws, strict=True):
        if sequence.matcher is None or sequence.late:
            continue
        known = rows.num_tokens[sequence.slot]
        drafts = rows.tokens[sequence.slot, known : known + count - 1].tolist() if count > 1 else []
        end = next((i for i, draft in enumerate(drafts) if draft in sequence.stop_ids), len(drafts))
        if sequence.move is None or sequence.move.drafts != drafts[:end]:
            asking.append((sequence, Move(sequence.matcher, drafts=drafts[:end], wake=wake)))
    _begin(asking)


def make_masks(drawing: list[Sequence], draws: list[int], width: int, rows: Rows) -> Masks:
    """Rows under a grammar or with texts that they must not say, their masks [M, width] (32 tokens a word),
    why a row could not have one, and the indices of sequences whose masks are late.
    """
    own_rows, masks, failed, late = _grammar_masks(drawing, draws, width)
    return *_without_banned(drawing, draws, rows, own_rows, masks), failed, late


def _grammar_masks(drawing: list[Sequence], draws: list[int], width: int) -> Masks:
    """The same for rows under a grammar alone."""
    firsts = accumulate(draws, initial=0)
    owned = [
        (i, *each) for i, each in enumerate(zip(drawing, firsts, draws, strict=False)) if each[0].matcher
    ]
    for stepper in _steppers(sequence for _, sequence, _, _ in owned):
        stepper.settle(_patience(drawing), masks=True)
    own_rows = [row for _, _, first, count in owned for row in range(first, first + count)]
    masks = np.full((len(own_rows), width), -1, np.int32)
    failed: dict[int, EngineError] = {}
    late: list[int] = []
    made: list[NDArray[np.int32]] = []
    places: list[int] = []
    at = 0
    for i, sequence, first, count in owned:
        move = sequence.move
        assert move is not None
        if sequence.late:
            late.append(i)
        elif move.error is not None:  # one grammar's failure is that row's
            failed[first] = move.error
        else:
            assert move.masks is not None
            sequence.slow = move.seconds > SLOW_MASK_S
            made.append(move.masks)
            places += range(at, at + len(move.masks))
            if move.right < len(move.masks):
                failed[first + move.right] = ConstraintError("the grammar outgrew its limits")
        at += count
    if made:
        _place(np.concatenate(made), masks, places)
    return np.array(own_rows, np.int64), masks, failed, late


def _without_banned(
    drawing: list[Sequence], draws: list[int], rows: Rows, own_rows: Ints, masks: NDArray[np.int32]
) -> tuple[Ints, NDArray[np.int32]]:
    """Rows and their masks, and those of sequences that must not say some texts, in which the tokens are
    missing that would complete one."""
    if all(sequence.banned is None for sequence in drawing):
        return own_rows, masks
    places = {row: at for at, row in enumerate(own_rows.tolist())}
    added: dict[int, NDArray[np.int32]] = {}
    for sequence, first, count in zip(drawing, accumulate(draws, initial=0), draws, strict=False):
        if sequence.banned is None:
            continue
        begin, end = rows.num_prompt[sequence.slot], rows.num_tokens[sequence.slot]
        for ahead in range(count):  # as if the drafts before it were accepted
            said = rows.tokens[sequence.slot, begin : end + ahead]
            allowed = _of_width(sequence.banned.allowed(said), masks.shape[1])
            if first + ahead in places:
                masks[places[first + ahead]] &= allowed
            else:
                added[first + ahead] = allowed
    if not added:
        return own_rows, masks
    all_rows = np.concatenate((own_rows, np.array(list(added), np.int64)))
    order = np.argsort(all_rows)  # masks for all rows of a step are applied without their numbers
    return all_rows[order], np.concatenate((masks, np.stack(list(added.values()))))[order]


def _patience(drawing: list[Sequence]) -> float:
    return WAIT_S if any(sequence.matcher is None for sequence in drawing) else ALONE_WAIT_S


def _place(made: NDArray[np.int32], masks: NDArray[np.int32], places: list[int]) -> None:
    """Write masks where they belong."""
    masks[places] = _of_width(made, masks.shape[1])


def _of_width(made: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """Masks with so many words; ids beyond the tokenizer's are not allowed."""
    own = made.shape[-1]
    if own >= width:
        return made[..., :width]
    return np.pad(made, [(0, 0)] * (made.ndim - 1) + [(0, width - own)])


def _begin(moves: list[tuple[Sequence, Move]]) -> None:
    """Send each move to the process of its row's grammar: slow rows have one of their own."""
    for stepper in _steppers(sequence for sequence, _ in moves):
        stepper.begin([move for sequence, move in moves if not sequence.slow])
    for sequence, move in moves:
        if sequence.slow:
            move.matcher.grammar.home.slow.later([move])
        sequence.move = move


def _steppers(sequences: Iterable[Sequence]) -> list[Stepper]:
    """The one that steps the grammars of these, if there is any to step."""
    matcher = next((sequence.matcher for sequence in sequences if sequence.matcher is not None), None)
    return [] if matcher is None else [matcher.grammar.home.fast]
