"""Turns values that models write without JSON's quotes, and Python literals, into JSON.

Which JSON value a bare text becomes follows from the type that the tool's schema gives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NoReturn

from engine.references import pointed
from engine.types import ToolShape

Types = frozenset[str]
TEXT: Types = frozenset({"string"})
ALL_TYPES: Types = TEXT | {"null", "boolean", "integer", "number", "array", "object"}
# Nested brackets of a value; deeper is none that a tool takes. No schema may ask for more, and llguidance
# reads none of more than 128.
MAX_DEPTH = 120


class Shapes:
    """The parameters of the tools that were offered, as far as reading a call needs them."""

    def __init__(self, tools: Iterable[ToolShape] = ()) -> None:
        tools = tuple(tools)
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._custom = {tool.name for tool in tools if tool.input is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """The offered tools."""
        return tuple(self._schemas)

    def is_custom(self, name: str) -> bool:
        """Whether what a tool is given is one text with a grammar of its own."""
        return name in self._custom

    def parameters(self, name: str) -> tuple[str, ...]:
        """The parameters of a tool in the order of its schema; none for a tool that was not offered."""
        return tuple(_types_of(self._schemas.get(name, "")))

    def types(self, name: str, parameter: str) -> Types | None:
        """The JSON types that a parameter may have; None where that is not known."""
        return _types_of(self._schemas.get(name, "")).get(parameter)


@lru_cache(maxsize=256)
def _types_of(schema: str) -> dict[str, Types | None]:
    try:
        root = json.loads(schema or "{}")
        reading = _Reading(root)
        return {key: reading.types(part) for key, part in root.get("properties", {}).items()}
    except (ValueError, RecursionError, AttributeError):
        return {}


class _Reading:
    """Reads the types of one schema's parts, each of them once: a client says how many references lead to a
    part, and whether it leads back to itself."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, Types | None] = {}  # of each part, by its identity

    def types(self, part: Any, depth: int = 0) -> Types | None:
        """The types that a part allows, looking through references and choices; None where any may come."""
        if not isinstance(part, dict) or depth > MAX_DEPTH:
            return None
        if id(part) not in self._known:
            self._known[id(part)] = None  # for whatever leads back to it
            self._known[id(part)] = self._found(part, depth + 1)
        return self._known[id(part)]

    def _found(self, part: dict[str, Any], depth: int) -> Types | None:
        if isinstance(kind := part.get("type"), str | list):
            return ALL_TYPES.intersection([kind] if isinstance(kind, str) else map(str, kind))
        if isinstance(target := part.get("$ref"), str):
            return self.types(pointed(target, self._root), depth)
        for key in ("anyOf", "oneOf"):
            if isinstance(choices := part.get(key), list):
                each = [self.types(choice, depth) for choice in choices]
                return None if None in each else frozenset().union(*(types for types in each if types))
        fixed = [part["const"]] if "const" in part else None
        values = listed if isinstance(listed := part.get("enum"), list) else fixed
        return frozenset(map(_type_of, values)) if values else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def json_of(text: str, types: Types | None) -> str:
    """A bare text as JSON: what it parses as where its type is another than string, else a string.

    Where a string is allowed it is one, but for `null` where that is allowed too. With no known type JSON
    wins.
    """
    stripped = text.strip()
    if types is not None and "string" in types and not ("null" in types and stripped == "null"):
        return written(text)
    try:
        return _spelled(stripped) if types is None else value_of(stripped)
    except (ValueError, RecursionError):
        return written(text)


def value_of(source: str) -> str:
    """The JSON of a value that is written as JSON or as a Python literal; ValueError for anything else."""
    try:
        return _spelled(source)
    except (ValueError, RecursionError):
        return written(literal(source))


def _spelled(source: str) -> str:
    """JSON in the layout that templates print."""
    value = json.loads(source, parse_constant=_refuse)
    try:
        return written(value)
    except UnicodeEncodeError:
        raise
    except ValueError:
        return source  # a number beyond what a float holds: it stays as it was written


def written(value: Any) -> str:
    """A value as JSON in the layout that templates print. ValueError where it has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for an escaped lone surrogate
    return text


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# ------------------------------------------------------------------------------------------------------------
# Python literals


def literal(text: str) -> Any:
    """The value of a Python (or JSON) literal: strings, numbers, True, None, lists, tuples, dicts.

    Raises ValueError for anything else. Tuples are lists; keys that are no strings become their JSON text.
    """
    reader = _Literal(text)
    value = reader.value(0)
    if reader.peek():
        raise ValueError("there is more behind the value")
    return value


_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
STRING = re.compile(
    r"""([rRuUfF]?)('''(?:[^\\]|\\.)*?'''|\"{3}(?:[^\\]|\\.)*?\"{3}|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(\n|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "", "/": "/"}
_ESCAPES |= {quote: quote for quote in "'\"\\"}


class _Literal:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def peek(self) -> str:
        """The next character that is not white space; "" at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[0]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        char = self.peek()
        if char in "[(":
            return self._sequence("]" if char == "[" else ")", depth)
        if char == "{":
            return self._mapping(depth)
        if (found := self._take(STRING)) is not None:
            value = _decoded(found)
            while self.peek() in "'\"" and self.peek() and (found := self._take(STRING)) is not None:
                value += _decoded(found)
            return value
        if (found := self._take(_NUMBER)) is not None:
            digits = found.replace("_", "")
            return float(digits) if set(digits) & set(".eE") else int(digits)
        word = self._take(_WORD)
        if word not in _WORDS:
            raise ValueError("no literal")
        return _WORDS[word]

    def _sequence(self, close: str, depth: int) -> list[Any]:
        self._at += 1
        values = []
        while self.peek() != close:
            values.append(self.value(depth + 1))
            self._comma(close)
        self._at += 1
        return values

    def _mapping(self, depth: int) -> dict[str, Any]:
        self._at += 1
        values = {}
        while self.peek() != "}":
            key = self.value(depth + 1)
            if self.peek() != ":":
                raise ValueError("no colon")
            self._at += 1
            values[key if isinstance(key, str) else json.dumps(key)] = self.value(depth + 1)
            self._comma("}")
        self._at += 1
        return values

    def _comma(self, close: str) -> None:
        if self.peek() == ",":
            self._at += 1
        elif self.peek() != close:
            raise ValueError("no comma")


def _decoded(source: str) -> str:
    """The text of a Python string literal; unknown escapes stay as they are written."""
    match = STRING.fullmatch(source)
    if match is None:
        raise ValueError("no string")
    body = match[2][3:-3] if match[2][:3] in ("'''", '"""') else match[2][1:-1]
    return body if match[1] in ("r", "R") else unescaped(body)


def unescaped(text: str) -> str:
    """A text without Python's escapes; what is none of them stays as it is."""
    return _ESCAPE.sub(_unescaped, text)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else match[0]
    return chr(int(code, 8)) if code[0] in "01234567" else match[0]
