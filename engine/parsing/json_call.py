"""Scans calls that are written in JSON: an object with a name and arguments, or a name before an object.

The name and the arguments are given out as the text comes. `Scanner` is what scanners of all formats have in
common.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Protocol

from engine.dialects import CallMarks
from engine.parsing.coercion import MAX_DEPTH

Status = Literal["more", "closed", "bad"]
_Role = Literal["key", "name", "arguments", "quoted", "function", "other"]
_CALL_KEYS = ("type", "id", "tool_call_id", "call_id", "index")  # beside a name and arguments
MAX_HEADER = 400  # characters of a name and the marks around it
MAX_NUMBER = 4000  # characters; Python reads no integer of many more


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
        """Read on; returns how many characters were used. The rest comes again, with more after it."""
        ...


class JsonValue:
    """One JSON value as its text comes: what is given out is the front of a JSON text, and the whole of it
    once the value has `ended`. `bad`: no JSON can go on like this.

    What models get wrong and nobody can mistake is given out right: line breaks and lone backslashes within
    strings, commas after the last of several, Python's words, braces written twice as in a template.
    """

    __slots__ = ("_closers", "_comma", "_escape", "_expects", "_in_key", "_parts", "_scalar", "bad", "ended")

    def __init__(self) -> None:
        self._expects: Literal["key", "colon", "value", "comma", "string", "scalar"] = "value"
        self._closers = ""  # of the objects and arrays that are open, innermost last
        self._in_key = self.ended = self.bad = False
        self._comma = ""  # with the white space after it, while nothing else stands there
        self._escape = ""  # as far as it was read
        self._scalar = ""  # a number or a word, as far as it was read
        self._parts: list[str] = []

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read from `at`; returns where the value's end, or the text's, or something bad stands, and the JSON
        up to there."""
        before = len(self._parts)
        while at < len(text) and not self.ended and not self.bad:
            if self._expects == "string":
                at = self._string(text, at)
            elif self._expects == "scalar":
                at = self._number_or_word(text, at)
            else:
                at = self._outside(text, at)
        return at, "".join(self._parts[before:])

    @property
    def value(self) -> Any:
        """What the text that was read spells."""
        return json.loads("".join(self._parts))

    def _outside(self, text: str, at: int) -> int:
        """White space, or one character that begins or ends something."""
        char, expects = text[at], self._expects
        if char in " \t\r\n":
            if self._comma:
                self._comma += char
            else:
                self._parts.append(char)
        elif char == '"' and expects in ("key", "value"):
            self._put(char)
            self._in_key, self._expects = expects == "key", "string"
        elif char == ":" and expects == "colon":
            self._put(char)
            self._expects = "value"
        elif char == "," and expects == "comma":
            self._comma = char
            self._expects = "key" if self._closers.endswith("}") else "value"
        elif char == "{" and expects == "key" and "".join(self._parts).strip() == "{":
            pass
        elif char in "{[" and expects == "value" and len(self._closers) < MAX_DEPTH:
            self._put(char)
            self._closers += "}" if char == "{" else "]"
            self._expects = "key" if char == "{" else "value"
        elif self._closers.endswith(char) and expects in ("comma", "key" if char == "}" else "value"):
            self._comma = self._comma[1:]
            self._put(char)
            self._closers = self._closers[:-1]
            self._end()
        elif expects == "value" and (char == "-" or char.isalnum()):
            self._put("")
            self._expects, self._scalar = "scalar", ""
            return at
        else:
            self._put("")
            self.bad = True
            return at
        return at + 1

    def _string(self, text: str, at: int) -> int:
        """A string up to its end or the next backslash, or an escape's next character."""
        if self._escape:
            return self._escaped(text[at], at)
        found = _IN_STRING.search(text, at)
        end = found.start() if found else len(text)
        self._parts.append(_CONTROL.sub(lambda char: json.dumps(char[0])[1:-1], text[at:end]))
        if found is None:
            return end
        if found[0] == "\\":
            self._escape = found[0]
        else:
            self._parts.append(found[0])
            self._end()
        return end + 1

    def _escaped(self, char: str, at: int) -> int:
        """The next character of an escape, at `at`, or of what turns out to be none."""
        self._escape += char
        if _ESCAPE.fullmatch(self._escape):
            said, at = self._escape, at + 1
        elif _MAY_BE_ESCAPE.fullmatch(self._escape):
            return at + 1
        elif self._escape == "\\'":
            said, at = char, at + 1
        else:
            said = "\\" + self._escape[:-1]
        self._parts.append(said)
        self._escape = ""
        return at

    def _number_or_word(self, text: str, at: int) -> int:
        """A number, which comes out as it is read, or a word; either ends before what follows."""
        found = _AFTER_SCALAR.search(text, at)
        end = found.start() if found else len(text)
        scalar = self._scalar + text[at:end]
        # What is none is told by its first character too many, whatever pieces the text comes in.
        most = MAX_NUMBER + 1 if not scalar[0].isalpha() else _known(scalar) + 1
        end -= max(0, len(scalar) - most)
        too_long, scalar = len(scalar) >= most, scalar[:most]
        self._scalar = scalar
        if not scalar[0].isalpha():
            self._parts.append(text[at:end])
            self.bad = too_long or (found is not None and not _NUMBER.fullmatch(scalar))
        elif found is not None or too_long:
            self._parts.append(_WORDS.get(scalar, scalar))
            self.bad = scalar not in _WORDS
        if found is not None and not self.bad:
            self._end()
        return end

    def _put(self, text: str) -> None:
        self._parts.append(self._comma + text)
        self._comma = ""

    def _end(self) -> None:
        """A key or a value has ended."""
        self._expects, self._in_key = "colon" if self._in_key else "comma", False
        self.ended = not self._closers


def _known(text: str) -> int:
    """How many characters at its beginning begin one of the words."""
    longest = min(len(text), max(map(len, _WORDS)))
    return next(n for n in range(longest, -1, -1) if any(word.startswith(text[:n]) for word in _WORDS))


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
        self._inside = JsonValue()

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
            case "key", "{" if self._depth == 1 and self.name is None and not self.arguments_whole:
                pass  # braces written twice
            case "value", "{" if self._role == "function":
                self._expects, self._depth = "key", self._depth + 1
            case "key", '"':
                self._begin("key")
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
                    self._begin(self._role)
                return 0
            case _:
                self.status = "bad"
                return 0
        return 1

    def _begin(self, role: _Role) -> None:
        self._expects, self._role = "inside", role
        self._inside = JsonValue()

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
            json.dumps(value, ensure_ascii=False).encode()  # raises for an escaped lone surrogate
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
        """Arguments that are not an object: nothing, or a text that spells one."""
        text = "{}" if value is None else value.strip() if isinstance(value, str) else ""
        inside = JsonValue()
        end, said = inside.read(text, 0)
        if text.startswith("{") and inside.ended and end == len(text):
            self._arguments.append(said)
            self.arguments_whole = True
        else:
            self.status = "bad"


class NamedScanner:
    """A name between marks, then the arguments as one JSON object; a call without arguments has none.

    `name` may be known beforehand, from a header that somebody else has read. names: of the offered tools.
    """

    def __init__(self, marks: CallMarks, name: str | None = None, names: tuple[str, ...] = ()) -> None:
        self._header = re.compile(marks.header)
        self._alias = marks.alias
        self._names = names
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
                self._value = JsonValue()
            elif rest.startswith(self._ends):
                self.status = "closed"
            elif not any(end.startswith(rest) for end in self._ends):
                self.status = "bad"
            return start
        found = [at for mark in ("{", *self._ends) if (at := text.find(mark)) >= 0]
        at = min(found, default=-1)
        header = text[: at if at >= 0 else len(text)]
        match = self._header.fullmatch(header) if 0 <= at <= MAX_HEADER else None
        if len(header) > MAX_HEADER or (at >= 0 and match is None):
            self.status = "bad"
        elif match is not None:
            alias = re.fullmatch(self._alias, match[1]) if match[1] not in self._names else None
            self.name = alias[1] if alias is not None and alias[1] in self._names else match[1]
            if text[at] == "{":
                self._value = JsonValue()
            else:
                self.status = "closed"
            return at
        return 0


_IN_STRING = re.compile(r'["\\]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_MAY_BE_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}")
_AFTER_SCALAR = re.compile(r"[^\w.+-]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
