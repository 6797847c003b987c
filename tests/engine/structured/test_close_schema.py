"""Closed schemas: they forbid what nobody listed, and nothing that a part of the client's schema lists."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine import closed_schema
from engine.types import Constraint, Shape
from tests.engine.structured.test_shapes import accepts

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}


def thing(*names: str, **more: Any) -> Schema:
    """An object of texts, all of them required."""
    return {"type": "object", "properties": dict.fromkeys(names, STRING), "required": [*names], **more}


BASE: Schema = {"$ref": "#/$defs/Base"}
DEFS: Schema = {"$defs": {"Base": thing("id")}}


def takes(schema: Schema, value: Any) -> bool:
    return accepts("bytes", Constraint(answer=Shape("json", closed_schema(schema))), json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({**DEFS, "allOf": [BASE, thing("extra")]}, {"id": "a", "extra": "b"}),
        ({**DEFS, "allOf": [BASE, {"type": "object", "properties": {"extra": STRING}}]},
         {"id": "a", "extra": "b"}),
        ({**DEFS, "allOf": [{"allOf": [BASE]}, thing("extra")]}, {"id": "a", "extra": "b"}),
        ({**DEFS, "allOf": [BASE, {"required": ["extra"]}]}, {"id": "a", "extra": "b"}),
        ({**DEFS, **BASE, "required": ["extra"]}, {"id": "a", "extra": "b"}),
        ({**DEFS, "type": "array", "items": {**BASE, "properties": {"extra": STRING}}},
         [{"id": "a", "extra": "b"}]),
        ({**DEFS, **BASE, "type": "object", "anyOf": [thing("x"), thing("y")]}, {"id": "a", "x": "b"}),
        ({**DEFS, **BASE, "type": "object", "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
         {"id": "a", "x": "b"}),
        ({**thing("x"), "$defs": {"Base": thing("id"), "More": {"allOf": [BASE, thing("y")]}},
          "properties": {"x": {"$ref": "#/$defs/More"}}}, {"x": {"id": "a", "y": "b"}}),
        ({"definitions": {"deep": {"properties": {"p": {"$ref": "#/definitions/in"}}}, "in": thing("a")},
          "type": "object", "allOf": [{"$ref": "#/definitions/deep"}, {"properties": {"p": thing("b")}}],
          "required": ["p"]}, {"p": {"a": "x", "b": "y"}}),
        ({"type": "object", "properties": {"p": thing("a")}, "allOf": [{"properties": {"p": thing("b")}}],
          "required": ["p"]}, {"p": {"a": "x", "b": "y"}}),
        ({**thing("a"), "properties": {"a": STRING, "b": STRING},
          "dependencies": {"a": {"properties": {"b": {"type": "string", "minLength": 2}}}}},
         {"a": "x", "b": "yy"}),
        ({"type": "object", "properties": {"a": STRING}, "required": ["a", "b"]}, {"a": "x", "b": 1}),
        ({"type": "object", "properties": {"a": STRING}, "dependentRequired": {"a": ["b"]}},
         {"a": "x", "b": 1}),
        ({"type": "object", "required": ["k"], "anyOf": [thing("a"), thing("k")]}, {"a": "x", "k": "y"}),
        ({"type": "array", "items": {"type": "object", "properties": {"a": STRING}}, "contains": thing("b"),
          "maxItems": 1}, [{"a": "x", "b": "y"}]),
    ],
)  # fmt: skip
def test_what_one_part_lists_no_other_forbids(schema: Schema, value: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(value)
    assert takes(schema, value)


def test_what_must_not_fit_is_not_made_less() -> None:
    """Were the object under `not` closed, this would fit."""
    schema = {**thing("k", "x"), "$defs": {"K": {"type": "object", "properties": {"k": {"const": "a"}}}}}
    closed = json.loads(closed_schema({**schema, "not": {"$ref": "#/$defs/K"}}))
    assert closed["$defs"] == schema["$defs"]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({**DEFS, **BASE, "description": "one"}, {"id": "a"}),
        ({**DEFS, "allOf": [BASE], "title": "one"}, {"id": "a"}),
        ({**DEFS, "anyOf": [BASE, {"type": "null"}], "default": None}, {"id": "a"}),
        ({**DEFS, "type": "object", "required": ["id"], "oneOf": [BASE, thing("id", "x")]}, {"id": "a"}),
        ({**DEFS, "type": "object", "properties": {"p": BASE}, "anyOf": [{"required": ["p"]}]},
         {"p": {"id": "a"}}),
        ({**thing("a"), "dependencies": {"a": ["a"]}}, {"a": "x"}),
        ({"type": "object", "patternProperties": {"^p$": thing("a")}, "additionalProperties": False},
         {"p": {"a": "x"}}),
        ({"type": "object", "patternProperties": {"^[a-z]{2}$": {"type": "integer"}}}, {"ab": 1}),
    ],
)  # fmt: skip
def test_what_nothing_adds_to_is_closed(schema: Schema, value: Any) -> None:
    """The value fits, and it does not with one more property, which nobody listed."""
    assert takes(schema, value)
    inner = next((each for each in value.values() if isinstance(each, dict)), value)
    inner["invented"] = "x"
    jsonschema.Draft202012Validator(schema).validate(value)
    assert not takes(schema, value)
