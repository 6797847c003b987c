"""Bare texts and Python literals as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parsing.coercion import Shapes, Types, json_of, literal
from engine.types import ToolShape

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_python_s_own_spelling_and_json_s_are_read(value: Any) -> None:
    assert literal(repr(value)) == value
    assert literal(json.dumps(value)) == value or "\\ud" in json.dumps(value)  # pairs of escapes stay escapes
    assert json.loads(json_of(repr(value), frozenset({"object"}))) == value


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("(1, 'a',)", [1, "a"]),
        ("{1: 2, None: 3, 'b': {}}", {"1": 2, "null": 3, "b": {}}),
        ("'a' \"b\"", "ab"),
        ("'''it's\n\"so\"'''", 'it\'s\n"so"'),
        ("r'\\d'", "\\d"),
        ("'\\d\\x4'", "\\d\\x4"),
        ("-1_000", -1000),
        ("+1.5e3", 1500.0),
    ],
)
def test_literals(source: str, value: Any) -> None:
    assert literal(source) == value


@pytest.mark.parametrize(
    "source", ["", "x", "f()", "1 + 1", "[1", "{1}", "'a", "1 2", "[" * 5000, "9" * 5000, "__import__('os')"]
)
def test_what_is_no_literal(source: str) -> None:
    with pytest.raises(ValueError):
        literal(source)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("42", None, 42),
        ("42", {"string"}, "42"),
        ("42", {"integer"}, 42),
        (" true\n", {"boolean"}, True),
        ("True", {"boolean"}, True),
        ("True", None, "True"),
        ("None", {"object", "null"}, None),
        ("null", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ("a b", {"integer"}, "a b"),
        ("{'a': 1}", {"object"}, {"a": 1}),
        ('{"a": 1}', None, {"a": 1}),
        ("NaN", None, "NaN"),
        ("[" * 5000, {"array"}, "[" * 5000),
        ('"\\ud800"', None, '"\\ud800"'),
        ("", {"integer"}, ""),
    ],
)
def test_bare_texts(text: str, types: set[str] | None, value: Any) -> None:
    known: Types | None = None if types is None else frozenset(types)
    assert json.loads(json_of(text, known)) == value


def test_types_of_parameters() -> None:
    schema = {
        "properties": {
            "plain": {"type": "string"},
            "either": {"type": ["integer", "null"]},
            "choice": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]},
            "listed": {"enum": ["a", 1]},
            "fixed": {"const": None},
            "open": {},
            "loop": {"$ref": "#/$defs/loop"},
            "spelled": {"$ref": "#/$defs/a~1b%20c/oneOf/1"},
            "odd": 5,
        },
        "$defs": {
            "n": {"type": "number"},
            "loop": {"$ref": "#/$defs/loop"},
            "a/b c": {"oneOf": [{"type": "array"}, {"type": "string"}]},
        },
    }
    shapes = Shapes((ToolShape("f", json.dumps(schema)), ToolShape("broken", "{"), ToolShape("list", "[]")))
    found = {name: shapes.types("f", name) for name in shapes.parameters("f")}
    assert found == {
        "plain": {"string"},
        "either": {"integer", "null"},
        "choice": {"string", "number"},
        "listed": {"string", "integer"},
        "fixed": {"null"},
        "open": None,
        "loop": None,
        "spelled": {"string"},
        "odd": None,
    }
    assert shapes.names == ("f", "broken", "list")
    for name in ("broken", "list", "unknown"):
        assert shapes.parameters(name) == () and shapes.types(name, "x") is None


def choices(name: str, count: int) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/$defs/{name}"}] * count}


@pytest.mark.parametrize(
    ("definitions", "types"),
    [
        ({"a": choices("a", 20)}, None),
        (
            {"a": choices("b", 20), "b": choices("c", 20), "c": choices("d", 20), "d": {"type": "null"}},
            {"null"},
        ),
    ],
    ids=["a circle", "one behind another"],
)
def test_types_are_found_in_one_walk_however_references_lead(
    definitions: dict[str, Any], types: set[str] | None
) -> None:
    schema = json.dumps({"properties": {"x": choices("a", 20)}, "$defs": definitions})
    shapes, calls = Shapes((ToolShape("f", schema),)), Counter[str]()

    def count(_: FrameType, event: str, __: Any) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        found = shapes.types("f", "x")
    finally:
        sys.setprofile(None)
    assert found == types
    assert calls["call"] < 20 * schema.count("$ref")
