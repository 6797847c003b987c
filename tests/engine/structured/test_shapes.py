"""Shapes of answers and inputs: whatever is drawn under the mask has the shape, and can be read again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from engine.dialects.table import dialect_named
from engine.parsing.coercion import MAX_DEPTH
from engine.parsing.output_reader import Reader
from engine.structured.grammar import Grammars, Matcher, allowed_ids
from engine.structured.json_schema import read_schema, rewrite, written
from engine.structured.regexes import shortest_match
from engine.types import (
    CallArgs,
    CallEnd,
    CallStart,
    Constraint,
    ConstraintError,
    Delta,
    Done,
    ReaderParams,
    Reasoning,
    SamplingParams,
    Shape,
    Text,
    ToolShape,
)
from tests.engine.structured.test_grammar import HERMES, mask_of, tokenizer
from tests.support.schemas import Generator

NUM_SCHEMAS = int(os.environ.get("ANTIPHON_SCHEMAS", "200"))
PLAIN = ReaderParams(dialect=False)
WEATHER = ToolShape(
    "get_weather",
    '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"],'
    ' "additionalProperties": false}',
)
INPUT = (
    '{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],'
    ' "additionalProperties": false}'
)
PATCH = r"""
start: "*** Begin Patch\n" change{1,3} "*** End Patch"
change: "*** Update \"" NAME "\"\n" line{1,3}
line: /[+-]/ TEXT "\n"
NAME: /[a-z\\\/]{1,8}/
TEXT: /[^\n]{0,12}/
"""


def is_patch(text: str) -> bool:
    """The patch language, recognised by hand."""
    lines = text.split("\n")
    if lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch":
        return False
    changes: list[int] = []
    for line in lines[1:-1]:
        if re.fullmatch(r'\*\*\* Update "[a-z\\/]{1,8}"', line):
            changes.append(0)
        elif changes and re.fullmatch(r"[+-][^\n]{0,12}", line):
            changes[-1] += 1
        else:
            return False
    return 1 <= len(changes) <= 3 and all(1 <= count <= 3 for count in changes)


@lru_cache
def grammars(kind: str) -> Grammars:
    return Grammars(tokenizer(kind), HERMES)


def matcher(kind: str, constraint: Constraint, reader: ReaderParams = PLAIN, limit: int = 10**6) -> Matcher:
    return grammars(kind).compile(constraint, reader).matcher(limit)


def walk(
    kind: str, constraint: Constraint, rng: random.Random, reader: ReaderParams = PLAIN, limit: int = 1500
) -> list[int] | None:
    """Token ids drawn at random under the mask up to an end; None when there was none within the limit."""
    own = tokenizer(kind)
    state = matcher(kind, constraint, reader)
    closing = {own.encode(text)[0] for text in ('"', "}", "]", "0", "</think>", "<|im_end|>", "\\", "\n")}
    ids: list[int] = []
    while len(ids) < limit:
        allowed = allowed_ids(mask_of(state, own.vocab_size)).tolist()
        assert allowed, own.decode(ids)
        ends = [each for each in allowed if each in closing]
        token_id = rng.choice(ends) if ends and rng.random() < 0.4 else rng.choice(allowed)
        assert state.allows(token_id), own.decode([*ids, token_id])
        state.advance(token_id)
        if token_id in own.eos_token_ids:
            return ids
        ids.append(token_id)
        if state.stopped:
            return ids
    return None


def accepts(kind: str, constraint: Constraint, text: str, reader: ReaderParams = PLAIN) -> bool:
    """Whether a text is a whole one."""
    own = tokenizer(kind)
    state = matcher(kind, constraint, reader)
    for token_id in own.encode(text):
        if not state.allows(token_id):
            return False
        state.advance(token_id)
    return state.stopped or any(state.allows(end) for end in own.eos_token_ids)


def read(kind: str, ids: list[int], reader: ReaderParams) -> list[Delta]:
    own = Reader(tokenizer(kind), HERMES, reader, SamplingParams(seed=1, max_tokens=9999))
    deltas: list[Delta] = []
    for at, token_id in enumerate(ids):
        deltas += own.feed((token_id,), Done("stop") if at + 1 == len(ids) else None).deltas
    return deltas


def joined(deltas: list[Delta], kind: type[Text | CallArgs | Reasoning]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


# -- JSON ----------------------------------------------------------------------------------------------------


def test_random_schemas_validate() -> None:
    """Each seed a schema and a walk: what comes to an end validates, what is refused says why. For the long
    form: `ANTIPHON_SCHEMAS=1000 pytest tests/engine/structured/test_shapes.py`."""
    whole = refused = 0
    for seed in range(NUM_SCHEMAS):
        schema = Generator(seed).schema()
        constraint = Constraint(answer=Shape("json", json.dumps(schema)))
        kind = "tiny" if seed % 3 else "bytes"
        try:
            ids = walk(kind, constraint, random.Random(seed), limit=300)
        except ConstraintError as error:
            assert str(error)
            refused += 1
            continue
        if ids is not None:
            whole += 1
            text = tokenizer(kind).decode(ids)
            value = json.loads(text)
            jsonschema.Draft202012Validator(schema).validate(value)
    assert refused <= NUM_SCHEMAS // 10, f"{refused} of {NUM_SCHEMAS} refused"
    assert whole >= NUM_SCHEMAS * 6 // 10, f"{whole} of {NUM_SCHEMAS} came to an end"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "klingon"}, '"Qapla"', "1"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]", '["a"]'),
        ({"not": {"type": ["string", "object"]}}, "12", '"a"'),
        ({"enum": [1, 2, 3], "not": {"const": 2}}, "3", "2"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab": 1}', '{"b": 1}'),
        ({"type": "object", "propertyNames": {"enum": ["a"]}}, '{"a": 1}', '{"b": 1}'),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
         '{"a": 1, "b": 2}', '{"a": 1}'),
        ({"type": "object", "unevaluatedProperties": False}, "{}", '{"a": 1}'),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "2", "1"),
        ({"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
          "required": ["k"], "if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["n"]}},
         '{"k": "b"}', '{"k": "a"}'),
        ({"type": "object", "properties": {"x": {}}, "not": {"required": ["x"]}}, "{}", '{"x": 1}'),
        ({"type": ["object", "integer"], "not": {"required": ["x"]}}, "{}", "7"),
        ({"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True}, '[3, "a"]', "[3, 3]"),
        ({"type": "array", "items": {"$ref": "#/$defs/t"}, "uniqueItems": True, "minItems": 2,
          "$defs": {"t": {"enum": list("abcdefghij")}}}, '["a", "c"]', '["a"]'),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, "[true]", "[true, true]"),
        ({"enum": [[1, 1], [1, 2]], "uniqueItems": True}, "[1, 2]", "[1, 1]"),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, "[0, 1, 2]", "[0, 2]"),
        ({"type": "array", "contains": {"type": "null"}, "minContains": 2, "maxItems": 3},
         "[null, 1, null]", "[null, 1, 2]"),
        ({"type": "array", "contains": {"const": 1}, "minContains": 0}, "[2]", "2"),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
         '{"a": 1, "c": 1}', '{"b": 1}'),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1},
         '{"b": 1}', '{"a": 1, "b": 1}'),
        ({"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d).{3,}$"}, '"xB7"', '"xb7"'),
        ({"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}], "$defs": {
            "c": {"type": "object", "properties": {"k": {"const": "c"}, "n": {}}, "required": ["k"]},
            "d": {"type": "object", "properties": {"k": {"const": "d"}}, "required": ["k"]}}},
         '{"k": "c", "n": 1}', '{"k": "e"}'),
        ({"type": "object", "properties": {"a": {}, "b": {}},
          "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
         '{"b": 1}', '{"a": 1, "b": 1}'),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "3", "2"),
        ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]}, "4", "true"),
        ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]}, '"ab"', "1"),
        ({"oneOf": [{"const": "ab"}, {"type": "string", "pattern": "^c"}]}, '"cd"', '"d"'),
        # Python takes 1 for true.
        ({"type": "array", "items": {"enum": [1, True, "a"]}, "uniqueItems": True}, "[1, true]", "[1, 1]"),
        ({"type": "array", "items": {"enum": [0, False]}, "uniqueItems": True}, "[false, 0]", "[0, 0]"),
        ({"enum": [[1, True], [1, 1.0]], "uniqueItems": True}, "[1, true]", "[1, 1.0]"),
        ({"oneOf": [{"const": 1}, {"const": True}]}, "true", "2"),
        ({"oneOf": [{"enum": [[1], 2]}, {"enum": [[True], 2.0]}]}, "[1]", "2"),
        ({"oneOf": [{"const": 1}, {"enum": [True, "a"], "minLength": 1}]}, "1", "2"),
        ({"enum": [0, 1, True], "not": {"const": True}}, "1", "true"),
    ],
)  # fmt: skip
def test_keywords_that_are_rewritten(schema: Any, good: str, bad: str) -> None:
    constraint = Constraint(answer=Shape("json", json.dumps(schema)))
    assert accepts("bytes", constraint, good)
    assert not accepts("bytes", constraint, bad)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": list(range(40))}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, "contains"),
        ({"type": "array", "contains": {"const": 1}, "minContains": 9}, "contains"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (
            {"type": "object", "properties": {f"p{n}": {} for n in range(40)}, "minProperties": 9},
            "minProperties",
        ),
        ({"type": "string", "pattern": "^(?!a)b"}, "pattern"),
        ({"type": "string", "pattern": "a(?<=a)b"}, "pattern"),
        ({"oneOf": [{"const": "a"}, {"type": "string"}]}, "oneOf"),
        ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]}, "oneOf"),
        ({"not": {"minLength": 2}}, "not"),
        ({"if": {"minLength": 2}, "then": {"type": "string"}}, "if"),
        ({"$ref": "http://127.0.0.1:9/x"}, "ref"),
        ({"$ref": "other.json#/a"}, "ref"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$dynamicRef": "#a"}, "dynamicRef"),
        ({"allOf": [{"$ref": "#"}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ],
)
def test_keywords_that_are_refused_by_name(schema: Any, keyword: str) -> None:
    nested = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(ConstraintError, match=keyword):
        matcher("bytes", Constraint(answer=Shape("json", json.dumps(nested))))


@pytest.mark.parametrize(
    ("schema", "keyword", "why"),
    [
        ({"$ref": "#/$defs/zz"}, "$ref", "nothing in the schema stands at '#/$defs/zz'"),
        ({"$ref": "#nobody"}, "$ref", "nothing in the schema stands at '#nobody'"),
        ({"$ref": "#/required"}, "$ref", "what stands at '#/required' is no schema"),
        ({"type": "strnig"}, "type", "there is no type 'strnig'"),
        ({"type": ["null", "any"]}, "type", "there is no type 'any'"),
        ({"type": "strnig", "enum": ["a"]}, "type", "there is no type 'strnig'"),
        ({"type": []}, "type", "it names no type"),
        ({"minLength": -1}, "minLength", "its value has another form"),
        ({"exclusiveMaximum": "3"}, "exclusiveMaximum", "its value has another form"),
        ({"additionalProperties": None}, "additionalProperties", "its value has another form"),
        ({"anyOf": [{}, 5]}, "anyOf", "its value has another form"),
        ({"$defs": {"b": [1]}}, "$defs", "its value has another form"),
        ({"dependencies": {"b": [1]}}, "dependencies", "its value has another form"),
        ({"multipleOf": 0}, "multipleOf", "its value has another form"),
        ({"type": "integer", "multipleOf": 5_000_000_000}, "multipleOf", "it has too many digits"),
        ({"type": "number", "multipleOf": 1e-12}, "multipleOf", "it has too many digits"),
        ({"minimum": 1e19}, "minimum", "numbers beyond 9000000000000000000 are not written"),
        ({"type": "integer", "exclusiveMaximum": -(10**400)}, "exclusiveMaximum",
         "numbers beyond -9000000000000000000 are not written"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "exclusiveMinimum",
         "no number that can be written lies between it and 'exclusiveMaximum'"),
        ({"minimum": math.nan}, "minimum", "its value has another form"),
        ({"const": [(1 << 53) + 1]}, "const", "9007199254740993 is not written exactly"),
        ({"enum": ["a", -(1 << 63)]}, "enum", "-9223372036854775808 is not written exactly"),
        ({"type": "string", "pattern": "(["}, "pattern", "unclosed character class"),
        ({"pattern": "(a)\\1"}, "pattern", "backreferences are not supported"),
        ({"pattern": "a^b"}, "pattern", "it has an anchor, or the edge of a word, in its middle"),
        ({"pattern": "a\\b c"}, "pattern", "it has an anchor, or the edge of a word, in its middle"),
        ({"pattern": "[a&&b]"}, "pattern", "nothing matches it"),
        ({"$ref": "#/$defs/a/items"}, "$ref", "what stands at '#/$defs/a/items' never ends"),
    ],
)  # fmt: skip
def test_a_refusal_says_where(schema: Any, keyword: str, why: str) -> None:
    whole = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "required": ["a"],
        "$defs": {"a": {"type": "array", "items": schema}},
    }
    with pytest.raises(ConstraintError) as caught:
        matcher("bytes", Constraint(answer=Shape("json", json.dumps(whole))))
    assert str(caught.value) == f"at $defs.a.items: {keyword!r} cannot be enforced: {why}"


CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**CLOSED, "required": ["a", "b"]}, ""),
        ({"properties": {"o": {**CLOSED, "required": ["b"]}}, "required": ["o"]}, "at properties.o: "),
        (
            {"properties": {"o": {"$ref": "#/$defs/it"}}, "required": ["o"],
             "$defs": {"it": {**CLOSED, "required": ["b"]}}},
            "at $defs.it: ",
        ),
        (
            {"properties": {"o": {"type": "array", "minItems": 1, "items": {**CLOSED, "required": ["b"]}}},
             "required": ["o"]},
            "at properties.o.items: ",
        ),
    ],
)  # fmt: skip
def test_a_required_property_that_is_not_allowed_is_told(schema: dict[str, Any], place: str) -> None:
    schema = {"type": "object", **schema}
    why = "nothing fits it: 'required' names 'b', which 'properties' does not list and 'additionalProperties'"
    for constraint in (
        Constraint(answer=Shape("json", json.dumps(schema))),
        Constraint((ToolShape("t", json.dumps(schema)),), 1),
    ):
        with pytest.raises(ConstraintError) as caught:
            matcher("bytes", constraint)
        assert str(caught.value) == f"{place}{why} forbids"


def test_bounds_that_exclude_each_other_are_told() -> None:
    schema = {"type": "integer", "minimum": 3, "maximum": 1}
    with pytest.raises(
        ConstraintError, match=r"nothing fits the schema: minimum \(3\) is greater than maximum"
    ):
        matcher("bytes", Constraint(answer=Shape("json", json.dumps(schema))))


def node(more: Any, required: tuple[str, ...] = ("more",)) -> Any:
    """A list of nodes, each of which may or must have more."""
    each = {"type": "object", "properties": {"more": more}, "required": required}
    return {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": each}}


SELF = {"$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    "more",
    [
        SELF,
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "array", "prefixItems": [{}, SELF], "minItems": 2},
        {"anyOf": [SELF, {"allOf": [SELF, {"type": "object"}]}]},
        {"type": "object", "properties": {"on": {"$ref": "#"}, "own": SELF}, "required": ["own"]},
    ],
)
def test_what_never_ends_is_refused(more: Any) -> None:
    with pytest.raises(
        ConstraintError, match=r"at .*: '\$ref' cannot be enforced: what stands at '#/\$defs/n' never ends"
    ):
        matcher("bytes", Constraint(answer=Shape("json", json.dumps(node(more)))))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (node(SELF, ()), '[{"more": {"more": {}}}]'),
        (node({"anyOf": [SELF, {"type": "null"}]}), '[{"more": {"more": null}}]'),
        (node({"type": "array", "items": SELF}), '[{"more": [{"more": []}]}]'),
        (node({"type": "array", "prefixItems": [{}, SELF], "minItems": 1}), '[{"more": [1]}]'),
        (node({"properties": {"on": SELF}, "required": ["on"]}), '[{"more": 1}]'),
        ({"type": "integer", "x-ui": {"$ref": "#/x-ui"}, "$defs": node(SELF)["$defs"]}, "12"),
    ],
)
def test_what_may_end_is_enforced(schema: Any, text: str) -> None:
    assert accepts("bytes", Constraint(answer=Shape("json", json.dumps(schema))), text)


def test_a_reference_to_what_was_written_otherwise_names_its_keyword() -> None:
    schema = {
        "oneOf": [{"type": "integer"}, {"type": "object"}],
        "properties": {"a": {"$ref": "#/oneOf/0"}},
    }
    with pytest.raises(ConstraintError, match=r"'\$ref' to '#/oneOf/0' cannot be enforced"):
        matcher("bytes", Constraint(answer=Shape("json", json.dumps(schema))))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a b", "$defs": {"a b": {"type": "integer"}}},
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "integer"}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
        {"$ref": "#/$defs/List[Ü]", "$defs": {"List[Ü]": {"type": "integer"}}},
        {"$ref": "#own", "$defs": {"a": {"$anchor": "own", "type": "integer"}}},
        {"$ref": "#/x-parts/0", "x-parts": [{"type": "integer"}]},
    ],
)
def test_references_as_generators_write_them(schema: Any) -> None:
    constraint = Constraint(answer=Shape("json", json.dumps(schema)))
    assert accepts("bytes", constraint, "12")
    assert not accepts("bytes", constraint, '"a"')


def test_a_reference_may_lead_to_what_is_no_schema() -> None:
    named = {"allOf": {"type": "integer"}, "minItems": {}, "$ref": {}, "required": False}
    schema = {"type": "object", "properties": {**named, "a": {"$ref": "#/properties"}}}
    with contextlib.suppress(ConstraintError):
        assert not accepts("bytes", Constraint(answer=Shape("json", json.dumps(schema))), "12")


def test_annotations_need_not_be_schemas() -> None:
    schema = {"type": "integer", "x-ui": {"type": "slider"}, "discriminator": {"required": True}}
    assert accepts("bytes", Constraint(answer=Shape("json", json.dumps(schema))), "12")


def deep(depth: int) -> ToolShape:
    """A tool that takes a list in so many lists."""
    part: Any = {"type": "integer"}
    for _ in range(depth):
        part = {"type": "array", "items": part, "maxItems": 1}
    return ToolShape("f", json.dumps({"type": "object", "properties": {"a": part}, "required": ["a"]}))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": VALUE}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": VALUE}'),
        (
            "qwen3-coder",
            "<tool_call>\n<function=f>\n<parameter=a>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        ),
        ("gemma4", "<|tool_call>call:f{a:VALUE}<tool_call|>"),
        ("gemma3", "[f(a=VALUE)]"),
    ],
)
def test_whatever_may_be_nested_is_read_back(name: str, call: str) -> None:
    """As deep as a schema may be, a value reads as it was written; a deeper schema is refused beforehand."""
    row, own, depth = dialect_named(name), tokenizer("bytes"), MAX_DEPTH - 4
    tool = deep(depth)
    reader = ReaderParams(calls=True, tools=(tool,))
    state = Grammars(own, row).compile(Constraint((tool,), 1), reader).matcher(10**6)
    ids = own.encode(call.replace("VALUE", "[" * depth + "7" + "]" * depth))
    for token_id in ids:
        state.advance(token_id)
    assert state.stopped
    deltas = Reader(own, row, reader, SamplingParams(seed=1, max_tokens=9999)).feed(ids, Done("stop")).deltas
    assert CallEnd(True) in deltas
    with pytest.raises(ConstraintError, match=f"nested more than {MAX_DEPTH} levels deep") as caught:
        Grammars(own, row).compile(Constraint((deep(MAX_DEPTH),), 1), reader)
    assert caught.value.tool == "f"


KEYWORDS = """
    type properties required additionalProperties patternProperties propertyNames minProperties maxProperties
    dependentRequired dependentSchemas prefixItems items minItems maxItems uniqueItems contains minContains
    maxContains enum const oneOf anyOf allOf not if then else $ref $defs pattern format minLength maxLength
    minimum exclusiveMaximum multipleOf unevaluatedItems unevaluatedProperties
""".split()  # noqa: SIM905
BESIDE: list[dict[str, Any]] = [
    {},
    {"type": "array", "items": {"enum": [1, 2]}},
    {"properties": {"a": {}}},
]


@pytest.mark.parametrize("value", [None, 5, "x", True, ["x"], {"x": 5}, [5], [None], {"x": [[]]}, -1, 1e400])
def test_what_is_no_schema_is_refused_or_enforced_and_never_a_crash(value: Any) -> None:
    """Whatever a keyword says of one property, arguments are an object."""
    call = '<tool_call>\n{"name": "f", "arguments": 5}\n</tool_call>'
    for keyword in KEYWORDS:
        for beside in BESIDE:
            schema = {"type": "object", "properties": {"a": {**beside, keyword: value}}}
            tool = ToolShape("f", json.dumps(schema))
            with contextlib.suppress(ConstraintError):
                assert not accepts(
                    "bytes", Constraint((tool,), 1), call, ReaderParams(calls=True, tools=(tool,))
                ), schema


def test_integers_stay_readable() -> None:
    """Python refuses to read integers of more than 4,300 digits, and a model may well write one."""
    constraint = Constraint(answer=Shape("json", '{"type": "integer"}'))
    assert accepts("bytes", constraint, "-" + "8" * 18)
    assert not accepts("bytes", constraint, "8" * 30)


BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def bounded(rng: random.Random) -> dict[str, Any]:
    """A schema of numbers with bounds of any magnitude."""

    def bound() -> int | float:
        near: list[int] = [0, 1, 10 ** rng.randint(0, 30), 1 << rng.randint(0, 70), (1 << 63) - 1, 1 << 53]
        size: int | float = rng.choice(near) + rng.randint(-3, 3)
        if rng.random() < 0.4:
            size = rng.choice(
                [size * rng.random(), 10 ** -rng.uniform(0, 12), 3.4028235e38, sys.float_info.max]
            )
        return size * rng.choice([-1, 1])

    low, high = sorted([bound(), bound()])
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    if rng.random() < 0.8:
        schema[rng.choice(BOUNDS[:2])] = low
    if rng.random() < 0.8:
        schema[rng.choice(BOUNDS[2:])] = high
    if rng.random() < 0.15:
        schema["multipleOf"] = rng.choice([1, 3, 1000])
    return schema


def at_the_edges(schema: dict[str, Any]) -> Iterator[str]:
    """Numbers at a schema's bounds, and on both sides of them."""
    for bound in (schema[key] for key in BOUNDS if key in schema):
        if abs(bound) < 10**40:
            for far in ("0", "1", "1e-9", "1e-20", "1024", repr(math.ulp(bound))):
                with localcontext(prec=100):
                    yield from (f"{Decimal(repr(bound)) + side * Decimal(far):f}" for side in (-1, 1))


@pytest.mark.parametrize("seed", range(8))
def test_numbers_stay_within_their_bounds(seed: int) -> None:
    """Whatever the bounds, and wherever they stand: what is written lies within them as it stands, and as the
    float that it is read as; what cannot be written so is refused, by the keyword's path."""
    enforced = 0
    for number in range(NUM_SCHEMAS // 8):
        rng = random.Random(1000 * seed + number)
        part = bounded(rng)
        typed = {"type": part["type"]}
        schema = rng.choice(
            [
                part,
                {"$ref": "#/$defs/n", "$defs": {"n": part}},
                {"anyOf": [part, {"type": "null"}]},
                {"allOf": [typed, {key: value for key, value in part.items() if key != "type"}]},
                {"allOf": [{**typed, key: value} for key, value in part.items()]},
                {**part, "type": [part["type"], "null"]},
            ]
        )
        constraint = Constraint(answer=Shape("json", json.dumps(schema)))
        try:
            matcher("bytes", constraint)
        except ConstraintError as error:
            assert re.search("'.*' cannot be enforced: n|nothing fits", str(error)), (schema, error)
            continue
        enforced += 1
        texts = [text for text in at_the_edges(part) if accepts("bytes", constraint, text)]
        drawn = (walk("bytes", constraint, rng, limit=60) for _ in range(3))
        texts += [tokenizer("bytes").decode(ids) for ids in drawn if ids is not None]
        for text in texts:
            for read in (float, Decimal):
                value, known = (json.loads(each, parse_float=read) for each in (text, json.dumps(schema)))
                jsonschema.Draft202012Validator(known).validate(value)
    assert enforced >= NUM_SCHEMAS // 8 * 6 // 10


INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "integer", **INT64},
            ["9000000000000000000", "-9000000000000000000", "0"],
            ["1.5", "1" * 20],
        ),
        ({"type": "integer", "minimum": -(1 << 63)}, ["7"], ["1" * 20]),
        ({"type": "integer", "maximum": 10**400}, ["7"], ["1" * 20]),
        ({"type": "number", "minimum": 0, "maximum": 1e20}, ["2.5", "8999999999999999999"], ["-1", "1e3"]),
        ({"type": "number", "maximum": 3.4028235e38}, ["2.5", "-2.5"], ["1" * 20, "1e39"]),
        ({"maximum": 3.4028235e38}, ["2.5"], ["1" * 20]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1"], ["0", "0.0", "0.5"]),
        ({"type": "integer", "exclusiveMaximum": 10**18}, ["99999999999"], [str(10**18)]),
        ({"type": "integer", "minimum": (1 << 53) + 1}, [str((1 << 53) + 2)], [str(1 << 53)]),
        ({"allOf": [{"type": "number", "minimum": 0}, {"multipleOf": 7}]}, ["14"], ["15", "0.5"]),
        (
            {"enum": [(1 << 63) - 1, 10**30, 5], "minimum": -(1 << 63)},
            [str((1 << 63) - 1), str(10**30), "5"],
            ["6"],
        ),
    ],
)
def test_far_bounds(schema: Any, good: list[str], bad: list[str]) -> None:
    constraint = Constraint(answer=Shape("json", json.dumps(schema)))
    assert [text for text in good + bad if accepts("bytes", constraint, text)] == good


# -- bombs ---------------------------------------------------------------------------------------------------


def choosing(*parts: Any) -> dict[str, Any]:
    return {"anyOf": list(parts)}


def listing(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(count)}}


BOMBS: dict[str, Shape | dict[str, Any]] = {
    "10,000 choices": choosing(*({"const": index} for index in range(10_000))),
    "10,000 objects": choosing(*(listing(1) for _ in range(10_000))),
    "20,000 properties": listing(20_000),
    "remote": {"$ref": "http://10.255.255.1/x"},
    "itself": {"$ref": "#"},
    "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "all of itself": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "a product": {"allOf": [choosing(*({"properties": {f"k{i}": {"const": j}}} for j in range(3)))
                            for i in range(12)]},
    "multiples": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7919, 7907, 7901, 7883)]},
    "a long text": {"description": "x" * 2_000_000},
    "deep": json.loads('{"not": ' * 900 + "{}" + "}" * 900),
    "a long repetition": Shape("regex", "x{1000000}"),
    "a long repetition in JSON": {"type": "string", "pattern": "^x{1000000}$"},
    "nested repetitions": Shape("regex", "((a{100}){100}){100}"),
    "nested repetitions in JSON": {"type": "string", "pattern": "^((a{100}){100}){100}$"},
    "nested repetitions in a grammar": Shape("lark", 'start: "/" A // a/b\nA: /((a{100}){100}){100}/'),
    "a long choice": Shape("choice", json.dumps(["a", "x" * 300_000])),
    "a long constant": {"const": "x" * 300_000},
    "a long value": {"enum": [1, ["x" * 300_000]]},
    "a long name": {"type": "object", "properties": {"x" * 300_000: {}}},
    "20,000 words": Shape("lark", "start: " + " | ".join(f'"w{index}"' for index in range(20_000))),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    bomb = BOMBS[name]
    shape = bomb if isinstance(bomb, Shape) else Shape("json", json.dumps(bomb))
    grammars("tiny").compile(Constraint(answer=Shape("choice", '["a"]')), PLAIN)  # what is read but once
    assert min(_refusal_s(shape) for _ in range(3)) < 0.25  # the least: a pause of the machine is not ours


def _refusal_s(shape: Shape) -> float:
    began = time.thread_time()
    with pytest.raises(ConstraintError):
        matcher("tiny", Constraint(answer=shape), ReaderParams())
    return time.thread_time() - began


LOOKING = [
    Shape("regex", "((((a{1,100}){1,100}){1,100}){1,100})b"),
    Shape("regex", "(((a+)+)+)+b"),
    Shape("regex", "(.*a){30}"),
    Shape("lark", 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}'),
    Shape("lark", 'start: s\ns: s s s | "a" | "a" s | s "a"'),
    Shape("json", json.dumps({"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}})),
    Shape("json", json.dumps(listing(400))),
]
"""Shapes that are quick, but look like bombs."""


@pytest.mark.parametrize("shape", LOOKING)
def test_what_only_looks_like_a_bomb_is_quick(shape: Shape) -> None:
    own = tokenizer("tiny")
    began = time.thread_time()
    state, rng = matcher("tiny", Constraint(answer=shape)), random.Random(1)
    for _ in range(40):
        allowed = allowed_ids(mask_of(state, own.vocab_size)).tolist()
        token_id = rng.choice(allowed)
        state.advance(token_id)
        if state.stopped or token_id in own.eos_token_ids:
            break
    assert time.thread_time() - began < 0.5


def test_a_count_may_be_written_as_a_float_without_a_fraction() -> None:
    counted: dict[str, Any] = {
        "type": "object",
        "properties": {
            "enum": {"type": "string", "minLength": 2, "maxLength": 3},
            "minItems": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/a"}},
        },
        "minProperties": 1,
        "propertyNames": {"maxLength": 8},
        "$defs": {"a": {"type": "string", "minLength": 4}},
    }
    text = re.sub(r'("m(?:in|ax)(?:Length|Items|Properties)": \d+)', r"\1.0", json.dumps(counted))
    assert text.count(".0") == 7
    assert written(rewrite(read_schema(text))) == written(rewrite(counted))
    with pytest.raises(ConstraintError, match="minLength"):
        rewrite({"minLength": 1.5})
    assert rewrite({"const": {"minLength": 1.0}})["const"] == {"minLength": 1.0}


SHORTEST = {
    "abc": 3,
    "a|bcd": 1,
    "(a|bcd){4}": 4,
    "((a{100}){100}){100}": 1_000_000,
    "((((a{1,100}){1,100}){1,100}){1,100})b": 2,
    "(?:ab)?c": 1,
    "(?i)(?=abc)x": 1,
    "[a-z{}()]{5}\\d{2,}b+c*": 8,
    "\\u0041{3}\\p{L}{3}": 6,
    "(a{100}?){100}?": 10_000,
    "^a$|^$": 0,
    "(ab": 0,
}


@pytest.mark.parametrize("pattern", SHORTEST)
def test_the_shortest_match_of_a_regex(pattern: str) -> None:
    assert shortest_match(pattern) == SHORTEST[pattern]


# -- other shapes --------------------------------------------------------------------------------------------

FUNCTION: dict[str, Any] = {
    "begin": "<function=f>",
    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
    "end": "</function>",
}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<function="], "tags": [FUNCTION]}


def tags(format: Any) -> Shape:
    return Shape("tags", json.dumps({"type": "structural_tag", "format": format}))


@pytest.mark.parametrize("kind", ["tiny", "bytes"])
@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (Shape("choice", '["yes", "a \\"no\\""]'), ["yes", 'a "no"'], ["maybe", "ye", ""]),
        (Shape("regex", "[a-z]+@x/y\\.com"), ["a@x/y.com"], ["@x/y.com", "a@x/y.comm"]),
        (Shape("regex", "^a|b$"), ["a", "b"], ["ab"]),
        (Shape("lark", 'start: "a" b\nb: "b"+'), ["abb"], ["a", "b"]),
        (Shape("lark", 'root ::= "a" x\nx ::= [0-9]+'), ["a1"], ["a"]),
        (tags(TRIGGERED), ["", "x y", "a <function=f>1</function> b"], ["<function=g", "<function=f>x"]),
        (tags({**TRIGGERED, "at_least_one": True, "stop_after_first": True}), ["<function=f>1</function>"],
         ["x", "", "<function=f>1</function> b"]),
        (tags({"type": "sequence", "elements": [
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            {"type": "or", "elements": [{"type": "const_string", "value": "a"},
                                        {"type": "regex", "pattern": "b+"}]}]}),
         ["<t>x < y</t>a", "<t></t>bb"], ["<t>x</t>", "<t>x</t>c", "x"]),
        (tags({"type": "tags_with_separator", "separator": ", ", "tags": [FUNCTION]}),
         ["", "<function=f>1</function>, <function=f>2</function>"], ["x", "<function=f>1</function>,"]),
        (Shape("tags", json.dumps({"structures": [{"begin": "<tool_call>", "schema": {"type": "integer"},
                                                   "end": "</tool_call>"}], "triggers": ["<tool_call>"]})),
         ["hi", "hi <tool_call>7</tool_call> ho"], ["<tool_call>x"]),
    ],
)  # fmt: skip
def test_other_shapes(kind: str, shape: Shape, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(kind, Constraint(answer=shape), text), text
        assert accepts(kind, Constraint(answer=shape), f"<think>\nHm.\n</think>\n\n{text}", ReaderParams()), (
            text
        )
    for text in bad:
        assert not accepts(kind, Constraint(answer=shape), text), text


@pytest.mark.parametrize(
    "shape",
    [
        Shape("lark", "start: nothing"),
        Shape("regex", "a(?=b)"),
        tags({"type": "klingon"}),
        tags({"type": "tag", "content": {"type": "any_text"}}),
        tags({**TRIGGERED, "triggers": ["<other>"]}),
        tags({"type": "or", "elements": []}),
        tags({**TRIGGERED, "tags": [-0.0]}),
        tags({**TRIGGERED, "tags": [{**FUNCTION, "begin": None}]}),
        tags({**TRIGGERED, "triggers": "", "tags": [FUNCTION]}),
        tags({**TRIGGERED, "triggers": [1]}),
        tags({"type": "tags_with_separator", "tags": [None]}),
        tags({"type": "tags_with_separator", "tags": [FUNCTION], "separator": 1}),
        tags({**FUNCTION, "type": "tag", "end": 1}),
        tags({**FUNCTION, "type": "tag", "end": ["a", None]}),
        tags({**FUNCTION, "type": "tag", "end": {"x": "y"}}),
        tags({"type": "any_text", "excludes": 1}),
        tags({"type": "any_text", "excludes": {"x": 1}}),
        tags({**FUNCTION, "type": "tag", "content": {"type": "any_text", "excludes": [1]}}),
        Shape("tags", '{"structures": [null], "triggers": ["<"]}'),
        Shape("tags", '{"structures": {"begin": "<"}, "triggers": ["<"]}'),
    ],
)
def test_shapes_that_cannot_be_honoured(shape: Shape) -> None:
    with pytest.raises(ConstraintError):
        matcher("bytes", Constraint(answer=shape))


# -- an answer beside thoughts and calls ---------------------------------------------------------------------

INTEGER = Shape("json", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')


@pytest.mark.parametrize("kind", ["tiny", "bytes"])
@pytest.mark.parametrize("starts_in", ["text", "reasoning"])
def test_a_thought_ends_in_time(kind: str, starts_in: Any) -> None:
    """A model that never closes its thought is made to, halfway; the shape follows."""
    own = tokenizer(kind)
    reader = ReaderParams(starts_in=starts_in)
    state = matcher(kind, Constraint(answer=INTEGER), reader, 60)
    said = own.encode("<think>" if starts_in == "text" else "")
    for token_id in said:
        state.advance(token_id)
    x, close = own.encode("x")[0], own.encode("</think>")[0]
    for _ in range(30 - len(said)):
        assert state.allows(x)
        state.advance(x)
    assert not state.allows(x)
    assert allowed_ids(mask_of(state, own.vocab_size)).tolist() == [close]
    for token_id in own.encode('</think>\n\n{"n": 1}'):
        state.advance(token_id)
    assert state.stopped


def test_a_thought_whose_tag_is_spelled_ends_in_time() -> None:
    own = tokenizer("untagged")
    state = matcher("untagged", Constraint(answer=INTEGER), ReaderParams(starts_in="reasoning"), 20)
    for token_id in own.encode("x" * 8 + "</"):
        state.advance(token_id)
    rest: list[int] = []
    while len(rest) < 6:
        [token_id] = allowed_ids(mask_of(state, own.vocab_size)).tolist()
        state.advance(token_id)
        rest.append(token_id)
    assert own.decode(rest) == "think>"
    assert state.allows(own.encode("\n")[0]) and not state.allows(own.encode("x")[0])


@pytest.mark.parametrize("kind", ["tiny", "bytes", "untagged"])
def test_a_model_chooses_between_text_and_calls(kind: str) -> None:
    """Strict auto: free text, or calls whose names and arguments hold, or text and then calls."""
    free = Constraint((WEATHER,), None, Shape("text"))
    reader = ReaderParams(calls=True)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    for text in (
        "",
        "Hello <b>!",
        call,
        f"{call}\n{call}",
        f"Well,\n{call}",
        f"<think>\nHm\n</think>\n\n{call}",
    ):
        assert accepts(kind, free, text, reader), text
    for text in (
        '<tool_call>\n{"name": "other"',
        call.replace("city", "town"),
        "x <tool_call>y",
        f"{call} and",
    ):
        assert not accepts(kind, free, text, reader), text
    once = Constraint((WEATHER,), 1, Shape("text"))
    assert accepts(kind, once, f"Well,\n{call}", reader)
    assert not accepts(kind, once, f"{call}\n{call}", reader)


@pytest.mark.parametrize("kind", ["tiny", "bytes"])
def test_free_text_costs_a_mask_that_allows_all_text(kind: str) -> None:
    own = tokenizer(kind)
    state = matcher(kind, Constraint((WEATHER,), None, Shape("text")), ReaderParams(calls=True))
    for token_id in own.encode("Hello"):
        state.advance(token_id)
    allowed = set(allowed_ids(mask_of(state, own.vocab_size)).tolist())
    missing = set(range(own.vocab_size)) - allowed - set(own.added_ids)
    assert all(re.search(rb"[\x80-\xff]", own.token_bytes(each)) for each in missing), "but broken UTF-8"
    assert own.token_id("<tool_call>") in allowed and set(own.eos_token_ids) <= allowed


@pytest.mark.parametrize("kind", ["tiny", "bytes"])
def test_an_answer_of_a_shape_or_calls(kind: str) -> None:
    constraint = Constraint((WEATHER,), None, INTEGER)
    reader = ReaderParams(calls=True, shaped=True)
    seen = set()
    for seed in range(12):
        ids = walk(kind, constraint, random.Random(seed), reader)
        assert ids is not None
        deltas = read(kind, ids, reader)
        if any(isinstance(delta, CallStart) for delta in deltas):
            assert not joined(deltas, Text)
            seen.add("calls")
        else:
            assert isinstance(json.loads(joined(deltas, Text))["n"], int)
            seen.add("answer")
    assert seen == {"calls", "answer"}


def test_an_answer_may_spell_what_opens_a_call() -> None:
    own, reader = tokenizer("bytes"), ReaderParams(calls=True, shaped=True)
    shape = Shape("json", '{"const": {"a": "<tool_call>\\n{\\"name\\": \\"get_weather\\", "}}')
    text = '{"a": "<tool_call>\\n{\\"name\\": \\"get_weather\\", "}'
    ids = [each for char in text for each in own.encode(char)]
    state = matcher("bytes", Constraint((WEATHER,), None, shape), reader)
    for token_id in ids:
        state.advance(token_id)
    assert joined(read("bytes", ids, reader), Text) == text


# -- inputs of custom tools ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tiny", "bytes"])
@pytest.mark.parametrize("free", [False, True])
def test_inputs_fit_their_grammar(kind: str, free: bool) -> None:
    """Quotes, backslashes and line breaks are escaped in the call and not in the input."""
    patch = ToolShape("apply_patch", INPUT, Shape("lark", PATCH))
    answer = Shape("text") if free else None
    reader = ReaderParams(calls=True)
    found = 0
    for seed in range(8):
        ids = walk(kind, Constraint((patch, WEATHER), 2, answer), random.Random(seed), reader)
        assert ids is not None
        for tool, arguments in calls_of(read(kind, ids, reader)):
            if tool == "apply_patch":
                found += 1
                [(key, text)] = json.loads(arguments).items()
                assert key == "input" and is_patch(text), text
                assert accepts("bytes", Constraint(answer=Shape("lark", PATCH)), text)
                assert json.dumps({"input": text}, ensure_ascii=False) == arguments
    assert free or found > 2


def calls_of(deltas: list[Delta]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            calls.append((delta.name, ""))
        elif isinstance(delta, CallArgs):
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return calls


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ('"\\d+"\\n', ['"12"\n']),
        ("[a-c]{2}\\\\é", ["ab\\é"]),
        ("a*", ["", "aaa"]),
        (r"\t😀|\r", ["\t😀", "\r"]),
    ],
)
@pytest.mark.parametrize("kind", ["tiny", "bytes"])
def test_inputs_fit_their_regex(kind: str, pattern: str, texts: list[str]) -> None:
    constraint = Constraint((ToolShape("f", INPUT, Shape("regex", pattern)),), 1)
    reader = ReaderParams(calls=True)

    def call(text: str) -> str:
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'

    for text in texts:
        assert accepts(kind, constraint, call(text), reader), text
        assert not accepts(kind, constraint, call(text + "zz"), reader)
    ids = walk(kind, constraint, random.Random(1), reader)
    assert ids is not None
    [(_, arguments)] = calls_of(read(kind, ids, reader))
    assert re.fullmatch(pattern, json.loads(arguments)["input"])


def test_a_bad_input_grammar_names_its_tool() -> None:
    bad = ToolShape("bad", INPUT, Shape("lark", "start: nothing"))
    with pytest.raises(ConstraintError) as caught:
        matcher("bytes", Constraint((WEATHER, bad)), ReaderParams(calls=True))
    assert caught.value.tool == "bad"


def test_dialects_without_calls_cannot_be_made_to_call() -> None:
    with pytest.raises(ConstraintError, match="cannot be made to call"):
        Grammars(tokenizer("bytes"), dialect_named("plain")).compile(Constraint((WEATHER,)), ReaderParams())
