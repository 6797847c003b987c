"""What descriptions are put together of."""

from __future__ import annotations

from collections.abc import Mapping

from server.shapes import Schema, or_null

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
METADATA: Schema = {"type": "object", "additionalProperties": STRING, "maxProperties": 16}


def ref(name: str) -> Schema:
    """A schema by its name in the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def listed(items: Schema, **bounds: int) -> Schema:
    """An array of such values."""
    return {"type": "array", "items": items, **bounds}


def of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of which members may be left out, or be null, where they are optional."""
    properties = {**required, **{name: or_null(schema) for name, schema in (optional or {}).items()}}
    return {"type": "object", "properties": properties, **({"required": [*required]} if required else {})}


def page_of(items: Schema) -> Schema:
    """A page of a list."""
    ends = {"first_id": or_null(STRING), "last_id": or_null(STRING), "has_more": BOOLEAN}
    return of({"object": {"const": "list"}, "data": listed(items), **ends})


_BY_TURN = listed(INTEGER)
USAGE = of(
    {
        "input_tokens": INTEGER,
        "input_tokens_details": of({"cached_tokens": INTEGER}),
        "output_tokens": INTEGER,
        "output_tokens_details": of({"reasoning_tokens": INTEGER}, {"tool_output_tokens": INTEGER}),
        "total_tokens": INTEGER,
    },
    {
        "input_tokens_per_turn": _BY_TURN,
        "cached_tokens_per_turn": _BY_TURN,
        "output_tokens_per_turn": _BY_TURN,
        "tool_output_tokens_per_turn": _BY_TURN,
    },
)
"""The usage of a response."""
