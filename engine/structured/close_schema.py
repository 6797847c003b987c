"""Closes a client's JSON Schema, where that is safe: properties that it does not list are not allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def closed_schema(schema: Mapping[str, Any]) -> str:
    """The JSON Schema text that the decoder enforces for a client's schema.

    Objects that list properties and say nothing of others are closed: every text that fits the closed schema
    fits the client's, and a small model is kept from inventing properties. Under a combinator that adds to
    properties listed elsewhere nothing is closed, since each part would then forbid what the other lists.
    """
    return json.dumps(_close(schema))


_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_PLAIN_VALUES = frozenset({"enum", "const", "default", "examples", "required", "type"})
_ADDING = frozenset({"$ref", "allOf", "not", "if", "then", "else", "dependentSchemas"})
_CHOOSING = frozenset({"anyOf", "oneOf"})


def _close(schema: Any, closing: bool = True) -> Any:
    if not isinstance(schema, dict):
        return schema
    combined = bool(schema.keys() & (_ADDING | _CHOOSING))
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        inside = closing and key not in _ADDING and not (key in _CHOOSING and "properties" in schema)
        if key in _PLAIN_VALUES:
            closed[key] = value
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            closed[key] = {name: _close(part, inside) for name, part in value.items()}
        elif isinstance(value, list):
            closed[key] = [_close(part, inside) for part in value]
        else:
            closed[key] = _close(value, inside)
    if closing and not combined and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed
