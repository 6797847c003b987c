"""Chat completions with tools that the server runs: whole, in chunks, and however they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from engine import Fail, RequestFailed, Say, ScriptedEngine
from server.errors import ApiError
from server.mcp_servers import read_mcp_settings
from server.runs.events import Events, ReaderLagged
from server.schema import ChatStreamOptions
from server.stateless.choices import Part
from server.stateless.tool_runs import RunWriter, ToolRun
from server.web_settings import WebSettings
from storage import Counts
from tests.server.runs.test_disconnect import eventually
from tests.server.runs.test_store_false import rows
from tests.server.stateless.test_chat import asking, refused, streamed, whole
from tests.support import wire
from tests.support.loopback_web import LoopbackWeb, loopback_web
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, prompts, saying, wrote
from tests.support.usage import used
from tests.support.wire import Json

DESK: Json = {
    "type": "mcp",
    "server_label": "desk",
    "server_url": "builtin:desk",
    "require_approval": "never",
}
WEB: Json = {"type": "web_search"}
CLIENTS: Json = {"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}
PAINT: Json = {"type": "custom", "custom": {"name": "paint", "description": "Paints."}}
LOOK_UP = 'call look_up {"word": "home"}'
SUM = 'call calculator {"expression": "2+3"}'
ASK = 'call get_weather {"city": "Paris"}'


def desk(url: str, **table: Any) -> dict[str, Any]:
    """The setting that has the server `desk`. table: what else stands under `[mcp]`."""
    return {"mcp": read_mcp_settings({"servers": {"desk": {"url": url}}, **table}, {})}


@asynccontextmanager
async def at_desk(
    folder: Path, engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[Seen, Running, httpx.AsyncClient]]:
    """A server that reaches an MCP server, on sockets both."""
    seen = Seen()
    async with (
        mcp_server(seen) as url,
        live_app(folder, engine, **desk(url), **settings) as running,
        http_client(running) as client,
    ):
        yield seen, running, client


@asynccontextmanager
async def searching(
    folder: Path, web: LoopbackWeb, engine: ScriptedEngine, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that searches this web."""
    table = WebSettings(provider="searxng", url=f"http://{web.host}")
    async with (
        running_app(folder, engine, registry=None, web=table, **settings) as running,
        http_client(running) as client,
    ):
        yield client


def searches(*queries: str) -> str:
    """What the model writes to search."""
    return wrote("web_search", queries=queries)


async def message(client: httpx.AsyncClient, content: Any, **fields: Any) -> Json:
    """The message of a completion that is not streamed."""
    [choice] = (await whole(client, asking(content, **fields)))["choices"]
    found: Json = choice["message"]
    return found


def made(message: Json) -> list[Json]:
    """The calls that the server has made, as a message has them."""
    return list(message.get("server_tool_calls", ()))


def sent(raw: bytes) -> list[Json]:
    """What a stream has sent that does not come to its end."""
    assert b"[DONE]" not in raw
    return [json.loads(frame.data) for frame in wire.parse_sse(raw)]


# ------------------------------------------------------------------------------------------------------------
# What is answered


CASES: dict[str, Json] = {
    "call": asking(SUM, tools=[BUILTIN]),
    "no call": asking("say hi", tools=[BUILTIN]),
    "calls": asking(f"{SUM}\n{SUM}", tools=[BUILTIN]),
    "one call in a turn": asking(f"{SUM}\n{SUM}", tools=[BUILTIN], parallel_tool_calls=False),
    "think and call": asking(f"think hm then {SUM}", tools=[BUILTIN]),
    "thoughts left out": asking(f"think hm then {SUM}", tools=[BUILTIN], include_reasoning=False),
    "text and call": asking(f"say one moment\n{SUM}", tools=[BUILTIN]),
    "a call that fails": asking('call calculator {"expression": "2+"}', tools=[BUILTIN]),
    "a call of the client": asking(ASK, tools=[BUILTIN, CLIENTS]),
    "both": asking(f"say wait\n{SUM}\n{ASK}", tools=[BUILTIN, CLIENTS]),
    "custom": asking('call paint {"input": "a \\"red\\"\\nhouse"}', tools=[BUILTIN, PAINT]),
    "forced": asking("say no", tools=[BUILTIN], tool_choice={"type": "mcp", "server_label": "antiphon"}),
    "forbidden": asking(SUM, tools=[BUILTIN], tool_choice="none"),
    "length": asking("count 50", tools=[BUILTIN], max_completion_tokens=10),
    "length behind a call": asking(SUM, tools=[BUILTIN], max_tokens=90),
    "stop": asking("say one two three", tools=[BUILTIN], stop="three"),
    "shape": asking(SUM, tools=[BUILTIN], response_format={"type": "json_object"}),
    "logprobs": asking(f"say so\n{SUM}", tools=[BUILTIN], logprobs=True, top_logprobs=2),
    "empty": asking("say  ", tools=[BUILTIN]),
}


def bare(choice: Json) -> Json:
    """A choice without ids, and without what chunks leave out where there is nothing."""
    said = {key: value for key, value in choice["message"].items() if value not in (None, [], "")}
    for call in said.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    for index, call in enumerate(said.get("server_tool_calls", ())):
        assert call.pop("id").startswith("mcp_") and call.pop("index", index) == index
    return {**choice, "message": said}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_folds_to_the_whole(client: httpx.AsyncClient, name: str) -> None:
    body = {**CASES[name], "seed": 1}
    full = await whole(client, body)
    choices, usage = await streamed(client, {**body, "stream_options": {"include_usage": True}})
    assert usage == full["usage"] and full["id"].startswith("chatcmpl-")
    assert list(map(bare, choices)) == list(map(bare, full["choices"]))


async def test_calls_are_made_before_the_answer(tmp_path: Path) -> None:
    async with at_desk(tmp_path) as (seen, _, client):
        before = rows(tmp_path)
        reply = await whole(client, asking(LOOK_UP, tools=[DESK]))
        response = await Api(client).create(LOOK_UP, tools=[DESK], store=False)
        assert rows(tmp_path) == before, "nothing is stored"
    [choice] = reply["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "The tool said: home means much"
    [call], usage = made(choice["message"]), response["usage"]
    assert call == {**response["output"][1], "id": call["id"]}, "it is the item of a response"
    assert reply["usage"] == {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert seen.called == ["look_up", "look_up"]


async def test_what_is_used_is_counted_once(server_app: Running, client: httpx.AsyncClient) -> None:
    reply = await whole(client, asking(f"think hm then {SUM}", tools=[BUILTIN]))
    usage = reply["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    expected = Counts(1, usage["prompt_tokens"], 0, usage["completion_tokens"], reasoning)
    assert await used(server_app) == expected and reasoning > 0


async def test_paragraphs_are_what_turns_have_said(client: httpx.AsyncClient) -> None:
    said = await message(client, f"think first then say one moment\n{SUM}", tools=[BUILTIN])
    assert said["content"] == "one moment\n\nThe tool said: 5"
    assert said["reasoning"] == said["reasoning_content"] == "first"


async def test_a_call_that_fails_is_told_to_the_model(tmp_path: Path) -> None:
    async with at_desk(tmp_path) as (_, _, client):
        said = await message(client, 'call book {"room": 13}', tools=[DESK])
    [call] = made(said)
    assert (call["status"], call["error"]["type"]) == ("failed", "mcp_protocol_error")
    assert said["content"] == "The tool said: error: no room is given this number"


async def test_a_turn_may_have_calls_of_both_sides(tmp_path: Path) -> None:
    """The server's are made, and the client's are left to it; what came of the server's goes with the
    message."""
    engine = ScriptedEngine()
    async with at_desk(tmp_path, engine) as (seen, _, client):
        body = asking(f"{LOOK_UP}\n{ASK}", tools=[DESK, CLIENTS])
        [choice] = (await whole(client, body))["choices"]
        said = choice["message"]
        [call] = said["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "get_weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        assert [one["output"] for one in made(said)] == ["home means much"]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        body["messages"] += [said, answer]
        reply = await client.post("/v1/chat/completions", json=body)
        assert "x-antiphon-ignored" not in reply.headers
        assert reply.json()["choices"][0]["message"]["content"] == "The tool said: sunny"
        assert "home means much" in prompts(engine)[-1]
        del said["server_tool_calls"]  # as clients do that do not know of it
        await whole(client, body)
        assert "home means much" not in prompts(engine)[-1]
    assert seen.called == ["look_up"]


async def test_a_function_of_the_client_keeps_its_name(client: httpx.AsyncClient) -> None:
    """A tool of the server's that has the same name is called by another one, and told by its own."""
    mine = {"type": "function", "function": {**CLIENTS["function"], "name": "calculator"}}
    theirs = 'call antiphon__calculator {"expression": "2+3"}'
    said = await message(client, f'{theirs}\ncall calculator {{"city": "Paris"}}', tools=[BUILTIN, mine])
    assert [(call["name"], call["output"]) for call in made(said)] == [("calculator", "5")]
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["calculator"]


def test_an_index_is_the_place_among_the_calls() -> None:
    """In a stream, too, where the second of two calls has its outcome first: a client that folds lists by
    their indexes, as the SDK does, needs them in order besides."""

    def writer() -> RunWriter:
        return RunWriter(logprobs=False, thoughts=False, role="assistant")

    def call(number: int) -> Json:
        fields = {"server_label": "desk", "name": "look_up", "arguments": "{}", "output": "k", "error": None}
        return {"type": "mcp_call", "id": f"mcp_{number}", "status": "completed", **fields}

    def told(parts: Sequence[Part]) -> list[Json]:
        return [made for part in parts for made in part["delta"].get("server_tool_calls", ())]

    def done(number: int) -> Json:
        return {"type": "response.output_item.done", "item": call(number)}

    streaming, whole = writer(), writer()
    for number in range(3):
        begun = {**call(number), "status": "in_progress", "output": None}
        streaming.event({"type": "response.output_item.added", "item": begun})
    assert told(streaming.event(done(1))) == [], "the first one comes before it"
    assert told(streaming.event(done(0))) == [{"index": 0, **call(0)}, {"index": 1, **call(1)}]
    assert told(streaming.event(done(2))) == [{"index": 2, **call(2)}]
    plain = [made for number in range(3) for made in told(whole.item(call(number)))]
    assert plain == [{"index": number, **call(number)} for number in range(3)]


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_message_begins_as_a_text_only_with_a_text(logprobs: bool) -> None:
    def first(event: Json) -> Json:
        parts = RunWriter(logprobs=logprobs, thoughts=True, role="critic").event(event)
        delta: Json = parts[0]["delta"]
        return delta

    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": ""}
    begun = {"type": "response.output_item.added", "item": call}
    said = {"type": "response.output_text.delta", "delta": "hi", "logprobs": []}
    thought = {"type": "response.reasoning_text.delta", "delta": "hm"}
    assert first(said) == {"role": "critic", "content": ""}
    assert first(thought) == {
        "role": "critic", "content": None, "reasoning": "hm", "reasoning_content": "hm"
    }  # fmt: skip
    assert first(begun) == {
        "role": "critic",
        "content": None,
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
        ],
    }
    nothing = RunWriter(logprobs=logprobs, thoughts=True, role="critic").end({"status": "completed"})
    assert [part["delta"] for part in nothing] == [{"role": "critic", "content": ""}, {}]


async def test_calls_are_taken_back_without_such_tools_too(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    body = asking(SUM, tools=[BUILTIN])
    choices, _ = await streamed(client, body)
    body["messages"] += [choices[0]["message"], {"role": "user", "content": "say on"}]
    reply = await client.post("/v1/chat/completions", json={"messages": body["messages"]})
    assert reply.json()["choices"][0]["message"]["content"] == "on"
    assert "x-antiphon-ignored" not in reply.headers, "the index in chunks is known"
    engine = server_app.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    assert "<tool_response>\n5\n</tool_response>" in prompts(engine)[-1]


# ------------------------------------------------------------------------------------------------------------
# The web


@pytest.fixture
async def web() -> AsyncIterator[LoopbackWeb]:
    async with loopback_web() as web:
        yield web


@pytest.mark.parametrize("asked", [{"tools": [WEB]}, {"web_search_options": {}}])
async def test_citations_are_annotations(tmp_path: Path, web: LoopbackWeb, asked: Json) -> None:
    engine = ScriptedEngine(saying(f"Let me see.\n{searches('tide')}", "High【1】. So【1】."))
    async with searching(tmp_path, web, engine) as client:
        said = await message(client, "hi", **asked)
        body = asking("hi", **asked, stream=True)
        chunks = wire.chunks((await client.post("/v1/chat/completions", json=body)).content)
    link = f"([{web.host}]({web.url('/p/tides.html')}))"
    assert said["content"] == f"Let me see.\n\nHigh {link}. So {link}."
    assert [one["type"] for one in said["annotations"]] == ["url_citation"] * 2
    for note in (one["url_citation"] for one in said["annotations"]):
        assert said["content"][note["start_index"] : note["end_index"]] == link
        assert note["url"] == web.url("/p/tides.html") and note["title"]
    [call] = made(said)
    assert (call["type"], call["action"]["queries"]) == ("web_search_call", ["tide"])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    [noted] = [delta for delta in deltas if "annotations" in delta]
    assert noted == {"annotations": said["annotations"]} and deltas[-2:] == [noted, {}]
    assert "【" not in "".join(delta.get("content", "") for delta in deltas)


async def test_search_options_reach_the_tool(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = ScriptedEngine(saying(searches("tide"), "So【1】."))
    place = {"type": "approximate", "approximate": {"city": "Oslo", "country": "NO"}}
    options = {"search_context_size": "low", "user_location": place}
    async with searching(tmp_path, web, engine) as client:
        await message(client, "hi", web_search_options=options)
        assert "The user is in Oslo, NO." in prompts(engine)[0]
        place["approximate"] = {"street": "High"}
        asked = asking("hi", web_search_options=options)
        reply = await client.post("/v1/chat/completions", json=asked)
        named = "web_search_options.user_location.approximate.street"
        assert reply.headers["x-antiphon-ignored"] == named
        forced = asking("hi", web_search_options={}, tool_choice=WEB)
        assert made((await whole(client, forced))["choices"][0]["message"])
        for options, param in (
            ({"search_context_size": "huge"}, "web_search_options.search_context_size"),
            ({"user_location": {"type": "approximate"}}, "web_search_options.user_location.approximate"),
            ([], "web_search_options"),
        ):
            error = await refused(client, asking("hi", web_search_options=options))
            assert error["param"] == param
        error = await refused(client, asking("hi", web_search_options={}, tools=[WEB]))
        assert (error["param"], "Two tools" in error["message"]) == ("tools", True)


async def test_a_search_that_is_sent_back_says_nothing(tmp_path: Path, web: LoopbackWeb) -> None:
    engine = ScriptedEngine(saying(searches("tide"), "So【1】."))
    async with searching(tmp_path, web, engine) as client:
        said = await message(client, "hi", tools=[WEB])
        body = {"messages": [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "ho"}]}
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-antiphon-ignored"] == "messages[1].server_tool_calls[0]"


@pytest.mark.parametrize(
    ("asked", "param", "place"),
    [
        ({"web_search_options": {}}, "web_search_options", "web_search_options"),
        ({"tools": [CLIENTS, WEB]}, "tools[1].type", "tools[1]"),
        ({"tools": [CLIENTS], "web_search_options": {}}, "web_search_options", "web_search_options"),
    ],
)
async def test_without_a_provider_a_search_is_refused_or_left_out(
    tmp_path: Path, asked: Json, param: str, place: str
) -> None:
    async with running_app(tmp_path / "a") as running, http_client(running) as client:
        error = await refused(client, asking("say hi", **asked))
        assert (error["code"], error["param"]) == ("unsupported_tool", param)
        assert "no search provider" in error["message"]
    ignoring = running_app(tmp_path / "b", unsupported_tools="ignore")
    async with ignoring as running, http_client(running) as client:
        reply = await client.post("/v1/chat/completions", json=asking("say hi", **asked))
        assert reply.json()["choices"][0]["message"]["content"] == "hi"
        assert reply.headers["x-antiphon-ignored"] == place


# ------------------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize(
    ("asked", "param", "told"),
    [
        ({"tools": [{**DESK, "require_approval": "always"}]}, "tools[0].require_approval", "'never'"),
        ({"tools": [CLIENTS, {**DESK, "require_approval": None}]}, "tools[1].require_approval", "'never'"),
        (
            {"tools": [{**DESK, "require_approval": {"never": {"tool_names": ["look_up"]}}}]},
            "tools[0].require_approval",
            "'allowed_tools'",
        ),
        ({"tools": [{**BUILTIN, "require_approval": "always"}]}, "tools[0].require_approval", "/v1/resp"),
        ({"tools": [BUILTIN], "n": 2}, "n", "for each answer"),
        ({"tools": [BUILTIN], "add_generation_prompt": False}, "add_generation_prompt", "server runs"),
        ({"tools": [BUILTIN, {"type": "shell"}]}, "tools[1].type", "tools that the server runs"),
        ({"tools": [{"type": "tool_search"}]}, "tools[0].type", "/v1/responses"),
        ({"tools": [{**DESK, "server_url": "builtin:shop"}]}, "tools[0].server_url", "shop"),
        ({"tools": [{**BUILTIN, "allowed_tools": ["juggle"]}]}, "tools[0].allowed_tools", "juggle"),
        ({"tools": [BUILTIN], "tool_choice": WEB}, "tool_choice", "not found"),
        ({"tools": [BUILTIN], "max_tool_calls": -1}, "max_tool_calls", ""),
        ({"tools": [BUILTIN, BUILTIN]}, "tools", "Two tools"),
    ],
)
async def test_what_chat_cannot_have_is_refused(tmp_path: Path, asked: Json, param: str, told: str) -> None:
    nowhere = desk("http://127.0.0.1:9/mcp")
    async with running_app(tmp_path, **nowhere) as running, http_client(running) as client:
        for stream in (False, True):
            error = await refused(client, asking("say hi", **asked, stream=stream))
            assert error["param"] == param and told in error["message"]


async def test_candidates_would_each_make_their_calls(client: httpx.AsyncClient) -> None:
    error = await refused(client, asking("say hi", tools=[BUILTIN], best_of=2))  # which nobody can stream
    assert error["param"] == "best_of"
    error = await refused(client, asking("say hi", tools=[BUILTIN], use_beam_search=True, n=2))
    assert error["param"] == "tools"


async def test_errors_name_the_fields_of_chat(client: httpx.AsyncClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    error = await refused(client, {"messages": history, "tools": [BUILTIN, CLIENTS]})
    assert (error["param"], "c1" in error["message"]) == ("messages[1].tool_calls", True)
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    error = await refused(client, asking(image, tools=[BUILTIN]))
    assert (error["param"], error["code"]) == ("messages[0].content[0]", "unsupported_content")
    limit = asking("say hi", tools=[BUILTIN], max_completion_tokens=1 << 30, user="u")
    reply = await client.post("/v1/chat/completions", json=limit)
    assert reply.headers["x-antiphon-ignored"] == "max_completion_tokens"
    kept = {"type": "message", "role": "user", "content": "x"}
    for calls, param in (([kept], "[0].type"), ([{}], "[0].type"), ("x", "")):
        sent_back: Json = {"role": "assistant", "content": "x", "server_tool_calls": calls}
        error = await refused(client, {"messages": [sent_back]})
        assert error["param"] == f"messages[0].server_tool_calls{param}"


async def test_a_prompt_that_is_too_long_names_the_messages(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_model_len=600)
    async with running_app(tmp_path, engine) as running, http_client(running) as client:
        error = await refused(client, asking("x" * 1000, tools=[BUILTIN]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("policy", ["always", "never"])
async def test_the_operator_may_decide_for_approvals(tmp_path: Path, policy: str) -> None:
    asking_for_it = {**DESK, "require_approval": "always"}
    async with mcp_server(seen := Seen()) as url:
        forced = desk(url, approval=policy)
        async with running_app(tmp_path, **forced) as running, http_client(running) as client:
            if policy == "never":
                said = await message(client, LOOK_UP, tools=[asking_for_it])
                assert made(said) and seen.called == ["look_up"]
                return
            error = await refused(client, asking(LOOK_UP, tools=[DESK]))
            assert error["param"] == "tools[0].require_approval" and "operator" in error["message"]


async def test_the_tokens_of_tools_that_the_server_runs_are_counted_elsewhere(
    client: httpx.AsyncClient,
) -> None:
    reply = await client.post("/tokenize", json=asking("hi", tools=[BUILTIN]))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_tool")
    assert "/v1/responses/input_tokens" in reply.json()["error"]["message"]


async def test_a_limit_of_calls_needs_calls(client: httpx.AsyncClient) -> None:
    body = asking("say hi", max_tool_calls=1)
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.headers["x-antiphon-ignored"] == "max_tool_calls"


# ------------------------------------------------------------------------------------------------------------
# Limits


async def test_calls_are_limited(tmp_path: Path) -> None:
    limits = ("tool_calls_per_minute=2", "requests_per_minute=10", "tokens_per_minute=100000")
    async with running_app(tmp_path, owner_limit=limits) as running, http_client(running) as client:
        said = await message(client, f"{SUM}\n{SUM}", tools=[BUILTIN], max_tool_calls=1)
        assert [one["error"] is None for one in made(said)] == [True, False]
        assert "no more than 1 tool call." in str(made(said)[1]["error"])
        said = await message(client, f"{SUM}\n{SUM}", tools=[BUILTIN])
        assert [one["error"] is None for one in made(said)] == [True, False]
        assert "only 2 tool calls a minute" in str(made(said)[1]["error"])
        last = await client.post("/v1/chat/completions", json=asking("say hi", tools=[BUILTIN]))
        assert last.headers["x-ratelimit-remaining-requests"] == "7"
        assert int(last.headers["x-ratelimit-remaining-tokens"]) < 100_000


async def test_there_may_be_no_calls(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        [refused] = made(await message(client, SUM, tools=[BUILTIN], max_tool_calls=0))
        assert "may make no tool calls." in str(refused["error"])


async def test_open_streams_are_limited(tmp_path: Path) -> None:
    async with (
        at_desk(tmp_path, owner_limit=("concurrent_streams=1",)) as (seen, _, client),
        client.stream("POST", "/v1/chat/completions", json=HELD | {"stream": True}) as reply,
    ):
        await seen.held.wait()
        assert reply.status_code == 200, "headers do not wait for a call"
        error = await refused(client, {**HELD, "stream": True}, status=429)
        assert error["code"] == "rate_limit_exceeded"


# ------------------------------------------------------------------------------------------------------------
# Ends

HELD = asking("call hold {}", tools=[DESK])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_call(tmp_path: Path, stream: bool) -> None:
    async with at_desk(tmp_path) as (seen, running, client):
        asked = client.post("/v1/chat/completions", json=HELD | {"stream": stream})
        left = asyncio.create_task(asked)
        await asyncio.wait_for(seen.held.wait(), 20)
        assert running.context.runs.num_active == 1
        left.cancel()
        await asyncio.wait_for(seen.cancelled.wait(), 20)
        await eventually(lambda: running.context.runs.num_active == 0)
        assert running.context.runs.feed._channels == {}


async def test_a_server_that_cannot_be_reached_is_424(tmp_path: Path) -> None:
    nowhere = desk("http://127.0.0.1:9/mcp")
    async with running_app(tmp_path, **nowhere) as running, http_client(running) as client:
        reply = await client.post("/v1/chat/completions", json=asking("say hi", tools=[DESK]))
        error = wire.validate_error(reply.json())
        assert (reply.status_code, error["code"]) == (424, "external_connector_error")
        assert "'desk'" in error["message"] and reply.headers["x-should-retry"] == "false"
        body = asking("say hi", tools=[DESK], stream=True)
        late = await client.post("/v1/chat/completions", json=body)
        told = late.json() if late.status_code == 424 else sent(late.content)[-1]
        assert told["error"]["code"] == "external_connector_error"


async def test_what_fails_at_once_is_an_http_error_and_later_the_last_event(tmp_path: Path) -> None:
    def script(request: Any, prompt: str) -> Any:
        yield Say("early")
        yield Fail(RequestFailed("boom"))

    async with (
        running_app(tmp_path, ScriptedEngine(script)) as running,
        http_client(running) as client,
    ):
        error = await refused(client, asking("hi", tools=[BUILTIN]), status=500)
        assert error["code"] == "server_error"
        reply = await client.post("/v1/chat/completions", json=asking("hi", tools=[BUILTIN], stream=True))
        *chunks, last = sent(reply.content)
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "early"
        assert last["error"]["type"] == "server_error"


async def test_a_generation_that_takes_too_long_is_408(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request, prompt: [Gate().wait()])
    async with (
        running_app(tmp_path, engine, request_timeout_s=0.2) as running,
        http_client(running) as client,
    ):
        error = await refused(client, asking("hi", tools=[BUILTIN]), status=408)
    assert error["code"] == "deadline_exceeded"


async def test_the_engine_dies(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(lambda request, prompt: [gate.wait()])
    async with live_app(tmp_path, engine) as running, http_client(running) as client:
        left = asyncio.create_task(refused(client, asking("hi", tools=[BUILTIN]), status=503))
        await gate.reached.wait()
        engine.kill(RuntimeError("gone"))
        assert (await left)["code"] == "engine_dead"


async def test_the_end_of_the_server_interrupts(tmp_path: Path) -> None:
    async with at_desk(tmp_path) as (seen, running, client):
        waiting = asyncio.create_task(refused(client, HELD, status=503))
        async with client.stream("POST", "/v1/chat/completions", json=HELD | {"stream": True}) as reply:
            await eventually(lambda: seen.called == ["hold", "hold"])
            await running.context.runs.drain(0)
            [last] = sent(await reply.aread())
    assert (await waiting)["code"] == last["error"]["code"] == "response_interrupted"


async def test_a_completion_can_be_cancelled_by_the_id_of_its_response(tmp_path: Path) -> None:
    async with at_desk(tmp_path) as (seen, running, client):
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=HELD))
        await asyncio.wait_for(seen.held.wait(), 20)
        [(plan, _)] = running.context.runs.unstored()
        await client.post(f"/v1/responses/{plan.response_id}/cancel")
        await asyncio.wait_for(seen.cancelled.wait(), 20)
        reply = await waiting
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "response_interrupted")
    assert reply.headers["x-should-retry"] == "false"


async def test_a_stream_that_is_read_too_slowly_says_so() -> None:
    class Lagging:
        async def events(self) -> AsyncIterator[Any]:
            yield Events(0, (b'{"type":"response.created"}',), terminal=False)
            raise ReaderLagged

    started: Any = SimpleNamespace(reader=Lagging())
    run = ToolRun(started, {"id": "chatcmpl-1"}, logprobs=False, thoughts=True)
    with pytest.raises(ApiError, match="so slowly") as caught:
        await anext(run.frames("chat.completion.chunk", ChatStreamOptions()))
    assert (caught.value.status, caught.value.code) == (503, "response_interrupted")


async def test_a_repeated_request_is_carried_out_once(tmp_path: Path) -> None:
    async with at_desk(tmp_path) as (seen, _, client):
        body, headers = asking(LOOK_UP, tools=[DESK]), {"idempotency-key": "k"}
        for form in ({}, {"stream": True}):
            headers = {"idempotency-key": f"k{form}".replace(" ", "")}
            asked = {"json": {**body, **form}, "headers": headers}
            first, again = [await client.post("/v1/chat/completions", **asked) for _ in range(2)]
            assert first.content == again.content and first.status_code == 200
            assert again.headers["idempotent-replayed"] == "true"
    assert seen.called == ["look_up", "look_up"]


async def test_log_probabilities_say_what_bytes_they_know(client: httpx.AsyncClient) -> None:
    """The scripted model has a token for each byte, so an accented letter is two."""
    body = asking("say né", tools=[BUILTIN], logprobs=True)
    [choice] = (await whole(client, body))["choices"]
    shown = [entry["bytes"] for entry in choice["logprobs"]["content"]]
    assert bytes(byte for each in shown for byte in each) == "né".encode()
    [folded], _ = await streamed(client, body)
    assert [entry["bytes"] for entry in folded["logprobs"]["content"]] == [[110], None, None]


# ------------------------------------------------------------------------------------------------------------
# The SDK


async def test_the_sdk_reads_it(sdk: AsyncOpenAI) -> None:
    asked: Mapping[str, Any] = {
        "model": "antiphon-scripted",
        "messages": [{"role": "user", "content": f"say wait\n{SUM}\n{SUM}"}],
        "tools": [BUILTIN],
    }
    completion = await sdk.chat.completions.create(**asked)
    said = completion.choices[0].message
    assert said.content == "wait\n\nThe tool said: 5; 5" and not said.tool_calls
    assert [one["output"] for one in (said.model_extra or {})["server_tool_calls"]] == ["5", "5"]
    stream = await sdk.chat.completions.create(**asked, stream=True)
    deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(deltas) == said.content
    async with sdk.chat.completions.stream(**asked) as events:
        folded = (await events.get_final_completion()).choices[0].message
    assert folded.content == said.content
    assert [one["output"] for one in (folded.model_extra or {})["server_tool_calls"]] == ["5", "5"]


async def test_the_sdk_folds_citations(tmp_path: Path, web: LoopbackWeb) -> None:
    import httpx2

    engine = ScriptedEngine(saying(searches("tide"), "High【1】. So【1】."))
    table = WebSettings(provider="searxng", url=f"http://{web.host}")
    async with running_app(tmp_path, engine, registry=None, web=table) as running:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(running.app))
        async with (
            AsyncOpenAI(api_key="x", base_url=f"{running.base_url}/v1", http_client=http) as sdk,
            sdk.chat.completions.stream(
                model="antiphon-scripted",
                messages=[{"role": "user", "content": "hi"}],
                web_search_options={"search_context_size": "high"},
            ) as events,
        ):
            said = (await events.get_final_completion()).choices[0].message
    assert said.content is not None and said.annotations is not None and len(said.annotations) == 2
    note = said.annotations[1].url_citation
    assert said.content[note.start_index : note.end_index].startswith(f"([{web.host}]")
