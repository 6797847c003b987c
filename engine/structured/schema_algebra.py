"""Computes with JSON Schemas: a schema's complement, the values that it lists, whether two share a value.

Answers are certain, or "unknown".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.references import pointed
from engine.structured.regexes import found

Schema = dict[str, Any]

TYPES = ("null", "boolean", "object", "array", "number", "string")
MAX_VALUES = 64  # of a range of integers that is listed
MAX_DEPTH = 8  # of references and choices that are looked through

_RANGES = {
    "string": (("minLength", "maxLength"),),
    "array": (("minItems", "maxItems"),),
    "number": (("minimum", "maximum"), ("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum"),
               ("exclusiveMinimum", "exclusiveMaximum")),
}  # fmt: skip


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that is only a reference refers to; itself where that is not found."""
    for _ in range(MAX_DEPTH):
        target = schema.get("$ref") if isinstance(schema, dict) and schema.keys() == {"$ref"} else None
        found = pointed(target, root) if isinstance(target, str) else None
        if found is None:
            return schema
        schema = found
    return schema


def kinds(schema: Any) -> tuple[str, ...]:
    """The types that a schema names, every type where it names none; an integer is a number."""
    named = schema.get("type") if isinstance(schema, dict) else None
    listed = named if isinstance(named, list) else TYPES if named is None else [named]
    return tuple(dict.fromkeys("number" if kind == "integer" else str(kind) for kind in listed))


def values(schema: Any) -> list[Any] | None:
    """All values that may fit a schema, where it lists them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "boolean":
            return [False, True]
        case "null":
            return [None]
        case "integer" if isinstance(low, int) and isinstance(high, int) and high - low < MAX_VALUES:
            return [each for each in range(low, high + 1) if _fits(each, schema)]
    return None


def told(value: Any) -> str:
    """A JSON value as text, the same for those that are equal to JSON Schema: 1 is 1.0, and not true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _fits(value: int, schema: Schema) -> bool:
    step, below, above = (schema.get(key) for key in ("multipleOf", "exclusiveMaximum", "exclusiveMinimum"))
    return (
        (not isinstance(step, int) or step < 1 or value % step == 0)
        and (not isinstance(below, int | float) or isinstance(below, bool) or value < below)
        and (not isinstance(above, int | float) or isinstance(above, bool) or value > above)
    )


# ------------------------------------------------------------------------------------------------------------
# Two schemas


def apart(one: Any, other: Any, root: Mapping[str, Any], steps: Iterator[int], depth: int = 0) -> bool:
    """Whether certainly no value fits both; not certain any more once the steps have run out."""
    if next(steps, None) is None:
        return False
    one, other = resolved(one, root), resolved(other, root)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_DEPTH:
        return False
    for left, right in ((one, other), (other, one)):
        for key in ("anyOf", "oneOf"):
            choices = left.get(key)
            if isinstance(choices, list) and all(
                apart(each, right, root, steps, depth + 1) for each in choices
            ):
                return True
        parts = left.get("allOf")
        if isinstance(parts, list) and any(apart(each, right, root, steps, depth + 1) for each in parts):
            return True
        listed = values(left)
        if listed is not None and all(refused(value, right) for value in listed):
            return True
    common = set(kinds(one)) & set(kinds(other))
    return all(_apart_as(kind, one, other, root, steps, depth) for kind in common)


def _apart_as(
    kind: str, one: Schema, other: Schema, root: Mapping[str, Any], steps: Iterator[int], depth: int
) -> bool:
    """Whether no value of this type fits both."""
    if kind == "object":
        return any(
            apart(_property(left, name), _property(right, name), root, steps, depth + 1)
            for left, right in ((one, other), (other, one))
            for name in right.get("required", ())
        )
    return any(_gap(left, right, *ends) for left, right in ((one, other), (other, one))
               for ends in _RANGES.get(kind, ()))  # fmt: skip


def _property(schema: Schema, name: str) -> Any:
    """What a schema wants of a property."""
    listed = schema.get("properties")
    if isinstance(listed, dict) and name in listed:
        return listed[name]
    return {} if "patternProperties" in schema else schema.get("additionalProperties", {})


def _gap(above: Schema, below: Schema, least: str, most: str) -> bool:
    low, high = above.get(least), below.get(most)
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return False
    if isinstance(low, bool) or isinstance(high, bool):  # draft 4 wrote flags
        return False
    return low > high or (low == high and "exclusive" in least + most)


def refused(value: Any, schema: Schema) -> bool:
    """Whether a value certainly does not fit."""
    if _type_of(value) not in kinds(schema):
        return True
    if schema.get("type") == "integer" and isinstance(value, float) and not value.is_integer():
        return True
    listed = values(schema)
    # Python's own equality costs less, and holds wherever that of JSON Schema does.
    if listed is not None and (value not in listed or told(value) not in map(told, listed)):
        return True
    exact = {"minimum": value, "maximum": value} if isinstance(value, int | float) else {}
    if isinstance(value, str):
        exact = {"minLength": len(value), "maxLength": len(value)}
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and found(pattern, value) is False:
            return True
    kind = _type_of(value)
    return any(_gap(exact, schema, *ends) or _gap(schema, exact, *ends) for ends in _RANGES.get(kind, ()))


def _type_of(value: Any) -> str:
    known = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return known.get(type(value), "null")


# ------------------------------------------------------------------------------------------------------------
# One schema


def opposite(schema: Any, beside: Schema) -> Any:
    """The opposite of a schema, for values that fit `beside`; None where it cannot be written."""
    if schema in (True, {}) or schema is False:
        return schema not in (True, {})
    if not isinstance(schema, dict):
        return None
    keys = schema.keys() - {"description", "title", "$comment"}
    if keys == {"type"}:
        return _other_types(schema["type"])
    if keys in ({"const"}, {"enum"}, {"const", "type"}, {"enum", "type"}):
        unwanted, known = values(schema), values(beside)
        if known is None or unwanted is None:
            return None
        others = set(map(told, unwanted))
        return {"enum": left} if (left := [value for value in known if told(value) not in others]) else False
    if keys == {"required"} and len(schema["required"]) == 1:
        return {"type": "object", "properties": {schema["required"][0]: False}}
    if keys <= {"properties", "required", "type"} and len(schema.get("properties", ())) == 1:
        return _other_property(schema, beside)
    return None


def _other_types(named: Any) -> Any:
    unwanted = named if isinstance(named, list) else [named]
    if "integer" in unwanted and "number" not in unwanted:
        return None  # numbers that are not integers
    left = [kind for kind in TYPES if kind not in unwanted]
    return {"type": left} if left else False


def _other_property(schema: Schema, beside: Schema) -> Any:
    """The opposite of "this property fits that", in objects."""
    [(name, part)] = schema["properties"].items()
    required = schema.get("required", [])
    if beside.get("type") != "object" or not set(required) <= {name}:
        return None
    own = beside.get("properties", {}).get(name, {})
    other = opposite(part, own if isinstance(own, dict) else {})
    if other is None:
        return None
    branches: list[Any] = [] if other is False else [{"properties": {name: other}, "required": [name]}]
    if required and name not in beside.get("required", ()):
        branches.append({"properties": {name: False}})  # what is required may be missing
    return {"anyOf": branches} if branches else False
