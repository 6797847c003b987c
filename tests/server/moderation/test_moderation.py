"""Moderation of responses, chat completions and messages: scored, blocked, refused; and
POST /v1/moderations."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from server.errors import ApiError
from server.items import with_file_texts
from server.moderation import asked_in, said_in
from server.pooling import Moderator, work
from server.pooling.own_use import OFFICIAL_NAMES
from server.vector_stores import Payer
from tests.support import wire
from tests.support.pooling_checkpoints import make_classifier
from tests.support.running import Running, http_client, running_app
from tests.support.talk import WEATHER, Api, saying, wrote

Json = dict[str, Any]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Words(Moderator):
    """A moderator that flags a text with the word "bad", and fails at one with the word "broken"."""

    __slots__ = ("judged",)
    model = "words"  # type: ignore[assignment]

    def __init__(self) -> None:
        object.__setattr__(self, "judged", [])

    def require(self, model: str, param: str) -> None:
        assert model.startswith((*OFFICIAL_NAMES, "words"))

    async def moderate(self, texts: Sequence[str], *, payer: Payer, param: str | None = None) -> list[Json]:
        self.judged.extend(texts)  # type: ignore[attr-defined]
        if any("broken" in text for text in texts):
            raise ApiError(429, "no room", code="rate_limit_exceeded")
        return [
            {
                "type": "moderation_result",
                "model": "words",
                "flagged": "bad" in text,
                "categories": {"rude": "bad" in text},
                "category_scores": {"rude": float("bad" in text)},
                "category_applied_input_types": {"rude": ["text"]},
            }
            for text in texts
        ]


def use(running: Running) -> list[str]:
    """Have a server moderate by words; what is judged."""
    words = Words()
    running.context.runs.moderator = words
    running.context.runs._loop._moderator = words
    judged: list[str] = words.judged  # type: ignore[attr-defined]
    return judged


def wanting(input: str = "score", output: str = "score") -> Json:
    policy = {"input": {"mode": input}, "output": {"mode": output}}
    return {"moderation": {"model": "omni-moderation-latest", "policy": policy}}


def chatting(text: str, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    async with running_app(tmp_path) as running:
        use(running)
        yield running


@pytest.fixture
async def http(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(running) as client:
        yield client


# ------------------------------------------------------------------------------------------------------------
# Responses


async def test_both_halves_are_judged(http: httpx.AsyncClient) -> None:
    api = Api(http)
    made = await api.create("say a bad word", **wanting())
    assert made["status"] == "completed"
    assert (made["moderation"]["input"]["flagged"], made["moderation"]["output"]["flagged"]) == (True, True)
    assert await api.get(made["id"]) == made
    streamed = await api.stream("say all is well", moderation={"model": "words"})
    verdicts = streamed.events[-1]["response"]["moderation"]
    assert [verdicts[half]["flagged"] for half in ("input", "output")] == [False, False]
    assert "moderation" not in await api.create("say hello")


async def test_a_flagged_input_reaches_no_model(http: httpx.AsyncClient, running: Running) -> None:
    api = Api(http)
    engine = running.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    made = await api.create("say a bad word", **wanting(input="block"))
    assert (made["status"], made["output"]) == ("incomplete", [])
    assert made["incomplete_details"] == {"reason": "content_filter"}
    assert made["moderation"]["input"]["flagged"]
    assert made["moderation"]["output"]["code"] == "not_moderated"
    assert not engine.requests and made["usage"]["output_tokens"] == 0
    assert (await api.create("say a word", **wanting(input="block")))["status"] == "completed"
    failed = await api.create("say broken", **wanting(input="block"))
    assert failed["status"] == "incomplete", "what cannot be judged goes no further"
    assert failed["moderation"]["input"]["type"] == "error"


async def test_a_flagged_output_is_never_shown(tmp_path: Path) -> None:
    engine = ScriptedEngine(saying("<think>so bad</think>fine", "all is well"))
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        judged = use(running)
        api = Api(client)
        streamed = await api.stream("hello", **wanting(output="block"))
        assert streamed.types == ["created", "in_progress", "incomplete"]
        final = streamed.events[-1]["response"]
        assert final["output"] == [] and final["incomplete_details"] == {"reason": "content_filter"}
        assert final["moderation"]["output"]["flagged"] and final["usage"]["output_tokens"] > 5
        assert wire.events(await api.replay(final["id"])) == streamed.events
        assert judged == ["hello", "so badfine"]


async def test_outputs_for_a_waiting_response_are_judged_before_the_model_goes_on(tmp_path: Path) -> None:
    """What was judged before is not judged again, though the run is taken up anew each time."""
    calling = [wrote("get_weather", city=city) for city in ("Paris", "Rome")]
    engine = ScriptedEngine(saying(*calling, "never said"))
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        api, judged = Api(client), use(running)
        asked = {"tools": [WEATHER], "background": True, "await_tool_outputs": True}
        begun = await api.create("hello", **asked, **wanting(input="block"))
        for posted in ("fine", "bad"):
            [waiting] = (await api.waits(begun["id"]))["pending_tool_calls"]
            await api.outputs(begun["id"], {waiting["call_id"]: posted})
        ended = await api.ended(begun["id"])
        assert ended["incomplete_details"] == {"reason": "content_filter"}
        assert [item["type"] for item in ended["output"]] == ["function_call", "function_call_output"] * 2
        assert ended["moderation"]["input"]["flagged"]
        assert judged == ["hello", "fine", "bad"] and len(engine.requests) == 2


async def test_an_output_that_passes_is_shown_whole(http: httpx.AsyncClient, running: Running) -> None:
    api = Api(http)
    blocked = await api.stream("say one two three", seed=1, **wanting(output="block"))
    plain = await api.stream("say one two three", seed=1)
    assert blocked.types == plain.types
    said = blocked.events[-1]["response"]
    assert said["output"][0]["content"] == plain.events[-1]["response"]["output"][0]["content"]
    assert said["moderation"]["output"]["flagged"] is False


async def test_a_turn_is_judged_by_what_is_new(http: httpx.AsyncClient, running: Running) -> None:
    api = Api(http)
    first = await api.create("say a bad word")
    judged = use(running)
    second = await api.create("say more", previous_response_id=first["id"], **wanting(input="block"))
    assert second["status"] == "completed" and judged == ["say more", "more"]


def test_what_is_said() -> None:
    items: list[Json] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "old"}]},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"type": "message", "role": "user", "content": "new"},
    ]
    assert asked_in(items) == "42\n\nnew"
    assert said_in(items[:2]) == "old\n\n{}"
    assert asked_in(items[-1:], items[:3]) == "new\n\nold\n\n42"


def test_a_file_says_what_was_read_of_it() -> None:
    part = {"type": "input_file", "filename": "a.txt", "file_id": "file_1"}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "read"}, part]}
    assert asked_in([with_file_texts(item, {1: "its words"})]) == "read\n\nits words"


@pytest.mark.parametrize("api", ["responses", "chat/completions"])
async def test_a_file_of_a_message_is_judged(http: httpx.AsyncClient, running: Running, api: str) -> None:
    judged = use(running)
    data = "data:text/plain;base64," + base64.b64encode(b"a bad word").decode()
    if api == "responses":
        parts = [{"type": "input_text", "text": "say hi"}, {"type": "input_file", "filename": "a.txt"}]
        asked: Json = {"input": [{"role": "user", "content": [parts[0], {**parts[1], "file_data": data}]}]}
    else:
        file = {"type": "file", "file": {"filename": "a.txt", "file_data": data}}
        asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "say hi"}, file]}]}
    reply = await http.post(f"/v1/{api}", json={**asked, **wanting(input="block")})
    assert reply.status_code == 200 and "a bad word" in judged[0]
    assert "content_filter" in reply.text


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"type": "shell_call_output", "output": [{"stdout": "a", "stderr": "b", "outcome": {}}]}, "a b"),
        ({"type": "local_shell_call_output", "id": "l", "output": "a"}, "a"),
        ({"type": "code_interpreter_call", "code": "a", "outputs": [{"type": "logs", "logs": "b"}]}, "a b"),
        ({"type": "shell_call", "call_id": "c", "action": {"commands": ["a", "b"]}}, "a b"),
        ({"type": "local_shell_call", "action": {"type": "exec", "command": ["a", "b"], "env": {}}}, "a b"),
        (
            {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a", "diff": "b"}},
            "a b",
        ),
        ({"type": "web_search_call", "action": {"type": "search", "query": "a", "queries": ["b"]}}, "a b"),
        ({"type": "web_search_call", "action": {"type": "find_in_page", "url": "u", "pattern": "a"}}, "a"),
        ({"type": "file_search_call", "queries": ["a", "b"], "results": None}, "a b"),
        ({"type": "computer_call", "actions": [{"type": "wait"}, {"type": "type", "text": "a"}]}, "a"),
        ({"type": "tool_search_call", "arguments": {"goal": "a", "paths": ["b"]}}, "a b"),
        ({"type": "mcp_approval_response", "approve": False, "reason": "a"}, "a"),
        ({"type": "mcp_list_tools", "tools": [{"name": "t", "input_schema": {"pattern": "p"}}]}, ""),
        ({"type": "image_generation_call", "result": "aGk=", "action": "generate"}, ""),
        ({"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "u"}}, ""),
    ],
)
def test_the_words_of_an_item(item: Json, words: str) -> None:
    assert said_in([item]).split() == words.split()


# ------------------------------------------------------------------------------------------------------------
# Chat


@pytest.mark.parametrize("mode", ["score", "block"])
async def test_chat_tells_what_was_judged(http: httpx.AsyncClient, mode: str) -> None:
    asked = chatting("say one two", n=2, **wanting(output=mode))
    whole = (await http.post(CHAT, json=asked)).json()
    wire.validate_chat(whole)
    halves = [whole["moderation"][half] for half in ("input", "output")]
    assert [[each["flagged"] for each in half["results"]] for half in halves] == [[False], [False, False]]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, told, usage = wire.chunks((await http.post(CHAT, json={**asked, **options})).content)
    assert told["choices"] == [] and told["moderation"] == whole["moderation"] and told["usage"] is None
    assert usage["usage"] == whole["usage"]
    for choice in wire.check_chunks(
        [*parts, usage], "CreateChatCompletionStreamResponse", include_usage=True
    ):
        assert choice["message"]["content"] == "one two"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("policy", "text"), [({"input": "block"}, "bad"), ({"output": "block"}, "say bad")])
async def test_chat_withholds(
    http: httpx.AsyncClient, policy: dict[str, str], text: str, stream: bool
) -> None:
    reply = await http.post(CHAT, json=chatting(text, stream=stream, **wanting(**policy)))
    assert reply.status_code == 200, reply.text
    if stream:
        *parts, told = wire.chunks(reply.content)
        (choice,) = wire.check_chunks(parts, "CreateChatCompletionStreamResponse")
        moderation = told["moderation"]
    else:
        (choice,) = wire.validate_chat(reply.json())
        moderation = reply.json()["moderation"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("content_filter", "")
    assert moderation["input"]["results"][0]["flagged"]
    assert ("results" in moderation["output"]) == ("output" in policy)


async def test_a_stored_chat_completion_keeps_what_was_judged(http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        reply = await http.post(CHAT, json=chatting("say hi", store=True, stream=stream, **wanting()))
        id = wire.chunks(reply.content)[0]["id"] if stream else reply.json()["id"]
        kept = (await http.get(f"{CHAT}/{id}")).json()
        assert kept["moderation"]["output"]["results"][0]["flagged"] is False


async def test_chat_with_tools_of_the_server_is_judged_too(http: httpx.AsyncClient) -> None:
    tool = {"type": "mcp", "server_label": "a", "server_url": "builtin:", "require_approval": "never"}
    for stream in (False, True):
        body = chatting("say bad", tools=[tool], stream=stream, **wanting(output="block"))
        reply = await http.post(CHAT, json=body)
        assert reply.status_code == 200, reply.text
        whole = wire.chunks(reply.content)[-1] if stream else reply.json()
        assert whole["moderation"]["output"]["results"][0]["flagged"]
        if not stream:
            assert whole["choices"][0]["finish_reason"] == "content_filter"


# ------------------------------------------------------------------------------------------------------------
# Messages

REFUSED = {
    "stop_reason": "refusal",
    "stop_sequence": None,
    "stop_details": {
        "type": "refusal",
        "category": None,
        "explanation": "The moderation that the request asks for has kept this back.",
    },
}


def sending(text: str, **fields: Any) -> Json:
    thinking = {"type": "adaptive"}
    return chatting(text, model="claude-x", max_tokens=2000, thinking=thinking, **fields)


def message_events(reply: httpx.Response) -> list[Json]:
    lines = reply.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("mode", ["score", "block"])
async def test_a_message_tells_what_was_judged(http: httpx.AsyncClient, running: Running, mode: str) -> None:
    judged = use(running)
    asked = sending("think aha then say one two", **wanting(output=mode))
    whole = (await http.post(MESSAGES, json=asked)).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert (whole["stop_reason"], whole["stop_details"]) == ("end_turn", None)
    assert judged == ["think aha then say one two", "ahaone two"]
    flagged = [whole["moderation"][half]["results"][0]["flagged"] for half in ("input", "output")]
    assert flagged == [False, False]
    *_, delta, stop = message_events(await http.post(MESSAGES, json={**asked, "stream": True}))
    assert delta["type"] == "message_delta" and stop == {"type": "message_stop"}
    assert delta["moderation"] == whole["moderation"] and delta["usage"]["output_tokens"] > 5
    unasked = (await http.post(MESSAGES, json=sending("say bad"))).json()
    assert "moderation" not in unasked and unasked["stop_reason"] == "end_turn"


@pytest.mark.parametrize(("policy", "text"), [({"input": "block"}, "bad"), ({"output": "block"}, "say bad")])
async def test_a_message_that_is_kept_back_is_a_refusal(
    http: httpx.AsyncClient, policy: dict[str, str], text: str
) -> None:
    asked = sending(text, **wanting(**policy))
    whole = (await http.post(MESSAGES, json=asked)).json()
    assert whole["content"] == [] and {name: whole[name] for name in REFUSED} == REFUSED
    assert whole["moderation"]["input"]["results"][0]["flagged"]
    assert ("results" in whole["moderation"]["output"]) == ("output" in policy)
    assert (whole["usage"]["output_tokens"] > 0) == ("output" in policy)
    start, delta, stop = message_events(await http.post(MESSAGES, json={**asked, "stream": True}))
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert delta["delta"] == REFUSED and delta["moderation"] == whole["moderation"]
    assert (
        delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"] and stop["type"] == "message_stop"
    )


async def test_a_call_in_a_message_is_judged(http: httpx.AsyncClient, running: Running) -> None:
    judged = use(running)
    tool = {"name": "f", "input_schema": {"type": "object"}}
    asked = sending('call f {"x": "bad"}', tools=[tool], **wanting(output="block"))
    whole = (await http.post(MESSAGES, json=asked)).json()
    assert judged[1:] == ['{"x": "bad"}'] and whole["stop_reason"] == "refusal"


# ------------------------------------------------------------------------------------------------------------
# What is refused, and the model


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, chatting("say hi")), (RESPONSES, {"input": "say hi"}), (MESSAGES, sending("say hi"))],
)
async def test_without_a_model_it_is_refused(client: httpx.AsyncClient, path: str, asked: Json) -> None:
    def refusal(reply: httpx.Response) -> tuple[Any, Any]:
        if path != MESSAGES:
            error = wire.validate_error(reply.json())
            return error["code"], error["param"]
        details = reply.json()["error"]["details"]
        return details["error_code"], details["param"]

    reply = await client.post(path, json={**asked, **wanting()})
    assert (reply.status_code, *refusal(reply)) == (400, "unsupported_parameter", "moderation")
    for wrong, param in (
        ({}, "moderation.model"),
        ({"model": 1}, "moderation.model"),
        ({"model": "words", "policy": {"input": {}}}, "moderation.policy.input.mode"),
        ({"model": "words", "policy": {"output": {"mode": "hide"}}}, "moderation.policy.output.mode"),
        ({"model": "words", "policy": 1}, "moderation.policy"),
        ([], "moderation"),
    ):
        reply = await client.post(path, json={**asked, "moderation": wrong})
        assert (reply.status_code, refusal(reply)[1]) == (400, param)
    reply = await client.post("/v1/moderations", json={"input": "say hi"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_model")


async def test_a_classifier_moderates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_classifier("distilbert", tmp_path / "m", 3, dim=64, hidden_dim=96, n_layers=2, n_heads=4)
    config = folder / "config.json"
    labels = {"0": "Safe", "1": "rude", "2": "cruel"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"id2label": labels}))
    settings = {"classification_model": (f"guard={folder}",), "moderation_model": "guard"}
    monkeypatch.setattr(work, "MAX_TOKENS", 2000)
    (tmp_path / "data").mkdir()
    async with (
        running_app(tmp_path / "data", moderation_threshold=0.01, num_threads=1, **settings) as running,
        http_client(running) as client,
    ):
        long = "the river bank is green " * 200
        body = {"input": ["a dog", long, ""], "model": "omni-moderation-latest"}
        reply = (await client.post("/v1/moderations", json=body)).json()
        assert reply["model"] == "guard" and reply["id"].startswith("modr-")
        dog, bank, nothing = reply["results"]
        assert set(dog["categories"]) == {"rude", "cruel"} and dog["flagged"] and bank["flagged"]
        assert not nothing["flagged"] and set(nothing["category_scores"].values()) == {0.0}
        probs = (await client.post("/v1/classify", json={"input": "a dog", "model": "guard"})).json()["data"]
        assert dog["category_scores"]["rude"] == pytest.approx(probs[0]["probs"][1], abs=1e-6)
        parts = [{"type": "text", "text": "a dog"}]
        reply = (await client.post("/v1/moderations", json={"input": parts})).json()
        assert reply["results"] == [dog]
        for wrong, code, param in (
            (
                {"input": [{"type": "image_url", "image_url": {"url": "x"}}]},
                "unsupported_content",
                "input[0]",
            ),
            ({"input": []}, "empty_array", "input"),
            ({"input": 1}, "invalid_type", "input"),
            ({}, "missing_required_parameter", "input"),
            ({"input": "a", "model": "other"}, "model_not_found", "model"),
            ({"input": ["a" * 4_800_000, "b"]}, "max_tokens_per_request", "input"),
            ({"input": [long, "word " * 1100]}, "max_tokens_per_request", "input"),
        ):
            error = wire.validate_error((await client.post("/v1/moderations", json=wrong)).json())
            assert (error["code"], error["param"]) == (code, param)
        made = await Api(client).create("say a dog", moderation={"model": "guard"})
        assert made["moderation"]["output"]["model"] == "guard"
        other = await client.post(RESPONSES, json={"input": "say hi", "moderation": {"model": "other"}})
        assert (other.status_code, other.json()["error"]["param"]) == (404, "moderation.model")
        await running.context.meter.flush()
        path = "/v1/organization/usage/moderations?start_time=0&bucket_width=1d&limit=1"
        operator = {"authorization": f"Bearer {running.life.admin_token}"}
        since = int(time.time()) // 86400 * 86400
        used = await client.get(path.replace("start_time=0", f"start_time={since}"), headers=operator)
        counted = used.json()["data"][0]["results"][0]
        # Two requests, a response's input and its output; classifying is none, and nothing that was refused.
        assert counted["num_model_requests"] == 4
        assert counted["input_tokens"] > 0
