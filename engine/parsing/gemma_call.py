"""Scans a call of the form `NAME{key:VALUE,...}`, whose keys are bare and whose strings stand between tags.

The name and the arguments, written as JSON, are given out as the text comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from engine.dialects import NAME, CallMarks
from engine.parsing.coercion import MAX_DEPTH, TEXT, Shapes, json_of, literal, value_of, written
from engine.parsing.json_call import MAX_HEADER, Status
from engine.parsing.tag_search import partial

_Expects = Literal["name", "key", "colon", "value", "comma", "string", "quoted", "scalar"]


class KeyedScanner:
    """A name, then an object in braces; see `Scanner`.

    A string between tags comes out as it is written. Models quote strings as JSON or Python do, too, and
    write the tag where a string of theirs holds a quotation mark: it ends one where the object goes on after
    it. A `loose` call, which no tag announced, must be of a tool that was offered.
    """

    in_arguments = False  # the rest of a broken call is not JSON

    def __init__(self, marks: CallMarks, shapes: Shapes, *, loose: bool) -> None:
        self._quote = marks.quote
        self._ends = tuple(end for end in (marks.each_close, marks.close) if end)
        self._shapes = shapes
        self._loose = loose
        self.status: Status = "more"
        self.name: str | None = None
        self.arguments_whole = False
        self._arguments: list[str] = []
        self._expects: _Expects = "name"
        self._closers = ""  # of the objects and lists that are open, innermost last
        self._key = ""  # of the argument at hand
        self._comma = False  # one was read, and what follows it was not
        self._held: list[str] | None = None  # the text of what turned out not to be a string
        self._seen = 0  # characters of a value at hand in which it does not end

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        at = used = 0
        while self.status == "more" and at < len(text):
            if self._expects != "string":
                at += len(text[at:]) - len(text[at:].lstrip())
            if at == len(text):
                return at
            expects, used = self._expects, at
            at = _READ[expects](self, text, at)
            if at == used and expects == self._expects:
                break
        return at

    # Each reads on from `at`, where no white space stands, and returns how far it came: `at` itself where
    # more text is needed.

    def _read_name(self, text: str, at: int) -> int:
        found = [end for mark in ("{", *self._ends) if (end := text.find(mark, at)) >= 0]
        end = min(found, default=len(text))
        match = _HEADER.fullmatch(text, at, end) if found and end - at <= MAX_HEADER else None
        if end - at > MAX_HEADER or (found and match is None):
            self.status = "bad"
        elif match is not None:
            if self._loose and match[1] not in self._shapes.names:
                self.status = "bad"
                return at
            self.name = match[1]
            if text[end] == "{":
                return self._open("}", end)
            self.status = "closed"
            return end
        return at

    def _read_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        if text[at] == "{" and self._closers == "}" and not self._key:  # braces written twice
            return at + 1
        if text[at] in "\"'" or text.startswith(self._quote, at):
            mark = text[at] if text[at] in "\"'" else self._quote
            start = at + len(mark)
            end = text.find(mark, start)
            length = len(mark)
        elif self._quote.startswith(text[at:]):
            return at
        else:
            start, length = at, 0
            found = _AFTER_KEY.search(text, at)
            end = found.start() if found else -1
        if (end if end >= 0 else len(text)) - at > MAX_HEADER or end == at:
            self.status = "bad"
        if end < 0 or self.status == "bad":
            return at
        key = text[start:end].strip()
        if len(self._closers) == 1:
            self._key = key
        self._put(f"{written(key)}: ")
        self._expects = "colon"
        return end + length

    def _read_colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            self.status = "bad"
            return at
        self._expects = "value"
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        char = text[at]
        if text.startswith(self._quote, at):
            types = self._types()
            self._held = [] if types is not None and "string" not in types else None
            self._put('"' if self._held is None else "")
            self._expects = "string"
            return at + len(self._quote)
        if self._quote.startswith(text[at:]):
            return at
        if char in "{[" and len(self._closers) < MAX_DEPTH:
            return self._open("}" if char == "{" else "]", at)
        if char == "]" and self._closers.endswith("]"):
            return self._close(at)
        if char in "\"'":
            self._expects = "quoted"
        elif _SCALAR.match(char):
            self._expects = "scalar"
        else:
            self.status = "bad"
        return at

    def _read_comma(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._comma = True
            self._expects = "key" if self._closers.endswith("}") else "value"
            return at + 1
        if self._closers.endswith(text[at]):
            return self._close(at)
        self.status = "bad"
        return at

    def _read_string(self, text: str, at: int) -> int:
        end = text.find(self._quote, at)
        if end < 0:
            end = partial(text, (self._quote,), at)
            self._say(text[at:end])
            return end
        self._say(text[at:end])
        behind = text[end + len(self._quote) :].lstrip()
        if not behind or any(tag.startswith(behind) for tag in self._ends):
            return end
        if behind[0] not in ",}]" and not behind.startswith(self._ends):
            self._say('"')
        elif self._held is None:
            self._arguments.append('"')
            self._expects = "comma"
        else:
            self._arguments.append(json_of("".join(self._held), self._types()))
            self._expects = "comma"
        return end + len(self._quote)

    def _read_quoted(self, text: str, at: int) -> int:
        inside = _INSIDE[text[at]].match(text, at + max(1, self._seen))
        assert inside is not None
        end = inside.end()
        if text[end : end + 1] != text[at]:
            self._seen = end - at
            return at
        source, self._seen = text[at : end + 1], 0
        try:
            value = str(json.loads(source, strict=False) if source[0] == '"' else literal(source))
            said = written(value)
        except ValueError:
            said = written(source[1:-1])
        types = self._types()
        self._put(said if types is None or "string" in types else json_of(json.loads(said), types))
        self._expects = "comma"
        return end + 1

    def _read_scalar(self, text: str, at: int) -> int:
        found = _AFTER_SCALAR.search(text, at + self._seen)
        self._seen = 0 if found else len(text) - at
        if found is None:
            return at
        word, types = text[at : found.start()].strip(), self._types()
        try:
            said = written(word) if types == TEXT else value_of(word)
        except (ValueError, RecursionError):
            said = json_of(word, types)
        self._put(said)
        self._expects = "comma"
        return found.start()

    # -- what is given out -----------------------------------------------------------------------------------

    def _types(self) -> frozenset[str] | None:
        """What the value at hand may be, where it is an argument's own."""
        return self._shapes.types(self.name or "", self._key) if len(self._closers) == 1 else None

    def _put(self, said: str) -> None:
        self._arguments.append(", " + said if self._comma else said)
        self._comma = False

    def _say(self, text: str) -> None:
        if self._held is None:
            self._arguments.append(written(text)[1:-1])
        else:
            self._held.append(text)

    def _open(self, closer: str, at: int) -> int:
        self._put("{" if closer == "}" else "[")
        self._closers += closer
        self._expects = "key" if closer == "}" else "value"
        return at + 1

    def _close(self, at: int) -> int:
        self._comma = False
        self._arguments.append(self._closers[-1])
        self._closers = self._closers[:-1]
        self._expects = "comma"
        if not self._closers:
            self.arguments_whole, self.status = True, "closed"
        return at + 1


def reads_name(name: str) -> bool:
    """Whether a tool of this name can be called."""
    match = _HEADER.fullmatch(name)
    return match is not None and match[1] == name and len(name) < MAX_HEADER // 2


def reads_key(key: str) -> bool:
    """Whether an argument of this name can be given."""
    return _BARE_KEY.fullmatch(key) is not None and len(key) < MAX_HEADER // 2


# Models put a namespace in front of names.
_HEADER = re.compile(rf"\s*+(?:call\s*+:\s*+)?(?:[\w.-]++:)*{NAME}\s*+")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"'<>|]+")
_AFTER_KEY = re.compile(r"[\s:,{}\[\]\"'<>|]")
_SCALAR = re.compile(r"[^\s:,{}\[\]\"'<>|]")
_AFTER_SCALAR = re.compile(r"[,{}\[\]\"'<>]")
_INSIDE = {quote: re.compile(rf"(?s)(?:[^{quote}\\]|\\.)*") for quote in "'\""}

_READ: dict[str, Callable[[KeyedScanner, str, int], int]] = {
    "name": KeyedScanner._read_name,
    "key": KeyedScanner._read_key,
    "colon": KeyedScanner._read_colon,
    "value": KeyedScanner._read_value,
    "comma": KeyedScanner._read_comma,
    "string": KeyedScanner._read_string,
    "quoted": KeyedScanner._read_quoted,
    "scalar": KeyedScanner._read_scalar,
}
