"""Writes a JSON Schema as rules in Lark around llguidance's `%json`, so that every number and name ends.

llguidance writes a number without bounds with as many digits as a model likes, and no keyword makes it
shorter and leaves it its exponent. So the objects, arrays, choices and references that lead to such a number
are written here, in the same format; everything else is a `%json` of its own. Where further keywords do not
allow that, the number gets bounds instead, and with them no exponent. The properties of an object that may
have any are written here too: a small model that is asked for any JSON easily writes a name without end.
"""

from __future__ import annotations

import json
from typing import Any

from engine.references import pointed
from engine.structured.json_schema import written
from engine.structured.schema_algebra import Schema, kinds

DIGITS = 20  # of a number: more than a float tells apart
NUMBER = (
    f"/-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})(\\.[0-9]{{1,{DIGITS - 1}}})?([eE][+-]?[0-9]{{1,3}})?/"
    f" & /-?[0-9.]{{1,{DIGITS + 1}}}([eE].*)?/"
)
BOUNDS: Schema = {"minimum": -9_999_999_999, "maximum": 9_999_999_999, "multipleOf": 1e-9}
MAX_NAME = 128  # characters of a property's name, where an object may have any: more than people write
MAX_RULES = 2_000  # beyond it llguidance writes the whole document
MAX_TEXT = 1 << 17  # characters of a schema; the same
MAX_ITEMS = 1_000  # that an array may be asked for here

_NOTES = frozenset(
    {"title", "description", "default", "example", "examples", "$defs", "definitions", "$schema", "$id"}
    | {"$comment", "deprecated", "readOnly", "writeOnly"}
)
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"})
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})
_NUMBER = frozenset({"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LISTS = ("anyOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def document(schema: Schema, root: Schema, name: str, rules: list[str]) -> str:
    """The values of a schema that was rewritten, as the body of a rule. root: what its references lead into.

    Adds to `rules` what the body refers to, under names that begin with `name`.
    """
    writer = _Writer(root, name)
    if len(written(schema)) <= MAX_TEXT and writer.runs(schema):
        body = writer.value(schema)
        if len(writer.rules) <= MAX_RULES and not writer.lost:
            rules += writer.rules
            return body
        whole = schema is root
        root = _bounded(root)
        schema = root if whole else _bounded(schema)
    return f"%json {_standing_alone(schema, root)}"


class _Writer:
    """Writes one document."""

    def __init__(self, root: Schema, name: str) -> None:
        self._root = root
        self._bounded_root = _bounded(root)
        self._name = name
        self._known: dict[str, str] = {}  # bodies, and targets of references -> rules
        self.lost = False  # a reference leads to nothing that is there by its path
        self.rules: list[str] = []

    def _rule(self, body: str, *, term: bool = False) -> str:
        if (found := self._known.get(body)) is None:
            found = self._known[body] = self._named(term=term)
            self.rules.append(f"{found}: {body}")
        return found

    def _named(self, *, term: bool = False) -> str:
        name = f"{self._name}_json_{len(self._known)}"
        return name.upper() if term else name

    # -- which parts ---------------------------------------------------------------------------------------

    def runs(self, part: Any, seen: frozenset[str] = frozenset()) -> bool:
        """Whether llguidance would let a number of a part run on."""
        if not isinstance(part, dict):
            return part is not False
        if part.keys() & {"enum", "const"}:
            return False
        target = part.get("$ref")
        if isinstance(target, str):
            found = pointed(target, self._root)
            self.lost = self.lost or found is None
            return target not in seen and self.runs(found, seen | {target})
        if any(self.runs(each, seen) for key in ("anyOf", "allOf") for each in part.get(key, ())):
            return True
        named = kinds(part)
        if part.keys() & {"anyOf", "allOf"} and "type" not in part:
            return False  # what they say of numbers was looked at
        if "number" in named and not part.keys() & _NUMBER and _may_be_a_fraction(part):
            return True
        inside: list[Any] = []
        if "object" in named:
            inside += [*part.get("properties", {}).values(), *part.get("patternProperties", {}).values()]
            inside.append(part.get("additionalProperties", True))
        if "array" in named and part.get("maxItems") != 0:
            inside += [*part.get("prefixItems", ()), part.get("items", True)]
        return any(self.runs(each, seen) for each in inside)

    # -- how they are written ------------------------------------------------------------------------------

    def value(self, part: Any) -> str:
        """A part as the body of a rule."""
        if not self.runs(part):
            return self._leaf(part)
        said = part.keys() - _NOTES if isinstance(part, dict) else frozenset()
        if not said:
            return self._anything()
        named = part.get("type")
        if said == {"$ref"}:
            return self._reference(part["$ref"])
        if said == {"anyOf"}:
            return " | ".join(self._rule(self.value(each)) for each in part["anyOf"] if each is not False)
        if said == {"type"} and isinstance(named, list):
            return " | ".join(self._rule(self.value({"type": each})) for each in named)
        if said == {"type"} and named == "number":
            return self._rule(NUMBER, term=True)
        if named == "object" and said <= _OBJECT and (found := self._object(part)) is not None:
            return found
        if named == "array" and said <= _ARRAY and (found := self._array(part)) is not None:
            return found
        return self._leaf(self._bounded_root if part is self._root else _bounded(part))

    def _leaf(self, part: Any) -> str:
        return f"%json {_standing_alone(part, self._bounded_root)}"

    def _anything(self) -> str:
        either = [{"type": kind} for kind in ("object", "array", "number", "string", "boolean", "null")]
        target = "anything"
        if (found := self._known.get(target)) is None:
            found = self._known[target] = self._named()
            body = " | ".join(self._rule(self.value(each)) for each in either)
            self.rules.append(f"{found}: {body}")
        return found

    def _reference(self, target: str) -> str:
        """Its name is known before what it stands for is written, which may refer to itself."""
        if (found := self._known.get(f"$ref {target}")) is None:
            found = self._known[f"$ref {target}"] = self._named()
            self.rules.append(f"{found}: {self.value(pointed(target, self._root))}")
        return found

    def _object(self, part: Schema) -> str | None:
        """The properties in the order of the schema; None for what cannot be written like this."""
        listed, needed = part.get("properties", {}), part.get("required", ())
        rest = part.get("additionalProperties", True)
        if any(listed.get(name, False) is False for name in needed):
            return None
        row = [(key, each) for key, each in listed.items() if each is not False]
        if rest is not False:
            if listed:
                return None
            name = self._rule(self._leaf({"type": "string", "maxLength": MAX_NAME}))
            pair = self._rule(f'{name} ": " {self._rule(self.value(rest))}')
            return f'"{{" ({pair} (", " {pair})*)? "}}"'
        behind = first = self._rule('""')
        for key, each in reversed(row):
            front = json.dumps(f"{json.dumps(key, ensure_ascii=False)}: ", ensure_ascii=False)
            pair = f"{front} {self._rule(self.value(each))}"
            one = f"{pair} {behind}"
            if key in needed:
                behind, first = self._rule(f'", " {one}'), self._rule(one)
            else:
                behind, first = self._rule(f'(", " {pair})? {behind}'), self._rule(f"{one} | {first}")
        return f'"{{" {first} "}}"'

    def _array(self, part: Schema) -> str | None:
        least, most = part.get("minItems", 0), part.get("maxItems")
        if max(least, most or 0) > MAX_ITEMS or (most is not None and most < max(least, 1)):
            return None
        item = self._rule(self.value(part.get("items", True)))
        more = f'(", " {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        items = item if most == 1 else f"{item} {more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'


def _may_be_a_fraction(part: Schema) -> bool:
    named = part.get("type", "number")
    return "number" in (named if isinstance(named, list) else [named])


def _bounded(part: Any) -> Any:
    """A schema with bounds for the numbers that have none."""
    if not isinstance(part, dict):
        return part
    out = dict(part)
    for key in _LISTS:
        if isinstance(part.get(key), list):
            out[key] = [_bounded(each) for each in part[key]]
    for key in _NAMED:
        if isinstance(part.get(key), dict):
            out[key] = {name: _bounded(each) for name, each in part[key].items()}
    for key in ("items", "additionalProperties"):
        if key in part:
            out[key] = _bounded(part[key])
    if "type" in part and _may_be_a_fraction(part) and not part.keys() & {*_NUMBER, "enum", "const"}:
        out |= BOUNDS
    return out


def _standing_alone(part: Any, root: Schema) -> str:
    """The text of a part of a schema: what it refers to comes along."""
    schema = part if isinstance(part, dict) else {"not": {}} if part is False else {}
    text = written(schema)
    if '"$ref"' not in text or schema is root:
        return text
    return written({**_moved(schema), "$defs": {"whole": _moved(root)}})


def _moved(value: Any) -> Any:
    """A part of a schema, for a place where the whole stands below `#/$defs/whole`."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(each) for key, each in value.items()}
    if isinstance(target := value.get("$ref"), str):
        moved["$ref"] = f"#/$defs/whole{target[1:]}"
    return moved
