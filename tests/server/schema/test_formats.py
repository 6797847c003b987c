"""Shapes of answers and custom tools, as clients ask for them and get them."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engine import GenerateRequest, LocalEngine, Say, ScriptedEngine
from engine.tiny import CHECKPOINT
from server.errors import ApiError
from server.items import InputReader
from server.schema.formats import as_output, asked_shape, parse_format
from tests.engine.structured.test_shapes import PATCH as PATCHES
from tests.engine.structured.test_shapes import is_patch
from tests.support import wire
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, call, prompts, saying, text
from tests.support.wire import Json

POINT: Json = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["x", "name"],
}
FORMAT: Json = {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}
CHAT_FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
PATCH = 'start: "*** Begin\\n" line+ "*** End"\nline: /[+-]/ /[^\\n]{0,40}/ "\\n"\n'
CUSTOM: Json = {"type": "custom", "name": "apply_patch", "description": "Patches a file"}
GRAMMAR: Json = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}
INPUT = '*** Begin\n+say "hi\\n"\n-é\n*** End'


@pytest.fixture
async def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


def custom_call(text: str = INPUT) -> str:
    """The directive that makes the scripted engine call the custom tool."""
    return "call apply_patch " + json.dumps({"input": text})


def shaped(form: Json = FORMAT) -> Json:
    return {"text": {"format": form}}


async def chat(client: httpx.AsyncClient, asked: str, **body: Any) -> Json:
    """A chat completion, which the stream of the same request equals."""
    body = {"messages": [{"role": "user", "content": asked}], "seed": 5, **body}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choices = wire.validate_chat(reply.json())
    streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
    folded = wire.check_chunks(wire.chunks(streamed.content), "CreateChatCompletionStreamResponse")
    for whole, other in zip(choices, folded, strict=True):
        assert (whole["message"]["content"] or "") == (other["message"].get("content") or "")
        assert whole["finish_reason"] == other["finish_reason"]
    first: Json = choices[0]
    return first


# ------------------------------------------------------------------------------------------------------------
# Formats


async def test_a_response_has_the_shape_streamed_or_not(api: Api) -> None:
    for asked in ("hello", 'say {"x": 12, "name": "here"}', 'say {"x": 5, "y": 3}', "think hm then say no"):
        whole = await api.create(asked, **shaped())
        streamed = await api.stream(asked, **shaped())
        assert whole["status"] == "completed"
        assert text(whole) == text(streamed.response)
        value = json.loads(text(whole))
        assert set(value) == {"x", "name"}, "closed, and what is required is there"
    assert text(await api.create('say {"x": 12, "name": "here"}', **shaped())) == '{"x": 12, "name": "here"}'


async def test_the_echo_has_the_official_form(api: Api) -> None:
    form = {**FORMAT, "description": "a point", "strict": False}
    assert (await api.create("hi", **shaped(form)))["text"]["format"] == form
    lax = {key: value for key, value in FORMAT.items() if key != "strict"}
    assert (await api.create("hi", **shaped(lax)))["text"]["format"] == {**FORMAT, "strict": False}
    assert (await api.create("hi", **shaped({"type": "json_object"})))["text"]["format"] == {
        "type": "json_object"
    }
    assert (await api.create("hi"))["text"]["format"] == {"type": "text"}


async def test_json_object_needs_no_word_in_the_prompt(api: Api, client: httpx.AsyncClient) -> None:
    assert json.loads(text(await api.create("hi", **shaped({"type": "json_object"})))) == {}
    said = await api.create('say {"a": [1, "b"]}', **shaped({"type": "json_object"}))
    assert json.loads(text(said)) == {"a": [1, "b"]}
    choice = await chat(client, "hi", response_format={"type": "json_object"})
    assert json.loads(choice["message"]["content"]) == {}


async def test_chat_has_the_shape(client: httpx.AsyncClient) -> None:
    choice = await chat(client, 'say {"x": 1, "name": "a"}', response_format=CHAT_FORMAT)
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"x": 1, "name": "a"}', "stop")
    for n in (1, 3):
        body = {"messages": [{"role": "user", "content": "random 3"}], "n": n, "logprobs": True}
        reply = await client.post("/v1/chat/completions", json={**body, "response_format": CHAT_FORMAT})
        for choice in wire.validate_chat(reply.json()):
            assert set(json.loads(choice["message"]["content"])) == {"x", "name"}
            spelled = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
            assert spelled.decode().startswith(choice["message"]["content"])


async def test_a_shape_that_is_cut_is_incomplete(api: Api, client: httpx.AsyncClient) -> None:
    asked = 'say {"x": 1, "name": "' + "long " * 30 + '"}'
    cut = await api.create(asked, max_output_tokens=30, **shaped())
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    choice = await chat(client, asked, max_tokens=30, response_format=CHAT_FORMAT)
    assert choice["finish_reason"] == "length"


async def test_nothing_else_cuts_json_short(api: Api, client: httpx.AsyncClient) -> None:
    """Stop strings and tokens, and the like, apply to free text; in JSON they could only break it."""
    asked = 'say {"x": 1, "name": "a b"}'
    odd = {"stop": [" ", "name"], "stop_token_ids": [ord("x")], "min_tokens": 60, "ignore_eos": True}
    assert text(await api.create(asked, **shaped(), **odd)) == '{"x": 1, "name": "a b"}'
    assert (await chat(client, asked, response_format=CHAT_FORMAT, **odd))["message"]["content"] == (
        '{"x": 1, "name": "a b"}'
    )
    cut = await api.create("say a-b", guided_regex="[a-z]-[a-z]", stop=["-"])
    assert text(cut) == "a", "other shapes are the client's to compose with"


async def test_reasoning_may_come_first(api: Api) -> None:
    done = await api.create('think one two then say {"x": 1, "name": ""}', **shaped())
    assert [item["type"] for item in done["output"]] == ["reasoning", "message"]
    assert text(done) == '{"x": 1, "name": ""}'


async def test_with_tools_the_model_answers_in_the_shape_or_calls(api: Api) -> None:
    called = await api.create(call(), tools=[WEATHER], **shaped())
    assert [item["type"] for item in called["output"]] == ["function_call"]
    answered = await api.create('say {"x": 1, "name": "a"}', tools=[WEATHER], **shaped())
    assert json.loads(text(answered)) == {"x": 1, "name": "a"}
    none = await api.create(call(), tools=[WEATHER], tool_choice="none", **shaped())
    assert set(json.loads(text(none))) == {"x", "name"}
    forced = await api.create("hi", tools=[WEATHER], tool_choice="required", **shaped())
    assert forced["output"][0]["type"] == "function_call"


@pytest.mark.parametrize("asked", [shaped(), {"guided_json": POINT}])
async def test_a_shape_holds_behind_tool_outputs(tmp_path: Path, asked: Json) -> None:
    script = saying('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>', "no")
    async with live_app(tmp_path, ScriptedEngine(script)) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("weather?", tools=[WEATHER], await_tool_outputs=True, **asked) as live:
            made = (await live.until("output_item.done"))["item"]
            await api.outputs(live.id, {made["call_id"]: "rain"})
            assert set(json.loads(text(await live.done()))) == {"x", "name"}
        begun = await api.create("weather?", tools=[WEATHER], **asked)
        then = await api.outputs(begun["id"], {begun["output"][0]["call_id"]: "rain"})
        assert then["text"] == begun["text"]
        assert then["output"][0]["type"] == "function_call", "generation 0 of a run of its own"


async def test_a_shape_goes_on_after_a_restart(tmp_path: Path) -> None:
    gate = Gate()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Any]:
        yield Say('{"x": 4, ')
        yield gate.wait()
        yield Say('"name": "after"}')

    async with live_app(tmp_path, ScriptedEngine(script)) as server, http_client(server) as client:
        begun = await Api(client).create("hi", background=True, **shaped())
        await gate.reached.wait()
    async with running_app(tmp_path, ScriptedEngine(script)) as server, http_client(server) as client:
        gate.release.set()
        done = await Api(client).ended(begun["id"])
        assert (done["status"], text(done)) == ("completed", '{"x": 4, "name": "after"}')


BAD_SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
FAR_OFF: Json = {"$ref": f"#/anyOf/{'9' * 5000}", "anyOf": [{"type": "string"}]}
"""A place in a list, with more digits than Python reads as a number."""


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (shaped({**FORMAT, "schema": BAD_SCHEMA}), "text.format", "invalid_schema"),
        (shaped({**FORMAT, "name": "a\tb"}), "text.format.name", "invalid_value"),
        (shaped({"type": "json_schema", "name": "a"}), "text.format.schema", "missing_required_parameter"),
        (shaped({**FORMAT, "schema": []}), "text.format.schema", "invalid_type"),
        (shaped({**FORMAT, "strict": "yes"}), "text.format.strict", "invalid_type"),
        (shaped({"type": "yaml"}), "text.format.type", "invalid_value"),
        ({"guided_json": BAD_SCHEMA}, "guided_json", "invalid_schema"),
        ({"guided_json": {"$ref": "#/$defs/zz"}}, "guided_json", "invalid_schema"),
        ({"guided_json": FAR_OFF}, "guided_json", "invalid_schema"),
        (shaped({**FORMAT, "schema": FAR_OFF}), "text.format", "invalid_schema"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": {"anyOf": [{"const": index} for index in range(8_000)]}}, "guided_json",
         "invalid_schema"),
        ({"guided_regex": "a(?=b)"}, "guided_regex", "invalid_schema"),
        ({"guided_choice": []}, "guided_choice", "empty_array"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "invalid_type"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "invalid_schema"),
        ({"guided_json": POINT, "guided_regex": "a"}, "guided_regex", "mutually_exclusive_parameters"),
        ({**shaped(), "guided_json": POINT}, "guided_json", "mutually_exclusive_parameters"),
        ({"structured_outputs": {"json": POINT, "regex": "a"}}, "structured_outputs.regex",
         "mutually_exclusive_parameters"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "unsupported_parameter"),
        ({"tools": [{**WEATHER, "parameters": BAD_SCHEMA}]}, "tools[0].parameters", "invalid_schema"),
        ({"tools": [WEATHER, {**GRAMMAR, "format": {**GRAMMAR["format"], "definition": "x"}}]},
         "tools[1].format", "invalid_schema"),
        ({"tools": [{**GRAMMAR, "format": {**GRAMMAR["format"], "syntax": "ebnf"}}]},
         "tools[0].format.syntax", "invalid_value"),
        ({"tools": [CUSTOM, {**WEATHER, "name": "apply_patch"}]}, "tools", "invalid_value"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "function", "name": "apply_patch"}},
         "tool_choice", "invalid_value"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_named(api: Api, body: Json, param: str, code: str) -> None:
    error = await api.refused(400, "hi", **body)
    assert (error["param"], error["code"]) == (param, code), error


@pytest.mark.parametrize("pattern", ["[" * 20_000, "a(?=b)"])
async def test_no_prompt_is_made_for_a_shape_that_cannot_be_honoured(
    client: httpx.AsyncClient, pattern: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "guided_regex": pattern}
    for path in ("/tokenize", "/v1/chat/completions"):
        reply = await client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert (reply.json()["error"]["param"], reply.json()["error"]["code"]) == (
            "guided_regex",
            "invalid_schema",
        )


async def test_a_required_property_that_is_not_allowed_is_told_with_its_place(api: Api) -> None:
    closed = {"properties": {}, "required": ["b"], "additionalProperties": False, "type": "object"}
    outer = {"type": "object", "properties": {"a": closed}, "required": ["a"]}
    for schema, place in ((closed, ""), (outer, ".properties.a")):
        error = await api.refused(400, "hi", **shaped({**FORMAT, "schema": schema}))
        assert f"at 'text.format.schema{place}': nothing fits it: 'required' names 'b'" in error["message"]
        error = await api.refused(400, "hi", guided_json=schema)
        assert f"at 'guided_json{place}': nothing fits it" in error["message"]


async def test_a_refused_schema_is_told_where(api: Api) -> None:
    """Strict parameters: the keyword, and where it stands; and how deep a call can be read."""
    misspelled = {"type": "object", "properties": {"a": {"type": "strnig"}}}
    error = await api.refused(400, "hi", tools=[{**WEATHER, "parameters": misspelled}])
    assert (
        "at 'parameters.properties.a': 'type' cannot be enforced: there is no type 'strnig'"
        in error["message"]
    )
    part: Json = {"type": "integer"}
    for _ in range(122):
        part = {"items": part}
    tools = [{**WEATHER, "parameters": {"type": "object", "properties": {"a": part}}}]
    error = await api.refused(400, "hi", tools=tools)
    assert (error["param"], error["code"]) == ("tools[0].parameters", "invalid_schema")
    assert "nested more than 120 levels deep" in error["message"]


async def test_strict_tools_share_what_schemas_may_hold(api: Api) -> None:
    large = {"anyOf": [{"const": index} for index in range(5_000)]}
    tools = [{**WEATHER, "name": name, "parameters": large} for name in ("first", "second")]
    error = await api.refused(400, "hi", tools=tools)
    assert (error["param"], error["code"]) == ("tools[1].parameters", "invalid_schema")
    assert "10004 objects and arrays; at most 8000" in error["message"]
    lax = [tools[0], {**tools[1], "strict": False}]
    assert "objects and arrays" not in (await api.refused(400, "hi", tools=lax))["message"]


async def test_a_refusal_names_the_keyword(api: Api) -> None:
    error = await api.refused(400, "hi", **shaped({**FORMAT, "schema": BAD_SCHEMA}))
    assert "at 'text.format.schema.properties.a': 'uniqueItems' cannot be enforced" in error["message"]
    lax = {**WEATHER, "parameters": BAD_SCHEMA, "strict": False}
    assert (await api.create("hi", tools=[lax]))["status"] == "completed", "nothing is enforced"


# ------------------------------------------------------------------------------------------------------------
# Extensions


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"guided_json": POINT}, r'\{"x": 0, "name": ""\}'),
        ({"guided_json": json.dumps(POINT)}, r'\{"x": 0, "name": ""\}'),
        ({"guided_regex": "[ab]{3}-\\d"}, r"[ab]{3}-\d"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, r"x\d\d"),
        ({"structured_outputs": {"regex": "z{4}"}}, "zzzz"),
        ({"structured_outputs": {"json_object": True}}, r"\{\}"),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {
            "type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {"const": 1}},
            "end": "</a>"}}}}, "<a>1</a>"),
    ],
)  # fmt: skip
async def test_extensions_hold_on_every_api(
    api: Api, client: httpx.AsyncClient, body: Json, pattern: str
) -> None:
    assert re.fullmatch(pattern, text(await api.create("hello", **body)))
    assert re.fullmatch(pattern, (await chat(client, "hello", **body))["message"]["content"])
    reply = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 99, "n": 2, **body})
    for choice in wire.validate_completion(reply.json()):
        assert re.fullmatch(pattern, choice["text"])
        assert choice["finish_reason"] == "stop"


async def test_a_structural_tag_as_a_format(client: httpx.AsyncClient) -> None:
    form = {"type": "structural_tag", "triggers": ["<f>"], "structures": [
        {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]}  # fmt: skip
    choice = await chat(client, "say one <f>12</f> two", response_format=form)
    assert choice["message"]["content"] == "one <f>12</f> two"
    choice = await chat(client, "say one <f>x", response_format=form)
    assert re.fullmatch(r"one <f>\d+</f>[^<]*", choice["message"]["content"])


def shape_of(**fields: Any) -> Any:
    """The shape that fields of a body ask for."""
    return asked_shape(fields, None, "text.format")


def deep_tag(depth: int, width: int) -> Json:
    """A structural tag of formats in each other, the innermost one with so many elements that are none."""
    form: Any = {"type": "sequence", "elements": [0] * width}
    for _ in range(depth):
        form = {"type": "sequence", "elements": [form]}
    return {"type": "structural_tag", "format": form}


def bracketed(count: int) -> str:
    """The text of a schema with so many arrays."""
    return json.dumps({"enum": [[]] * (count - 1)})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (bracketed(8_000), "8001 objects and arrays; at most 8000"),
        (json.dumps({"const": "x" * (1 << 20)}), "bytes of schema; at most"),
        (deep_tag(0, 600_000), "bytes of schema; at most"),
        (deep_tag(200, 1), "Recursion limit reached"),
        (json.dumps(deep_tag(200, 1)), "Recursion limit reached"),
    ],
    ids=["parts", "bytes", "bytes of an object", "levels of an object", "levels"],
)
def test_every_shape_is_bounded_as_a_schema_is(value: Any, told: str) -> None:
    for field in ("json", "structural_tag"):
        with pytest.raises(ApiError, match=told) as refused:
            shape_of(structured_outputs={field: value})
        assert (refused.value.status, refused.value.param) == (400, f"structured_outputs.{field}")
    if isinstance(value, dict):
        for form in (value, value["format"]):
            with pytest.raises(ApiError, match=told):
                parse_format(form, "text.format")


def test_a_text_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("server.schema.formats.orjson.loads", never)
    monkeypatch.setattr("server.schema.formats.json.loads", never)
    for field, value in (("json", bracketed(8_000)), ("structural_tag", " " * (1 << 20) + "{}")):
        with pytest.raises(ApiError, match="at most"):
            shape_of(structured_outputs={field: value})


def test_a_wide_and_deep_tag_takes_little_memory() -> None:
    """Its paths are long, and it has many elements."""
    tag = json.dumps(deep_tag(120, 200_000))
    tracemalloc.start()
    try:
        shape_of(structured_outputs={"structural_tag": tag})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20  # ten times less than the paths of all elements


def test_a_text_says_what_its_object_would() -> None:
    """Numbers among it, which the body's parser reads as it does."""
    schema = '{"enum": [1, 1.0, 18446744073709551616, "é"]}'
    for field in ("json", "structural_tag"):
        shape, _ = shape_of(structured_outputs={field: orjson.loads(schema)})
        assert shape_of(structured_outputs={field: schema})[0] == shape
        assert shape_of(structured_outputs=as_output(shape.kind, shape.source))[0] == shape


# ------------------------------------------------------------------------------------------------------------
# Strict auto


async def test_a_call_that_has_begun_holds(api: Api) -> None:
    """Text is free; a call is of an offered tool, with arguments that validate."""
    assert text(await api.create("say hello", tools=[WEATHER])) == "hello"
    for asked in ('call get_weather {"town": 5}', "call get_time {}", 'call get_weather ["Paris"]'):
        [made] = (await api.create(asked, tools=[WEATHER]))["output"]
        assert made["name"] == "get_weather"
        assert set(json.loads(made["arguments"])) == {"city"}
    lax = {**WEATHER, "strict": False}
    [made] = (await api.create('call get_weather {"town": 5}', tools=[lax]))["output"]
    assert json.loads(made["arguments"]) == {"town": 5}


async def test_at_most_one_call(api: Api) -> None:
    both = f"{call()}\n{call()}"
    assert len((await api.create(both, tools=[WEATHER]))["output"]) == 2
    assert len((await api.create(both, tools=[WEATHER], parallel_tool_calls=False))["output"]) == 1


# ------------------------------------------------------------------------------------------------------------
# Custom tools


@pytest.mark.parametrize("tool", [CUSTOM, GRAMMAR])
async def test_a_custom_call_has_its_item_and_events(api: Api, tool: Json) -> None:
    streamed = await api.stream(custom_call(), tools=[tool])
    [item] = streamed.response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", INPUT)
    assert item["id"].startswith("ctc_") and item["call_id"].startswith("call_")
    deltas = [e["delta"] for e in streamed.events if e["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 2 and "".join(deltas) == INPUT
    assert streamed.types[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]
    assert streamed.response["tools"] == [tool]
    assert (await api.create(custom_call(), tools=[tool]))["output"][0]["input"] == INPUT


async def test_an_input_always_fits(api: Api) -> None:
    for asked in ("hello", custom_call("nonsense"), "call apply_patch {}"):
        done = await api.create(asked, tools=[GRAMMAR], tool_choice={"type": "custom", "name": "apply_patch"})
        [item] = done["output"]
        assert re.fullmatch(r"\*\*\* Begin\n([+-][^\n]{0,40}\n)+\*\*\* End", item["input"]), item
    regex = {**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": '"[a-c]{2}"'}}
    [item] = (await api.create("hello", tools=[regex], tool_choice="required", parallel_tool_calls=False))[
        "output"
    ]
    assert re.fullmatch('"[a-c]{2}"', item["input"])


async def test_every_input_parses_however_hot_the_model(tmp_path: Path) -> None:
    """The shipped model at temperature 1.5, streamed, in both APIs."""
    engine = LocalEngine(CHECKPOINT, num_threads=1, kv_cache_bytes=64 << 20)
    nested = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCHES}}
    on_chat = {"type": "custom", "custom": {"name": "apply_patch", "format": nested}}
    tool = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": PATCHES}}
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        for seed in range(2):
            hot = {"temperature": 1.5, "seed": seed, "tool_choice": "required", "parallel_tool_calls": False}
            streamed = await Api(client).stream("Patch it.", tools=[tool], max_output_tokens=500, **hot)
            [item] = streamed.response["output"]
            assert streamed.response["status"] == "completed" and is_patch(item["input"]), item
            body = {
                "messages": [{"role": "user", "content": "Patch it."}],
                "tools": [on_chat],
                "max_tokens": 500,
                **hot,
            }
            reply = await client.post("/v1/chat/completions", json={**body, "stream": True})
            kind = "CreateChatCompletionStreamResponse"
            [choice] = wire.check_chunks(wire.chunks(reply.content), kind)
            [made] = choice["message"]["tool_calls"]
            assert is_patch(made["custom"]["input"]), made


async def test_a_custom_call_that_is_cut_is_incomplete(api: Api) -> None:
    cut = await api.create(custom_call(), tools=[GRAMMAR], max_output_tokens=80)
    [item] = cut["output"]
    assert (cut["status"], item["status"]) == ("incomplete", "incomplete")
    assert INPUT.startswith(item["input"])


async def test_the_history_shows_a_custom_call_as_it_was_generated(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create(custom_call(), tools=[GRAMMAR])
        [item] = first["output"]
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
        then = await api.create([output], previous_response_id=first["id"], tools=[GRAMMAR])
        assert text(then) == "The tool said: patched"
        one, two = engine.requests
        generated = await server.context.storage.records(first["id"], after=-1)
        ids = [token for record in generated for token in record.token_ids]
        assert [*two.prompt_ids][: len(one.prompt_ids) + len(ids)] == [*one.prompt_ids, *ids]
        sent = await api.create([{"role": "user", "content": custom_call()}, item, output], tools=[GRAMMAR])
        assert text(sent) == "The tool said: patched"
        assert prompts(engine)[-1] == prompts(engine)[-2]


async def test_outputs_of_custom_calls_that_a_run_waits_for(live_client: httpx.AsyncClient) -> None:
    api = Api(live_client)
    async with api.open(custom_call(), tools=[GRAMMAR], await_tool_outputs=True) as live:
        item = (await live.until("output_item.done"))["item"]
        await api.outputs(live.id, {item["call_id"]: "patched"})
        done = await live.done()
    kinds = [item["type"] for item in done["output"]]
    assert kinds == ["custom_tool_call", "custom_tool_call_output", "message"]
    assert text(done) == "The tool said: patched"


async def test_a_completed_custom_call_is_continued_by_its_output(api: Api) -> None:
    first = await api.create(custom_call(), tools=[GRAMMAR])
    then = await api.outputs(first["id"], {first["output"][0]["call_id"]: "patched"})
    assert text(then) == "The tool said: patched"
    listed = await api.input_items(then["id"])
    assert listed["data"][0]["type"] == "custom_tool_call_output"


async def test_custom_tools_on_chat(client: httpx.AsyncClient) -> None:
    nested = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}}
    tool = {"type": "custom", "custom": {"name": "apply_patch", "format": nested}}
    choice = await chat(client, custom_call(), tools=[tool])
    [made] = choice["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "apply_patch", "input": INPUT})
    assert choice["finish_reason"] == "tool_calls"
    forced = await chat(
        client, "hi", tools=[tool], tool_choice={"type": "custom", "custom": {"name": "apply_patch"}}
    )
    assert forced["message"]["tool_calls"][0]["custom"]["input"].startswith("*** Begin\n")
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": "patched"},
    ]
    reply = await client.post("/v1/chat/completions", json={"messages": messages, "tools": [tool]})
    assert reply.json()["choices"][0]["message"]["content"] == "The tool said: patched"


async def test_a_custom_tool_is_offered_and_not_ignored(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/responses", json={"input": "hi", "tools": [CUSTOM]})
    assert "x-antiphon-ignored" not in reply.headers


@pytest.mark.parametrize("text", ["", "plain", 'a "b" \\ \n\t\x00', "é😀", "\\u0041"])
def test_an_input_reads_the_same_however_it_is_cut(text: str) -> None:
    for ascii in (False, True):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii)
        for size in range(1, len(arguments) + 1):
            reader = InputReader()
            pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
            assert "".join(map(reader.feed, pieces)) == text, (arguments, size)


def test_arguments_that_hold_no_input_are_the_input() -> None:
    for arguments in ('{"code": "x"}', '{"inputs": 1}', "[1]", "{}"):
        reader = InputReader()
        assert "".join(map(reader.feed, arguments)) == arguments
    assert InputReader().feed('{"input": "\\ud800x"}') == "\N{REPLACEMENT CHARACTER}x"
