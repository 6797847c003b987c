"""A generator of random JSON Schemas.

Every keyword that is enforced occurs, alone and beside others. What is generated is always a valid schema,
but there may be no value that fits it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Schema = dict[str, Any]

NAMES = ["a", "b", "city", "näme", "x-1", 'q"t', ""]
PATTERNS = ["^[a-z]{1,4}$", "^\\d{3}-\\d{2}$", "ab+", "^(yes|no)$", "[A-F0-9]{2}"]
FORMATS = ["date", "time", "uuid", "ipv4", "email", "date-time", "klingon"]
VALUES: list[Any] = [None, True, 0, -3, 2.5, "x", 'q"\\', "é", [1], {"k": [None]}]


class Generator:
    """Schemas drawn from one seed, whose properties have some of these names."""

    def __init__(self, seed: int, names: Sequence[str] = NAMES) -> None:
        self.rng = random.Random(seed)
        self.names = names

    def schema(self) -> Schema:
        """A root: an object as often as not, with definitions that it may refer to, itself among them."""
        rng = self.rng
        root = self._object(3) if rng.random() < 0.7 else self.part(3)
        root["$defs"] = {"leaf": self.part(0), "node": self._node()}
        return root

    def parameters(self) -> Schema:
        """The arguments of a tool: an object."""
        return {**self._object(2), "$defs": {"leaf": self.part(0), "node": self._node()}}

    def part(self, depth: int) -> Schema:
        """A subschema, nested at most `depth` deep."""
        leaves: list[Callable[[], Schema]] = [self._string, self._number, self._values, self._simple]
        nested: list[Callable[[], Schema]] = [
            lambda: self._object(depth - 1),
            lambda: self._array(depth - 1),
            lambda: self._map(depth - 1),
            lambda: {"anyOf": [self.part(depth - 1) for _ in range(self.rng.randint(1, 3))]},
            lambda: {"oneOf": [self._string(), self._number(), {"type": "null"}]},
            lambda: {"$ref": self.rng.choice(["#/$defs/leaf", "#/$defs/node"])},
            lambda: self._conditional(depth - 1),
            lambda: {"allOf": [self._object(0), {"required": [self.rng.choice(self.names)]}]},
        ]
        return self.rng.choice(leaves + nested if depth > 0 else leaves)()

    def _simple(self) -> Schema:
        kinds = ["boolean", "null", "integer"]
        return self.rng.choice(
            [
                {"type": self.rng.choice(kinds)},
                {"type": self.rng.sample(kinds, 2), "title": "t", "x-own": 1},
                {"not": {"type": self.rng.sample(["string", "object", "array", "number"], 3)}},
            ]
        )

    def _values(self) -> Schema:
        if self.rng.random() < 0.3:
            return {"const": self.rng.choice(VALUES)}
        some = self.rng.sample(VALUES, self.rng.randint(2, 5))
        return {"enum": some, "not": {"const": some[0]}} if self.rng.random() < 0.3 else {"enum": some}

    def _string(self) -> Schema:
        rng, schema = self.rng, {"type": "string"}
        kind = rng.random()
        if kind < 0.3:
            return {**schema, "pattern": rng.choice(PATTERNS)}
        if kind < 0.5:
            return {**schema, "format": rng.choice(FORMATS)}
        least = rng.randint(0, 3)
        return {**schema, "minLength": least, "maxLength": least + rng.randint(0, 6)}

    def _number(self) -> Schema:
        rng, low = self.rng, self.rng.randint(-50, 50)
        schema: Schema = {"type": rng.choice(["integer", "number"])}
        if rng.random() < 0.6:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.6:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 90)
        if schema["type"] == "integer" and rng.random() < 0.2:
            schema["multipleOf"] = rng.choice([2, 5])
        return schema

    def _object(self, depth: int) -> Schema:
        rng = self.rng
        names = rng.sample(self.names, rng.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self.part(depth) for name in names}}
        if rng.random() < 0.8:
            schema["required"] = rng.sample(names, rng.randint(0, len(names)))
        if rng.random() < 0.6:
            schema["additionalProperties"] = False
        if rng.random() < 0.15 and len(names) > 1:
            schema["dependentRequired"] = {names[0]: [names[1]]}
        return schema

    def _map(self, depth: int) -> Schema:
        schema: Schema = {"type": "object", "additionalProperties": self.part(depth), "maxProperties": 3}
        if self.rng.random() < 0.4:
            schema["propertyNames"] = self.rng.choice([{"pattern": "^[a-z]+$"}, {"maxLength": 4}])
        return schema

    def _array(self, depth: int) -> Schema:
        rng, least = self.rng, self.rng.randint(0, 2)
        schema: Schema = {"type": "array", "items": self.part(depth), "minItems": least}
        schema["maxItems"] = least + rng.randint(0, 2)
        if rng.random() < 0.2:
            schema = {"type": "array", "prefixItems": [self.part(depth)], "items": False, "minItems": 1}
        if rng.random() < 0.2:
            schema["uniqueItems"] = False
        return schema

    def _conditional(self, depth: int) -> Schema:
        return {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b", "c"]}, "n": self.part(depth)},
            "required": ["kind"],
            "additionalProperties": False,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": {"type": "boolean"}}},
        }

    def _node(self) -> Schema:
        return {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
