"""Reads a section of tool calls, from its opening to its end.

It handles the brackets, separators and tags around calls, and finds out which of several formats a model
uses; scanners read the calls themselves. Of a broken call it gives out what is certain, and returns the rest
as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from engine.dialects import CallMarks
from engine.parsing.buffers import Held, Pieces
from engine.parsing.call_starts import Opening
from engine.parsing.coercion import Shapes
from engine.parsing.gemma_call import KeyedScanner
from engine.parsing.json_call import NamedScanner, ObjectScanner, Scanner
from engine.parsing.python_call import PythonScanner
from engine.parsing.tag_search import first_of, partial
from engine.parsing.xml_call import TaggedScanner
from engine.types import CallEnd, CallStart

Verdict = Literal["more", "again", "over", "text"]
"""What a section says: it needs more text, look again, it has ended, or what is held is text from here on."""

SPACE = " \t\r\n"


class Section:
    """One or more calls after an opening.

    num_calls: how many have ended, whole or not. `room` is how many may come. With `name` it is one call
    whose name is known already, ended by one of `ends`.
    """

    def __init__(
        self,
        opening: Opening,
        shapes: Shapes,
        held: Held,
        out: Pieces,
        *,
        room: int | None,
        lead: int = 0,
        name: str | None = None,
        ends: tuple[str, ...] = (),
    ) -> None:
        """The opening stands at the front of `held`, after `lead` characters of its own."""
        self._opening = opening
        self._shapes = shapes
        self._held = held
        self._out = out
        self._room = room
        self._ends = ends
        self.num_calls = 0
        self._layouts = opening.layouts
        self._opened = held.text[: lead + len(opening.string) * opening.tag]
        held.drop(len(self._opened))
        self._listed: Literal["no", "open", "closed"] = "no"
        self._state: Literal["between", "call", "end", "broken"] = "between"
        self._layout = opening.layouts[0]
        self._scanner: Scanner = ObjectScanner(self._layout)
        self._announced = False
        self._unnamed = ""  # what was read since the opening, or the last call, and may yet be text
        if name is not None:
            self._open_call(self._layout, name)

    @property
    def strip(self) -> str:
        """What is dropped after the calls."""
        return self._layout.strip

    @property
    def undecided(self) -> bool:
        """Whether what was read since the opening, or since the last call, may yet be no call."""
        if self._state == "between":
            return self.num_calls == 0
        return self._state == "call" and not self._announced

    @property
    def told(self) -> bool:
        """Whether a tag, or a call before it, says that what follows is a call."""
        return self._opening.tag or self.num_calls > 0

    def advance(self) -> Verdict:
        """Read what it can of the held text."""
        return _STATES[self._state](self)

    def give_up(self) -> None:
        """What looked like a call is text: its opening is given out, and what followed is held again."""
        held, out = self._held, self._out
        held.put_back(self._unnamed)
        if self.num_calls == 0:
            out.add("text", self._opened, held.at - len(self._opened))
            if not self._opening.tag:
                front = held.text[: len(self._opening.string)]
                out.add("text", front, held.at)
                held.drop(len(front))

    def finish(self) -> None:
        """The generation is over: whatever call is open is closed with what there is of it."""
        if self._state == "between":
            return
        layout = self._layout
        if self._state == "call" and layout.kind == "tags" and self._held.text.strip() == layout.close:
            # Nothing follows: what was held as a part of a value may as well be the call's end.
            self._scanner.feed(self._held.text + layout.open)
            self._out.add("arguments", self._scanner.take_arguments(), self._held.at)
        if self._state == "broken" and self._scanner.in_arguments:
            self._out.add("arguments", self._held.text, self._held.at)
        self._out.close(CallEnd(self._scanner.arguments_whole))

    # -- between calls ---------------------------------------------------------------------------------------

    def _between(self) -> Verdict:
        """Brackets, separators, the next call, the section's end. What is none of these ends the section, or
        was none when no call came before it."""
        held, layout = self._held, self._layout
        first, full = self.num_calls == 0, self.num_calls == self._room
        close = "" if first else layout.close
        if not first and not close and (self._listed == "closed" or (full and self._listed == "no")):
            return "over"
        body = held.text.lstrip(SPACE if first else SPACE + layout.slack)
        space = len(held.text) - len(body)
        if not body:
            return "more"
        if not first and self._listed == "open" and body[0] == "]":
            self._listed = "closed"
            return self._take(space + 1)
        if close and body.startswith(close):
            held.drop(space + len(close))
            return "over"
        if close and close.startswith(body):
            return "more"
        found = None if full or self._listed == "closed" else self._next(body, space)
        if found is None and not first:
            held.drop(space)
        return found or ("text" if first else "over")

    def _next(self, body: str, space: int) -> Verdict | None:
        """A bracket, a separator or a call that begins; None where nothing of that stands."""
        first = self.num_calls == 0
        if not first and body[0] in ",;" and (self._listed == "open" or self._layout.many):
            return self._take(space + 1)
        if first and self._listed == "no" and body[0] == "[":
            layouts = tuple(layout for layout in self._layouts if layout.kind in ("object", "python"))
            if layouts:
                self._listed, self._layouts = "open", layouts
                return self._take(space + 1)
        for layout in self._layouts:
            opens = layout.each_open
            if body.startswith(opens) if opens else _BEGINS[layout.kind].match(body):
                self._take(space + len(opens))
                self._layouts = (layout,)
                self._open_call(layout)
                return "again"
        return "more" if any(layout.each_open.startswith(body) for layout in self._layouts) else None

    def _open_call(self, layout: CallMarks, name: str | None = None) -> None:
        self._layout = layout
        self._scanner = self._scanner_of(layout, name)
        self._announced = False
        self._state = "call"

    def _scanner_of(self, layout: CallMarks, name: str | None) -> Scanner:
        if layout.kind == "tags":
            return TaggedScanner(layout, self._shapes)
        if layout.kind == "python":
            return PythonScanner(self._shapes, loose=not self._opening.tag)
        if layout.kind == "keyed":
            return KeyedScanner(layout, self._shapes, loose=not self._opening.tag)
        if layout.kind == "named":
            return NamedScanner(layout, name, self._shapes.names)
        return ObjectScanner(layout, loose=not self._opening.tag)

    # -- a call ----------------------------------------------------------------------------------------------

    def _call(self) -> Verdict:
        scanner = self._scanner
        self._take(scanner.feed(self._held.text))
        if scanner.name is not None and not self._announced and self._credible(scanner.name):
            self._announced, self._unnamed = True, ""
            self._out.close(CallStart(scanner.name))
        if self._announced:
            self._out.add("arguments", scanner.take_arguments(), self._held.at)
        if scanner.status == "more":
            return "more"
        if not self._announced:
            return "text"
        if scanner.status == "bad" and not scanner.arguments_whole:
            self._state = "broken"
            return "again"
        if not scanner.arguments_whole:  # a call without arguments
            self._out.add("arguments", "{}", self._held.at)
            scanner.arguments_whole = True
        self._state = "end"
        return "again"

    def _credible(self, name: str) -> bool:
        """Whether a name makes a call of it: what no tag announced must have arguments, or be named like a
        tool."""
        scanner = self._scanner
        return self.told or name in self._shapes.names or scanner.in_arguments or scanner.arguments_whole

    def _end(self) -> Verdict:
        """After the arguments: white space, braces too many, the call's own closing tag."""
        held, layout = self._held, self._layout
        if close := layout.each_close:
            held.drop(len(held.text) - len(held.text.lstrip(SPACE + layout.slack)))
            if not held.text.startswith(close) and close.startswith(held.text):
                return "more"
            held.drop(len(close) if held.text.startswith(close) else 0)
        self._close_call(complete=True)
        goes_on = layout.close or layout.each_open or layout.many or self._listed == "open"
        return "again" if goes_on and not self._ends else "over"

    def _broken(self) -> Verdict:
        """The rest of a call whose name is out and whose text is broken: arguments are given out as written,
        up to a tag; without one nothing tells where it ends, and what follows is text."""
        held, layout = self._held, self._layout
        ends = self._ends or tuple(filter(None, (layout.each_close, layout.close)))
        found = first_of(held.text, ends) if ends else (0, "")
        ready = found[0] if found is not None else partial(held.text, ends)
        if self._scanner.in_arguments:
            self._out.add("arguments", held.text[:ready], held.at)
        held.drop(ready)
        if found is None:
            return "more"
        self._close_call(complete=False)
        if found[1] == layout.each_close:
            held.drop(len(found[1]))
        return "again" if ends and not self._ends else "over"

    def _close_call(self, *, complete: bool) -> None:
        self._out.close(CallEnd(complete))
        self.num_calls += 1
        self._unnamed = ""
        self._state = "between"

    def _take(self, count: int) -> Verdict:
        """Drop what may yet turn out to be text."""
        if self._state == "between" or not self._announced:
            self._unnamed += self._held.text[:count]
        self._held.drop(count)
        return "again"


_STATES: dict[str, Callable[[Section], Verdict]] = {
    "between": Section._between,
    "call": Section._call,
    "end": Section._end,
    "broken": Section._broken,
}
# How a call without an opening of its own begins.
_BEGINS = {
    "object": re.compile(r"\{"),
    "python": re.compile(r"[A-Za-z_]"),
    "named": re.compile(r"[^\s<>{}()\[\]\"'`]"),
    "tags": re.compile(r"[^\s<>{}()\[\]\"'`]"),
    "keyed": re.compile(r"\w"),
}
