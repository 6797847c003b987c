"""One incremental parser, driven by a dialect row: text in, deltas out.

Owns: where text, reasoning and calls begin and end, what is held back until that is known, the white space at
their borders, and stop strings (a stop string is a tag that ends the generation: held back and found like
one). Refuses to know: tokens, templates, which tools were offered. It never raises on what a model writes,
and splitting the text anywhere changes nothing but where the deltas are cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from engine.calls import CallScanner
from engine.dialects import CallMarks, Dialect
from engine.types import CallArgs, CallEnd, CallStart, Delta, Done, Reasoning, Text

_Piece = type[Text] | type[Reasoning] | type[CallArgs]
_State = Literal["text", "reasoning", "call", "call_end", "broken"]


class Parser:
    """The parser of one generation.

    Offsets count characters of all text fed. `ended` is set once a stop string or the last allowed call has
    ended the generation; what is fed after that is ignored. `thoughts` are the spans [start, end) of
    reasoning blocks, tags included, `end` None while one is open; they are final below `settled`.
    """

    def __init__(
        self,
        dialect: Dialect,
        *,
        calls: bool = False,
        max_calls: int | None = None,
        starts_in: Literal["text", "reasoning"] = "text",
        stops: tuple[str, ...] = (),
    ) -> None:
        """`calls`: call markup means calls, else it is text. `max_calls`: end after this many."""
        self._reasoning = dialect.reasoning
        self._thought_firsts = _NEVER
        if dialect.reasoning is not None:
            self._thought_firsts = _firsts((dialect.reasoning.close, *dialect.reasoning.strip))
        self._calls = dialect.calls if calls else None
        self._max_calls = max_calls
        self._num_calls = 0
        self._held = ""  # fed, and not yet told apart
        self._at = 0  # offset of _held
        self.thoughts: list[tuple[int, int | None]] = []
        self.ended: Done | None = None
        # Text: whether something visible stands in this stretch of text, what its front still loses, and
        # whether a reasoning block or a call stands before it.
        self._visible = False
        self._skip = ""
        self._follows = False
        # Call: its scanner, its opening tag, and all that was read of it before its name was known.
        self._scanner = CallScanner(CallMarks())
        self._opening = ""
        self._unnamed = ""
        self._announced = False
        # Output: finished deltas, and the run of pieces that becomes the next one.
        self._deltas: list[Delta] = []
        self._spans: list[tuple[int, int]] = []
        self._kind: _Piece | None = None
        self._run: list[str] = []
        self._run_start = self._run_end = 0
        self._state: _State = "text"
        self._calm: re.Pattern[str] = _ALWAYS
        self._calm_kind: _Piece = Text
        self.arm(stops)
        if starts_in == "reasoning" and self._reasoning is not None:
            self._open_reasoning(0)

    def arm(self, stops: tuple[str, ...]) -> None:
        """From here on these stop strings end the generation when they appear in visible text."""
        self._marks = _marks(self._calls, tuple(stop for stop in stops if stop))
        self._refresh()

    @property
    def settled(self) -> int:
        """The offset below which it is final what is reasoning and what is not."""
        return self._at if self._state == "text" else self._at + len(self._held)

    def feed(self, text: str) -> None:
        """Read more text; `take` hands out what it gave."""
        if not self._held and not self._calm.search(text):
            self._emit(self._calm_kind, text, self._at)
            self._at += len(text)
            return
        if self.ended is None:
            self._held += text
            self._advance()

    def finish(self, text: str = "") -> Done | None:
        """The generation is over, `text` is its last: everything held is given out, whatever is open is
        closed.

        Returns `ended`, which the last text may have set.
        """
        self.feed(text)
        while self.ended is None and self._state == "call" and not self._announced:
            self._not_a_call()
            self._advance()
        if self.ended is not None:
            return self.ended
        held, self._held = self._held, ""
        if self._state == "text":
            if self._visible or held.strip() or not self._follows:
                self._emit(Text, held, self._at)
        elif self._state == "reasoning":
            assert self._reasoning is not None
            self._emit(Reasoning, held.rstrip(self._reasoning.strip), self._at)
        else:
            if self._state == "broken" and self._scanner.in_arguments:
                self._emit_arguments(held)
            self._close_run(CallEnd(self._scanner.arguments_whole))
        self._at += len(held)
        return None

    def take(self) -> tuple[list[Delta], list[tuple[int, int]]]:
        """The deltas since the last take, neighbours joined, and the span [start, end) behind each of its
        Texts."""
        self._flush()
        deltas, spans = self._deltas, self._spans
        self._deltas, self._spans = [], []
        return deltas, spans

    # -- states: each reads what it can of the held text and tells whether to look again ---------------------

    def _advance(self) -> None:
        while self.ended is None and _STATES[self._state](self):
            pass
        self._refresh()

    def _refresh(self) -> None:
        """Choose the short cut of `feed`: a piece in which this regex finds nothing is all text, or all
        thought."""
        self._calm, self._calm_kind = _ALWAYS, Text
        if self.ended is None and self._state == "text" and self._visible:
            self._calm = self._marks.firsts
        elif self.ended is None and self._state == "reasoning" and not self._skip and self._reasoning:
            self._calm = self._thought_firsts
            self._calm_kind = Reasoning

    def _text(self) -> bool:
        if self._skip:
            self._drop(len(self._held) - len(self._held.lstrip(self._skip)))
            if not self._held:
                return False
            self._skip = ""
        if not self._visible and (again := self._beginning()) is not None:
            return again
        found = self._marks.find(self._held)
        if found is None:
            ready = self._marks.ready(self._held)
            self._emit(Text, self._held[:ready], self._at)
            self._drop(ready)
            return False
        start, end, stop = found
        self._emit(Text, self._held[:start], self._at)
        if stop:
            self.ended = Done("stop", self._held[start:end])
            return False
        self._open_call(start, end)
        return True

    def _beginning(self) -> bool | None:
        """The beginning of a stretch of text, where blocks may open and white space may turn out to be
        theirs.

        None: text begins here; otherwise whether to look again.
        """
        body = self._held.lstrip()
        space = len(self._held) - len(body)
        stop = self._marks.find(self._held, stops_only=True)
        limit = len(self._held) + 1 if stop is None else stop[1]
        openings = []
        if self._reasoning is not None:
            openings.append(self._reasoning.open)
        if self._calls is not None and self._calls.open:
            openings.append(self._calls.open)
        for opening in openings:
            end = space + len(opening)
            if body.startswith(opening) and end < limit:
                if self._reasoning is not None and opening == self._reasoning.open:
                    self._drop(space)
                    start = self._at
                    self._drop(len(opening))
                    self._open_reasoning(start)
                else:
                    self._open_call(space, end)
                return True
        if self._calls is not None and self._calls.bare and body.startswith("{") and space < limit:
            self._open_call(space, space)
            return True
        may_open = bool(openings) or (self._calls is not None and self._calls.bare)
        if may_open and stop is None and (not body or any(opening.startswith(body) for opening in openings)):
            return False
        self._visible = True
        return None

    def _think(self) -> bool:
        marks = self._reasoning
        assert marks is not None
        if self._skip:
            self._drop(len(self._held) - len(self._held.lstrip(self._skip)))
            if not self._held:
                return False
            self._skip = ""
        start = self._held.find(marks.close)
        if start < 0:
            # A partial tag, and line breaks before it, may be the block's end.
            ready = len(self._held[: _partial(self._held, marks.close)].rstrip(marks.strip))
            self._emit(Reasoning, self._held[:ready], self._at)
            self._drop(ready)
            return False
        self._emit(Reasoning, self._held[:start].rstrip(marks.strip), self._at)
        self._drop(start + len(marks.close))
        self.thoughts[-1] = (self.thoughts[-1][0], self._at)
        self._open_text(marks.strip)
        return True

    def _call(self) -> bool:
        scanner = self._scanner
        used = scanner.feed(self._held)
        if not self._announced:
            self._unnamed += self._held[:used]
        self._drop(used)
        if scanner.name is not None:
            if not self._announced:
                self._announced = True
                self._close_run(CallStart(scanner.name))
            self._emit_arguments(scanner.take_arguments())
        if scanner.status == "more":
            return False
        if not self._announced:
            self._not_a_call()
        elif scanner.status == "closed" or scanner.arguments_whole:
            if not scanner.arguments_whole:  # a call without arguments
                self._emit_arguments("{}")
                scanner.arguments_whole = True
            self._state = "call_end"
        else:
            self._state = "broken"
        return True

    def _call_end(self) -> bool:
        """Behind the arguments: white space, braces too many, the closing tag. Anything else is text."""
        assert self._calls is not None
        close = self._calls.close
        if close:
            self._drop(len(self._held) - len(self._held.lstrip(" \t\r\n}")))
            if not self._held.startswith(close) and close.startswith(self._held):
                return False
            self._drop(len(close) if self._held.startswith(close) else 0)
        self._close_call(complete=True)
        return True

    def _broken(self) -> bool:
        """The rest of a call whose name is out and whose JSON is broken: given out as written, up to its
        tag."""
        assert self._calls is not None
        close = self._calls.close
        end = self._held.find(close) if close else 0
        ready = end if end >= 0 else _partial(self._held, close)
        if self._scanner.in_arguments:
            self._emit_arguments(self._held[:ready])
        self._drop(ready)
        if end < 0:
            return False
        self._drop(len(close))
        self._close_call(complete=False)
        return True

    # -- transitions -----------------------------------------------------------------------------------------

    def _open_text(self, skip: str) -> None:
        self._state = "text"
        self._visible, self._follows, self._skip = False, True, skip

    def _open_reasoning(self, start: int) -> None:
        assert self._reasoning is not None
        self.thoughts.append((start, None))
        self._state = "reasoning"
        self._skip = self._reasoning.strip

    def _open_call(self, start: int, end: int) -> None:
        """A call's opening stands at [start, end) of the held text; what stands before it is dealt with."""
        assert self._calls is not None
        self._drop(start)
        self._opening = self._held[: end - start]
        self._drop(end - start)
        self._scanner = CallScanner(self._calls)
        self._unnamed, self._announced = "", False
        self._state = "call"

    def _not_a_call(self) -> None:
        """What looked like a call is text: its tag is given out, and what followed is read again."""
        self._at -= len(self._unnamed)
        self._held = self._unnamed + self._held
        self._visible, self._unnamed = True, ""
        self._state = "text"
        self._emit(Text, self._opening, self._at - len(self._opening))

    def _close_call(self, *, complete: bool) -> None:
        self._close_run(CallEnd(complete))
        self._num_calls += 1
        if self._num_calls == self._max_calls:
            self.ended = Done("stop")
        else:
            assert self._calls is not None
            self._open_text(self._calls.strip)

    # -- output ----------------------------------------------------------------------------------------------

    def _drop(self, count: int) -> None:
        self._held = self._held[count:]
        self._at += count

    def _emit(self, kind: _Piece, text: str, start: int) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind, self._run_start = kind, start
        self._run.append(text)
        self._run_end = start + len(text)

    def _emit_arguments(self, text: str) -> None:
        self._emit(CallArgs, text, self._at)

    def _close_run(self, delta: Delta) -> None:
        self._flush()
        self._deltas.append(delta)

    def _flush(self) -> None:
        if self._kind is not None:
            self._deltas.append(self._kind("".join(self._run)))
            if self._kind is Text:
                self._spans.append((self._run_start, self._run_end))
            self._kind, self._run = None, []


_STATES: dict[_State, Callable[[Parser], bool]] = {
    "text": Parser._text,
    "reasoning": Parser._think,
    "call": Parser._call,
    "call_end": Parser._call_end,
    "broken": Parser._broken,
}


# ------------------------------------------------------------------------------------------------------------
# Finding tags and stop strings

_ALWAYS = re.compile("")
_NEVER = re.compile(r"(?!)")


class _Marks(NamedTuple):
    """What may interrupt visible text. `patterns` are (string, is it a stop)."""

    patterns: tuple[tuple[str, bool], ...]
    firsts: re.Pattern[str]  # where a pattern may begin
    longest: int

    def find(self, text: str, *, stops_only: bool = False) -> tuple[int, int, bool] | None:
        """(start, end, is it a stop) of what is complete first, as reading one character at a time would find
        it; of those that end together a stop, and then the longest."""
        best: tuple[int, bool, int] | None = None
        for pattern, stop in self.patterns:
            start = text.find(pattern) if stop or not stops_only else -1
            if start >= 0 and (best is None or (start + len(pattern), not stop, start) < best):
                best = (start + len(pattern), not stop, start)
        return None if best is None else (best[2], best[0], not best[1])

    def ready(self, text: str) -> int:
        """How much of a text without a whole pattern cannot be the beginning of one."""
        for match in self.firsts.finditer(text, max(0, len(text) - self.longest + 1)):
            rest = text[match.start() :]
            if any(pattern.startswith(rest) for pattern, _ in self.patterns):
                return match.start()
        return len(text)


def _marks(calls: CallMarks | None, stops: tuple[str, ...]) -> _Marks:
    patterns = [(stop, True) for stop in stops]
    if calls is not None and calls.open:
        patterns.append((calls.open, False))
        if calls.lead:  # the line break that the template prints before a call is not text
            patterns.append((calls.lead + calls.open, False))
    strings = tuple(pattern for pattern, _ in patterns)
    return _Marks(
        patterns=tuple(patterns),
        firsts=_firsts(strings),
        longest=max(map(len, strings), default=1),
    )


def _firsts(strings: tuple[str, ...]) -> re.Pattern[str]:
    chars = "".join(sorted({string[0] for string in strings}))
    return re.compile(f"[{re.escape(chars)}]") if chars else _NEVER


def _partial(text: str, tag: str) -> int:
    """Where the longest end of `text` that is a proper beginning of `tag` stands; its length when there is
    none."""
    for start in range(max(0, len(text) - len(tag) + 1), len(text)):
        if tag.startswith(text[start:]):
            return start
    return len(text)
