"""Encodes prompts to token ids, and encodes only the parts that are new.

A tokenizer looks for its added tokens before anything else, and encodes the texts between them separately. So
a text may be cut in front of an added token, as long as nothing else decides whether that token is found: it
must be matched in the text as it stands, and no other added token may begin there or reach into it. Chat
templates begin each message with such a token, so a conversation is encoded message by message, and the parts
are cached.
"""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import AddedToken

from engine.tokenizer.escapes import any_of
from engine.tokenizer.tokenizer import Tokenizer

MAX_BYTES = 64 << 20
"""What the memory may take: some ten thousand conversations of a few thousand tokens."""

PART_BYTES = 300
"""What a part takes beside its text and ids."""


IDLE_S = 600.0
"""Seconds after its last use that a part may go. The next turn of a conversation comes sooner, or can wait
for a millisecond; and what users said does not lie in memory for longer than it is of use."""


class _Part(NamedTuple):
    ids: array[int]
    used_at: float


def cutting_tokens(added: Sequence[AddedToken]) -> list[str]:
    """The added tokens in front of which a text may be cut."""
    # What stands earlier in a text reaches into a token where a tail of it begins the token or holds it.
    # Some tokenizers have thousands of added tokens, so they are not compared with one another.
    tails = {token.content[at:] for token in added for at in range(1, len(token.content))}
    insides = "\n".join(token.content[1:] for token in added)
    return [
        token.content
        for token in added
        if not (token.lstrip or token.single_word or token.normalized)
        and token.content
        and not token.content[0].isspace()  # the token before may take white space with it
        and not any(token.content[:end] in tails for end in range(1, len(token.content)))
        and token.content not in insides
    ]


class Encoder:
    """A tokenizer with a memory. Safe to use from several threads. clock: monotonic seconds."""

    def __init__(
        self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokenizer = tokenizer
        tokens = cutting_tokens(tokenizer.added_tokens)
        self._cut = re.compile(f"(?={any_of(tokens)})") if tokens else None
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._clock = clock
        self._parts: OrderedDict[tuple[str, str], _Part] = OrderedDict()  # the one used last is the last
        self._lock = threading.Lock()

    def cuts(self, text: str) -> bool:
        """Whether a text may be encoded by itself, whatever stands before it."""
        return self._cut is not None and self._cut.match(text) is not None

    def encode(self, text: str, scope: str | None) -> array[int]:
        """The ids that the tokenizer makes of a rendered prompt, without special tokens of its own.

        scope: whose text it is. Nobody else is answered sooner for it; None: nothing is remembered.
        """
        if self._cut is None or scope is None:
            return array("i", self._tokenizer.encode_rendered([text])[0])
        parts = [part for part in self._cut.split(text) if part]
        found: list[array[int] | None] = []
        now = self._clock()
        with self._lock:
            for part in parts:
                known = self._parts.pop((scope, part), None)
                if known is not None:
                    self._parts[scope, part] = _Part(known.ids, now)
                found.append(known.ids if known is not None else None)
        missing = list(dict.fromkeys(part for part, ids in zip(parts, found, strict=True) if ids is None))
        if missing:
            encoded = self._tokenizer.encode_rendered(missing)
            new = {part: array("i", ids) for part, ids in zip(missing, encoded, strict=True)}
            self._remember(scope, new, now)
            found = [new[part] if ids is None else ids for part, ids in zip(parts, found, strict=True)]
        whole = array("i")
        for ids in found:
            assert ids is not None
            whole.extend(ids)
        return whole

    def _remember(self, scope: str, new: dict[str, array[int]], now: float) -> None:
        with self._lock:
            for part, ids in new.items():
                if (scope, part) in self._parts or _size(part, ids) > self._max_bytes // 8:
                    continue
                self._parts[scope, part] = _Part(ids, now)
                self._num_bytes += _size(part, ids)
            while self._num_bytes > self._max_bytes or self._oldest_use(now) < now - IDLE_S:
                (_, part), (ids, _) = self._parts.popitem(last=False)
                self._num_bytes -= _size(part, ids)

    def _oldest_use(self, now: float) -> float:
        oldest = next(iter(self._parts.values()), None)
        return now if oldest is None else oldest.used_at


def _size(part: str, ids: array[int]) -> int:
    return PART_BYTES + 4 * len(part) + ids.itemsize * len(ids)
