"""Splits a model's text into text, reasoning and calls, incrementally, by a row of the table of dialects.

Text that may yet become a tag is held back until that is known. Stop strings are treated as tags that end the
generation. The parser never raises on what a model writes, and where the text is split into feeds changes
only where deltas are cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from engine.dialects import Dialect
from engine.parsing.buffers import Held, Pieces
from engine.parsing.call_starts import Opening, openings
from engine.parsing.coercion import Shapes
from engine.parsing.harmony_header import is_header, read_header
from engine.parsing.tag_search import NEVER, Mark, Marks, first_of, firsts, partial
from engine.parsing.tool_calls import Section
from engine.types import Delta, Done, Start, ToolShape

_State = Literal["header", "text", "reasoning", "calls"]
_ALWAYS = re.compile("")


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
        starts_in: Start = "text",
        stops: tuple[str, ...] = (),
        tools: tuple[ToolShape, ...] = (),
        shaped: bool = False,
        include_stop: bool = False,
    ) -> None:
        """`calls`: call markup means calls, else it is text. `max_calls`: end after this many; at 0 where one
        would begin, of which nothing is told. `tools`: what was offered, for values that need their type and
        for calls without a tag. `shaped`: a text, once begun, goes on to the end: what it spells is neither a
        call nor another message. `include_stop`: a stop string is part of the text that it ends."""
        self._reasoning = dialect.reasoning
        self._channels = dialect.channels
        self._shapes = Shapes(tools)
        self._own_calls = dialect.calls if calls else None
        self._interrupts = dialect.interrupts if calls else ()
        self._openings = openings(dialect.layouts, self._shapes.names) if calls else ()
        if max_calls == 0:  # a bracket alone begins no call that is not to be told
            self._openings = tuple(opening for opening in self._openings if opening.anywhere)
        self._thought_opens: tuple[str, ...] = ()  # where nothing of a thought was read yet
        self._thought_closes: tuple[str, ...] = ()
        self._thought_ends: tuple[str, ...] = ()
        self._thought_firsts = NEVER
        self._shaped = shaped
        self._include_stop = include_stop
        self._max_calls = max_calls
        self._num_calls = 0
        self._held = Held()
        self.thoughts: list[tuple[int, int | None]] = []
        self.ended: Done | None = None
        # Text: whether something visible stands in this stretch of it, what its front still loses, whether a
        # reasoning block or a call stands before it, what it is, and the tags around an answer.
        self._visible = False
        self._skip = ""
        self._follows = False
        self._text_kind: Literal["text", "preamble"] = "text"
        self._answers = () if self._reasoning is None else self._reasoning.answers
        self._answer_close = ""
        self._section: Section | None = None
        self._out = Pieces()
        self._marks: Marks[Opening | str] = Marks(())
        self._state: _State = "text" if dialect.channels is None else "header"
        self._calm: re.Pattern[str] = _ALWAYS
        self._calm_kind: Literal["text", "preamble", "thought"] = "text"
        self._stops: tuple[str, ...] = ()
        self.arm(stops)
        if starts_in == "reasoning" and self._reasoning is not None:
            self._open_reasoning(0)
            self._refresh()

    def arm(self, stops: tuple[str, ...]) -> None:
        """From here on these stop strings end the generation when they appear in visible text."""
        self._stops = tuple(stop for stop in stops if stop)
        self._mark()
        self._refresh()

    @property
    def settled(self) -> int:
        """The offset below which it is final what is reasoning and what is not."""
        return self._held.at if self._state in ("text", "header") else self._held.at + len(self._held.text)

    def feed(self, text: str) -> None:
        """Read more text; `take` hands out what it gave."""
        if not self._held.text and not self._calm.search(text):
            self._out.add(self._calm_kind, text, self._held.at)
            self._held.at += len(text)
            return
        if self.ended is None:
            self._held.text += text
            self._advance()

    def finish(self, text: str = "", *, cut: bool = False) -> Done | None:
        """The generation is over, `text` is its last: everything held is given out, whatever is open is
        closed.

        `cut`: it would have gone on. So a call behind a tag that has no name yet is dropped, tag and all: it
        is no text that anybody is to see. Returns `ended`, which the last text may have set.
        """
        self.feed(text)
        while self.ended is None and self._section is not None and self._state == "calls":
            if not self._section.undecided:
                break
            if cut and self._section.told:
                self._held.drop(len(self._held.text))
                return None
            self._open_again(self._section)
            self._advance()
        if self.ended is not None:
            return self.ended
        held = self._held
        if self._state == "text":
            if self._visible or held.text.strip() or not self._follows:
                self._out.add(self._text_kind, held.text, held.at)
        elif self._state == "reasoning":
            assert self._reasoning is not None
            self._out.add("thought", held.text.rstrip(self._reasoning.strip), held.at)
        elif self._state == "header":
            assert self._channels is not None
            if not is_header(held.text, self._channels):
                self._out.add("text", held.text, held.at)
        else:
            assert self._section is not None
            self._section.finish()
        held.drop(len(held.text))
        return None

    def take(self) -> tuple[list[Delta], list[tuple[int, int]]]:
        """The deltas since the last take, neighbours joined, and the span [start, end) behind each of its
        Texts."""
        return self._out.take()

    # -- states: each reads what it can of the held text and tells whether to look again ---------------------

    def _advance(self) -> None:
        while self.ended is None and _STATES[self._state](self):
            pass
        self._refresh()

    def _refresh(self) -> None:
        """Choose the short cut of `feed`: a piece in which this regex finds nothing is all text, or all
        thought."""
        self._calm, self._calm_kind = _ALWAYS, self._text_kind
        if self.ended is None and self._state == "text" and self._visible:
            self._calm = self._marks.firsts
        elif self.ended is None and self._state == "reasoning" and not (self._skip or self._thought_opens):
            self._calm, self._calm_kind = self._thought_firsts, "thought"

    def _header(self) -> bool:
        """Between the messages of a turn: ends of the last one, and the next one's header."""
        marks = self._channels
        assert marks is not None
        body = self._held.text.lstrip()
        space = len(self._held.text) - len(body)
        if (end := next((tag for tag in marks.ends if body.startswith(tag)), "")) != "":
            self._held.drop(space + len(end))
            return True
        if not body or any(tag.startswith(body) for tag in marks.ends):
            return False
        header = read_header(self._held.text, marks)
        if header == "more":
            return False
        start = self._held.at
        kind: Literal["text", "preamble", "thought", "call"] = "text"
        if header is None:
            # A tag that begins no header is text, and must not be looked at again.
            tags = (marks.start, marks.channel, marks.message)
            tag = next((tag for tag in tags if body.startswith(tag)), "")
            self._out.add("text", self._held.text[: space + len(tag)], start)
            self._held.drop(space + len(tag))
        else:
            kind = header.kind
            self._held.drop(header.length)
            self._out.part()
        if kind == "thought" and self._reasoning is not None:
            self._open_reasoning(start)
        elif kind == "call" and header is not None and self._own_calls is not None:
            self._open_calls(Opening("", (self._own_calls,)), name=header.name, ends=marks.ends)
        else:
            self._text_kind = "preamble" if kind == "preamble" else "text"
            self._state, self._visible, self._skip = "text", True, ""
        return True

    def _text(self) -> bool:
        if not self._skipped():
            return False
        if not self._visible and (again := self._beginning()) is not None:
            return again
        found = self._marks.find(self._held.text)
        if found is None:
            ready = self._marks.ready(self._held.text)
            self._out.add(self._text_kind, self._held.text[:ready], self._held.at)
            self._held.drop(ready)
            return False
        start, mark = found
        self._out.add(self._text_kind, self._held.text[:start], self._held.at)
        if mark.stop:
            if self._include_stop:
                self._out.add(self._text_kind, mark.string, self._held.at + start)
            self.ended = Done("stop", mark.string)
            return False
        self._held.drop(start)
        if isinstance(mark.meaning, Opening):
            self._open_calls(mark.meaning, lead=mark.lead)
        elif mark.meaning == "turn":
            self._state = "header"
        else:
            self._held.drop(len(mark.string))
        return True

    def _beginning(self) -> bool | None:
        """The beginning of a stretch of text, where blocks may open and white space may turn out to be
        theirs.

        None: text begins here; otherwise whether to look again.
        """
        body = self._held.text.lstrip()
        space = len(self._held.text) - len(body)
        stop = self._marks.find(self._held.text, stops_only=True)
        limit = len(self._held.text) + 1 if stop is None else stop[0] + len(stop[1].string)
        strings = [opening.string for opening in self._openings]
        for opening in self._openings:
            if body.startswith(opening.string) and space + len(opening.string) < limit:
                self._held.drop(space)
                self._open_calls(opening)
                return True
        for tag in (tag for pair in self._reasoning.pairs for tag in pair) if self._reasoning else ():
            strings.append(tag)
            if body.startswith(tag) and space + len(tag) < limit:
                self._held.drop(space)
                self._open_reasoning(self._held.at)
                return True
        for tag, close in self._answers:
            strings.append(tag)
            if body.startswith(tag) and space + len(tag) < limit:
                self._held.drop(space + len(tag))
                self._skip, self._answer_close, self._answers = "\n", close, ()
                self._mark()
                return True
        if stop is None and strings and (not body or any(string.startswith(body) for string in strings)):
            return False
        self._visible = True
        return None

    def _think(self) -> bool:
        marks = self._reasoning
        assert marks is not None
        if not self._skipped():
            return False
        if self._thought_opens:
            if (tag := next(filter(self._held.text.startswith, self._thought_opens), "")) != "":
                self._held.drop(len(tag))
                self._skip = marks.strip
                return True
            if any(tag.startswith(self._held.text) for tag in self._thought_opens):
                return False
            self._thought_opens = ()
        found = first_of(self._held.text, self._thought_ends)
        if found is None:
            # A partial tag, and line breaks before it, may be the block's end.
            ready = len(self._held.text[: partial(self._held.text, self._thought_ends)].rstrip(marks.strip))
            self._out.add("thought", self._held.text[:ready], self._held.at)
            self._held.drop(ready)
            return False
        start, tag = found
        self._out.add("thought", self._held.text[:start].rstrip(marks.strip), self._held.at)
        self._held.drop(start + (len(tag) if tag in self._thought_closes else 0))
        self.thoughts[-1] = (self.thoughts[-1][0], self._held.at)
        self._answers = marks.answers
        if self._channels is not None:
            self._state = "header"
        else:
            self._open_text(marks.strip)
        return True

    def _calls(self) -> bool:
        section = self._section
        assert section is not None
        match section.advance():
            case "more":
                return False
            case "text":
                self._open_again(section)
            case "over":
                self._num_calls += section.num_calls
                if self._num_calls == self._max_calls:
                    self.ended = Done("stop")
                elif self._channels is not None:
                    self._state = "header"
                else:
                    self._open_text(section.strip)
        return True

    # -- transitions -----------------------------------------------------------------------------------------

    def _open_text(self, skip: str) -> None:
        self._state = "text"
        self._visible, self._follows, self._skip = False, True, skip

    def _open_reasoning(self, start: int) -> None:
        """A thought from `start` on, whose tags may be held still."""
        assert self._reasoning is not None
        self._thought_opens, self._thought_closes = zip(*self._reasoning.pairs, strict=True)
        self._thought_ends = (*self._thought_closes, *self._reasoning.ends, *self._interrupts)
        self._thought_firsts = firsts((*self._thought_ends, *self._reasoning.strip))
        self._out.part()
        self.thoughts.append((start, None))
        self._state = "reasoning"
        self._skip = self._reasoning.strip

    def _open_calls(self, opening: Opening, **options: Any) -> None:
        room = None if self._max_calls is None else self._max_calls - self._num_calls
        if room == 0:
            self.ended = Done("stop")
            return
        self._section = Section(opening, self._shapes, self._held, self._out, room=room, **options)
        self._state = "calls"

    def _open_again(self, section: Section) -> None:
        """What looked like a call is text."""
        section.give_up()
        self._num_calls += section.num_calls
        self._visible, self._skip = True, ""
        self._state = "text"

    def _mark(self) -> None:
        """What may interrupt text: stop strings, openings, tags of messages, and an answer's end."""
        marks: list[Mark[Opening | str]] = [Mark(stop, "stop", stop=True) for stop in self._stops]
        for opening in self._openings:
            # The line breaks that the template prints before a call are not text.
            leads = (opening.lead[start:] for start in range(len(opening.lead) + 1))
            if opening.anywhere and not self._shaped:
                marks += [Mark(lead + opening.string, opening, lead=len(lead)) for lead in leads]
        if (turns := self._channels) is not None and not self._shaped:
            marks += [Mark(tag, "turn") for tag in (turns.start, turns.channel, turns.message, *turns.ends)]
        if self._answer_close:
            marks += [Mark(lead + self._answer_close, "answer", lead=len(lead)) for lead in ("", "\n")]
        self._marks = Marks(tuple(marks))

    def _skipped(self) -> bool:
        """Drop what the front loses; whether something is left."""
        if self._skip:
            self._held.drop(len(self._held.text) - len(self._held.text.lstrip(self._skip)))
            if not self._held.text:
                return False
            self._skip = ""
        return True


_STATES: dict[_State, Callable[[Parser], bool]] = {
    "header": Parser._header,
    "text": Parser._text,
    "reasoning": Parser._think,
    "calls": Parser._calls,
}
