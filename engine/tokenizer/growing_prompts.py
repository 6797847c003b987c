"""Makes prompts of messages, and of a conversation that has grown only what is new.

What a conversation's prompt was, up to its last message, is remembered as tokens. When the same messages
come again with more behind them, a template that prints each message by itself (`local_template`) is given
the first message and the last ones alone, and only what it prints for the last ones is encoded. The result is
that of rendering and encoding everything; wherever that is not certain, everything is rendered and encoded.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any

from engine.dialects import Dialect
from engine.tokenizer.chat_template import template_environment, template_messages, template_variables
from engine.tokenizer.local_template import local_template, segments
from engine.tokenizer.prompt_encoder import IDLE_S, Encoder
from engine.tokenizer.short_answers import skips_thought
from engine.tokenizer.template_fallbacks import holds_system
from engine.tokenizer.tokenizer import Tokenizer
from engine.types import Prompt, RenderError, RenderInput, Start

Message = Mapping[str, Any]

MAX_BYTES = 64 << 20
"""What the memory may take: the newest prompts of some hundred conversations of 10,000 tokens."""

FEW = 8
"""Messages below which a prompt is rendered as a whole: there is little to be saved."""

NEW = 16
"""The most messages that a turn brings; a conversation that has grown by more is rendered as a whole."""


@dataclass(frozen=True, slots=True)
class _Past:
    """A prompt, up to its last message.

    asked: what it was made of. head: what the template printed up to the end of the first message. ids,
    num_chars: of all that it printed in front of the last message. messages_bytes: what the messages take in
    memory, about. key: where it is remembered. num_bytes: what all of it takes.
    """

    asked: RenderInput
    head: str
    ids: array[int]
    num_chars: int
    messages_bytes: int
    key: Hashable = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        key = _key(self.asked, len(self.asked.messages), _digest(self.asked))
        object.__setattr__(self, "key", key)
        rest = sum(map(_size, (replace(self.asked, messages=[]), self.head, self.ids)))
        object.__setattr__(self, "num_bytes", self.messages_bytes + rest)


class GrowingPrompts:
    """A tokenizer and its template, with a memory of the newest prompts. Safe to use from several threads.

    clock: monotonic seconds. A prompt that was not continued for `IDLE_S` of them is forgotten with the next
    one that is remembered.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        dialect: Dialect,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._encoder = Encoder(tokenizer, clock=clock)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._clock = clock
        self._pasts: OrderedDict[Hashable, _Past] = OrderedDict()  # the one used last is the last
        self._used_at: dict[Hashable, float] = {}  # of each of them
        self._lock = threading.Lock()

    def prompt(self, inp: RenderInput, check: Callable[[int], None] = lambda num_chars: None) -> Prompt:
        """An input as tokens, and where they leave the model.

        check: is given the number of the text's characters before it is encoded, and may raise. Raises
        RenderError.
        """
        if inp.scope is not None and not inp.continue_final_message and len(inp.messages) >= FEW:
            found = self._grown(inp, check) or self._begun(inp, check)
            if found is not None:
                return found
        text = self._tokenizer.render(inp, self._dialect.history)
        check(len(text))
        return Prompt(self._encoder.encode(text, inp.scope), start_of(text, inp, self._dialect))

    # -- growing ---------------------------------------------------------------------------------------------

    def _grown(self, inp: RenderInput, check: Callable[[int], None]) -> Prompt | None:
        """A prompt made of an earlier one; None where that cannot be."""
        past = self._find(inp)
        if past is None:
            return None
        last = len(past.asked.messages) - 1
        # The first message, for what is printed in front of all; the one before those that are printed anew,
        # because they may look at it.
        window = [inp.messages[0], *inp.messages[last - 1 :]]
        printed = self._segments(inp, window)
        if printed is None:
            return None
        num_first, num_kept = self._num_printed(inp, window[:1]), self._num_printed(inp, window[:2])
        head, new = "".join(printed[: 1 + num_first]), printed[1 + num_kept :]
        text = "".join(new)
        if head != past.head or not self._encoder.cuts(text):
            return None
        if not self._is_certain(inp, inp.messages[last:], text):
            return None
        check(past.num_chars + len(text))
        num_last = self._num_printed(inp, [window[0], window[-1]]) - num_first
        ends = len(new) - 1 - num_last
        return self._remembered(inp, head, past, "".join(new[:ends]), "".join(new[ends:]))

    def _begun(self, inp: RenderInput, check: Callable[[int], None]) -> Prompt | None:
        """A prompt that later ones may grow from; None where its template or its messages are not such."""
        printed = self._segments(inp, inp.messages)
        if printed is None:
            return None
        text = "".join(printed)
        num_first = self._num_printed(inp, inp.messages[:1])
        num_last = self._num_printed(inp, [inp.messages[0], inp.messages[-1]]) - num_first
        if not self._is_certain(inp, inp.messages, text):
            return None
        check(len(text))
        head, ends = "".join(printed[: 1 + num_first]), len(printed) - 1 - num_last
        return self._remembered(inp, head, None, "".join(printed[:ends]), "".join(printed[ends:]))

    def _remembered(self, inp: RenderInput, head: str, past: _Past | None, kept: str, rest: str) -> Prompt:
        """The prompt of what was printed: `past`, `kept` up to the last message, and `rest`."""
        before, num_chars, num_known, num_bytes = array("i"), 0, 0, 0
        if past is not None:
            before, num_chars = past.ids, past.num_chars
            num_known, num_bytes = len(past.asked.messages), past.messages_bytes
        start = start_of(kept + rest, inp, self._dialect)
        if not self._encoder.cuts(rest):
            return Prompt(before + self._encoder.encode(kept + rest, inp.scope), start)
        ids = before + self._encoder.encode(kept, inp.scope)
        num_bytes += sum(map(_size, inp.messages[num_known:]))  # those before are the same, and may be many
        self._remember(_Past(_kept(inp), head, ids, num_chars + len(kept), num_bytes), instead_of=past)
        return Prompt(ids + self._encoder.encode(rest, inp.scope), start)

    def _segments(self, inp: RenderInput, messages: Sequence[Message]) -> list[str] | None:
        """What the template prints in front of messages, for each of them, and behind them; None where that
        depends on more."""
        history = self._dialect.history
        has_calls = any("tool_calls" in message or "tool_call_id" in message for message in messages)
        if has_calls and (history.call_ids or history.single):  # numbered, or moved to their calls
            return None
        source = self._tokenizer.template_of(inp)
        template = local_template(source, template_environment())
        if template is None:
            return None
        variables = template_variables(source, inp, self._tokenizer.special_tokens, self._tokenizer.escapes)
        try:
            return segments(template, self._as_given(inp, messages), variables)
        except RenderError:
            return None  # the orders that stricter templates take are tried where everything is rendered

    def _num_printed(self, inp: RenderInput, messages: Sequence[Message]) -> int:
        """How many messages the template is given for these."""
        return len(self._as_given(inp, messages))

    def _as_given(self, inp: RenderInput, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Some of an input's messages as the template is given them."""
        source, escapes = self._tokenizer.template_of(inp), self._tokenizer.escapes
        return template_messages(source, messages, inp, self._dialect.history, escapes)

    def _is_certain(self, inp: RenderInput, messages: Sequence[Message], text: str) -> bool:
        """Whether the template said all that the system did, and where the prompt leaves the model can be
        told from this end of it."""
        if not holds_system(text, messages):
            return False
        dialect = self._dialect
        return dialect.reasoning is None or bool(dialect.turn and dialect.turn in text)

    # -- memory ----------------------------------------------------------------------------------------------

    def _find(self, inp: RenderInput) -> _Past | None:
        """The newest prompt that this one continues."""
        digest = _digest(inp)
        for count in range(len(inp.messages), max(FEW, len(inp.messages) - NEW) - 1, -1):
            key = _key(inp, count, digest)
            with self._lock:
                past = self._pasts.get(key)
                if past is not None:
                    self._pasts.move_to_end(key)
                    self._used_at[key] = self._clock()
            if past is not None and _kept(inp, count) == past.asked:
                return past
        return None

    def _remember(self, past: _Past, *, instead_of: _Past | None = None) -> None:
        if past.num_bytes > self._max_bytes // 8:
            return
        with self._lock:
            for old in (past, instead_of):
                if old is not None:
                    self._forget(old.key)
            now = self._clock()
            self._pasts[past.key], self._used_at[past.key] = past, now
            self._num_bytes += past.num_bytes
            while self._num_bytes > self._max_bytes or self._used_at[next(iter(self._pasts))] < now - IDLE_S:
                self._forget(next(iter(self._pasts)))

    def _forget(self, key: Hashable) -> None:
        past = self._pasts.pop(key, None)
        if past is not None:
            self._num_bytes -= past.num_bytes
            del self._used_at[key]


def _digest(inp: RenderInput) -> bytes:
    """Of what its template is given beside messages."""
    # As text, because what is printed of 1, 1.0 and true differs, and they are equal.
    told = repr((inp.tools, inp.template_kwargs))
    return blake2b(told.encode(errors="surrogatepass"), digest_size=16).digest()


def _key(inp: RenderInput, count: int, digest: bytes) -> Hashable:
    """Where the prompt of an input's first messages is remembered. digest: the input's."""
    last = inp.messages[count - 1]
    content = last.get("content")
    said = content if isinstance(content, str) else None
    return inp.scope, count, last.get("role"), said, digest


def _size(value: Any) -> int:
    """Bytes that a value and all that it holds take in memory."""
    held: list[Any] = []
    if isinstance(value, Mapping):
        held = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        held = [*value]
    elif is_dataclass(value):
        held = [getattr(value, each.name) for each in fields(value)]
    return sys.getsizeof(value) + sum(map(_size, held))


def _kept(inp: RenderInput, count: int | None = None) -> RenderInput:
    """An input's first messages, and what else its prompt depends on; the head shows whether time does."""
    return replace(inp, messages=list(inp.messages[:count]), now=0.0)


def start_of(rendered: str, messages: RenderInput, dialect: Dialect) -> Start:
    """Where a prompt leaves the model; after thoughts also where none is wanted and it cannot be told."""
    start = dialect.starts_in(rendered)
    if start == "text" and (dialect.has_thought(rendered) or skips_thought(messages)):
        return "answer"
    return start
