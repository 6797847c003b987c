"""The inside of a call: incremental scanners, one for each kind of layout that is JSON.

Owns: what a scanner is, and finding the name and the arguments in a JSON object, or behind a name, as the
text comes. Refuses to know: the tags around a call, deltas, and whether a value makes sense.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Protocol

from engine.marks import CallMarks

Status = Literal["more", "closed", "bad"]
_Role = Literal["key", "name", "arguments", "quoted", "function", "other"]
_CALL_KEYS = ("type", "id", "tool_call_id", "call_id", "index")  # beside a name and arguments
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
    """One JSON value as its text comes. Only strings and nesting are checked, and that no character is one
    that JSON does not have. What models get wrong and nobody can mistake is given out right: line breaks
    within strings, commas behind the last of several, Python's words."""

    __slots__ = ("_closers", "_escaped", "_in_string", "_parts", "_scalar", "bad", "ended")

    def __init__(self, first: str) -> None:
        self._closers = ""  # of the objects and arrays that are open, innermost last
        self._in_string = self._escaped = self.ended = self.bad = False
        self._scalar = first not in '"{['
        self._parts: list[str] = []

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read from `at`; returns where the value's end, or something bad stands, or what needs more text
        behind it, and the JSON up to there."""
        before = len(self._parts)
        while at < len(text) and not self.ended and not self.bad:
            start = at
            at, part = self._step(text, at)
            if at == start:
                break
            self._parts.append(part)
        return at, "".join(self._parts[before:])

    @property
    def value(self) -> Any:
        """What has been read. ValueError where it is no JSON."""
        try:
            return json.loads("".join(self._parts))
        except RecursionError:
            raise ValueError("nested too deep") from None

    def _step(self, text: str, at: int) -> tuple[int, str]:
        """Read one piece."""
        if self._in_string:
            return self._string(text, at)
        if self._scalar:  # a number or a literal ends before what follows
            found = _AFTER_SCALAR.search(text, at)
            self.ended = found is not None
            end = found.start() if found else len(text)
            return end, text[at:end]
        match = _PIECE.match(text, at)
        assert match is not None
        piece, end = match[0], match.end()
        if match.lastgroup == "mark":
            self._nest(piece)
        elif match.lastgroup is not None and end == len(text):
            return at, ""
        elif match.lastgroup == "comma" and text[end] in "}]":
            piece = piece[1:]
        return (at, "") if self.bad else (end, _WORDS.get(piece, piece))

    def _string(self, text: str, at: int) -> tuple[int, str]:
        """Read within a string, up to its end or the next backslash."""
        if self._escaped:
            self._escaped, end = False, at + 1
        else:
            found = _IN_STRING.search(text, at)
            end = found.end() if found else len(text)
            if found is not None:
                self._escaped = self._in_string = found[0] == "\\"
                self.ended = not self._in_string and not self._closers
        return end, _CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], text[at:end])

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
    """A JSON object with a name and arguments, in any order; they may stand in an object of their own.

    The arguments may be null, and a string that spells an object. A `loose` object, which no tag announced,
    must begin like a call.
    """

    def __init__(self, marks: CallMarks, *, loose: bool = False) -> None:
        self._marks = marks
        self._loose = loose
        self.status: Status = "more"
        self.name: str | None = None
        self.arguments_whole = False
        self._arguments: list[str] = []
        self._expects: Literal["object", "key", "colon", "value", "inside", "comma"] = "object"
        self._role: _Role = "key"
        self._depth = 0  # objects open around the keys
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
                start, at = at, self._value(text, at)
                if at == start and self._expects == "inside":
                    break
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
                elif self._role == "arguments" and char != "{":
                    self._role = "quoted"
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
        self._expects, self._role = "inside", role
        self._inside = JsonValue(char)

    def _value(self, text: str, start: int) -> int:
        """Read inside a value from `start`; returns where its end, or the text's, or something bad stands."""
        at, said = self._inside.read(text, start)
        if self._inside.bad:
            self.status = "bad"
        if self._role == "arguments":
            self._arguments.append(said)
        if self._inside.ended:
            self._end()
        return at

    def _end(self) -> None:
        """A value has ended: note what it was."""
        role, self._expects = self._role, "comma"
        if role == "arguments":
            self.arguments_whole = True
        if role not in ("key", "name", "quoted"):
            return
        try:
            value = self._inside.value
            json.dumps(value, ensure_ascii=False).encode()  # an escaped lone surrogate is no text
        except ValueError:
            self.status = "bad"
            return
        match role:
            case "key":
                self._key(value)
            case "name":
                self.name = value or None
                self.status = "more" if value else "bad"
            case _:
                self._quoted(value)

    def _key(self, key: str) -> None:
        marks = self._marks
        self._expects, self._role = "colon", "other"
        if key == marks.name_key and self.name is None:
            self._role = "name"
        elif key in marks.arguments_keys and not self.arguments_whole:
            self._role = "arguments"
        elif key == marks.function_key and self.name is None and self._depth == 1:
            self._role = "function"
        elif self._loose and self.name is None and not self.arguments_whole and key not in _CALL_KEYS:
            self.status = "bad"

    def _quoted(self, value: Any) -> None:
        """Arguments that are no object: nothing, or a text that spells one."""
        text = "{}" if value is None else value.strip() if isinstance(value, str) else ""
        inside = JsonValue("{")
        if text.startswith("{") and inside.read(text, 0)[0] == len(text) and inside.ended:
            self._arguments.append(text)
            self.arguments_whole = True
        else:
            self.status = "bad"


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
        end, said = self._value.read(text, start)
        self._arguments.append(said)
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
_CONTROL = re.compile(r"[\x00-\x1f]")
_AFTER_SCALAR = re.compile(r"[^\w.+-]")
# Outside of strings: what means nothing here, a word, a comma, and a quote, a bracket or what is no JSON.
_PIECE = re.compile(r"[\s\d.:+-]+|(?P<word>[^\W\d]\w*)|(?P<comma>,\s*)|(?P<mark>.)")
_WORDS = {"True": "true", "False": "false", "None": "null"}
