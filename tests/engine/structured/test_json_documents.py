"""JSON that ends: nothing that a bounded schema asks for runs on, numbers least of all."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine import LLM, Options
from engine.types import Constraint, ReaderParams, Shape, ToolShape
from tests.engine.structured.test_shapes import accepts

NUMBER = {"type": "number"}
OPTIONAL = {"anyOf": [NUMBER, {"type": "null"}]}
LIST = {"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 2}
TREE = {
    "type": "object",
    "properties": {"own": NUMBER, "below": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["own"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"size": {"title": "Size", "type": "number"}},
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/size"}, "é\n": OPTIONAL, "d": NUMBER},
    "required": ["b"],
    "additionalProperties": False,
}
LONG = "1" * 21


def fits(schema: Any, text: str, kind: str = "bytes") -> bool:
    return accepts(kind, Constraint(answer=Shape("json", json.dumps(schema))), text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NUMBER, ["0", "-0.5", "12.25", "6.02214076e23", "1E-99", "-1.5e+279", "1" * 20, "0." + "1" * 19],
         [LONG, "0." + "1" * 20, "1" * 10 + "." + "1" * 11, "1e1000", "01", "1.", ".5", '"1"']),
        (OPTIONAL, ["1e9", "null"], [LONG, "true"]),
        ({"type": ["number", "boolean"]}, ["1e9", "true"], [LONG, "null"]),
        (LIST, ["[1e9]", "[1e9, 2.5]"], ["[]", f"[{LONG}]", "[1, 2, 3]", "[1,2]"]),
        ({**LIST, "minItems": 0}, ["[]", "[1e9, 2.5]"], [f"[1, {LONG}]", "[1, 2, 3]"]),
        ({"type": "array", "items": NUMBER}, ["[]", "[1, 2, 3, 1e9]"], [f"[{LONG}]", "[1, ]"]),
        (TREE, ['{"own": 1e9}', '{"own": 1, "below": [{"own": 2.5}, {"own": 1e9}]}'],
         ["{}", f'{{"own": {LONG}}}', f'{{"own": 1, "below": [{{"own": {LONG}}}]}}', '{"below": []}']),
        (NESTED, ['{"b": 1e9}', '{"a": 1, "b": 2.5}', '{"b": 1, "é\\n": null, "d": 1e9}', '{"b": 1, "d": 2}'],
         ["{}", '{"a": 1}', f'{{"b": {LONG}}}', f'{{"b": 1, "d": {LONG}}}', '{"b": 1, "x": 2}']),
        ({"type": "object"}, ["{}", '{"a": 1e9, "b": [null, true, {"c": "x"}]}'],
         [f'{{"a": {LONG}}}', f'{{"a": [{LONG}]}}', "1"]),
        ({}, ["1e9", '"x"', "[1]"], [LONG]),
        ({"type": "object", "additionalProperties": NUMBER}, ["{}", '{"a": 1e9}'], [f'{{"a": {LONG}}}']),
        # Within bounds, and where other keywords stand in the way, numbers have no exponent.
        ({"type": "number", "minimum": 0}, ["0.5", "3"], [LONG, "-1", "0." + "1" * 20]),
        ({"type": "number", "exclusiveMaximum": 0}, ["-0.5"], [f"-{LONG}", "0", "-0." + "1" * 20]),
        ({"type": "number", "minimum": 1e12}, ["1000000000000"], [LONG, "5"]),
        ({"type": "number", "multipleOf": 0.25}, ["0.75", "-2.25"], [LONG, "0.3"]),
        ({"type": "number", "enum": [1, 2.5]}, ["1", "2.5"], ["3"]),
        ({"allOf": [NUMBER, {"title": "x"}]}, ["2.5"], [LONG, "0." + "1" * 20]),
        ({"type": "array", "prefixItems": [NUMBER], "items": False}, ["[2.5]"], [f"[{LONG}]"]),
    ],
)  # fmt: skip
def test_a_number_has_at_most_twenty_digits(schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert fits(schema, text), text
    for text in bad:
        assert not fits(schema, text), text


@pytest.mark.parametrize(
    "schema", [{"type": "object"}, {}, {"type": "object", "additionalProperties": NUMBER}]
)
def test_a_name_that_may_be_any_ends(schema: Any) -> None:
    for name, taken in (("n" * 128, True), ("é\\n" * 64, True), ("n" * 129, False)):
        assert fits(schema, f'{{"{name}": 1}}') is taken
        if "additionalProperties" not in schema:
            assert fits(schema, f'{{"a": [{{"{name}": "{"x" * 500}"}}]}}') is taken
    assert fits({"type": "object", "properties": {"n" * 200: NUMBER}}, f'{{"{"n" * 200}": 1}}')


def test_arguments_of_a_call_end_too() -> None:
    schema = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"], "additionalProperties": False}
    constraint = Constraint((ToolShape("f", json.dumps(schema)), ToolShape("g", "{}")), 1)
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"x": {}}}}}\n</tool_call>'
    reader = ReaderParams(tools=constraint.tools, calls=True)
    for name in ("f", "g"):
        assert accepts("tiny", constraint, call.format(name, "1e9"), reader)
        assert not accepts("tiny", constraint, call.format(name, LONG), reader)


# ------------------------------------------------------------------------------------------------------------
# By the shipped model, at a temperature that makes it talk nonsense


class Bounded:
    """Random schemas all of whose values are short."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schema(self, depth: int = 2) -> dict[str, Any]:
        """One, nested at most `depth` deep."""
        rng = self.rng
        if depth == 2 or (depth and rng.random() < 0.4):
            if rng.random() < 0.3:
                return {"type": "array", "items": self.schema(depth - 1), "maxItems": rng.randint(1, 2)}
            names = rng.sample(["price", "name", "size", "city", "at", "count"], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: self.schema(depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        return rng.choice(
            [
                {"type": "number"},
                {"type": "number"},
                {"type": "number", "minimum": 0},
                {"type": "number", "maximum": -1.5},
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                {"type": "number", "multipleOf": 0.5},
                {"type": "integer"},
                {"type": "integer", "minimum": 1},
                {"type": "integer", "minimum": 0, "maximum": 100},
                {"anyOf": [{"type": "number"}, {"type": "null"}]},
                {"type": ["number", "boolean"]},
                {"enum": ["red", 2.5, None]},
                {"const": 7},
                {"type": "string", "maxLength": rng.randint(1, 12)},
                {"type": "string", "format": "date"},
                {"type": "boolean"},
            ]
        )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1) as llm:
        yield llm


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_bounded_schemas_end(llm: LLM, first: int) -> None:
    seeds = range(first, first + 20)
    schemas = [Bounded(seed).schema() for seed in seeds]
    asked = [[{"role": "user", "content": "Give me an example as JSON."}]] * len(schemas)
    options = [
        Options(temperature=1.3, top_p=1.0, max_tokens=400, seed=seed, json_schema=schema)
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    # A thought before the document has no bound but the tokens.
    results = llm.chat(asked, options, template_kwargs={"enable_thinking": False})
    for schema, result in zip(schemas, results, strict=True):
        assert result.finish == "stop", (schema, result.text)
        jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))
        for number in re.findall(r"[0-9][0-9.]*", re.sub(r'"[^"]*"', "", result.text)):
            assert len(number.replace(".", "")) <= 20, (schema, result.text)
