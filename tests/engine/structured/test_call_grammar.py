"""Forced calls in every row's layout: whatever is drawn under the mask reads as calls whose arguments fit."""

from __future__ import annotations

import json
import os
import random
import re
from collections import defaultdict
from functools import lru_cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer as Backend

from engine.dialects.spec import Dialect
from engine.dialects.table import DIALECTS
from engine.parsing.output_reader import Reader
from engine.structured.grammar import Grammars, allowed_ids
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
    Text,
    ToolShape,
)
from tests.engine.structured.test_grammar import mask_of, tokenizer
from tests.engine.structured.test_shapes import INPUT, PATCH, is_patch
from tests.support.schemas import Generator

FORCED = [row for row in DIALECTS if row.calls is not None]
TYPED = [row for row in FORCED if row.calls is not None and row.calls.kind in ("tags", "python", "keyed")]
KINDS = ("bytes", "tiny", "untagged")
NUM_TOOLS = int(os.environ.get("ANTIPHON_SCHEMAS", "200")) // 33
GRAMMARS: dict[tuple[str, str], Grammars] = {}


def names(row: Dialect) -> str:
    return row.name


def grammars(row: Dialect, kind: str) -> Grammars:
    return GRAMMARS.setdefault((row.name, kind), Grammars(tokenizer(kind), row))


@lru_cache
def by_bytes(kind: str) -> dict[bytes, list[int]]:
    own, found = tokenizer(kind), defaultdict(list)
    for token_id in range(own.vocab_size):
        found[own.token_bytes(token_id)].append(token_id)
    return found


def longest(kind: str, wish: bytes, allowed: set[int]) -> tuple[int | None, bytes]:
    """The longest token that a text begins with, and the rest of the text."""
    for size in range(len(wish), 0, -1):
        for token_id in allowed.intersection(by_bytes(kind).get(wish[:size], ())):
            return token_id, wish[size:]
    return None, b""


def walk(
    row: Dialect, kind: str, constraint: Constraint, reader: ReaderParams, rng: random.Random
) -> list[int] | None:
    """Token ids drawn at random under the mask to an end, closings more often than chance would; None where
    600 tokens did not do."""
    own = tokenizer(kind)
    state = grammars(row, kind).compile(constraint, reader).matcher(10**6)
    marks = row.calls
    assert marks is not None
    closings = ['"', "}", "]", ")", "\n", "null", "0", *filter(None, (marks.open, marks.close, marks.end))]
    if (tags := marks.parameters) is not None:
        closings += [tags.pad + tags.close] * 4
    closings += [marks.quote] * 4 if marks.quote else []
    wish = b""
    ids: list[int] = []
    while len(ids) < 600:
        allowed = allowed_ids(mask_of(state, own.vocab_size)).tolist()
        assert allowed, own.decode(ids)
        wish = wish or (rng.choice(closings).encode() if rng.random() < 0.3 else b"")
        token_id, wish = longest(kind, wish, set(allowed)) if wish else (None, b"")
        token_id = rng.choice(allowed) if token_id is None else token_id
        assert state.allows(token_id), own.decode([*ids, token_id])
        state.advance(token_id)
        if token_id in own.eos_token_ids:
            return ids
        ids.append(token_id)
        if state.stopped:
            return ids
    return None


def read(row: Dialect, kind: str, ids: list[int], reader: ReaderParams) -> list[Delta]:
    own = Reader(tokenizer(kind), row, reader, SamplingParams(seed=1, max_tokens=9999))
    deltas: list[Delta] = []
    for at, token_id in enumerate(ids):
        reading = own.feed((token_id,), Done("stop") if at + 1 == len(ids) else None)
        deltas += reading.deltas
        if reading.done:  # white space may follow the last call
            break
    return deltas


def calls_of(deltas: list[Delta]) -> tuple[list[tuple[str, Any]], str]:
    """The calls, and the text; every call is whole."""
    calls: list[tuple[str, str]] = []
    text = ""
    for delta in deltas:
        match delta:
            case CallStart():
                calls.append((delta.name, ""))
            case CallArgs():
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
            case CallEnd():
                assert delta.complete
            case Text():
                text += delta.text
            case _:
                assert isinstance(delta, Reasoning | Done)
    return [(name, json.loads(arguments)) for name, arguments in calls], text


def drawn_tools(seed: int) -> tuple[ToolShape, ...]:
    generator = Generator(seed, ["a", "b", "city", "x-1", "näme", "n0", "_c"])
    drawn = [json.dumps(generator.parameters()) for _ in range(2)]
    return tuple(map(ToolShape, (f"look_{seed}", f"get-it_{seed}"), drawn))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", FORCED, ids=names)
def test_random_tools_are_called_with_what_fits(row: Dialect) -> None:
    whole = 0
    for seed in range(NUM_TOOLS):
        kind, tools, rng = KINDS[seed % len(KINDS)], drawn_tools(seed), random.Random(seed)
        max_calls = rng.choice([1, 2, None])
        reader = ReaderParams(calls=True, tools=tools, max_calls=max_calls)
        try:
            ids = walk(row, kind, Constraint(tools, max_calls), reader, rng)
        except ConstraintError as error:
            assert error.tool or "nothing fits" in str(error)
            continue
        if ids is None:
            continue
        whole += 1
        calls, text = calls_of(read(row, kind, ids, reader))
        assert calls and not text and len(calls) <= (max_calls or 99)
        schemas = {tool.name: json.loads(tool.parameters) for tool in tools}
        for name, arguments in calls:
            jsonschema.Draft202012Validator(schemas[name]).validate(arguments)
    assert whole >= NUM_TOOLS // 6


# -- values, as each layout writes them ----------------------------------------------------------------------


def accepts(row: Dialect, kind: str, constraint: Constraint, text: str, reader: ReaderParams) -> bool:
    """Whether a text is a whole one."""
    own = tokenizer(kind)
    state = grammars(row, kind).compile(constraint, reader).matcher(10**6)
    for token_id in own.encode(text):
        if not state.allows(token_id):
            return False
        state.advance(token_id)
    return state.stopped or any(state.allows(end) for end in own.eos_token_ids)


def tool_of(**properties: Any) -> ToolShape:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return ToolShape("f", json.dumps({**schema, "required": list(properties)}))


def written(row: Dialect, *, text: bool = False, **values: str) -> str:
    """One call in a layout with tags, each value as it is given. text: where the layout says whether a value
    is one, these are."""
    marks = row.calls
    assert marks is not None
    tags = marks.parameters
    if tags is None:
        quote = marks.quote if text else ""
        arguments = ",".join(f"{key}:{quote}{value}{quote}" for key, value in values.items())
    else:
        kind = tags.kinds[not text] if tags.kinds else ""
        arguments = "".join(
            f"{tags.open}{json.dumps(key) if tags.quoted else key}{kind}{tags.key_close}{tags.gap}"
            f"{tags.value_open}{tags.pad}{value}{tags.pad}{tags.close}{tags.after}"
            for key, value in values.items()
        )
    call = f"{marks.before_name}f{marks.before_arguments}{arguments}{marks.end}"
    return f"{marks.open}{marks.front}{call}{marks.back}{marks.close}"


TAGGED = [row for row in TYPED if row.calls is not None and row.calls.kind == "tags"]
TOLD = [row for row in TYPED if row.name.startswith(("deepseek", "gemma4"))]
"""Rows whose layout tells texts from other values."""
UNTOLD = [row for row in TAGGED if row not in TOLD]
VALUES: list[tuple[Any, list[tuple[str, Any]], list[str]]] = [
    ({"type": "string"}, [("Zürich", "Zürich"), ("42", "42"), ("<b> a\n b", "<b> a\n b")], []),
    ({"type": "string", "pattern": "^[a-z]+$"}, [("abc", "abc")], ["ABC", '"abc"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, [("éé", "éé")], ["é", "éééé"]),
    ({"type": "string", "format": "date"}, [("2024-02-03", "2024-02-03")], ["2024-13-03"]),
    ({"enum": ["a b", 'c"', "null"]}, [("a b", "a b"), ('c"', 'c"'), ("null", "null")], ["a", '"a b"']),
    ({"enum": ["a", 1]}, [("a", "a")], ["1"]),  # the reader takes every text for a string
    ({"type": ["string", "null"]}, [("x", "x"), ("null", None)], []),
    ({"type": ["string", "null"], "enum": ["x"]}, [("x", "x")], ["null"]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}, [("a", "a"), ("null", None)], ["ab"]),
    ({"type": "integer", "minimum": 3}, [("7", 7)], ["2", "x", "7.5"]),
    ({"type": "number"}, [("-1.5", -1.5), ("1e400", float("inf"))], ["x"]),
    ({"type": "boolean"}, [("true", True)], ["True", "yes"]),
    ({"type": "array", "items": {"type": "string"}}, [('["a", "</b>"]', ["a", "</b>"])], ["a", '["a",]']),
    ({"type": "object"}, [('{"a": {"b": "\\""}}', {"a": {"b": '"'}})], ["a", "{"]),
    ({}, [("x", "x"), ("[1]", [1]), ("7", 7)], []),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["tiny", "bytes"])
@pytest.mark.parametrize("row", UNTOLD, ids=names)
@pytest.mark.parametrize(("schema", "good", "bad"), VALUES)
def test_values_between_tags(
    row: Dialect, kind: str, schema: Any, good: list[tuple[str, Any]], bad: list[str]
) -> None:
    tool = tool_of(v=schema)
    constraint, reader = Constraint((tool,), 1), ReaderParams(calls=True, tools=(tool,))
    for said, value in good:
        text = written(row, v=said)
        assert accepts(row, kind, constraint, text, reader), text
        ids = list(tokenizer(kind).encode(text))
        assert calls_of(read(row, kind, ids, reader)) == ([("f", {"v": value})], "")
    for said in bad:
        assert not accepts(row, kind, constraint, written(row, v=said), reader), said


TEXTS: list[tuple[Any, list[tuple[str, Any]], list[str]]] = [
    ({"type": "string"}, [("Zürich", "Zürich"), ("42", "42"), ("<b> {a}\n, 'b\"", "<b> {a}\n, 'b\"")], []),
    ({"type": "string", "pattern": "^[a-z]+$"}, [("abc", "abc")], ["ABC", '"abc"']),
    ({"enum": ["a b", 1]}, [("a b", "a b")], ["1", "a"]),
    ({"type": ["string", "null"]}, [("x", "x"), ("null", "null")], []),
    ({"type": ["string", "integer"], "minimum": 3}, [("1", "1")], []),
    ({}, [("x", "x"), ("7", "7")], []),
    ({"type": "integer"}, [], ["7"]),
]
OTHERS: list[tuple[Any, list[tuple[str, Any]], list[str]]] = [
    ({"type": "string"}, [], ["Zürich", '"a"', "1"]),
    ({"enum": ["a b", 1]}, [("1", 1)], ["2"]),
    ({"type": ["string", "null"]}, [("null", None)], ["x", "1"]),
    ({"type": ["string", "integer"], "minimum": 3}, [("7", 7)], ["2", "x"]),
    ({"type": "number"}, [("-1.5", -1.5)], ["x"]),
    ({"type": "boolean"}, [("true", True)], ["True", "yes"]),
    ({"type": "array", "items": {"type": "string"}}, [('["a", "</b>}"]', ["a", "</b>}"])], ["a", '["a",]']),
    ({"type": "object"}, [('{"a": {"b": "\\""}}', {"a": {"b": '"'}})], ["a", "{"]),
    ({}, [("[1]", [1]), ("7", 7), ('{"a": null}', {"a": None})], []),
]


@pytest.mark.parametrize("kind", ["tiny", "untagged"])
@pytest.mark.parametrize("row", TOLD, ids=names)
@pytest.mark.parametrize(
    ("text", "schema", "good", "bad"),
    [*((True, *each) for each in TEXTS), *((False, *each) for each in OTHERS)],
)
def test_values_that_say_whether_they_are_texts(
    row: Dialect, kind: str, text: bool, schema: Any, good: list[tuple[str, Any]], bad: list[str]
) -> None:
    tool = tool_of(v=schema)
    constraint, reader = Constraint((tool,), 1), ReaderParams(calls=True, tools=(tool,))
    for said, value in good:
        whole = written(row, text=text, v=said)
        assert accepts(row, kind, constraint, whole, reader), whole
        ids = list(tokenizer(kind).encode(whole))
        assert calls_of(read(row, kind, ids, reader)) == ([("f", {"v": value})], "")
    for said in bad:
        assert not accepts(row, kind, constraint, written(row, text=text, v=said), reader), said


@pytest.mark.parametrize("row", TOLD, ids=names)
def test_tags_that_are_tokens_are_written_as_tokens(row: Dialect) -> None:
    """The tokenizer knows what closes a text, or a part of it, as a token of its own."""
    assert row.calls is not None
    [tag] = [*row.calls.inner, *filter(None, [row.calls.quote])]
    file = json.loads(tokenizer("bytes").serialized)
    added = {**file["added_tokens"][-1], "id": max(each["id"] for each in file["added_tokens"]) + 1}
    file["added_tokens"].append({**added, "content": tag, "special": True})
    own = Tokenizer(Backend.from_str(json.dumps(file)), eos_token_ids=tokenizer("bytes").eos_token_ids)
    tool = tool_of(v={"type": "string"}, n={"type": "integer"})
    reader = ReaderParams(calls=True, tools=(tool,))
    state = Grammars(own, row).compile(Constraint((tool,), 1), reader).matcher(999)
    said = written(row, text=True, v="</a b")
    number = written(row, n="7")
    marks = row.calls
    inside = number[len(marks.open + marks.front + marks.before_name) + 1 + len(marks.before_arguments) :]
    comma = "," if marks.kind == "keyed" else ""
    end = f"{marks.end}{marks.back}{marks.close}"
    ids = own.encode(said.removesuffix(end) + comma + inside)
    assert own.token_id(tag) in ids
    for token_id in ids:
        assert token_id in allowed_ids(mask_of(state, own.vocab_size))
        state.advance(token_id)
    assert state.stopped
    deltas = Reader(own, row, reader, SamplingParams(seed=1, max_tokens=999)).feed(ids, Done("stop")).deltas
    assert calls_of(list(deltas)) == ([("f", {"v": "</a b", "n": 7})], "")


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 2}, {"enum": ["ab"]}])
@pytest.mark.parametrize("row", TAGGED + TOLD, ids=names)
def test_a_token_behind_the_last_text(row: Dialect, schema: Any) -> None:
    tool = tool_of(v=schema)
    own, reader = tokenizer("bytes"), ReaderParams(calls=True, tools=(tool,))
    state = grammars(row, "bytes").compile(Constraint((tool,), 1), reader).matcher(999)
    for token_id in own.encode(written(row, text=True, v="ab")):
        assert token_id in allowed_ids(mask_of(state, own.vocab_size))
        state.advance(token_id)
    assert state.stopped


@pytest.mark.parametrize("row", UNTOLD, ids=names)
def test_a_closing_tag_within_a_value(row: Dialect) -> None:
    """A bare text never holds one; in the strings of JSON it is text."""
    assert row.calls is not None and row.calls.parameters is not None
    close = row.calls.parameters.close
    tool = tool_of(v={"type": "array", "items": {"type": "string"}}, s={"type": "string"})
    constraint, reader = Constraint((tool,), 1), ReaderParams(calls=True, tools=(tool,))
    items = json.dumps([f"a{close}b", f'\\"{close}', close[:-1]])
    text = written(row, v=items, s="x")
    assert accepts(row, "untagged", constraint, text, reader)
    ids = [token for char in text for token in tokenizer("untagged").encode(char)]
    [(_, arguments)], _ = calls_of(read(row, "untagged", ids, reader))
    assert arguments == {"v": json.loads(items), "s": "x"}
    assert not accepts(row, "untagged", constraint, written(row, v=items, s=f"x{close}y"), reader)


@pytest.mark.parametrize("row", UNTOLD, ids=names)
def test_a_string_that_has_no_end_hides_no_closing_tag(row: Dialect) -> None:
    tool = tool_of(v={"type": "array"}, s={"type": "string"})
    reader = ReaderParams(calls=True, tools=(tool,))
    ids = list(tokenizer("untagged").encode(written(row, v='["a, "b]', s="x")))
    assert calls_of(read(row, "untagged", ids, reader)) == ([("f", {"v": '["a, "b]', "s": "x"})], "")


@pytest.mark.parametrize("row", TYPED, ids=names)
def test_optional_arguments_and_others(row: Dialect) -> None:
    """Any of the optional ones, in the order of the schema; and free keys where none are listed."""
    schema = {
        "type": "object",
        "properties": {each: {"type": "integer"} for each in "abc"},
        "required": ["b"],
    }
    tool = ToolShape("f", json.dumps(schema))
    constraint, reader = Constraint((tool,), 1), ReaderParams(calls=True, tools=(tool,))

    def call(keys: str) -> str:
        if row in TAGGED or row in TOLD:
            return written(row, **dict.fromkeys(keys, "1"))
        assert row.calls is not None
        opening, close = ("", "") if row.calls.bare else (row.calls.open, row.calls.close)
        said = f"f({', '.join(f'{key}=1' for key in keys)})"
        return f"{opening}{row.calls.front}{said}{row.calls.back}{close}"

    assert all(accepts(row, "bytes", constraint, call(keys), reader) for keys in ("b", "ab", "bc", "abc"))
    assert not any(accepts(row, "bytes", constraint, call(keys), reader) for keys in ("", "a", "ba", "bd"))
    open_tool = ToolShape("f", "{}")
    constraint, reader = Constraint((open_tool,), 1), ReaderParams(calls=True, tools=(open_tool,))
    assert all(accepts(row, "bytes", constraint, call(keys), reader) for keys in ("", "x", "xyz"))


@pytest.mark.parametrize("row", TYPED, ids=names)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a b<": {}}, "required": ["a b<"]}, "nothing that fits"),
        ({"patternProperties": {"^a": {}}}, "patternProperties"),
        ({"minProperties": 2}, "minProperties"),
        ({"$ref": "#/$defs/x"}, "x"),
    ],
)
def test_what_cannot_be_written_is_refused(row: Dialect, schema: Any, reason: str) -> None:
    tool = ToolShape("f", json.dumps({"type": "object", **schema}))
    with pytest.raises(ConstraintError, match=reason) as caught:
        grammars(row, "bytes").compile(Constraint((tool,)), ReaderParams(tools=(tool,)))
    assert caught.value.tool == "f"


@pytest.mark.parametrize("row", TAGGED, ids=names)
def test_a_bare_text_cannot_match_an_anchor_in_its_middle(row: Dialect) -> None:
    tool = tool_of(a={"type": "string", "pattern": "a(^b)"})
    with pytest.raises(ConstraintError, match="anchor"):
        grammars(row, "bytes").compile(Constraint((tool,)), ReaderParams(tools=(tool,)))


def test_names_that_python_cannot_call() -> None:
    row = next(row for row in TYPED if row.name == "gemma3")
    for name in ("3d", "print"):
        with pytest.raises(ConstraintError, match="cannot be called"):
            grammars(row, "bytes").compile(Constraint((ToolShape(name, "{}"),)), ReaderParams())


@pytest.mark.parametrize("row", DIALECTS, ids=names)
def test_an_answer_of_a_shape_may_spell_any_tag(row: Dialect) -> None:
    reader = ReaderParams(calls=True, shaped=True)
    shape = Shape("json", '{"type": "object", "properties": {"a": {"type": "string"}}}')
    text = json.dumps({"a": f"so: {' x '.join(sorted(row.tags))}"}, ensure_ascii=False)
    head = "" if row.channels is None else f"{row.channels.channel}final{row.channels.message}"
    state = grammars(row, "bytes").compile(Constraint(answer=shape), reader).matcher(10**6)
    ids = [*tokenizer("bytes").encode(head), *text.encode()]
    for token_id in ids:
        assert state.allows(token_id)
        state.advance(token_id)
    assert calls_of(read(row, "bytes", ids, reader)) == ([], text)


def test_schemas_that_refer_to_each_other() -> None:
    schema = {
        "$ref": "#/$defs/root",
        "$defs": {
            "root": {
                "type": "object",
                "properties": {"tree": {"$ref": "#/$defs/tree"}, "name": {"$ref": "#/$defs/name"}},
                "required": ["tree", "name"],
                "additionalProperties": False,
            },
            "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            "name": {"type": "string", "maxLength": 3},
        },
    }
    tool = ToolShape("f", json.dumps(schema))
    for row in UNTOLD:
        constraint, reader = Constraint((tool,), 1), ReaderParams(calls=True, tools=(tool,))
        assert accepts(row, "bytes", constraint, written(row, tree="[[], [[]]]", name='"abc"'), reader)
        assert not accepts(row, "bytes", constraint, written(row, tree="[1]", name='"abc"'), reader)


# -- text or calls, and inputs -------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", FORCED, ids=names)
def test_what_the_model_chooses_is_text_or_calls_that_hold(row: Dialect) -> None:
    """Strict auto: nothing in the text opens a call, in any layout that the row reads."""
    tool = tool_of(city={"type": "string", "maxLength": 5}, n={"type": "integer"})
    for seed in range(NUM_TOOLS):
        kind, rng = ("bytes", "untagged")[seed % 2], random.Random(seed)
        max_calls = rng.choice([1, 2, None])
        reader = ReaderParams(calls=True, tools=(tool,), max_calls=max_calls)
        ids = walk(row, kind, Constraint((tool,), max_calls, Shape("text")), reader, rng)
        if ids is None:
            continue
        calls, _ = calls_of(read(row, kind, ids, reader))
        for name, arguments in calls:
            assert name == "f"
            jsonschema.validate(arguments, json.loads(tool.parameters))


@pytest.mark.parametrize("row", FORCED, ids=names)
def test_text_that_opens_a_call_becomes_one(row: Dialect) -> None:
    tool = tool_of(n={"type": "integer"})
    free, reader = Constraint((tool,), None, Shape("text")), ReaderParams(calls=True, tools=(tool,))
    assert accepts(row, "untagged", free, "Hello, {you} [1](x)!", reader)
    for text in ('Then {"name": "f", {', "Then [f(x", "Then <function=f>", "Then <invoke name=f>"):
        before = read(row, "untagged", list(tokenizer("untagged").encode(text)), reader)
        if any(isinstance(delta, CallStart) for delta in before):
            assert not accepts(row, "untagged", free, text, reader), text


PATCHES = ToolShape("f", INPUT, Shape("lark", PATCH))
MARKUP = ToolShape(
    "f", INPUT, Shape("lark", "start: (TAG | WORD)+\nTAG: /<\\/?[a-z_]{1,12}>/\nWORD: /[a-z\\n]/")
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", TYPED, ids=names)
def test_inputs_fit_their_grammar(row: Dialect, kind: str) -> None:
    """Also where the grammar could spell the closing tag, or the line break in front of it."""
    found = 0
    for seed in range(3):
        for tool in (PATCHES, MARKUP):
            reader = ReaderParams(calls=True, tools=(tool,))
            ids = walk(row, kind, Constraint((tool,), 1), reader, random.Random(seed))
            if ids is None:
                continue
            found += 1
            [(_, arguments)], text = calls_of(read(row, kind, ids, reader))
            assert not text and arguments.keys() == {"input"}
            if tool is PATCHES:
                assert is_patch(arguments["input"]), arguments
            else:
                assert re.fullmatch(r"(<\/?[a-z_]{1,12}>|[a-z\n])+", arguments["input"]), arguments
    assert found >= 2
