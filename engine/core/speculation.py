"""Decides when to draft tokens for the model to check, and how many.

A draft counts only where the model's own keyed draw is the same token: drafts change how soon tokens come,
never which. Without a draft model (`draft_model`), drafts are what followed the last tokens earlier in the
text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.batch_state import Rows, ragged
from engine.failures import of_device
from engine.step import Ints

if TYPE_CHECKING:
    from engine.core.sequences import Sequence

log = logging.getLogger("antiphon.engine")

ROOM = {"cpu": 32, "cuda": 128}  # tokens of a step that costs about what one of a single token does
COST = 0.3  # of a token's time that checking one draft takes at most: as much must be gained by it
FIRST_LENGTH = 3  # drafts of a sequence's first attempt
LONGEST_REST = 64  # steps that a sequence whose drafts are rarely right goes without, at most


class Drafter(Protocol):
    """Where drafts come from."""

    def draft(self, rows: Rows, slots: Ints, wanted: Ints) -> None:
        """Write up to `wanted[i]` drafts after the tokens of `slots[i]`, and their number, 0 before, into
        `rows.num_drafts`.
        """
        ...

    def finds(self, rows: Rows, slots: Ints) -> bool:
        """Whether any of these texts may have drafts after it."""
        ...


class Speculation:
    """Decides step by step which sequences get drafts, and how many. The engine thread owns it."""

    def __init__(self, rows: Rows, drafter: Drafter, *, num_assistant_tokens: int, room: int) -> None:
        """num_assistant_tokens: drafts of one sequence, at most, unless its request says otherwise. room: a
        step of so many tokens costs about what a step of one does; with more there is nothing to gain.
        """
        self._rows = rows
        self._drafter = drafter
        self._most = num_assistant_tokens
        self._room = room
        num_slots = len(rows.num_tokens)
        self._tenure = np.zeros(num_slots, np.int64)
        self._length = np.zeros(num_slots, np.int64)  # drafts of the next attempt
        self._rest = np.zeros(num_slots, np.int64)  # steps until then
        self._patience = np.zeros(num_slots, np.int64)  # the rest after the next loss
        self._gain = np.zeros(num_slots, np.float64)  # tokens won by an attempt, lately
        self._barred = np.zeros(num_slots, np.bool_)

    def propose(self, running: Seq[Sequence]) -> None:
        """Write drafts for those of the running sequences that decode and for which it pays."""
        rows = self._rows
        rows.num_drafts[:] = 0
        share = self._room // len(running) - 1 if running else 0
        if share <= 0:
            return
        slots = self._slots_of(running)
        # the step adds one token more than there are drafts that are right
        known = rows.num_tokens[slots].tolist()
        left = [min(own.limit - num, own.credit) - 1 for own, num in zip(running, known, strict=True)]
        most = np.minimum(self._most_of(slots), share)
        wanted = np.minimum.reduce([most, self._length[slots], np.array(left)])
        decoding = rows.num_tokens[slots] - rows.num_computed[slots] == 1
        # masks after drafts are made within the step: slow ones would delay every row
        slow = np.fromiter((sequence.slow for sequence in running), np.bool_, len(running))
        able = decoding & (wanted > 0) & ~slow
        ready = able & (self._rest[slots] == 0)
        self._rest[slots[able & ~ready]] -= 1
        if ready.any():
            self._draft(slots[ready], wanted[ready])

    def _draft(self, slots: Ints, wanted: Ints) -> None:
        """Have drafts written. If that raises, each text is tried alone, and the one that is to blame gets no
        drafts from here on, which costs it nothing but time.
        """
        try:
            self._drafter.draft(self._rows, slots, wanted)
        except Exception as error:
            if of_device(error):
                raise
            self._rows.num_drafts[slots] = 0
            if len(slots) > 1:
                for at in range(len(slots)):
                    self._draft(slots[at : at + 1], wanted[at : at + 1])
                return
            log.exception("drafting failed for one request, which goes on without drafts")
            self.bar(slots)

    def bar(self, slots: Ints) -> None:
        """No drafts for these slots any more, until other sequences have them."""
        self._barred[slots] = True

    def rests(self, running: Seq[Sequence]) -> bool:
        """Whether the next step may begin before its drafts can be made, because no drafts are expected.

        If so, that step counts as one of rest.
        """
        rows = self._rows
        if self._room // max(1, len(running)) <= 1:
            return True
        slots = self._slots_of(running)
        ready = (self._rest[slots] == 0) & (self._most_of(slots) > 0)
        try:
            finds = ready.any() and self._drafter.finds(rows, slots[ready])
        except Exception as error:
            if of_device(error):
                raise
            finds = True  # then the next step asks again, text by text
        if finds:
            return False
        self._rest[slots] = np.maximum(0, self._rest[slots] - 1)
        return True

    def learn(self, slots: Ints, drafted: Ints, accepted: Ints) -> None:
        """Learn how many drafts of each slot were checked, and how many were accepted."""
        tried = drafted > 0
        slots, drafted, accepted = slots[tried], drafted[tried], accepted[tried]
        longer = np.minimum(2 * self._length[slots], self._room)
        self._length[slots] = np.where(accepted == drafted, longer, accepted + 1)
        self._gain[slots] += (accepted - COST * drafted - self._gain[slots]) / 4
        lost = (self._gain[slots] < 0) & (accepted < drafted)
        self._rest[slots] = np.where(lost, self._patience[slots], 0)
        self._patience[slots] = np.where(lost, np.minimum(2 * self._patience[slots], LONGEST_REST), 1)

    def _most_of(self, slots: Ints) -> Ints:
        asked = self._rows.max_drafts[slots]
        return np.where(self._barred[slots], 0, np.where(asked < 0, self._most, asked))

    def _slots_of(self, running: Seq[Sequence]) -> Ints:
        """The slots of these sequences; those that changed hands begin anew."""
        slots = np.fromiter((sequence.slot for sequence in running), np.int64, len(running))
        new = slots[self._tenure[slots] != self._rows.tenure[slots]]
        self._tenure[new] = self._rows.tenure[new]
        self._length[new], self._rest[new], self._patience[new] = FIRST_LENGTH, 0, 1
        self._gain[new], self._barred[new] = 0, False
        return slots


class Lookup:
    """Drafts from the text so far: where its last tokens stood before, what came then may come again
    (prompt lookup; Saxena 2023).
    """

    def __init__(self, max_ngram_size: int) -> None:
        self._max_ngram = max_ngram_size

    def finds(self, rows: Rows, slots: Ints) -> bool:
        """See `Drafter.finds`."""
        return bool(self._places(rows, slots).any())

    def draft(self, rows: Rows, slots: Ints, wanted: Ints) -> None:
        """See `Drafter.draft`."""
        after = self._places(rows, slots)
        slots, wanted, after = slots[after > 0], wanted[after > 0], after[after > 0]
        row_of, ahead = ragged(wanted)
        own, lengths = slots[row_of], rows.num_tokens[slots]
        # what came then may run into the end of the text: a loop, which goes on as it began
        source = after[row_of] + ahead % (lengths - after)[row_of]
        rows.tokens[own, lengths[row_of] + ahead] = rows.tokens[own, source]
        rows.num_drafts[slots] = wanted

    def _places(self, rows: Rows, slots: Ints) -> Ints:
        asked, lengths = rows.max_ngram[slots], rows.num_tokens[slots]
        sizes = np.where(asked < 0, self._max_ngram, asked)
        return follows(rows.tokens[slots, : lengths.max()], lengths, sizes)


def follows(tokens: NDArray[np.int32], lengths: Ints, sizes: Ints) -> Ints:
    """For each row of tokens [B, W], the index behind the latest earlier occurrence of the row's end.

    The end is the last `sizes[i]` tokens of the row's `lengths[i]`, or as many of them as stood there before,
    two at least (one if one is asked for); 0: nowhere. Sizes may be larger than any length.
    """
    width, last = tokens.shape[1], lengths - 1
    rows, places = np.arange(len(tokens)), np.arange(width - 1)
    # matches[b, p]: the tokens up to p are those at the end of row b
    matches = (tokens[:, :-1] == tokens[rows, last][:, None]) & (places < last[:, None])
    after = np.zeros(len(tokens), np.int64)
    for size in range(1, min(int(sizes.max()), width - 1) + 1):  # a longer end never stood before
        if size > 1:
            matches[:, size - 1 :] &= tokens[:, : width - size] == tokens[rows, last - size + 1][:, None]
            matches[:, : size - 1] = False
        found = matches.any(axis=1) & ((sizes == 1) if size == 1 else (sizes >= size))
        after[found] = width - 1 - matches[found, ::-1].argmax(axis=1)
    return after
