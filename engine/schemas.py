"""JSON Schema as the decoder can enforce it.

Owns: the walk that rewrites a schema so that llguidance takes it, the refusal of what is no schema, and the
bounds that keep compiling short. Refuses to know: dialects, tokens, which schema belongs to which tool, what
a keyword is rewritten as.
"""

from __future__ import annotations

import json
from typing import Any

from engine.opposites import Schema
from engine.patterns import check_repeats
from engine.rules import RULES, Place, refuse
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
MAX_DEPTH = 160
MAX_STEPS = 10_000  # of comparing schemas

_PLAIN = frozenset({"enum", "const", "default", "example", "examples", "required", "type", "x-guidance"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_FORMS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_NAMED, "dependentRequired", "dependencies"), (dict,)),
    **dict.fromkeys(("enum", "allOf", "anyOf", "oneOf", "prefixItems", "required"), (list,)),
    **dict.fromkeys(("pattern", "format", "$ref"), (str,)),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), (int,)
    ),
    **dict.fromkeys(("minContains", "maxContains"), (int,)),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (int, float)),
    "type": (str, list),
}
"""The forms that the values of keywords have."""


def read_schema(text: str) -> Schema:
    """A schema's text as an object; ConstraintError for what is no schema."""
    try:
        schema = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the schema is not JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConstraintError("the schema is not a JSON Schema object")
    return schema


def enforceable(schema: Schema) -> str:
    """The text, for llguidance's `%json`, of a schema that can be enforced.

    Raises ConstraintError naming the keyword that cannot be honoured, and where it stands.
    """
    return written(rewrite(schema))


def rewrite(schema: Schema) -> Schema:
    """A schema in the keywords that llguidance enforces; ConstraintError as `enforceable`."""
    weigh([schema])
    rewritten = _rewrite(schema, Place(schema, "#", iter(range(MAX_STEPS))))
    if rewritten is False:
        raise ConstraintError("nothing fits the schema")
    weigh([rewritten])
    return dict(rewritten)


def written(schema: Schema) -> str:
    """The text of a schema that was rewritten."""
    return json.dumps({**schema, "x-guidance": LAYOUT})


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
                check_repeats(pattern)
            pending += [(part, depth + 1) for part in value.values() if isinstance(part, dict | list)]
        elif isinstance(value, list):
            pending += [(part, depth) for part in value if isinstance(part, dict | list)]
        if squares > MAX_SQUARES:
            raise ConstraintError("the schema has too many properties")
        if parts > MAX_PARTS:
            raise ConstraintError(f"the schema has more than {MAX_PARTS} parts")


def _rewrite(schema: Any, place: Place) -> Any:
    """A subschema, rewritten; false where nothing fits it."""
    if not isinstance(schema, dict):
        return schema
    _check(schema, place)
    out: Schema = {}
    for key, value in schema.items():
        if key in _PLAIN:
            out[key] = value
        elif key in _NAMED and isinstance(value, dict):
            out[key] = {name: _rewrite(part, place.below(key, name)) for name, part in value.items()}
        elif isinstance(value, list):
            out[key] = [_rewrite(part, place.below(key, index)) for index, part in enumerate(value)]
        else:
            out[key] = _rewrite(value, place.below(key))
    for keyword, rule in RULES.items():
        if keyword in out and rule(out, place) is False:
            return False
    return out


def _check(schema: Schema, place: Place) -> None:
    """Raise ConstraintError for a keyword whose value has another form than the standard gives it."""
    for keyword in schema.keys() & _FORMS.keys():
        value = schema[keyword]
        fits = isinstance(value, _FORMS[keyword]) and not isinstance(value, bool)
        if fits and keyword in ("required", "type") and isinstance(value, list):
            fits = all(isinstance(each, str) for each in value)
        if not fits:
            raise refuse(keyword, place, "its value has another form")
