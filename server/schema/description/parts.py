"""What descriptions are put together of."""

from __future__ import annotations

from collections.abc import Mapping

from server.shapes import Schema, or_null

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
STOPPED: Schema = {
    **STRING,
    "description": "An extension: what ended the response, where that is no limit on tokens.",
}
RETRY_AFTER: Schema = {
    **INTEGER,
    "description": "An extension: seconds after which the request may succeed.",
}


def ref(name: str) -> Schema:
    """A schema by its name in the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def listed(items: Schema, **bounds: int) -> Schema:
    """An array of such values."""
    return {"type": "array", "items": items, **bounds}


def mapped(values: Schema) -> Schema:
    """An object of such values, by names that are not known before."""
    return {"type": "object", "additionalProperties": values}


def of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of which members may be left out, or be null, where they are optional."""
    properties = {**required, **{name: or_null(schema) for name, schema in (optional or {}).items()}}
    return {"type": "object", "properties": properties, **({"required": [*required]} if required else {})}


def nullable(members: Mapping[str, Schema]) -> dict[str, Schema]:
    """Members that are always there, and may be null."""
    return {name: or_null(schema) for name, schema in members.items()}


def with_others(schema: Schema) -> Schema:
    """An object that may have members besides those that are named: what a client has sent, given back."""
    return {**schema, "additionalProperties": True}


def page_of(items: Schema, more: Mapping[str, Schema] | None = None) -> Schema:
    """A page of a list. more: what it says besides."""
    ends = {**nullable({"first_id": STRING, "last_id": STRING}), "has_more": BOOLEAN}
    return of({"object": {"const": "list"}, "data": listed(items), **ends, **(more or {})})


METADATA: Schema = {**mapped(STRING), "maxProperties": 16}
ATTRIBUTES = mapped({"type": ["string", "number", "boolean"]})

_KINDS = ("input", "cached", "output", "tool_output")
USAGE = of(
    {
        **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), INTEGER),
        "input_tokens_details": of(dict.fromkeys(("cached_tokens", "cache_write_tokens"), INTEGER)),
        "output_tokens_details": of({"reasoning_tokens": INTEGER}, {"tool_output_tokens": INTEGER}),
    },
    {f"{kind}_tokens_per_turn": listed(INTEGER) for kind in _KINDS},
)
"""The usage of a response. What is optional was not counted by earlier versions of this server."""

JUDGED: Mapping[str, Schema] = {
    "flagged": BOOLEAN,
    "categories": mapped(BOOLEAN),
    "category_scores": mapped(NUMBER),
    "category_applied_input_types": mapped(listed(STRING)),
}
"""What moderation finds of a text, by category."""
VERDICT = of({"type": {"const": "moderation_result"}, "model": STRING, **JUDGED})
"""What moderation found of a text."""
UNJUDGED = of({"type": {"const": "error"}, "code": STRING, "message": STRING})
"""What stands in its place where a text was not judged."""

OBFUSCATION: Schema = {
    **STRING,
    "description": "Hides how long the text of the event is, with `include_obfuscation`.",
}
