"""Writes a JSON Schema as rules in Lark around llguidance's `%json`, so that every number and name ends.

llguidance writes a number without bounds with as many digits as a model likes, and no keyword makes it
shorter and leaves it its exponent. So the objects, arrays, choices and references that lead to such a number
are written here, in the same format; everything else is a `%json` of its own. Where further keywords do not
allow that, the number gets bounds instead, and with them no exponent. The properties of an object that may
have any are written here too: a small model that is asked for any JSON easily writes a name without end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from engine.references import pointed
from engine.structured.json_schema import written
from engine.structured.keyword_rules import LEAST_STEP, drop_steps
from engine.structured.keywords import NAMED, PLAIN
from engine.structured.schema_algebra import Schema, kinds

DIGITS = 20  # of a number: more than a float tells apart
NUMBER = (
    f"/-?(0|[1-9][0-9]{{0,{DIGITS - 1}}})(\\.[0-9]{{1,{DIGITS - 1}}})?([eE][+-]?[0-9]{{1,3}})?/"
    f" & /-?[0-9.]{{1,{DIGITS + 1}}}([eE].*)?/"
)
BOUNDS: Schema = {"minimum": -9_999_999_999, "maximum": 9_999_999_999, "multipleOf": LEAST_STEP}
MAX_NAME = 128  # characters of a property's name, where an object may have any: more than people write
MAX_RULES = 2_000  # beyond it llguidance writes the whole document
MAX_TEXT = 1 << 17  # characters of a schema; the same
MAX_COPIED = 1 << 18  # characters of the parts that llguidance writes, with what they refer to; the same
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
    alone = _standing_alone(schema, root)
    writer = _Writer(schema, root, name)
    if writer.runs(schema) and len(written(schema)) <= MAX_TEXT:
        if (body := writer.body()) is not None:
            rules += writer.rules
            return body
        alone = _bounded(alone)
    return f"%json {written(alone)}"


class _Writer:
    """Writes one document."""

    def __init__(self, schema: Schema, root: Schema, name: str) -> None:
        self._schema = schema
        self._root = root
        self._name = name
        self._known: dict[str, str] = {}  # bodies, and targets of references -> rules
        self._referred: list[tuple[str, str]] = []  # rules of references, and their targets
        self._num_copied = 0
        self._lost = False  # a reference leads to nothing that is there by its path
        self._running = self._leading_to_numbers()
        self.rules: list[str] = []

    def body(self) -> str | None:
        """The document as the body of a rule; None where llguidance is to write the whole of it."""
        body = self._value(self._schema)
        # What a reference stands for is written after its name is known: it may refer to itself, and a
        # chain of references may be longer than the stack.
        for name, target in self._referred:
            if self._in_vain:
                break
            runs = target in self._running
            text = self._value(pointed(target, self._root)) if runs else self._leaf({"$ref": target})
            self.rules.append(f"{name}: {text}")
        return None if self._in_vain else body

    @property
    def _in_vain(self) -> bool:
        return self._lost or len(self.rules) > MAX_RULES or self._num_copied > MAX_COPIED

    def _rule(self, body: str, *, term: bool = False) -> str:
        if (found := self._known.get(body)) is None:
            found = self._known[body] = self._named(term=term)
            self.rules.append(f"{found}: {body}")
        return found

    def _named(self, *, term: bool = False) -> str:
        name = f"{self._name}_json_{len(self._known)}"
        return name.upper() if term else name

    # -- which parts ---------------------------------------------------------------------------------------

    def runs(self, part: Any) -> bool:
        """Whether llguidance would let a number of a part run on."""
        return any(target is None or target in self._running for target in _leads(part))

    def _leading_to_numbers(self) -> set[str]:
        """The targets of references that lead to a number which would run on, at once or through others."""
        origins: dict[str, list[str]] = {target: [] for target in _leads(self._schema) if target is not None}
        targets = list(origins)
        leading: list[str] = []
        for target in targets:
            part = pointed(target, self._root)
            self._lost = self._lost or part is None
            for other in _leads(part):
                if other is None:
                    leading.append(target)
                    continue
                if other not in origins:
                    origins[other] = []
                    targets.append(other)
                origins[other].append(target)
        found: set[str] = set()
        for target in leading:
            if target not in found:
                found.add(target)
                leading += origins[target]
        return found

    # -- how they are written ------------------------------------------------------------------------------

    def _value(self, part: Any) -> str:
        """A part as the body of a rule."""
        if self._in_vain:
            return ""
        said = part.keys() - _NOTES if isinstance(part, dict) else frozenset()
        if said == {"$ref"}:
            return self._reference(part["$ref"])
        if not self.runs(part):
            return self._leaf(part)
        if not said:
            return self._anything()
        named = part.get("type")
        if said == {"anyOf"}:
            return " | ".join(self._rule(self._value(each)) for each in part["anyOf"] if each is not False)
        if said == {"type"} and isinstance(named, list):
            return " | ".join(self._rule(self._value({"type": each})) for each in named)
        if said == {"type"} and named == "number":
            return self._rule(NUMBER, term=True)
        if named == "object" and said <= _OBJECT and (found := self._object(part)) is not None:
            return found
        if named == "array" and said <= _ARRAY and (found := self._array(part)) is not None:
            return found
        return self._leaf(part)

    def _leaf(self, part: Any) -> str:
        alone = _standing_alone(part, self._root)
        text = written(_bounded(alone) if self.runs(part) else alone)
        self._num_copied += len(text)
        return f"%json {text}"

    def _anything(self) -> str:
        either = [{"type": kind} for kind in ("object", "array", "number", "string", "boolean", "null")]
        target = "anything"
        if (found := self._known.get(target)) is None:
            found = self._known[target] = self._named()
            body = " | ".join(self._rule(self._value(each)) for each in either)
            self.rules.append(f"{found}: {body}")
        return found

    def _reference(self, target: str) -> str:
        if (found := self._known.get(f"$ref {target}")) is None:
            found = self._known[f"$ref {target}"] = self._named()
            self._referred.append((found, target))
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
            pair = self._rule(f'{name} ": " {self._rule(self._value(rest))}')
            return f'"{{" ({pair} (", " {pair})*)? "}}"'
        behind = first = self._rule('""')
        for key, each in reversed(row):
            front = json.dumps(f"{json.dumps(key, ensure_ascii=False)}: ", ensure_ascii=False)
            pair = f"{front} {self._rule(self._value(each))}"
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
        item = self._rule(self._value(part.get("items", True)))
        more = f'(", " {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        items = item if most == 1 else f"{item} {more}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'


def _leads(part: Any) -> Iterator[str | None]:
    """What could let a number of a part run on: the targets of its references, None for a number itself."""
    if not isinstance(part, dict):
        if part is not False:
            yield None
        return
    if part.keys() & {"enum", "const"}:
        return
    if isinstance(target := part.get("$ref"), str):
        yield target
        return
    for key in ("anyOf", "allOf"):
        for each in part.get(key, ()):
            yield from _leads(each)
    named = kinds(part)
    if part.keys() & {"anyOf", "allOf"} and "type" not in part:
        return  # what they say of numbers was looked at
    if "number" in named and not part.keys() & _NUMBER and _may_be_a_fraction(part):
        yield None
    inside: list[Any] = []
    if "object" in named:
        inside += [*part.get("properties", {}).values(), *part.get("patternProperties", {}).values()]
        inside.append(part.get("additionalProperties", True))
    if "array" in named and part.get("maxItems") != 0:
        inside += [*part.get("prefixItems", ()), part.get("items", True)]
    for each in inside:
        yield from _leads(each)


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
    if "allOf" in out:
        drop_steps(out)
    return out


def _standing_alone(part: Any, root: Schema) -> Schema:
    """A part of a schema with what it refers to, and nothing else of the whole: there may be many parts."""
    schema = part if isinstance(part, dict) else {"not": {}} if part is False else {}
    if schema is root:
        return schema
    places: dict[str, int] = {}  # of targets, among the parts that come along
    along: list[Any] = []

    def moved(target: str) -> str:
        found = pointed(target, root)
        if found is None:
            return target
        if target not in places:
            places[target] = len(along)
            along.append(found)
        return f"#/$defs/{places[target]}"

    alone = _led_elsewhere(schema, moved)
    definitions = {str(place): _led_elsewhere(each, moved) for place, each in enumerate(along)}
    return {**alone, "$defs": definitions} if definitions else alone


def _led_elsewhere(value: Any, moved: Callable[[str], str]) -> Any:
    """A part of a schema without definitions, whose references lead to other targets."""
    if isinstance(value, list):
        return [_led_elsewhere(each, moved) for each in value]
    if not isinstance(value, dict):
        return value
    out: Schema = {}
    for key, each in value.items():
        if key == "$ref" and isinstance(each, str):
            out[key] = moved(each)
        elif key in PLAIN:
            out[key] = each
        elif key not in NAMED or not isinstance(each, dict):
            out[key] = _led_elsewhere(each, moved)
        elif key not in ("$defs", "definitions"):
            out[key] = {name: _led_elsewhere(part, moved) for name, part in each.items()}
    return out
