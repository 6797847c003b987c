"""Enforces a grammar on the text that a JSON string spells.

The vocabulary is viewed as what each token spells inside of a JSON string. So an argument of any grammar can
be written as a JSON string, and later prompts show it as it was generated.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine.types import ConstraintError

Mask = NDArray[np.int32]

ESCAPES = {b'"': b'"', b"\\": b"\\", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
"""Letters after a backslash, and what they spell."""

_SPELLED = re.compile(rb'(?:[^"\\\x00-\x1f]|\\["\\bfnrt])+')
_ESCAPE = re.compile(rb'\\(["\\bfnrt])')


class QuotedVocabulary:
    """The tokens of one model as what they spell inside of a JSON string; immutable.

    tokens: the bytes of each token id. A token that ends the string, or stops inside of an escape, spells
    nothing; after the vocabulary stand the characters that need an escape, so that one can be asked for.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        hidden = frozenset(special_ids)
        spelled = [token if token_id in hidden else _spell(token) for token_id, token in enumerate(tokens)]
        mute = [token_id for token_id, text in enumerate(spelled) if text is None or token_id in hidden]
        self.escaped = {letter: len(tokens) + index for index, letter in enumerate(ESCAPES)}
        texts = [text or b"\xff" for text in spelled] + list(ESCAPES.values())
        self._inner = LLTokenizer(TokenizerWrapper(_Tokens(texts, mute, eos_id)))
        visible = {token: token_id for token_id, token in enumerate(tokens) if token_id not in hidden}
        self.backslash = visible.get(b"\\")
        self.letters = {letter: visible[letter] for letter in ESCAPES if letter in visible}
        self.closing = _bits(
            [token_id for token, token_id in visible.items() if token[:1] == b'"'], len(tokens)
        )
        self.mute = _bits(mute, len(tokens))
        self.size = len(texts)
        if self.backslash is None or b'"' not in visible:
            raise ConstraintError("this model's tokenizer cannot spell JSON strings one character at a time")

    def compile(self, grammar: str, limits: Any) -> LLMatcher:
        """A matcher at the beginning of a text of this grammar; see its `get_error`."""
        return LLMatcher(self._inner, grammar, log_level=0, limits=limits)


class _Tokens:
    """What `TokenizerWrapper` asks for."""

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        # One token for every byte that has one: all that forced text is looked up by.
        self._bytes = {token[0]: index for index, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes[byte] for byte in data if byte in self._bytes]


class QuotedText:
    """One JSON string that is being written, after its opening quote. Not thread-safe."""

    __slots__ = ("_escaping", "_inner", "_vocabulary", "closed")

    def __init__(self, inner: LLMatcher, vocabulary: QuotedVocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        self._escaping = False
        self.closed = False

    def fork(self) -> QuotedText:
        """Another one at the same place."""
        other = copy.copy(self)
        other._inner = self._inner.deep_copy()
        return other

    def narrow(self, mask: Mask) -> None:
        """Take from the tokens that JSON allows those that the grammar does not."""
        known = self._vocabulary
        own = np.zeros(mask.size, np.int32)
        if self._escaping:
            _set(own, [known.letters[letter] for letter in known.letters if self._takes(letter)])
        else:
            if not self._inner.is_stopped():
                whole = np.zeros((known.size + 31) // 32, np.int32)
                self._inner.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
                self._check()
                own[:] = whole[: mask.size] & ~known.mute
                if any(self._takes(letter) for letter in known.letters):
                    assert known.backslash is not None
                    _set(own, [known.backslash])
            if self._inner.is_accepting():
                own |= known.closing
        mask &= own

    def allows(self, token_id: int) -> bool:
        """Whether a token that JSON allows fits the grammar."""
        own = np.full(self._vocabulary.mute.size, -1, np.int32)
        self.narrow(own)
        return bool(own.view(np.uint32)[token_id >> 5] >> (token_id & 31) & 1)

    def advance(self, token_id: int, token: bytes) -> None:
        """Take a token; `closed` once it ended the string."""
        known = self._vocabulary
        if self._escaping:
            self._escaping = False
            token_id = known.escaped[token]
        elif token_id == known.backslash:
            self._escaping = True
            return
        elif token[:1] == b'"':
            self.closed = True
            return
        if not self._inner.consume_token(token_id):
            self._check()
            raise ConstraintError(f"token {token_id} does not fit the input's grammar")

    def _takes(self, letter: bytes) -> bool:
        return bool(self._inner.validate_tokens([self._vocabulary.escaped[letter]]))

    def _check(self) -> None:
        if self._inner.is_error():
            raise ConstraintError(self._inner.get_error().split("\n")[0][:500])


def _spell(token: bytes) -> bytes | None:
    """What a token spells inside of a JSON string; None where it is no whole part of one."""
    if not _SPELLED.fullmatch(token):
        return None
    return _ESCAPE.sub(lambda found: ESCAPES[found[1]], token)


def _bits(token_ids: Sequence[int], count: int) -> Mask:
    mask = np.zeros((count + 31) // 32, np.int32)
    _set(mask, token_ids)
    return mask


def _set(mask: Mask, token_ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
