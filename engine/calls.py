"""The inside of a call that is written as JSON: an incremental scanner.

Owns: finding the name and the arguments in one JSON object as its text comes. Refuses to know: tags, deltas,
and whether a value makes sense.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from engine.dialects import CallMarks


class CallScanner:
    """Reads one JSON object with a name and arguments, in any order, as its text comes.

    status: "more", "closed" (the object's brace was read), "bad" (this is no such object). name: once known.
    arguments_whole: their value has ended. in_arguments: it was being read when the text turned bad. Only
    strings and nesting are checked, and that no character is one that JSON does not have; what the value
    means is its reader's matter.
    """

    def __init__(self, marks: CallMarks) -> None:
        self._marks = marks
        self.status: Literal["more", "closed", "bad"] = "more"
        self.name: str | None = None
        self.arguments_whole = False
        self._arguments: list[str] = []
        self._expects: Literal["object", "key", "colon", "value", "inside", "comma"] = "object"
        self._role: Literal["key", "name", "arguments", "other"] = "key"
        self._raw = ""  # of the key or name being read
        self._closers = ""  # of the objects and arrays open in the value, innermost last
        self._in_string = self._escaped = self._scalar = False

    @property
    def in_arguments(self) -> bool:
        return self._expects == "inside" and self._role == "arguments"

    def take_arguments(self) -> str:
        """The arguments' text since the last take."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        """Read on; returns how many characters were used (all of them while status is "more")."""
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
                self._expects = "key"
            case "key", '"':
                self._begin("key", char)
                return 0
            case (("key" | "comma"), "}"):
                self.status = "closed"
            case "colon", ":":
                self._expects = "value"
            case "comma", ",":
                self._expects = "key"
            case "value", _ if char in '"{[-+.' or char.isalnum():
                if self._role == "name" and char != '"':
                    self.status = "bad"
                else:
                    self._begin(self._role, char)
                return 0
            case _:
                self.status = "bad"
                return 0
        return 1

    def _begin(self, role: Literal["key", "name", "arguments", "other"], char: str) -> None:
        self._expects, self._role, self._raw = "inside", role, ""
        self._scalar = char not in '"{['

    def _value(self, text: str, start: int) -> int:
        """Read inside a value from `start`; returns where its end, or the text's, or something bad stands."""
        at, ended = start, False
        while at < len(text) and not ended and self.status == "more":
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                found = _IN_STRING.search(text, at)
                at = found.end() if found else len(text)
                if found:
                    self._escaped = found[0] == "\\"
                    self._in_string = self._escaped
                    ended = not self._in_string and not self._closers
            elif self._scalar:  # a number or a literal ends before what follows
                found = _AFTER_SCALAR.search(text, at)
                at, ended = (found.start(), True) if found else (len(text), False)
            else:
                found = _IN_NEST.search(text, at)
                at = found.start() if found else len(text)
                if found:
                    ended = self._nest(found[0])
                    at += self.status == "more"
        self._keep(text[start:at])
        if ended:
            self._end()
        return at

    def _nest(self, char: str) -> bool:
        """A quote or bracket outside strings; returns whether it ends the value."""
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._closers += "}" if char == "{" else "]"
        elif self._closers.endswith(char):
            self._closers = self._closers[:-1]
        else:
            self.status = "bad"
        return char in "}]" and not self._closers and self.status == "more"

    def _keep(self, text: str) -> None:
        if self._role == "arguments":
            self._arguments.append(text)
        elif self._role != "other":
            self._raw += text

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


_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[^\w.+-]")
# Quotes and brackets, and any character that stands nowhere outside JSON's strings.
_IN_NEST = re.compile(r"[^\s\w.,:+-]")
