"""When words are spoken: read off the attention that a decoder pays to its window, token by token.

Some heads of a decoder look at the sound of the token that they are about to write. Their attention is
smoothed and averaged, and the cheapest monotonic path through it says which moment belongs to which token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.speech.values import Word

FRAME_S = 0.02
"""Of sound, for each position of the encoder."""

SMOOTHED = 7
"""Positions whose median is taken in the place of each."""

_SPACELESS = (
    ("\u0e00", "\u0eff"),
    ("\u1000", "\u109f"),
    ("\u1780", "\u17ff"),
    ("\u3040", "\u30ff"),
    ("\u3400", "\u9fff"),
)


def token_starts(attention: NDArray[np.float32]) -> NDArray[np.floating]:
    """attention [heads, tokens, positions] -> the second at which each token begins, [tokens]."""
    spread = attention.std(axis=1, keepdims=True)
    scaled = (attention - attention.mean(axis=1, keepdims=True)) / np.maximum(spread, 1e-10)
    weights = _median(scaled, min(SMOOTHED, attention.shape[-1] | 1)).mean(axis=0)
    rows, columns = cheapest_path(-weights)
    begins = np.flatnonzero(np.diff(rows, prepend=-1) > 0)
    return columns[begins] * FRAME_S


def cheapest_path(cost: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of rows and columns along the path from the first corner of cost [N, M] to the last whose
    sum is least, a step going down, right or both (dynamic time warping)."""
    num_rows, num_columns = cost.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf)
    total[0, 0] = 0.0
    came = np.zeros((num_rows + 1, num_columns + 1), np.int8)  # 0: from both, 1: from above, 2: from the left
    # Cells on one diagonal depend on the two diagonals before it, so each is computed at once.
    for diagonal in range(2, num_rows + num_columns + 1):
        i = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        j = diagonal - i
        options = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        best = options.argmin(axis=0)
        came[i, j] = best
        total[i, j] = cost[i - 1, j - 1] + options[best, np.arange(len(i))]
    i, j, path = num_rows, num_columns, []
    while i > 0 and j > 0:
        path.append((i - 1, j - 1))
        step = came[i, j]
        i, j = i - (step != 2), j - (step != 1)
    rows, columns = np.array(path[::-1], np.int64).T
    return rows, columns


def _median(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """The median of each `width` neighbours, an odd number, on the last axis."""
    side = width // 2
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(side, side)], mode="reflect" if side else "edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    return np.median(windows, axis=-1).astype(np.float32)


def words_of(texts: Sequence[tuple[str, float, float]]) -> tuple[Word, ...]:
    """Words of pieces of text with their times: one begins at a space, and punctuation belongs to the word
    before.

    Pieces of languages without spaces are words of their own. texts: whole characters, start and end.
    """
    found: list[Word] = []
    for text, start, end in texts:
        alone = bool(text.strip()) and not any(each.isalnum() for each in text)
        begins = text.startswith(" ") or not found or _spaceless(text) or _spaceless(found[-1].text)
        if found and (not begins or (alone and not text.startswith(" "))):
            before = found[-1]
            found[-1] = Word(before.text + text, before.start, end)
        else:
            found.append(Word(text, start, end))
    return tuple(word for word in found if word.text.strip())


def _spaceless(text: str) -> bool:
    """Whether it is of a script that is written without spaces: Chinese, Japanese, Thai, Lao, Burmese,
    Khmer."""
    last = text.strip()[-1:]
    return bool(last) and any(low <= last <= high for low, high in _SPACELESS)
