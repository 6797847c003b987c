"""JSON that ends: nothing that a bounded schema asks for runs on, numbers least of all."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine import LLM, Options
from engine.structured.json_documents import document
from engine.structured.json_schema import rewrite
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
REFERRING: dict[str, Any] = {
    "$defs": {
        "size": NUMBER,
        "word": {"type": "string"},
        "deep": {"anyOf": [{"$ref": "#/$defs/word"}, {"$ref": "#/$defs/below"}]},
        "below": {"type": "object", "properties": {"c": {"$ref": "#/$defs/deep"}}, "required": ["c"]},
    },
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/size"},
        "b": {"$ref": "#/$defs/deep"},
        "d": {
            "type": "object",
            "properties": {"e": {"const": {"$ref": "#/$defs/size"}}, "f": {"$ref": "#/$defs/word"}},
            "additionalProperties": False,
        },
        "g": {"type": "object", "properties": {"h": {"$ref": "#/properties/a"}}, "required": ["h"]},
    },
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
        (REFERRING, ['{"a": 1e9, "b": {"c": {"c": "word"}}}', '{"g": {"h": 2.5}}',
                     '{"d": {"e": {"$ref": "#/$defs/size"}, "f": "word"}}'],
         [f'{{"a": {LONG}}}', '{"b": {"c": 1}}', '{"d": {"f": 1}}', '{"d": {"e": {"$ref": "#/$defs/0"}}}',
          f'{{"g": {{"h": {LONG}}}}}', '{"g": {"h": "word"}}']),
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
# References


def kinds_of_things(count: int) -> dict[str, Any]:
    """As many definitions of an object with eight texts as long as those of everyday."""
    names = [f"field_{at}" for at in range(8)]
    text = {"type": "string", "description": "One of the texts that such a thing has, as people write it."}
    kind = {
        "description": "What one kind of thing is made of, and what it is good for.",
        **{"type": "object", "properties": dict.fromkeys(names, text), "required": names},
        "additionalProperties": False,
    }
    return {f"Kind{at}": kind for at in range(count)}


def all_of_them(definitions: dict[str, Any], **others: Any) -> dict[str, Any]:
    """An object with a property for each of the definitions, and others."""
    own = {name.lower(): {"$ref": f"#/$defs/{name}"} for name in definitions}
    return {
        **{"type": "object", "properties": {**others, **own}, "required": [*others, *own]},
        "additionalProperties": False,
        "$defs": definitions,
    }


def test_a_number_beside_many_definitions_makes_a_schema_hardly_longer() -> None:
    schema = all_of_them(kinds_of_things(30), price=NUMBER)
    rules: list[str] = []
    body = document(rewrite(schema), rewrite(schema), "answer", rules)
    assert len(body) + sum(map(len, rules)) < 2 * len(json.dumps(schema))
    thing = dict.fromkeys([f"field_{at}" for at in range(8)], "x")
    value = {"price": 2.5, **{f"kind{at}": thing for at in range(30)}}
    jsonschema.Draft202012Validator(schema).validate(value)
    text = json.dumps(value)
    assert fits(schema, text) and fits(schema, text.replace("2.5", "1e9"))
    assert not fits(schema, text.replace("2.5", LONG))
    assert not fits(schema, text.replace('"x"', "7"))


def test_parts_of_one_schema_bring_only_what_they_refer_to() -> None:
    schema = rewrite(all_of_them(kinds_of_things(30)))
    rules: list[str] = []
    parts = [document(part, schema, "value", rules) for part in schema["properties"].values()]
    assert sum(map(len, [*parts, *rules])) < 2 * len(json.dumps(schema))


def test_where_parts_share_too_much_the_whole_is_written_at_once() -> None:
    """Each of 25 objects refers to all others, so that each would bring all along."""
    circle = kinds_of_things(25)
    for name, kind in circle.items():
        others = {other.lower(): {"$ref": f"#/$defs/{other}"} for other in circle if other != name}
        circle[name] = {**kind, "properties": {**kind["properties"], **others}}
    schema = all_of_them(circle, price=NUMBER)
    thing = dict.fromkeys([f"field_{at}" for at in range(8)], "x")
    value = {"price": 2.5, **{f"kind{at}": thing for at in range(25)}}
    value["kind3"] = {**thing, "kind4": thing}
    jsonschema.Draft202012Validator(schema).validate(value)
    text = json.dumps(value)
    assert fits(schema, text)
    for number in (LONG, "1e9"):  # the number has bounds, and so no exponent
        assert not fits(schema, text.replace("2.5", number))


@pytest.mark.parametrize("dense", [True, False])
def test_however_many_ways_lead_to_a_definition_it_is_looked_at_once(dense: bool) -> None:
    """Nine objects that each refer to all others; a chain of objects that each refer twice to the next."""
    names = [f"T{at}" for at in range(9 if dense else 19)]
    definitions: dict[str, Any] = {}
    for at, name in enumerate(names):
        others = [each for each in names if each != name] if dense else names[at + 1 : at + 2] * 2
        parts = {f"p{place}": {"$ref": f"#/$defs/{other}"} for place, other in enumerate(others)}
        listed = {**parts, "own": {"type": "string"}}
        definitions[name] = {"type": "object", "properties": listed, "additionalProperties": False}
    schema = rewrite({"$ref": "#/$defs/T0", "$defs": definitions})
    began = time.thread_time()  # of the processor: other threads do not count
    document(schema, schema, "answer", [])
    assert time.thread_time() - began < 0.5


def test_a_chain_of_references_may_be_long() -> None:
    links = {
        f"L{at}": {
            "type": "object",
            "properties": {"next": {"$ref": f"#/$defs/L{at + 1}"}},
            "additionalProperties": False,
        }
        for at in range(400)
    }
    schema = {"$ref": "#/$defs/L0", "$defs": {**links, "L400": NUMBER}}
    front, back = '{"next": ' * 400, "}" * 400
    assert fits(schema, f"{front}1e9{back}")
    assert not fits(schema, f"{front}{LONG}{back}")


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


@pytest.mark.sampled(2)
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
