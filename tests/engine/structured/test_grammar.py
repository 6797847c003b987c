"""Grammars: whatever is drawn under the mask is calls that parse and arguments that validate."""

from __future__ import annotations

import json
import random
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from engine.backends.scripted_tokens import scripted_tokenizer
from engine.dialects.spec import Dialect
from engine.dialects.table import dialect_named
from engine.parsing.output_reader import Reader
from engine.structured.grammar import CACHE_COUNT, Grammar, Grammars, Matcher, allowed_ids
from engine.tokenizer.tokenizer import Tokenizer
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
    ToolShape,
)

HERMES = dialect_named("hermes")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit \"é\""]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}  # fmt: skip
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    },
    "required": ["points", "note", "flag", "code"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": -5, "maximum": 5}, "y": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = (ToolShape("get_weather", json.dumps(WEATHER)), ToolShape("plot-2", json.dumps(NESTED)))
SCHEMAS = {"get_weather": WEATHER, "plot-2": NESTED}


@lru_cache
def tokenizer(kind: str) -> Tokenizer:
    """tiny: the shipped one. bytes: a token a byte and the tags. untagged: no tokens for the tags."""
    if kind == "tiny":
        return Tokenizer.load(Path("engine/tiny/checkpoint"))
    if kind == "bytes":
        return scripted_tokenizer()
    file = json.loads(scripted_tokenizer().serialized)
    file["added_tokens"] = [token for token in file["added_tokens"] if token["special"]]
    return Tokenizer(Backend.from_str(json.dumps(file)), eos_token_ids=(258, 256))


@lru_cache
def grammars(kind: str) -> Grammars:
    return Grammars(tokenizer(kind), HERMES)


def mask_of(matcher: Matcher, size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    mask = np.full((size + 31) // 32, -1, np.int32)
    matcher.fill(mask)
    return mask


def walk(
    kind: str, constraint: Constraint, rng: random.Random, starts_in: str = "text"
) -> tuple[list[int], bool]:
    """Token ids drawn at random under the mask, and whether the grammar had stopped without an end of turn.

    Tokens that close something are drawn more often, or strings would not end.
    """
    own = tokenizer(kind)
    matcher = grammars(kind).compile(constraint, ReaderParams(starts_in=starts_in)).matcher(10**6)
    closing = {own.encode(text)[0] for text in ('"', "}", "]", '"}', '",', "</think>", "<|im_end|>")}
    ids: list[int] = []
    spelled = list(b"</think>") if kind == "untagged" else []  # no chance would write that
    while len(ids) < 1500:
        allowed = [int(each) for each in allowed_ids(mask_of(matcher, own.vocab_size + 40))]
        assert allowed, own.decode(ids)
        ends = [each for each in allowed if each in closing]
        token_id = rng.choice(ends) if ends and rng.random() < 0.3 else rng.choice(allowed)
        if len(ids) > 20 and spelled and spelled[0] in allowed:
            token_id = spelled.pop(0)
        assert matcher.allows(token_id)
        matcher.advance(token_id)
        ids.append(token_id)
        if token_id in own.eos_token_ids:
            return ids, False
        if matcher.stopped:
            return ids, True
    pytest.fail("the walk did not end: " + own.decode(ids)[:2000])


def deltas_of(
    kind: str, ids: list[int], starts_in: Any = "text", max_calls: int | None = None
) -> list[Delta]:
    params = ReaderParams(calls=True, starts_in=starts_in, max_calls=max_calls)
    reader = Reader(tokenizer(kind), HERMES, params, SamplingParams(seed=1, max_tokens=9999))
    out: list[Delta] = []
    for at, token_id in enumerate(ids):
        reading = reader.feed((token_id,), Done("stop") if at + 1 == len(ids) else None)
        out += reading.deltas
        if reading.done:
            assert at + 1 == len(ids)
    return out


def calls_of(deltas: list[Delta]) -> list[tuple[str, str]]:
    """(name, arguments) of every call; fails on anything that is neither a call nor reasoning."""
    calls: list[tuple[str, str]] = []
    for delta in deltas[:-1]:
        if isinstance(delta, CallStart):
            calls.append((delta.name, ""))
        elif isinstance(delta, CallArgs):
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
        else:
            assert isinstance(delta, Reasoning) or delta == CallEnd(True), deltas
    assert isinstance(deltas[-1], Done)
    return calls


@pytest.mark.parametrize("starts_in", ["text", "reasoning"])
@pytest.mark.parametrize("max_calls", [1, 2, None])
@pytest.mark.parametrize("kind", ["tiny", "bytes", "untagged"])
def test_random_walks_are_valid_calls(kind: str, max_calls: int | None, starts_in: str) -> None:
    constraint = Constraint(TOOLS, max_calls)
    for seed in range(6):
        ids, stopped = walk(kind, constraint, random.Random(seed), starts_in)
        calls = calls_of(deltas_of(kind, ids, starts_in, max_calls))
        assert 1 <= len(calls) <= (max_calls or 99)
        assert not stopped or len(calls) == max_calls
        for name, arguments in calls:
            value = json.loads(arguments)
            jsonschema.validate(value, SCHEMAS[name])
            # what the template will print: numbers aside, whose spelling Python normalizes
            again = json.dumps(json.loads(arguments, parse_float=str, parse_int=str), ensure_ascii=False)
            assert (
                json.dumps(value, ensure_ascii=False) == arguments or "." in arguments or "e" in again.lower()
            )


@pytest.mark.parametrize("kind", ["tiny", "bytes"])
def test_tags_within_names_and_values_are_text(kind: str) -> None:
    """Their tokens are tags; in JSON the same characters are spelled with other tokens."""
    own = tokenizer(kind)
    schema = {
        "type": "object",
        "properties": {"</tool_call>": {"const": "<think>"}},
        "required": ["</tool_call>"],
    }
    shape = ToolShape("f", json.dumps({**schema, "additionalProperties": False}))
    matcher = grammars(kind).compile(Constraint((shape,), 1), ReaderParams()).matcher(10**6)
    ids: list[int] = []
    while not matcher.stopped:
        allowed = [int(each) for each in allowed_ids(mask_of(matcher, own.vocab_size))]
        ids.append(next(each for each in allowed if each != own.token_id("<think>") or ids))
        matcher.advance(ids[-1])
    assert calls_of(deltas_of(kind, ids)) == [("f", '{"</tool_call>": "<think>"}')]


@pytest.mark.parametrize(
    "grammar", ['start: "a" <|im_end|>', 'start: "a" <[3065]>', 'start: "a" <|im_end|> "b"']
)
def test_a_grammar_may_name_the_end_of_the_turn(grammar: str) -> None:
    """Nothing else may come there, and least of all the name that the grammar library has for it."""
    own = tokenizer("tiny")
    constraint = Constraint(answer=Shape("lark", grammar))
    matcher = grammars("tiny").compile(constraint, ReaderParams()).matcher(100)
    matcher.advance(*own.encode("a"))
    assert allowed_ids(mask_of(matcher, own.vocab_size)).tolist() == own.encode("<|im_end|>")
    matcher.advance(*own.encode("<|im_end|>"))


def test_a_schema_that_refers_to_itself() -> None:
    tree = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
    }
    shape = ToolShape("f", json.dumps(tree))
    matcher = grammars("bytes").compile(Constraint((shape,), 1), ReaderParams()).matcher(10**6)
    for token_id in tokenizer("bytes").encode(
        '<tool_call>\n{"name": "f", "arguments": {"n": {"n": {}}}}\n</tool_call>'
    ):
        matcher.advance(token_id)
    assert matcher.stopped


def test_one_call_stops_the_grammar() -> None:
    matcher = grammars("bytes").compile(Constraint((ToolShape("f", ""),), 1), ReaderParams()).matcher(10**6)
    said = tokenizer("bytes").encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    for token_id in said:
        assert not matcher.stopped
        matcher.advance(token_id)
    assert matcher.stopped


def test_more_calls_may_follow_or_not() -> None:
    own = tokenizer("tiny")
    matcher = grammars("tiny").compile(Constraint((ToolShape("f", "{}"),)), ReaderParams()).matcher(10**6)
    said = '<tool_call>\n{"name": "f", "arguments": {"any": [1, {"b": null}], "s": "\\n\\"é"}}\n</tool_call>'
    for _ in range(2):
        for token_id in own.encode(said):
            matcher.advance(token_id)
        assert not matcher.stopped
        allowed = allowed_ids(mask_of(matcher, own.vocab_size))
        assert set(own.eos_token_ids) <= set(allowed.tolist())
        matcher.advance(own.encode("\n")[0])


def test_the_layout_is_the_template_s() -> None:
    """White space, escapes and tags that the template would print in another way are not allowed."""
    own = tokenizer("bytes")
    start = '<tool_call>\n{"name": "f", "arguments": {'
    for bad in [
        "<tool_call>{", "Hi", '<tool_call>\n{"name":"', '<tool_call>\n{"name": "g',
        start + ' "', start + '"a":1', start + '"a": 1,"', start + '"a": "\\u00e9',
        start + '"a": "\\/', start + '"a": "</tool_call>',
    ]:  # fmt: skip
        matcher = (
            grammars("bytes").compile(Constraint((ToolShape("f", "{}"),)), ReaderParams()).matcher(10**6)
        )
        *good, last = own.encode(bad)
        if bad.endswith("</tool_call>"):
            assert own.token_id("</tool_call>") == last  # the tag's own token, inside a string
        for token_id in good:
            if not matcher.allows(token_id):
                break
            matcher.advance(token_id)
        else:
            assert not matcher.allows(last), bad


def test_reasoning_may_come_first() -> None:
    own = tokenizer("tiny")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    constraint = Constraint((ToolShape("f", "{}"),), 1)
    thought = "Hm <b>.\n</think>\n\n"
    for starts_in, text in (("text", f"<think>\n{thought}{call}"), ("reasoning", f"{thought}{call}")):
        matcher = grammars("tiny").compile(constraint, ReaderParams(starts_in=starts_in)).matcher(10**6)
        for token_id in own.encode(text):
            matcher.advance(token_id)
        assert matcher.stopped
    matcher = grammars("tiny").compile(constraint, ReaderParams(starts_in="reasoning")).matcher(10**6)
    with pytest.raises(ConstraintError):
        for token_id in own.encode("x")[:1] * 3 + own.encode("<tool_call>"):
            matcher.advance(token_id)


def test_masks_of_any_size() -> None:
    own = tokenizer("bytes")
    constraint = Constraint(TOOLS, 1)
    expected = {own.token_id("<tool_call>"), own.token_id("<think>")}
    for size in (own.vocab_size, own.vocab_size + 500, 200):
        matcher = grammars("bytes").compile(constraint, ReaderParams()).matcher(10**6)
        allowed = set(allowed_ids(mask_of(matcher, size)).tolist())
        assert allowed == (expected if size > 200 else set())


def test_matchers_are_apart() -> None:
    grammar = grammars("bytes").compile(Constraint(TOOLS, 1), ReaderParams())
    first, second = grammar.matcher(9), grammar.matcher(9)
    first.advance(tokenizer("bytes").token_id("<tool_call>") or 0)
    assert second.allows(tokenizer("bytes").token_id("<think>") or 0)


# -- what cannot be honoured ---------------------------------------------------------------------------------


def properties(schema: Any) -> str:
    return json.dumps({"type": "object", "properties": {"a": schema}, "required": ["a"]})


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (properties({"not": {}}), "nothing fits the required property .a."),
        (properties({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (properties({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (properties({"$ref": "#/$defs/x"}), r"/\$defs/x"),
        (properties({"$ref": "http://127.0.0.1:9/x"}), "leads outside of the schema"),
        (
            properties({"type": "integer", "minimum": 5, "maximum": 3}),
            "nothing fits the required property .a.",
        ),
        (properties({"type": "klingon"}), "klingon"),
        ('{"type": "string"}', "must have type object"),
        ("[]", "not a JSON Schema object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (json.dumps({"properties": {f"p{index}": {} for index in range(20_000)}}), "optional properties"),
        (json.dumps({"description": "x" * 2_000_000}), "too long"),
    ],
)
def test_constraints_that_cannot_be_honoured(parameters: str, reason: str) -> None:
    start = time.perf_counter()
    tools = (ToolShape("good", "{}"), ToolShape("bad", parameters))
    with pytest.raises(ConstraintError, match=reason) as caught:
        grammars("bytes").compile(Constraint(tools), ReaderParams())
    assert caught.value.tool == "bad"
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("constraint", [Constraint(), Constraint(TOOLS, 0)])
def test_constraints_without_a_call(constraint: Constraint) -> None:
    with pytest.raises(ConstraintError):
        grammars("bytes").compile(constraint, ReaderParams())


def test_dialects_without_calls() -> None:
    with pytest.raises(ConstraintError, match="'plain' dialect"):
        Grammars(tokenizer("bytes"), dialect_named("plain")).compile(Constraint(TOOLS), ReaderParams())


def test_a_token_that_does_not_fit() -> None:
    matcher = grammars("bytes").compile(Constraint(TOOLS), ReaderParams()).matcher(10**6)
    with pytest.raises(ConstraintError):
        matcher.advance(ord("x"))


# -- the cache -----------------------------------------------------------------------------------------------


def test_compiled_grammars_are_kept_within_bounds() -> None:
    own = Grammars(tokenizer("bytes"), HERMES)

    def compile(index: int, padding: str = "") -> Grammar:
        shape = ToolShape(f"f{index}", json.dumps({"description": padding}))
        return own.compile(Constraint((shape,), 1), ReaderParams())

    first = compile(0)
    assert compile(0) is first
    for index in range(1, CACHE_COUNT + 10):
        compile(index)
    assert len(own._kept) == CACHE_COUNT
    assert compile(0) is not first
    for index in range(12):
        compile(index, "x" * 1_000_000)
    assert own._size == sum(grammar.size for grammar in own._kept.values()) <= 9_000_000


def test_threads_compile_together() -> None:
    own = Grammars(tokenizer("tiny"), HERMES)
    found: list[Grammar] = []

    def work() -> None:
        for calls in (1, 2, 3):
            found.append(own.compile(Constraint(TOOLS, calls), ReaderParams()))
            found[-1].matcher(9).allows(5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and len(own._kept) == 3


def test_the_llama_layout() -> None:
    dialect: Dialect = dialect_named("llama3-json")
    own = tokenizer("bytes")
    constraint = Constraint((ToolShape("f", "{}"),), 2)
    matcher = Grammars(own, dialect).compile(constraint, ReaderParams()).matcher(10**6)
    for token_id in own.encode('{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}'):
        matcher.advance(token_id)
    assert matcher.stopped
