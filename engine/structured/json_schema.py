"""Rewrites a JSON Schema so that llguidance can enforce it.

It walks the schema, refuses what is not a schema, and bounds how long compiling can take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from math import inf, isnan
from typing import Any

from engine.parsing import MAX_DEPTH
from engine.references import pointed, steps_to
from engine.structured.keyword_rules import RULES, Place, refuse
from engine.structured.keywords import COUNTS, LISTS, NAMED, PLAIN, SINGLE
from engine.structured.recursion import endless
from engine.structured.regexes import check_fixed, check_pattern
from engine.structured.schema_algebra import TYPES, Schema
from engine.types import ConstraintError

# What json.dumps(value, ensure_ascii=False), so every chat template's `tojson`, writes: what is decoded is
# rendered again character for character. Letters are the escapes it uses (u: control characters, and without
# it values that contain one could not be written); other characters stand as they are.
LAYOUT = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": '"\\bfnrtu',
}

# Compiling takes time with the square of an object's properties, 0.15 s for a thousand, before any limit of
# llguidance's own holds; and with the number of subschemas. A step has room for some four states of each
# optional property.
MAX_SQUARES = 1_000_000
MAX_OPTIONAL = 450
MAX_PARTS = 4_000
MAX_COUNT = 1 << 31  # of characters, items or properties
MAX_STEPS = 10_000  # of comparing schemas
MAX_INT64 = (1 << 63) - 1

_FORMS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*NAMED, "dependentRequired"), (dict,)),
    **dict.fromkeys((*LISTS, "enum", "required"), (list,)),
    **dict.fromkeys(SINGLE, (dict, bool)),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    **dict.fromkeys(COUNTS, (int,)),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (int, float, bool)),
    "items": (dict, bool, list),
    "type": (str, list),
}
"""The forms that the values of keywords have."""
_TYPES = frozenset({*TYPES, "integer"})


def read_schema(text: str) -> Schema:
    """A schema's text as an object; ConstraintError for what is not a schema."""
    try:
        schema = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConstraintError("the schema is not a JSON Schema object")
    return schema


def rewrite(schema: Schema) -> Schema:
    """A schema in the keywords that llguidance enforces.

    Raises ConstraintError naming the keyword that cannot be honoured, and where it stands.
    """
    weigh([schema])
    schema = _with_whole_counts(schema)
    place = Place(schema, (), iter(range(MAX_STEPS)), frozenset(_anchors(schema)))
    rewritten = _rewrite(schema, place)
    if rewritten is False:
        raise ConstraintError("nothing fits the schema")
    weigh([rewritten])
    if (circle := endless(rewritten)) is not None:
        target, path = circle
        raise refuse("$ref", place._replace(path=path), f"what stands at {target[:128]!r} never ends")
    return dict(rewritten)


def unlisted(schema: Schema) -> tuple[str, tuple[str | int, ...]] | None:
    """A property that a schema requires, and by a closed list of properties forbids, and the place of the
    object that does so; None where there is none on the way that every value takes."""
    pending: list[tuple[Any, tuple[str | int, ...]]] = [(schema, ())]
    for part, place in pending:
        if not isinstance(part, dict) or len(pending) > MAX_PARTS:
            continue
        target = part.get("$ref")
        if isinstance(target, str) and (found := pointed(target, schema)) is not None:
            pending.append((found, steps_to(target)))
        listed = part.get("properties", {})
        for name in part.get("required", ()):
            if name in listed:
                pending.append((listed[name], (*place, "properties", name)))
            elif part.get("additionalProperties") is False and "patternProperties" not in part:
                return name, place
        pending += [(each, (*place, "allOf", index)) for index, each in enumerate(part.get("allOf", ()))]
        if part.get("minItems", 0) > 0 and isinstance(part.get("items"), dict):
            pending.append((part["items"], (*place, "items")))
    return None


def written(schema: Schema) -> str:
    """The text of a schema that was rewritten."""
    try:
        return json.dumps({**schema, "x-guidance": LAYOUT}, allow_nan=False)
    except ValueError:
        raise ConstraintError("the schema has a number that is too large") from None


def weigh(schemas: list[Schema]) -> None:
    """Raise ConstraintError where schemas that are compiled together would take too long."""
    parts = squares = 0
    pending: list[tuple[Any, int]] = [(schema, 0) for schema in schemas]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ConstraintError(f"the schema is nested more than {MAX_DEPTH} levels deep")
        parts += 1
        if isinstance(value, dict):
            listed, required = (value.get(key) or () for key in ("properties", "required"))
            if isinstance(listed, dict) and isinstance(required, list | tuple):
                squares += max(len(listed), len(required)) ** 2
                if len(listed) - len(required) > MAX_OPTIONAL:
                    raise ConstraintError(f"an object has more than {MAX_OPTIONAL} optional properties")
            if isinstance(pattern := value.get("pattern"), str):
                check_pattern(pattern)
            pending += [(part, depth + 1) for part in value.values() if isinstance(part, dict | list)]
        elif isinstance(value, list):
            pending += [(part, depth + 1) for part in value if isinstance(part, dict | list)]
        if squares > MAX_SQUARES:
            raise ConstraintError("the schema has too many properties")
        if parts > MAX_PARTS:
            raise ConstraintError(f"the schema has more than {MAX_PARTS} parts")


def _with_whole_counts(schema: Any) -> Any:
    """A schema whose counts are integers, as 1.0 is one by the standard."""
    if isinstance(schema, list):
        return [_with_whole_counts(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out: Schema = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            out[key] = {name: _with_whole_counts(part) for name, part in value.items()}
        elif key in COUNTS and isinstance(value, float) and value.is_integer():
            out[key] = int(value)
        else:
            out[key] = value if key in PLAIN else _with_whole_counts(value)
    return out


def _rewrite(schema: Any, place: Place) -> Any:
    """A subschema, rewritten; false where nothing fits it."""
    if not isinstance(schema, dict):
        return schema
    _check(schema, place)
    _check_fixed(schema, place)
    out: Schema = {}
    for key, value in schema.items():
        if key in PLAIN:
            out[key] = value
        elif key in NAMED and isinstance(value, dict):
            out[key] = {name: _rewrite(part, place.below(key, name)) for name, part in value.items()}
        else:
            try:
                out[key] = _part(value, place.below(key))
            except ConstraintError:
                if key in _FORMS:
                    raise
                # An annotation says nothing of what fits, so it need not be a schema: only a reference to it
                # would, and finds nothing.
    for keyword, rule in RULES:
        if keyword in out and rule(out, place) is False:
            return False
    return out


def _part(value: Any, place: Place) -> Any:
    if isinstance(value, list):
        return [_rewrite(part, place.below(index)) for index, part in enumerate(value)]
    return _rewrite(value, place)


def _anchors(value: Any) -> Iterator[str]:
    """The names that parts of a schema give themselves."""
    if isinstance(value, dict):
        yield from (name for key in ("$anchor", "$dynamicAnchor") if isinstance(name := value.get(key), str))
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _anchors(part)


def _check(schema: Schema, place: Place) -> None:
    """Raise ConstraintError for a keyword whose value has another form than the standard gives it."""
    for keyword in schema.keys() & _FORMS.keys():
        value, forms = schema[keyword], _FORMS[keyword]
        fits = isinstance(value, forms) and (not isinstance(value, bool) or bool in forms)
        if not fits or not _fits(keyword, value):
            raise refuse(keyword, place, "its value has another form")
        if keyword == "type":
            named = value if isinstance(value, list) else [value]
            unknown = next((each for each in named if each not in _TYPES), None)
            if unknown is not None or not named:
                what = "it names no type" if unknown is None else f"there is no type {unknown[:64]!r}"
                raise refuse("type", place, what)


def _check_fixed(schema: Schema, place: Place) -> None:
    """Raise ConstraintError for a value or a name that would be written as it stands and is too long."""
    values = [("const", schema["const"])] if "const" in schema else []
    values += [("enum", each) for each in schema.get("enum", ())]
    named = [(key, name) for key in ("properties", "required") for name in schema.get(key, ())]
    for keyword, value in (*values, *named):
        try:
            check_fixed(value if isinstance(value, str) else json.dumps(value))
        except ConstraintError as error:
            raise refuse(keyword, place, str(error)) from None
        if (lost := _lost(value)) is not None:
            raise refuse(keyword, place, f"{str(lost)[:32]} is not written exactly")


def _lost(value: Any) -> int | None:
    """An integer in a value of which llguidance would write other digits: it reads numbers as floats."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return next((lost for part in parts if (lost := _lost(part)) is not None), None)
    if not isinstance(value, int) or value == MAX_INT64:  # where its integers end, too large a float ends
        return None
    near = float(value) if abs(value) < 10**300 else inf
    kept = int(near) if abs(near) < MAX_INT64 else Decimal(repr(near))
    return None if kept == value else value


def _fits(keyword: str, value: Any) -> bool:
    """Whether what a keyword's value holds has the form that the standard gives it."""
    if keyword in COUNTS:
        return 0 <= int(value) < MAX_COUNT
    if keyword == "multipleOf":
        return bool(value > 0)
    if isinstance(value, float):
        return not isnan(value)
    if keyword in NAMED or keyword == "dependentRequired":
        lists = keyword in ("dependentRequired", "dependencies")
        schemas = (dict, bool) if keyword in NAMED else ()
        return all(
            lists and _are(each, str) if isinstance(each, list) else isinstance(each, schemas)
            for each in value.values()
        )
    if keyword in LISTS or (keyword == "items" and isinstance(value, list)):
        return _are(value, dict, bool)
    return keyword not in ("required", "type") or not isinstance(value, list) or _are(value, str)


def _are(values: list[Any], *forms: type) -> bool:
    return all(isinstance(each, forms) for each in values)
