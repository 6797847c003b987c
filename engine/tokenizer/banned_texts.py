"""Finds the tokens that would complete one of some texts, so that a generation can be kept from saying them.

Texts are compared byte by byte, whatever tokens they come in: of a token that begins within a text and goes
on behind it, or that holds a text whole, the bytes count, and so does what was said before it. Tokens that
nobody is shown (the end of a turn, for instance) have no bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

FAR = 1024
"""Tokens that are looked back at for the beginning of a text; almost always as many as the text has bytes are
enough."""

MASKS = 64
"""Masks of one set of texts that are remembered: most text is at the beginning of none of them."""

_BETWEEN = b"\xff"  # stands in no UTF-8, so that no text is found across two tokens


class Vocabulary:
    """What each token shows, in the order of the bytes."""

    def __init__(self, shown: Sequence[bytes]) -> None:
        """shown: by token id."""
        self.shown = tuple(shown)
        order = sorted(range(len(shown)), key=self.shown.__getitem__)
        self._ids = np.array(order, np.int64)
        self._sorted = [self.shown[token_id] for token_id in order]
        self._bytes = np.frombuffer(_BETWEEN.join([*self._sorted, b""]), np.uint8)
        lengths = np.fromiter((len(data) + 1 for data in self._sorted), np.int64, len(order))
        self._starts = np.cumsum(lengths) - lengths

    def beginning_with(self, text: bytes) -> Ints:
        """The tokens that begin with a text, or are it."""
        beyond = text[:-1] + bytes([text[-1] + 1])  # no byte of UTF-8 is the last one that there is
        return self._ids[bisect_left(self._sorted, text) : bisect_left(self._sorted, beyond)]

    def holding(self, text: bytes) -> Ints:
        """The tokens that hold a text whole."""
        at = np.flatnonzero(self._bytes[: max(0, len(self._bytes) - len(text) + 1)] == text[0])
        for offset, byte in enumerate(text[1:], 1):
            at = at[self._bytes[at + offset] == byte]
        return self._ids[np.unique(np.searchsorted(self._starts, at, side="right") - 1)]


class BannedTexts:
    """Some texts that must not be said. One thread at a time may ask."""

    def __init__(self, vocabulary: Vocabulary, texts: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._allowed = np.ones(-(-len(vocabulary.shown) // 32) * 32, np.bool_)
        self._rests: dict[bytes, list[bytes]] = defaultdict(list)  # by the beginnings that they follow
        for text in dict.fromkeys(texts):
            data = text.encode()
            self._allowed[vocabulary.holding(data)] = False
            for length in range(1, len(data)):
                self._rests[data[:length]].append(data[length:])
        self._longest = max(map(len, self._rests), default=0)
        self._masks: OrderedDict[bytes, NDArray[np.int32]] = OrderedDict()

    def allowed(self, said: NDArray[np.int32]) -> NDArray[np.int32]:
        """Which tokens may come behind `said`, token ids: a bit each, 32 tokens a word; not to be written
        to."""
        beginning = self._beginning(said)
        mask = self._masks.get(beginning)
        if mask is None:
            mask = self._masks[beginning] = self._mask(beginning)
            if len(self._masks) > MASKS:
                self._masks.popitem(last=False)
        else:
            self._masks.move_to_end(beginning)
        return mask

    def _beginning(self, said: NDArray[np.int32]) -> bytes:
        """The longest end of what was said that a text begins with."""
        shown, tail, missing = self._vocabulary.shown, [], self._longest
        for token_id in reversed(said[-FAR:].tolist()):
            if missing <= 0:
                break
            piece = shown[token_id] if token_id < len(shown) else b""
            tail.append(piece)
            missing -= len(piece)
        end = b"".join(reversed(tail))[-self._longest :] if self._longest else b""
        return next((end[at:] for at in range(len(end)) if end[at:] in self._rests), b"")

    def _mask(self, beginning: bytes) -> NDArray[np.int32]:
        allowed = self._allowed.copy()
        for at in range(len(beginning)):  # a shorter end may be the beginning of another text
            for rest in self._rests.get(beginning[at:], ()):
                allowed[self._vocabulary.beginning_with(rest)] = False
        return np.packbits(allowed, bitorder="little").view(np.int32)


@lru_cache(maxsize=16)
def banned_texts(vocabulary: Vocabulary, texts: tuple[str, ...]) -> BannedTexts:
    """The same for the choices of one request, and for requests that follow each other."""
    return BannedTexts(vocabulary, texts)
