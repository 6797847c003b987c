"""Enforces a grammar on a text that stands unescaped between a call's tags.

The text ends at the first closing tag where the grammar is complete. `json_string_grammar` does the same for
a text in a JSON string.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.types import ConstraintError

Mask = NDArray[np.int32]


class RawVocabulary:
    """One model's tokens by their bytes; immutable. hidden: those that are never text."""

    def __init__(self, tokens: Sequence[bytes], hidden: Mask) -> None:
        self.tokens = tokens
        self.hidden = hidden
        self._holding: dict[bytes, list[int]] = {}
        self._order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self._sorted = [tokens[token_id] for token_id in self._order]

    def holding(self, text: bytes) -> list[int]:
        """The tokens that hold a text after something else; looked up once."""
        if text not in self._holding:
            self._holding[text] = [at for at, token in enumerate(self.tokens) if token.find(text) > 0]
        return self._holding[text]

    def beginning(self, front: bytes) -> list[int]:
        """The tokens that begin so."""
        start = bisect_left(self._sorted, front)
        end = bisect_left(self._sorted, front + b"\xff" * 8, start)
        return self._order[start:end]

    def of(self, text: bytes) -> list[int]:
        """The tokens that are a beginning of a text."""
        return [each for size in range(1, len(text) + 1) for each in self._exactly(text[:size])]

    def _exactly(self, text: bytes) -> list[int]:
        at = bisect_left(self._sorted, text)
        found = []
        while at < len(self._sorted) and self._sorted[at] == text:
            found.append(self._order[at])
            at += 1
        return found


class RawText:
    """One text that is being written, from its first byte. Not thread-safe.

    pad, tag: what ends it; the text never holds the tag. tag_id: where that is a token of its own.
    """

    __slots__ = ("_alive", "_close", "_inner", "_left", "_said", "_tag", "_tag_id", "_vocabulary", "closed")

    def __init__(
        self, inner: LLMatcher, vocabulary: RawVocabulary, pad: bytes, tag: bytes, tag_id: int | None
    ) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._close = pad + tag
        self._tag = tag
        self._tag_id = tag_id
        self._alive = True  # what came may all be text
        self._left: bytes | None = None  # of the closing, which what came may have begun
        self._said = b""
        self.closed = False

    def fork(self) -> RawText:
        """Another one at the same place."""
        other = copy.copy(self)
        other._inner = self._inner.deep_copy()
        return other

    def narrow(self, mask: Mask) -> None:
        """Take from the tokens that the call's layout allows those that the grammar does not."""
        own = np.zeros(mask.size, np.int32)
        if self._alive and not self._inner.is_stopped():
            self._inner.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
            if self._inner.is_error():
                raise ConstraintError(self._inner.get_error().split("\n")[0][:500])
            own &= ~self._vocabulary.hidden
            _clear(own, self._closing_tags())
        for left in self._lefts():
            _set(own, self._pieces(left))
        mask &= own

    def allows(self, token_id: int) -> bool:
        """Whether a token that the layout allows fits the grammar."""
        own = np.full(self._vocabulary.hidden.size, -1, np.int32)
        self.narrow(own)
        return bool(own.view(np.uint32)[token_id >> 5] >> (token_id & 31) & 1)

    def advance(self, token_id: int, token: bytes) -> None:
        """Take a token; `closed` once it ended the closing."""
        left = next((left[len(token) :] for left in self._lefts() if left.startswith(token)), None)
        self._said = (self._said + token)[-len(self._close) - len(token) :]
        self._alive = (
            self._alive
            and self._tag not in self._said
            and bool(self._inner.validate_tokens([token_id]))
            and self._inner.consume_token(token_id)
        )
        self._left, self.closed = left, left == b""
        if not self._alive and left is None:
            raise ConstraintError(f"token {token_id} does not fit the input's grammar")

    def _lefts(self) -> list[bytes]:
        """What may follow of the closing."""
        begun = [] if self._left is None else [self._left]
        return [*begun, self._close] if self._alive and self._inner.is_accepting() else begun

    def _pieces(self, left: bytes) -> list[int]:
        """The tokens that go on with the closing."""
        if self._tag_id is None:
            return self._vocabulary.of(left)
        return [self._tag_id] if left == self._tag else self._vocabulary.of(left[: -len(self._tag)])

    def _closing_tags(self) -> list[int]:
        """The tokens with which the text would hold the closing tag."""
        found = list(self._vocabulary.holding(self._tag))
        for size in range(len(self._tag)):
            if self._said.endswith(self._tag[:size]):
                found += self._vocabulary.beginning(self._tag[size:])
        return found


def _set(mask: Mask, token_ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear(mask: Mask, token_ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
