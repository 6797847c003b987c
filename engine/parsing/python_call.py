"""Scans a call that is written as Python, `NAME(key=value, ...)`.

The name and the arguments, written as JSON, are given out as the text comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from engine.parsing.coercion import Shapes, unescaped, value_of, written
from engine.parsing.json_call import MAX_HEADER, Status


class PythonScanner:
    """`NAME(key=value, ...)`, values being literals; see `Scanner`.

    A string with a key comes out as it is written, any other argument when it has ended. Values without a key
    take the keys of the offered tool's schema in order; a `loose` call, which no tag announced, must name its
    keys unless the tool was offered.
    """

    in_arguments = False  # the rest of a broken call is not JSON

    def __init__(self, shapes: Shapes, *, loose: bool) -> None:
        self._shapes = shapes
        self._loose = loose
        self.status: Status = "more"
        self.name: str | None = None
        self.arguments_whole = False
        self._arguments: list[str] = []
        self._num_arguments = 0
        self._expects: Literal["argument", "string", "comma", "source"] = "argument"
        self._source: list[str] = []  # of an argument that comes out when it has ended
        self._depth = 0  # brackets open in it
        self._quote = ""  # of the string that is open
        self._escaped = False

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, text: str) -> int:
        at = 0
        if self.name is None:
            match = _HEADER.match(text)
            if match is None or match.end() == len(text) or match.end() > MAX_HEADER:
                self.status = "more" if len(text) <= MAX_HEADER and _MAY_BE.fullmatch(text) else "bad"
                return 0
            at = match.end()
            if self._loose and match[1] not in self._shapes.names:
                found = _EVIDENCE.match(text, at)
                if (found.end() if found else len(text)) - at > MAX_HEADER:
                    self.status = "bad"
                elif found is None:
                    self.status = "more" if _MAY_COME.fullmatch(text, at) else "bad"
                if found is None or self.status == "bad":
                    return 0
            self.name = match[1]
        used = -1
        while used != at and at < len(text) and self.status == "more":
            used = at
            at = _READ[self._expects](self, text, at)
        return at

    # Each reads on from `at` and returns how far it came: `at` itself where more text is needed.

    def _read_argument(self, text: str, at: int) -> int:
        """The front of an argument, which tells how it is read."""
        match = _STRING.match(text, at)
        # A front is matched anew with every piece of it, so one that is long is not waited for.
        too_long = (match.end() if match else len(text)) - at > MAX_HEADER
        if too_long or (match is None and _MAY_BE_STRING.fullmatch(text, at) is None):
            self._expects = "source"
            return self._read_source(text, at)
        if match is None:
            return at
        self._begin(match[1])
        self._arguments.append('"')
        self._quote, self._expects = match[2], "string"
        return match.end()

    def _read_string(self, text: str, at: int) -> int:
        end = at
        while end < len(text) and text[end] not in (self._quote, "\\"):
            end += 1
        self._arguments.append(written(text[at:end])[1:-1])
        if text[end : end + 1] == self._quote:
            self._arguments.append('"')
            self._quote, self._expects = "", "comma"
            return end + 1
        # An escape: as long as its kind, and an octal one until it ends.
        if end < len(text) and (match := _ESCAPED.match(text, end)) is not None:
            self._arguments.append(written(unescaped(match[0]))[1:-1])
            return match.end()
        return end

    def _read_comma(self, text: str, at: int) -> int:
        """After a string: what follows must not continue it as an expression."""
        char = text[at]
        if char in "),":
            self._close(last=char == ")")
        elif not char.isspace():
            self.status = "bad"
            return at
        return at + 1

    def _read_source(self, text: str, start: int) -> int:
        """An argument from `start` on, up to its end or the text's."""
        at = start
        while at < len(text):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}" and self._depth:
                self._depth -= 1
            elif char in ")," and not self._depth:
                self._source.append(text[start:at])
                self._end(last=char == ")")
                return at + 1
            at += 1
        self._source.append(text[start:at])
        return at

    def _begin(self, key: str) -> None:
        self._arguments.append(f"{', ' if self._num_arguments else '{'}{written(key)}: ")
        self._num_arguments += 1

    def _close(self, *, last: bool) -> None:
        self._expects = "argument"
        if last:
            self._arguments.append("}" if self._num_arguments else "{}")
            self.arguments_whole, self.status = True, "closed"

    def _end(self, *, last: bool) -> None:
        source = "".join(self._source).strip()
        self._source.clear()
        if source or not last:
            match = _KEYWORD.match(source)
            keys = self._shapes.parameters(self.name or "")
            if match is not None:
                key = match[1]
            elif self._num_arguments < len(keys):
                key = keys[self._num_arguments]
            else:
                key = ""
            try:
                value = value_of(source[match.end() if match else 0 :])
            except (ValueError, RecursionError):
                key = ""
            if not key:
                self.status = "bad"
                return
            self._begin(key)
            self._arguments.append(value)
        self._close(last=last)


def reads_name(name: str) -> bool:
    """Whether a tool of this name can be called."""
    match = _HEADER.fullmatch(f"{name}(")
    return match is not None and match[1] == name and len(name) < MAX_HEADER


def reads_key(key: str) -> bool:
    """Whether an argument of this name can be given."""
    match = _KEYWORD.fullmatch(f"{key}=")
    return match is not None and match[1] == key


# Prompts show calls inside a print, or as a method of an object that holds the tools.
_HEADER = re.compile(
    r"\s*(?:print\s*\(\s*)?(?:default_api\.)?(?!print\b)([A-Za-z_][\w.\-]*?)(?:\.call)?\s*\("
)
_MAY_BE = re.compile(r"\s*+(?:[A-Za-z_][\w.\-]*+\s*+\(?\s*+)?(?:[A-Za-z_][\w.\-]*+\s*+\(?)?")
_EVIDENCE = re.compile(r"\s*(?:\)|[A-Za-z_]\w*\s*=[^=])")
_MAY_COME = re.compile(r"\s*(?:[A-Za-z_]\w*\s*=?)?")
_STRING = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(['\"])(?!\2)(?=[\s\S])")
_MAY_BE_STRING = re.compile(r"\s*(?:[A-Za-z_]\w*\s*(?:=\s*['\"]?)?)?")
# A whole escape; one that is none of Python's stays as it is, so its backslash and letter are enough.
_ESCAPED = re.compile(
    r"\\(?:[0-7]{3}|[0-7]{1,2}(?=[^0-7])|[^xuU0-7]"
    + "".join(
        rf"|{kind}[0-9a-fA-F]{{{size}}}|{kind}(?=[0-9a-fA-F]{{0,{size - 1}}}[^0-9a-fA-F])"
        for kind, size in (("x", 2), ("u", 4), ("U", 8))
    )
    + ")",
    re.DOTALL,
)
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)\s*")

_READ: dict[str, Callable[[PythonScanner, str, int], int]] = {
    "argument": PythonScanner._read_argument,
    "string": PythonScanner._read_string,
    "comma": PythonScanner._read_comma,
    "source": PythonScanner._read_source,
}
