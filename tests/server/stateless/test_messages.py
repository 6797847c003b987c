"""Messages: what is asked of the engine, what comes back, whole and as events, and how streams end."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engine import Chunk, Done, Fail, LocalEngine, QueueFull, Say, ScriptedEngine, Text
from server.stateless.messages import MessageWriter, _input
from tests.server.stateless.test_chat_ends import Gated, idle, live
from tests.support.libraries import put_file
from tests.support.running import Running, http_client, live_app, running_app

Json = dict[str, Any]
PATH = "/v1/messages"
GOLDEN = Path(__file__).with_name("message_stream.txt")
TOOL: Json = {
    "name": "look_up",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'call look_up {"city": "Oslo"}'
ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}
FORCED = {"type": "tool", "name": "look_up"}
ADAPTIVE = {"thinking": {"type": "adaptive"}}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def asking(content: Any, **fields: Any) -> Json:
    return {
        "model": "claude-x",
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": content}],
        **fields,
    }


async def whole(client: httpx.AsyncClient, body: Json) -> Json:
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def refused(client: httpx.AsyncClient, body: Json, status: int = 400, path: str = PATH) -> Json:
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    told = reply.json()
    assert told["type"] == "error" and told["request_id"] == reply.headers["request-id"]
    return dict(told["error"])


def events(raw: bytes) -> list[Json]:
    """The events of a stream, whose names are their types."""
    found = []
    for frame in raw.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def engine_of(running: Running) -> ScriptedEngine:
    engine = running.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    return engine


def prompt(running: Running) -> str:
    engine = engine_of(running)
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)


# ------------------------------------------------------------------------------------------------------------
# Events


async def test_a_stream_of_a_thought_a_text_and_a_call(client: httpx.AsyncClient) -> None:
    asked = asking(f"think it is cold then say One moment.\n{CALL}", tools=[TOOL], stream=True, **ADAPTIVE)
    reply = await client.post(f"{PATH}?beta=true", json=asked, headers={"anthropic-beta": "no-such-beta"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "x-antiphon-ignored" not in reply.headers
    written = reply.content.decode()
    for pattern, shown in (
        (r"msg_[0-9a-f]{24}", "msg_1"),
        (r"toolu_[0-9a-f]{24}", "toolu_1"),
        (r'"signature":"[\w=-]{40,}"', '"signature":"SEALED"'),
    ):
        written = re.sub(pattern, shown, written)
    assert written == GOLDEN.read_text()


def test_what_was_said_before_the_answer_is_a_paragraph() -> None:
    usage = {"cache_creation": {}, "service_tier": "standard"}
    writer = MessageWriter(
        lambda: {"usage": dict(usage)}, seal=None, shows=False, silent=False, limit="max_tokens"
    )
    deltas = (Text("I look.", preamble=True), Text("Cold."), Done("stop"))
    assert writer.fold(writer.write(Chunk((1,), deltas))) == {
        "content": [{"type": "text", "text": "I look.\n\nCold."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
    }


@pytest.mark.parametrize(
    ("content", "fields", "reason", "sequence"),
    [
        ("say hello", {}, "end_turn", None),
        ("say one two three", {"stop_sequences": ["two", "x"]}, "stop_sequence", "two"),
        ("count 50", {"max_tokens": 10}, "max_tokens", None),
        (CALL, {"tools": [TOOL]}, "tool_use", None),
        (f"{CALL}\n{CALL}", {"tools": [TOOL], "tool_choice": ONE_CALL}, "tool_use", None),
        ("say no", {"tools": [TOOL], "tool_choice": FORCED}, "tool_use", None),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "none"}}, "end_turn", None),
        (CALL, {"tools": [TOOL], "max_tokens": 50}, "max_tokens", None),
    ],
)
async def test_why_an_answer_stops(
    client: httpx.AsyncClient, content: str, fields: Json, reason: str, sequence: str | None
) -> None:
    message = await whole(client, asking(content, **fields))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    kinds = [block["type"] for block in message["content"]]
    assert kinds.count("tool_use") == int("tools" in fields and reason != "end_turn")


@pytest.mark.parametrize("arguments", [r'{"x": "\ud800"}', "[1]", '{"x'])
def test_arguments_that_no_reply_can_say_are_a_text_in_an_object(arguments: str) -> None:
    assert _input(arguments) == {"INVALID_JSON": arguments}
    assert _input("") == {} and _input('{"x": 1}') == {"x": 1}
    orjson.dumps(_input('{"x": 123456789012345678901234567890}'))


async def test_a_call_that_is_cut_off_is_a_text_in_an_object(client: httpx.AsyncClient) -> None:
    message = await whole(client, asking(CALL, tools=[TOOL], max_tokens=50))
    [block] = message["content"]
    assert block["input"] == {"INVALID_JSON": '{"city": "Oslo"'}


async def test_an_answer_that_the_context_ends(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, ScriptedEngine(max_model_len=200)) as running,
        http_client(running) as client,
    ):
        message = await whole(client, asking("count 90", max_tokens=64_000))
        assert message["stop_reason"] == "model_context_window_exceeded"
        usage = message["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == 200
        assert (await whole(client, asking("count 90", max_tokens=9)))["stop_reason"] == "max_tokens"
        error = await refused(client, asking("x" * 300))
        assert re.fullmatch(r"prompt is too long: \d{3} tokens > 200 maximum", error["message"])


async def test_no_tokens_are_answered_with_nothing(client: httpx.AsyncClient) -> None:
    message = await whole(client, asking("say hello", max_tokens=0))
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    reply = await client.post(PATH, json=asking("say hello", max_tokens=0, stream=True))
    assert [event["type"] for event in events(reply.content)] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


async def test_an_answer_goes_on_with_the_last_message(
    client: httpx.AsyncClient, server_app: Running
) -> None:
    asked = asking("say hello")
    asked["messages"].append({"role": "assistant", "content": "hel"})
    await whole(client, asked)
    assert prompt(server_app).endswith("</think>\n\nhel")


# ------------------------------------------------------------------------------------------------------------
# What the engine is asked


async def test_fields_reach_the_engine(client: httpx.AsyncClient, server_app: Running) -> None:
    drawn = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "stop_sequences": ["x"], "max_tokens": 9}
    await whole(client, asking("say hello", system="Be brief.", **drawn))
    sampling = engine_of(server_app).requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.stop, sampling.max_tokens) == (("x",), 9)
    assert "system\nBe brief." in prompt(server_app)


@pytest.mark.parametrize(
    ("fields", "told", "ignored"),
    [
        ({}, "none", ""),
        ({"thinking": {"type": "disabled"}}, "none", ""),
        ({"output_config": {"effort": "max"}}, "none", "output_config.effort"),
        (ADAPTIVE, "high", ""),
        ({**ADAPTIVE, "output_config": {"effort": "low"}}, "low", ""),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "low 2000", ""),
        ({"thinking": {"type": "enabled", "budget_tokens": 9000}}, "medium 9000", ""),
    ],
)
async def test_thoughts_are_asked_of_the_template(
    tmp_path: Path, fields: Json, told: str, ignored: str
) -> None:
    template = (
        "{% if not enable_thinking %}none{% else %}{{ reasoning_effort }}{% endif %}"
        "{% if thinking_budget in (2000, 9000) %} {{ thinking_budget }}{% endif %}"
        "{% for message in messages %} {{ message.content }}{% endfor %}"
    )
    async with (
        running_app(tmp_path, ScriptedEngine(chat_template=template)) as running,
        http_client(running) as client,
    ):
        reply = await client.post(PATH, json=asking("x", **fields))
        assert reply.headers.get("x-antiphon-ignored", "") == ignored
        assert prompt(running) == f"{told} x"


async def test_a_model_that_cannot_be_told_of_thoughts_is_named(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    async with (
        running_app(tmp_path, ScriptedEngine(chat_template=template)) as running,
        http_client(running) as client,
    ):
        for fields, ignored in (
            ({}, ""),
            (ADAPTIVE, ""),
            ({**ADAPTIVE, "output_config": {"effort": "low"}}, "output_config.effort"),
            ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
            ({"thinking": {"type": "disabled"}}, "thinking"),
            ({"context_management": {"edits": []}, "unheard_of": 1}, "context_management,unheard_of"),
        ):
            reply = await client.post(PATH, json=asking("say hello", **fields))
            assert reply.headers.get("x-antiphon-ignored", "") == ignored


async def test_an_answer_is_held_to_a_shape(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        message = await whole(client, asking("say hello", **fields))
        assert orjson.loads(message["content"][0]["text"]).keys() == {"a"}
    both = {"output_config": {"format": form}, "output_format": form}
    assert (await refused(client, asking("x", **both)))["details"]["param"] == "output_format"


async def test_strict_tools_are_enforced_and_named_as_they_came(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = {"name": "f", "input_schema": schema, "strict": True}
    message = await whole(client, asking('call f {"x": "y"}', tools=[tool]))
    assert message["content"][0]["input"].keys() == {"n"}
    broken = {**tool, "input_schema": {**schema, "properties": {"n": {"type": "string", "pattern": "("}}}}
    error = await refused(client, asking("x", tools=[broken]))
    assert error["details"]["param"] == "tools[0].input_schema" and "input_schema" in error["message"]


async def test_images_are_refused_where_the_model_cannot_see(client: httpx.AsyncClient) -> None:
    image = {"type": "image", "source": PNG}
    error = await refused(client, asking([{"type": "text", "text": "what is it?"}, image]))
    assert error["details"] == {"error_code": "unsupported_content", "param": "messages[0].content[1]"}
    assert "cannot read image content" in error["message"]
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked = asking("x")
    asked["messages"] += turns
    assert (await refused(client, asked))["details"]["param"] == "messages[2].content[0].content[0]"


async def test_documents_are_read(client: httpx.AsyncClient, server_app: Running) -> None:
    uploaded = await put_file(server_app, "tides.txt", b"The tide is high.")
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    plain = {"type": "text", "media_type": "text/plain", "data": "Springs are strong."}
    documents = [
        {"type": "document", "source": {"type": "file", "file_id": uploaded}},
        {"type": "document", "source": plain, "title": "Springs"},
    ]
    asked = asking([*documents, {"type": "text", "text": "so?"}])
    asked["messages"] += [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": documents[1:]}]},
    ]
    counted = await client.post(f"{PATH}/count_tokens", json={**asked, "max_tokens": None})
    message = await whole(client, asked)
    assert counted.json()["input_tokens"] == message["usage"]["input_tokens"]
    shown = prompt(server_app)
    assert "The tide is high." in shown and shown.count("[file: Springs.txt]\nSprings are strong.") == 2
    broken = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
    error = await refused(client, asking([{"type": "document", "source": broken}]))
    assert error["details"]["param"] == "messages[0].content[0]"


# ------------------------------------------------------------------------------------------------------------
# Usage


async def test_the_second_turn_finds_the_first_in_the_prefix_cache(tmp_path: Path) -> None:
    """Although what Claude Code begins its system prompt with is another one each time."""
    engine = LocalEngine(Path("engine/tiny/checkpoint"), num_threads=1, kv_cache_bytes=64 << 20)

    def turn(number: int) -> Json:
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
        texts = (billing, "You help. " * 300)
        asked = asking("first", system=[{"type": "text", "text": text} for text in texts], max_tokens=4)
        asked["tools"] = [TOOL]
        if number > 1:
            more = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
            asked["messages"] += more
        return asked

    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        usages = [(await whole(client, turn(number)))["usage"] for number in (1, 2, 2)]
        first, second, again = [
            [usage[f"{kind}_input_tokens"] for kind in ("cache_read", "cache_creation")]
            + [usage["input_tokens"]]
            for usage in usages
        ]
        assert first[0] == 0 and first[1] > 900 and 0 < first[2] <= 16
        assert second[0] >= first[1] and second[0] / sum(second) >= 0.95
        assert again[0] == second[0] + second[1] and again[1] == 0
        counted = (await client.post(f"{PATH}/count_tokens", json=turn(2))).json()["input_tokens"]
        assert counted == sum(second) == sum(again)


async def test_an_engine_that_keeps_nothing_counts_all_as_input(client: httpx.AsyncClient) -> None:
    asked = asking("think hm then say hello", **ADAPTIVE)
    usage = (await whole(client, asked))["usage"]
    reply = await client.post(PATH, json={**asked, "stream": True})
    start, *_, end, _ = events(reply.content)
    assert start["message"]["usage"]["input_tokens"] == end["usage"]["input_tokens"] == usage["input_tokens"]
    assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
    assert usage["output_tokens_details"]["thinking_tokens"] > 0
    assert {**usage, **end["usage"]} == usage


# ------------------------------------------------------------------------------------------------------------
# How they end


async def test_a_client_that_leaves_ends_the_generation(tmp_path: Path) -> None:
    script = Gated(before=(Say("early"),))
    async with live(tmp_path, script) as (running, client):
        async with client.stream("POST", PATH, json=asking("x", stream=True)) as reply:
            async for line in reply.aiter_lines():
                if "early" in line:
                    break
        await idle(running)
        assert not script.gate.is_set()
        script.reached.clear()
        asked = asyncio.create_task(client.post(PATH, json=asking("x")))
        await script.reached.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await idle(running)


async def test_a_silent_stream_has_pings(tmp_path: Path) -> None:
    script = Gated()
    async with (
        live_app(tmp_path, ScriptedEngine(script), keepalive_s=0.02) as running,
        http_client(running) as client,
        client.stream("POST", PATH, json=asking("x", stream=True)) as reply,
    ):
        assert reply.status_code == 200
        pinged = ""
        async for part in reply.aiter_text():
            pinged += part
            if pinged.count("ping") >= 2:
                script.gate.set()
        frames = events(pinged.encode())
        assert frames[0] == {"type": "ping"} and frames[-1] == {"type": "message_stop"}


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request, prompt: [Say("a"), Fail(QueueFull(3.0))])
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        reply = await client.post(PATH, json=asking("x"))
        assert (reply.status_code, reply.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeat_with_its_key_gets_the_first_reply(server_app: Running, stream: bool) -> None:
    async with http_client(server_app, **{"idempotency-key": "once"}) as client:
        first, again = [await client.post(PATH, json=asking("random 3", stream=stream)) for _ in range(2)]
        assert first.content == again.content and again.headers["idempotent-replayed"] == "true"
        assert len(engine_of(server_app).requests) == 1
