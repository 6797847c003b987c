"""The keywords of JSON Schema: what each one holds, and which ones of a schema nothing here heeds."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple

from engine.references import Way, followed
from engine.structured.formats import FORMATS

PLAIN = frozenset(
    {"enum", "const", "default", "example", "examples", "required", "dependentRequired", "type"}
    | {"x-guidance"}
)
"""They hold values, no schemas."""
NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""They hold schemas by name."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""They hold lists of schemas."""
SINGLE = frozenset(
    {"additionalProperties", "propertyNames", "unevaluatedProperties", "contains", "unevaluatedItems"}
    | {"additionalItems", "not", "if", "then", "else"}
)
"""They hold one schema."""
COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"}
    | {"minProperties", "maxProperties"}
)
"""They hold a number of characters, items or properties."""

_ENFORCED = (
    PLAIN | NAMED | LISTS | SINGLE | COUNTS
    | {"items", "uniqueItems", "pattern", "format", "multipleOf", "$ref"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
)  # fmt: skip
_REFUSED = frozenset({"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"})
_ANNOTATIONS = frozenset(
    {"title", "description", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"$schema", "$id", "id", "$anchor", "$vocabulary"}
    | {"contentEncoding", "contentMediaType", "contentSchema"}
    | {"discriminator", "externalDocs", "xml"}  # OpenAPI's
)
"""They say nothing of which values fit; so does what begins with `x-`."""
_KNOWN = _ENFORCED | _REFUSED | _ANNOTATIONS


MAX_UNHEEDED = 512
"""How many are told of one schema."""


class Unheeded(NamedTuple):
    """A keyword of a schema that makes no difference to what fits.

    path: the steps that lead to it, from the schema's root. known: the standard has it, and leaves to the
    reader whether to enforce its value (an unknown `format`).
    """

    path: tuple[str | int, ...]
    known: bool

    def meant(self) -> str | None:
        """The keyword that is written much like it; None where there is none."""
        near = get_close_matches(str(self.path[-1])[:64], sorted(_ENFORCED | _ANNOTATIONS), 1)
        return near[0] if near else None


def unheeded(schema: Any) -> list[Unheeded]:
    """The keywords of a schema that are neither enforced, nor refused, nor mere annotations, in the order in
    which they are met, `MAX_UNHEEDED` at most. What a `$ref` of the schema leads through is heeded. Takes any
    JSON value."""
    found: dict[tuple[int, str | int], tuple[Way, bool]] = {}  # by the object and its member
    led_through: set[tuple[int, str | int]] = set()
    seen: set[int] = set()
    todo: list[tuple[Any, Way]] = [(schema, None)]
    for part, way in todo:  # no recursion: a client says how deep it goes
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        for keyword, value in part.items():
            here = (way, keyword)
            if keyword not in _KNOWN and not keyword.startswith("x-"):
                found[id(part), keyword] = here, False
            elif keyword == "format" and isinstance(value, str) and value not in FORMATS:
                found[id(part), keyword] = here, True
            elif keyword == "$ref" and isinstance(value, str):
                members, target = followed(value, schema)
                led_through.update(members)
                todo += target
            todo += schemas(keyword, value, here)
    told = ((way, known) for member, (way, known) in found.items() if member not in led_through)
    return [Unheeded(_path(way), known) for way, known in islice(told, MAX_UNHEEDED)]


def _path(way: Way) -> tuple[str | int, ...]:
    steps: list[str | int] = []
    while way is not None:
        way, step = way
        steps.append(step)
    return tuple(reversed(steps))


def schemas(keyword: str, value: Any, way: Way) -> Iterator[tuple[Any, Way]]:
    """The schemas that a keyword holds, and where; `way` leads to the keyword's value."""
    if keyword in NAMED and isinstance(value, dict):
        yield from ((each, (way, name)) for name, each in value.items())
    elif (keyword in LISTS or keyword == "items") and isinstance(value, list):
        yield from ((each, (way, index)) for index, each in enumerate(value))
    elif keyword in SINGLE or keyword == "items":
        yield value, way
