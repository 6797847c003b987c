"""Finds references in a schema that form a circle which no finite value satisfies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from engine.references import pointed, steps_to
from engine.structured.schema_algebra import Schema, kinds

T = TypeVar("T")
Path = tuple[str | int, ...]

MAX_PASSES = 64  # over references that wait for others; a chain that is longer passes unseen

_NAMED = ("properties", "patternProperties")
_LISTED = ("allOf", "anyOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")


def endless(schema: Schema) -> tuple[str, Path] | None:
    """A reference that a value may get to and that nothing of finite length fits, and the place where it
    stands; None where there is none. schema: as it was rewritten.

    Optional properties count: whoever begins one cannot end it.
    """
    places = dict(_references(schema, ()))
    pending = list(places)
    while pending:
        target = pending.pop()
        for other, place in _references(pointed(target, schema), steps_to(target)):
            if other not in places:
                places[other] = place
                pending.append(other)
    found: set[str] = set()
    for _ in range(MAX_PASSES):
        more = {each for each in places.keys() - found if _ends(pointed(each, schema), found.__contains__)}
        if not more:
            break
        found |= more
    else:
        return None
    return next(((target, place) for target, place in places.items() if target not in found), None)


def _references(schema: Any, path: Path) -> Iterator[tuple[str, Path]]:
    """What is referred to in a schema outside of its definitions, and where."""
    if not isinstance(schema, dict):
        return
    if target := _held(schema, "$ref", str):
        yield target, path
    for key in _SINGLE:
        yield from _references(schema.get(key), (*path, key))
    for key in _LISTED:
        for index, part in enumerate(_held(schema, key, list)):
            yield from _references(part, (*path, key, index))
    for key in _NAMED:
        for name, part in _held(schema, key, dict).items():
            yield from _references(part, (*path, key, name))


def _ends(schema: Any, known: Callable[[str], bool]) -> bool:
    """False where every value of a schema would hold one of a reference that is not known to end."""
    if not isinstance(schema, dict):
        return True
    if (target := _held(schema, "$ref", str)) and not known(target):
        return False
    if not all(_ends(part, known) for part in _held(schema, "allOf", list)):
        return False
    branches = _held(schema, "anyOf", list)
    if branches and not any(_ends(part, known) for part in branches):
        return False
    if "enum" in schema or "const" in schema:
        return True
    inside = {"object": _needed, "array": _first}
    return any(
        kind not in inside or all(_ends(part, known) for part in inside[kind](schema))
        for kind in kinds(schema)
    )


def _needed(schema: Schema) -> list[Any]:
    properties = _held(schema, "properties", dict)
    return [properties[name] for name in _held(schema, "required", list) if name in properties]


def _first(schema: Schema) -> list[Any]:
    """What an array begins with, what follows the listed ones once."""
    least, listed, rest = (
        _held(schema, "minItems", int),
        _held(schema, "prefixItems", list),
        schema.get("items"),
    )
    if isinstance(rest, list):
        listed, rest = rest, schema.get("additionalItems")
    return [*listed[:least], *([rest] if least > len(listed) else [])]


def _held(schema: Schema, key: str, kind: type[T]) -> T:
    """A keyword's value; nothing for one of another kind: a reference may lead to what is no schema, such as
    the properties of one, which may have any names."""
    value = schema.get(key)
    return value if isinstance(value, kind) else kind()
