"""Where the images of a prompt are: which of its tokens have features, and the positions of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.step import Ints, StepImage
from engine.types import MediaSpan


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of one sequence.

    at [N]: its tokens that have features, in their order. image, feature [N]: which image each is of, and
    which feature. positions [3, P]: of the tokens of the prompt, where images count rows and columns; None
    where none does. ahead: what the positions behind the prompt are more than the tokens' own numbers, mostly
    less than 0.
    """

    spans: tuple[MediaSpan, ...]
    at: Ints
    image: Ints
    feature: Ints
    positions: Ints | None
    ahead: int

    @classmethod
    def of(cls, spans: Sequence[MediaSpan], num_prompt: int) -> PromptImages:
        """Those of a prompt of so many tokens."""
        at = [np.asarray(span.places, np.int64) + span.offset for span in spans]
        image = [np.full(len(own), i) for i, own in enumerate(at)]
        positions, ahead = _positions(spans, num_prompt)
        return cls(
            tuple(spans),
            np.concatenate(at),
            np.concatenate(image),
            np.concatenate([np.arange(len(own)) for own in at]),
            positions,
            ahead,
        )

    def shown(self, start: int, end: int, row: int) -> list[StepImage]:
        """What the tokens from `start` up to `end` show. row: of the first of them in the step."""
        first, last = np.searchsorted(self.at, (start, end))
        at, image, feature = self.at[first:last], self.image[first:last], self.feature[first:last]
        found = []
        for i in np.unique(image).tolist():
            own = image == i
            found.append(StepImage(self.spans[i], at[own] - start + row, feature[own]))
        return found

    def positions_of(self, numbers: Ints) -> Ints:
        """The positions [3, N] of tokens by their numbers [N]."""
        if self.positions is None:
            return np.broadcast_to(numbers, (3, len(numbers)))
        num_prompt = self.positions.shape[1]
        inside = self.positions[:, np.minimum(numbers, num_prompt - 1)]
        return np.where(numbers < num_prompt, inside, numbers + self.ahead)


def _positions(spans: Sequence[MediaSpan], num_prompt: int) -> tuple[Ints | None, int]:
    """Positions in three axes: a text counts on in all of them, an image counts its rows in the second and
    its columns in the third from where it begins, and what follows begins behind the longer one."""
    if not any(span.grid for span in spans):
        return None, 0
    positions = np.empty((3, num_prompt), np.int64)
    done = position = 0
    for span in spans:
        if span.grid is None:
            continue
        positions[:, done : span.offset] = np.arange(span.offset - done) + position
        position += span.offset - done
        rows, cols = span.grid
        row, col = np.divmod(np.arange(rows * cols), cols)
        done = span.offset + span.length
        positions[:, span.offset : done] = np.stack((np.zeros_like(row), row, col)) + position
        position += max(rows, cols)
    positions[:, done:] = np.arange(num_prompt - done) + position
    return positions, position - done
