"""Closes a client's JSON Schema, where that is safe: properties that it does not list are not allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.references import pointed
from engine.structured.keywords import NAMED, PLAIN, schemas
from engine.structured.schema_algebra import resolved


def closed_schema(schema: Mapping[str, Any]) -> str:
    """The JSON Schema text that the decoder enforces for a client's schema.

    Objects that list properties, or patterns of their names, and say nothing of others are closed: every text
    that fits the closed schema fits the client's, and a small model is kept from inventing properties. What
    adds to properties that are listed elsewhere is left open, and so is what it adds to, by reference too,
    since each part would then forbid what the other lists.
    """
    return json.dumps(_closed(schema, _left_open(schema)))


_TURNING = frozenset({"not", "if"})
_ADDING = frozenset({"then", "else", "dependentSchemas", "dependencies"})
_CHOOSING = frozenset({"anyOf", "oneOf"})
_COMBINING = _TURNING | _ADDING | _CHOOSING | {"$ref", "allOf"}
_MEMBERS = frozenset({"properties", "additionalProperties", "items", "prefixItems", "additionalItems"})
"""One of these alone describes each member of a value."""
_ALSO_MEMBERS = frozenset({"patternProperties", "contains"})
_LISTING = (_COMBINING - _TURNING) | _MEMBERS | _ALSO_MEMBERS
_DEFINING = frozenset({"$defs", "definitions"})


def _closed(schema: Any, left_open: set[int]) -> Any:
    if isinstance(schema, list):
        return [_closed(part, left_open) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            closed[key] = {name: _closed(part, left_open) for name, part in value.items()}
        else:
            closed[key] = value if key in PLAIN else _closed(value, left_open)
    if id(schema) not in left_open and _lists_all(schema):
        closed.setdefault("additionalProperties", False)
    return closed


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """Whether an object lists properties, all that it requires among them, or patterns of their names, and no
    combinator may add more."""
    combined = schema.keys() & (_COMBINING - {"dependencies"}) or _held(schema, "dependencies")
    names = schema.get("properties", schema.get("patternProperties"))
    return isinstance(names, dict) and not combined and _lists(schema, _required(schema))


def _left_open(root: Mapping[str, Any]) -> set[int]:
    """The ids of the objects in a schema that other parts of it add to, or turn round."""
    left_open: set[int] = set()
    seen: set[int] = set()
    todo: list[tuple[Any, bool]] = [(root, False)]
    while todo:
        part, added = todo.pop()
        known = left_open if added else seen
        if not isinstance(part, dict) or id(part) in known:
            continue
        known.add(id(part))
        added = added or _add(part, root)
        if isinstance(target := part.get("$ref"), str):
            todo.append((pointed(target, root), added))
        for key in part:
            inside = key in _TURNING | _ADDING or (added and key not in _DEFINING)
            todo += [(each, inside) for each in _held(part, key)]
    return left_open


def _add(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether several parts of a schema may list members of one value, or one requires what another that
    lists them does not."""
    groups = [[each] for key in ("allOf", *_ADDING) for each in _held(schema, key)]
    groups += [_held(schema, key) for key in _CHOOSING]
    groups += [[{"$ref": schema["$ref"]}]] if "$ref" in schema else []
    listing = [group for group in groups if any(map(_lists_some, group))]
    if len(listing) + bool(schema.keys() & _MEMBERS) > 1:
        return True
    more = any(_lists_some(each) for key in _ALSO_MEMBERS for each in _held(schema, key))
    if more and any(_lists_some(each) for key in _MEMBERS for each in _held(schema, key)):
        return True
    silent = (each for group in groups for each in group if not _lists_some(each))
    required = _required(schema).union(*map(_required, silent))
    found = {id(own): own for group in listing for each in group if _lists_some(own := resolved(each, root))}
    return any(not _lists(own, required) for own in found.values())


def _lists_some(schema: Any) -> bool:
    return isinstance(schema, dict) and not _LISTING.isdisjoint(schema)


def _lists(schema: Any, names: set[str]) -> bool:
    """Whether a schema lists all these properties."""
    listed = schema.get("properties") if isinstance(schema, dict) else None
    return names <= (listed.keys() if isinstance(listed, dict) else set())


def _required(schema: Any) -> set[str]:
    """The properties that a schema may require."""
    if not isinstance(schema, dict):
        return set()
    lists = [schema.get("required")]
    for key in ("dependentRequired", "dependencies"):
        lists += value.values() if isinstance(value := schema.get(key), dict) else ()
    return {name for each in lists if isinstance(each, list) for name in each if isinstance(name, str)}


def _held(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The schemas that a keyword of a schema holds."""
    return [each for each, _ in schemas(key, schema.get(key), None) if isinstance(each, dict)]
