"""The inside of a call: incremental scanners, one for each kind of layout that is JSON.

Owns: what a scanner is, and finding the name and the arguments in a JSON object, or behind a name, as the
text comes. Refuses to know: the tags around a call, deltas, and whether a value makes sense.
"""

from __future__ import annotations

import json
import re
from typing import Literal, Protocol

from engine.marks import CallMarks

Status = Literal["more", "closed", "bad"]
_Role = Literal["key", "name", "arguments", "function", "other"]
MAX_HEADER = 400  # characters of a name and the marks around it


class Scanner(Protocol):
    """Reads one call as its text comes.

    status: "more", "closed" (the call's own text has ended), "bad" (this is no such call). name: once known.
    arguments_whole: their value has ended. in_arguments: it was being read when the text turned bad.
    """

    status: Status
    name: str | None
    arguments_whole: bool

    @property
    def in_arguments(self) -> bool: ...

    def take_arguments(self) -> str:
        """The arguments' text since the last take."""
        ...

    def feed(self, text: str) -> int:
        """Read on; returns how many characters were used. The rest comes again, with more behind it."""
        ...


class JsonValue:
    """One JSON value as its text comes; only strings and nesting are checked, and that no character is one
    that JSON does not have."""

    __slots__ = ("_closers", "_escaped", "_in_string", "_scalar", "bad", "ended")

    def __init__(self, first: str) -> None:
        self._closers = ""  # of the objects and arrays that are open, innermost last
        self._in_string = self._escaped = self.ended = self.bad = False
        self._scalar = first not in '"{['

    def read(self, text: str, at: int) -> int:
        """Read from `at`; returns where the value's end, or the text's, or something bad stands."""
        while at < len(text) and not self.ended and not self.bad:
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                found = _IN_STRING.search(text, at)
                at = found.end() if found else len(text)
                if found:
                    self._escaped = found[0] == "\\"
                    self._in_string = self._escaped
                    self.ended = not self._in_string and not self._closers
            elif self._scalar:  # a number or a literal ends before what follows
                found = _AFTER_SCALAR.search(text, at)
                at, self.ended = (found.start(), True) if found else (len(text), False)
            else:
                found = _IN_NEST.search(text, at)
                at = found.start() if found else len(text)
                if found:
                    self._nest(found[0])
                    at += not self.bad
        return at

    def _nest(self, char: str) -> None:
        """A quote or bracket outside strings."""
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._closers += "}" if char == "{" else "]"
        elif self._closers.endswith(char):
            self._closers = self._closers[:-1]
            self.ended = not self._closers
        else:
            self.bad = True


class ObjectScanner:
    """A JSON object with a name and arguments, in any order; they may stand in an object of their own."""

    def __init__(self, marks: CallMarks) -> None:
        self._marks = marks
        self.status: Status = "more"
        self.name: str | None = None
        self.arguments_whole = False
        self._arguments: list[str] = []
        self._expects: Literal["object", "key", "colon", "value", "inside", "comma"] = "object"
        self._role: _Role = "key"
        self._depth = 0  # objects open around the keys
        self._raw = ""  # of the key or name being read
        self._inside = JsonValue('"')

    @property
    def in_arguments(self) -> bool:
        return self._expects == "inside" and self._role == "arguments"

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and self.status == "more":
            if self._expects == "inside":
                at = self._value(text, at)
            elif text[at] in " \t\r\n":
                at += 1
            else:
                at += self._between(text[at])
        return at

    def _between(self, char: str) -> int:
        """One character between values; returns 1 when it is used up, 0 when a value begins with it or it is
        bad."""
        match self._expects, char:
            case "object", "{":
                self._expects, self._depth = "key", 1
            case "value", "{" if self._role == "function":
                self._expects, self._depth = "key", self._depth + 1
            case "key", '"':
                self._begin("key", char)
                return 0
            case (("key" | "comma"), "}"):
                self._expects, self._depth = "comma", self._depth - 1
                self.status = "more" if self._depth else "closed"
            case "colon", ":":
                self._expects = "value"
            case "comma", ",":
                self._expects = "key"
            case "value", _ if char in '"{[-+.' or char.isalnum():
                if self._role == "function":
                    self._role = "name" if char == '"' else "other"
                if self._role == "name" and char != '"':
                    self.status = "bad"
                else:
                    self._begin(self._role, char)
                return 0
            case _:
                self.status = "bad"
                return 0
        return 1

    def _begin(self, role: _Role, char: str) -> None:
        self._expects, self._role, self._raw = "inside", role, ""
        self._inside = JsonValue(char)

    def _value(self, text: str, start: int) -> int:
        """Read inside a value from `start`; returns where its end, or the text's, or something bad stands."""
        at = self._inside.read(text, start)
        if self._inside.bad:
            self.status = "bad"
        if self._role == "arguments":
            self._arguments.append(text[start:at])
        elif self._role != "other":
            self._raw += text[start:at]
        if self._inside.ended:
            self._end()
        return at

    def _end(self) -> None:
        """A value has ended: note what it was."""
        role, self._expects = self._role, "comma"
        if role == "arguments":
            self.arguments_whole = True
        if role not in ("key", "name"):
            return
        try:
            value = json.loads(self._raw, strict=False)
            value.encode()  # an escaped lone surrogate is no text
        except ValueError:
            self.status = "bad"
            return
        if role == "name":
            self.name = value or None
            self.status = "more" if value else "bad"
            return
        self._expects, self._role = "colon", "other"
        if value == self._marks.name_key and self.name is None:
            self._role = "name"
        elif value in self._marks.arguments_keys and not self.arguments_whole:
            self._role = "arguments"
        elif value == self._marks.function_key and self.name is None and self._depth == 1:
            self._role = "function"


class NamedScanner:
    """A name between marks, then the arguments as one JSON object; a call without arguments has none.

    `name` may be known beforehand, from a header that somebody else has read.
    """

    def __init__(self, marks: CallMarks, name: str | None = None) -> None:
        self._header = re.compile(marks.header)
        # What may stand where a call has no arguments.
        self._ends = tuple(end for end in (marks.each_close, marks.close) if end)
        self.status: Status = "more"
        self.name = name
        self.arguments_whole = False
        self._arguments: list[str] = []
        self._value: JsonValue | None = None

    @property
    def in_arguments(self) -> bool:
        return self.name is not None

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        start = 0
        if self._value is None:
            start = self._begin(text)
        if self._value is None or self.status != "more":
            return start
        end = self._value.read(text, start)
        self._arguments.append(text[start:end])
        self.status = "closed" if self._value.ended else "bad" if self._value.bad else "more"
        self.arguments_whole = self._value.ended
        return end

    def _begin(self, text: str) -> int:
        """Read the header and white space, up to the arguments."""
        if self.name is not None:
            start = len(text) - len(text.lstrip())
            rest = text[start:]
            if rest and rest[0] == "{":
                self._value = JsonValue("{")
            elif rest.startswith(self._ends):
                self.status = "closed"
            elif not any(end.startswith(rest) for end in self._ends):
                self.status = "bad"
            return start
        found = [at for mark in ("{", *self._ends) if (at := text.find(mark)) >= 0]
        at = min(found, default=-1)
        header = text[: at if at >= 0 else len(text)]
        match = self._header.fullmatch(header) if at >= 0 else None
        if len(header) > MAX_HEADER or (at >= 0 and match is None):
            self.status = "bad"
        elif match is not None:
            self.name = match[1]
            if text[at] == "{":
                self._value = JsonValue("{")
            else:
                self.status = "closed"
            return at
        return 0


_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[^\w.+-]")
# Quotes and brackets, and any character that stands nowhere outside JSON's strings.
_IN_NEST = re.compile(r"[^\s\w.,:+-]")
