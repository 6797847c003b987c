"""Filters on the attributes of files: comparisons, and `and` and `or` of filters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from server.shapes import (
    Schema,
    array,
    check_length,
    check_range,
    closed,
    described,
    missing,
    mistyped,
    number,
    one_of,
    record,
    refuse,
    shorten,
    text,
)

Filter = Mapping[str, Any]
Attributes = Mapping[str, Any]
Test = Callable[[Attributes], bool]

MAX_DEPTH = 8
"""How deeply filters may stand in filters."""
MAX_FILTERS = 64
"""Of one `and` or `or`; and values of one `in`."""
MAX_COMPARED = 256
"""Values in all of a filter: each file of a store is compared with all of them."""

_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_KEY = text(1, 64)


def _value(value: Any, path: str) -> Any:
    """A value that an attribute can have: a string, a number, or a boolean."""
    if isinstance(value, str):
        check_length(path, len(value), "string", most=512)
        return value
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return number(value, path)
    mistyped(path, "a string, a number or a boolean", value)


_VALUES = array(_value, 1, MAX_FILTERS)
_COMPARISON = closed(record({"key": _KEY}, {"type": one_of(*_COMPARED, "in", "nin")}), "type", "key", "value")


def _filter(value: Any, path: str) -> Any:
    return _read(value, path, 1, [MAX_COMPARED])


def _read(value: Any, path: str, depth: int, room: list[int]) -> Any:
    """room: the values that may still be compared with."""
    if not isinstance(value, dict):
        mistyped(path, "an object", value)
    if value.get("type") in ("and", "or"):
        if depth > MAX_DEPTH:
            refuse(path, f"Invalid '{path}': filters may stand in each other {MAX_DEPTH} deep.")
        for name in value.keys() - {"type", "filters"}:
            refuse(f"{path}.{shorten(name)}", f"Unknown parameter: '{path}.{shorten(name)}'.")
        if "filters" not in value:
            missing(f"{path}.filters")
        inner = value["filters"]
        if not isinstance(inner, list):
            mistyped(f"{path}.filters", "an array", inner)
        check_length(f"{path}.filters", len(inner), "array", 1, MAX_FILTERS)
        read = [_read(each, f"{path}.filters[{i}]", depth + 1, room) for i, each in enumerate(inner)]
        return {"type": value["type"], "filters": read}
    if "type" not in value:
        missing(f"{path}.type")
    kinds = ", ".join(f"'{kind}'" for kind in (*_COMPARED, "in", "nin", "and", "or"))
    if value["type"] not in (*_COMPARED, "in", "nin"):
        refuse(f"{path}.type", f"Invalid '{path}.type'. Supported values are: {kinds}.")
    read = _COMPARISON({name: said for name, said in value.items() if name != "value"}, path)
    if value.get("value") is None:
        missing(f"{path}.value")
    room[0] -= len(value["value"]) if isinstance(value["value"], list) else 1
    if room[0] < 0:
        refuse(path, f"Invalid '{path}': a filter compares with {MAX_COMPARED} values at most.")
    shape = _VALUES if value["type"] in ("in", "nin") else _value
    return {**read, "value": shape(value["value"], f"{path}.value")}


FILTER = described(_filter, lambda: _SCHEMA)
"""The shape of a filter."""

_PLAIN: Schema = {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}
_SCHEMA: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": [*_COMPARED, "in", "nin", "and", "or"]},
        "key": {"type": "string"},
        "value": {"anyOf": [*_PLAIN["anyOf"], {"type": "array", "items": _PLAIN}]},
        "filters": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["type"],
}


def attributes(value: Any, path: str) -> Any:
    """The shape of the attributes of a file: at most 16 strings, numbers and booleans."""
    if not isinstance(value, dict):
        mistyped(path, "an object", value)
    check_length(path, len(value), "object", most=16)
    for key, said in value.items():
        if not 0 < len(key) <= 64:
            refuse(f"{path}.{shorten(key)}", f"Invalid '{path}': a key has 1 to 64 characters.")
        _value(said, f"{path}.{shorten(key)}")
        if isinstance(said, int) and not isinstance(said, bool):
            check_range(f"{path}.{shorten(key)}", said, "integer", -(1 << 63), (1 << 63) - 1)
    return dict(value)


described(attributes, lambda: {"type": "object", "maxProperties": 16, "additionalProperties": _PLAIN})


def compiled(filter: Filter) -> Test:
    """The test of attributes that a filter is. An attribute that a file does not have, or has as a value of
    another kind, equals nothing and compares with nothing."""
    kind = filter["type"]
    if kind in ("and", "or"):
        tests = [compiled(each) for each in filter["filters"]]
        together = all if kind == "and" else any
        return lambda told: together(test(told) for test in tests)
    key, wanted = filter["key"], filter["value"]
    if kind in ("in", "nin"):
        return lambda told: any(_equal(told.get(key), each) for each in wanted) == (kind == "in")
    if kind in ("eq", "ne"):
        return lambda told: _equal(told.get(key), wanted) == (kind == "eq")
    compare = _COMPARED[kind]
    return lambda told: _comparable(told.get(key), wanted) and compare(told[key], wanted)


def _equal(has: Any, wanted: Any) -> bool:
    return _kind(has) == _kind(wanted) and bool(has == wanted)


def _comparable(has: Any, wanted: Any) -> bool:
    return _kind(has) == _kind(wanted) in ("number", "string")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "string" if isinstance(value, str) else "none"
