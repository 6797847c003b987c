"""Tools that come with an item: offered from there on, kept with the item, and read as those of a request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from engine import ScriptedEngine
from server.runs.planning import RunPlan
from tests.server.access.test_route_scopes import key_with
from tests.server.items.test_tool_search import ORDERS, SEARCH
from tests.server.items.test_web_search import searching
from tests.server.runs.execution.test_mcp_servers import DESK, LOOK_UP, kinds, settings
from tests.support.loopback_web import loopback_web
from tests.support.mcp_servers import Seen, mcp_server
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import BUILTIN, TIME, WEATHER, Api, answer, call, calls, prompts, text
from tests.support.wire import Json

TOKEN = "tk-0123456789abcdef"
ASK: Json = {"role": "user", "content": call()}


def added(*tools: Json, **more: Any) -> Json:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools], **more}


async def test_an_item_adds_tools_from_there_on(tmp_path: Path) -> None:
    """In its response, in a chain, in a conversation, and for a client that keeps the items itself; the
    prompt is the same, and has them behind the request's own."""
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create([added(WEATHER), ASK], tools=[TIME])
        (made,) = calls(first)
        assert made["name"] == "get_weather" and first["tools"] == [TIME]
        output = answer(made["call_id"])
        chained = await api.create([output, ASK], tools=[TIME], previous_response_id=first["id"])
        conversation = await api.conversation(added(WEATHER), ASK, *first["output"])
        talked = await api.create([output, ASK], tools=[TIME], conversation=conversation)
        kept = [added(WEATHER), ASK, *first["output"], output, ASK]
        resent = await api.create(kept, tools=[TIME], store=False)
        (item, _) = (await api.input_items(first["id"], order="asc"))["data"]
        assert item == added(WEATHER, id=item["id"]) and item["id"].startswith("at_")
        referred = await api.create([{"type": "item_reference", "id": item["id"]}, ASK], tools=[TIME])
        alone = await api.refused(
            400, [ASK], tools=[TIME], tool_choice={"type": "function", "name": "get_weather"}
        )
    for response in (chained, talked, resent, referred):
        assert [each["name"] for each in calls(response)] == ["get_weather"]
    told = prompts(engine)
    assert told[0].index("get_time") < told[0].index("get_weather")
    assert told[1] == told[2] == told[3] and told[4] == told[0]
    assert alone["param"] == "tool_choice"


async def test_what_comes_before_an_item_stays_as_it_was(tmp_path: Path) -> None:
    """A request's own tools begin the list, so that what is added to them changes the prompt behind them."""
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        await Api(client).create([ASK], tools=[WEATHER, BUILTIN])
        await Api(client).create([ASK, added(TIME)], tools=[WEATHER, BUILTIN])
    before, after = prompts(engine)
    own = before.index("</tools>")
    assert after[:own].rstrip() == before[:own].rstrip() and "get_time" in after[own:]


async def test_the_latest_definition_holds(tmp_path: Path) -> None:
    """Of an item over an earlier one's, and of the request over those of items."""
    engine = ScriptedEngine()
    older, newer, own = (
        {**WEATHER, "description": about} for about in ("the first", "the second", "the own")
    )
    pair: Json = {"type": "namespace", "name": "n", "description": "d", "tools": [older, TIME]}
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        await api.create([added(older, TIME), added(newer), ASK])
        await api.create([added(older), ASK], tools=[own])
        await api.create(
            [added(pair), added({**pair, "tools": [newer]}), {"role": "user", "content": "say a"}]
        )
    first, second, third = prompts(engine)
    assert "the second" in first and "the first" not in first and "get_time" in first
    assert "the own" in second and "the first" not in second
    assert "the second" in third and "the first" not in third and "n__get_time" in third


@pytest.mark.parametrize(
    ("tool", "param", "code"),
    [
        ({"type": "fucntion", "name": "f"}, "type", "invalid_value"),
        ({"type": "function", "name": "a b"}, "name", "invalid_value"),
        ({"type": "mcp", "server_label": "s"}, "server_url", "missing_required_parameter"),
        (
            {"type": "mcp", "server_label": "s", "server_url": "builtin:none"},
            "server_url",
            "unsupported_parameter",
        ),
        (
            {"type": "mcp", "server_label": "s", "server_url": "https://example.org"},
            "server_url",
            "unsupported_parameter",
        ),
        ({"type": "computer"}, "type", "unsupported_tool"),
        ({"type": "image_generation"}, "type", "unsupported_tool"),
        ({**BUILTIN, "allowed_tools": ["none"]}, "allowed_tools", "invalid_value"),
        ({**WEATHER, "allowed_callers": ["programmatic"]}, "allowed_callers", "unsupported_tool"),
        (ORDERS, "defer_loading", "invalid_value"),
        ({**WEATHER, "parameters": {"type": "nothing"}}, "parameters", "invalid_schema"),
        ({"type": "file_search", "vector_store_ids": ["vs_none"]}, "vector_store_ids[0]", "not_found"),
    ],
)
async def test_they_are_checked_as_those_of_a_request(
    tmp_path: Path, tool: Json, param: str, code: str
) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        status = 404 if code == "not_found" else 400
        error = await api.refused(status, [ASK, added(TIME, tool)])
        same = await api.refused(status, [ASK], tools=[TIME, tool])
    assert (error["code"], error["param"]) == (code, f"input[1].tools[1].{param}")
    assert same["param"] == f"tools[1].{param}"
    assert error["message"].replace("input[1].tools[1]", "tools[1]") == same["message"]


async def test_a_key_without_the_scope_cannot_use_what_another_has_added(tmp_path: Path) -> None:
    """Not in its own input, and not out of a conversation either."""
    scopes = ("responses", "conversations", "tool:function")
    async with running_app(tmp_path) as server, http_client(server) as client:
        everything, keyed = await key_with(client, server, "all"), await key_with(client, server, *scopes)
        client.headers.update(everything)
        conversation = await Api(client).conversation(added(BUILTIN))
        client.headers.update(keyed)
        for body in ({"input": [added(BUILTIN), ASK]}, {"input": [ASK], "conversation": conversation}):
            error = await Api(client).fails(403, "POST", "/v1/responses", json=body)
            assert error["code"] == "insufficient_permissions" and "tool:mcp" in error["message"]
        body = {"input": [added(WEATHER), ASK]}
        assert (await client.post("/v1/responses", json=body)).status_code == 200


async def test_a_key_without_the_scope_answers_no_run_that_has_the_tool(tmp_path: Path) -> None:
    """It would have the tool run, by an approval or by what the run does next."""
    async with live_app(tmp_path, ScriptedEngine()) as server, http_client(server) as client:
        api = Api(client)
        everything = await key_with(client, server, "all")
        keyed = await key_with(client, server, "responses", "tool:function")
        client.headers.update(everything)
        begun = await api.create(call(), tools=[WEATHER, BUILTIN], background=True, await_tool_outputs=True)
        now = await api.waits(begun["id"])
        body = {"tool_outputs": [answer(now["pending_tool_calls"][0]["call_id"], "wet")]}
        client.headers.update(keyed)
        path = f"/v1/responses/{begun['id']}/tool_outputs"
        error = await api.fails(403, "POST", path, json=body)
        assert error["code"] == "insufficient_permissions" and "tool:mcp" in error["message"]
        client.headers.update(everything)
        assert (await client.post(path, json=body)).status_code == 200
        assert (await api.ended(begun["id"]))["status"] == "completed"


async def test_deferred_tools_are_searched(tmp_path: Path) -> None:
    """The search may be the request's, and the deferred tools an item's."""
    engine = ScriptedEngine()
    find = 'call tool_search {"query": "open orders of a customer"}'
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        found = await Api(client).create([added(ORDERS), {"role": "user", "content": find}], tools=[SEARCH])
        lone = await Api(client).refused(400, [ASK], tools=[SEARCH])
    assert kinds(found)[:2] == ["tool_search_call", "tool_search_output"]
    assert found["output"][1]["tools"] == [ORDERS]
    assert lone["param"] == "tools[0]"


async def test_a_choice_can_name_them(tmp_path: Path) -> None:
    async with running_app(tmp_path) as server, http_client(server) as client:
        api, choice = Api(client), {"type": "function", "name": "get_time"}
        response = await api.create(
            [added(WEATHER, TIME), {"role": "user", "content": "Go."}], tool_choice=choice
        )
        assert [each["name"] for each in calls(response)] == ["get_time"]


async def test_tools_of_this_server_are_run(tmp_path: Path) -> None:
    async with loopback_web() as web, searching(tmp_path, web) as (_, api):
        stream = await api.stream(
            [
                added(BUILTIN, {"type": "web_search"}),
                {"role": "user", "content": 'call calculator {"expression": "6*7"}'},
            ]
        )
        searched = await api.create(
            'call web_search {"queries": ["harbour"]}', previous_response_id=stream.response["id"]
        )
    assert "42" in text(stream.response) and kinds(stream.response)[:2] == ["mcp_list_tools", "mcp_call"]
    assert kinds(searched)[0] == "web_search_call"


async def test_credentials_are_sealed_and_erased(tmp_path: Path) -> None:
    """They belong to the run that came with them: the item that is kept has none."""
    seen = Seen()
    secret = {**DESK, "authorization": TOKEN}
    async with mcp_server(seen) as url:
        known = settings(desk={"url": url})
        async with live_app(tmp_path, **known) as server, http_client(server) as client:
            body = {"input": [added(secret), {"role": "user", "content": "call hold {}"}], "background": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(seen.held.wait(), 20)
            stored = await server.context.storage.get_response("local", begun["id"])
            sealed = RunPlan.load(stored.plan).secrets
            opened = await server.context.sealing.opened_secrets("local", begun["id"], sealed)
            assert opened == {"0": {"authorization": TOKEN}}
            assert {each["authorization"] for each in seen.headers} == {f"Bearer {TOKEN}"}
            await server.context.runs.drain(0.0)
        async with running_app(tmp_path, ScriptedEngine(), **known) as server, http_client(server) as client:
            api = Api(client)
            ended = await api.ended(begun["id"])
            stored = await server.context.storage.get_response("local", begun["id"])
            assert RunPlan.load(stored.plan).secrets is None
            (item, _) = (await api.input_items(begun["id"], order="asc"))["data"]
            seen.headers.clear()
            again = await api.create(LOOK_UP, previous_response_id=begun["id"])
            without = {each.get("authorization") for each in seen.headers}
            given = await api.create(LOOK_UP, previous_response_id=begun["id"], tools=[secret])
        files = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert ended["status"] == "completed" and item["tools"] == [DESK]
    assert TOKEN.encode() not in files
    assert without == {None}
    assert "home means much" in (again["output"][0]["output"], given["output"][0]["output"])
    assert seen.headers[-1]["authorization"] == f"Bearer {TOKEN}"


async def test_a_conversation_takes_no_credentials(client: httpx.AsyncClient) -> None:
    tool = {
        **BUILTIN,
        "server_label": "desk",
        "server_url": "https://example.org/mcp",
        "authorization": TOKEN,
    }
    reply = await client.post("/v1/conversations", json={"items": [added(tool)]})
    assert reply.headers["x-antiphon-ignored"] == "items[0].tools[0].authorization"
    items = (await client.get(f"/v1/conversations/{reply.json()['id']}/items")).content
    assert b"example.org" in items and TOKEN.encode() not in items


async def test_an_item_that_comes_back_is_the_stored_one(tmp_path: Path) -> None:
    """And what it says in vain is named where it stands in this request, and nowhere else."""
    both = {**TIME, "allowed_callers": ["direct", "programmatic"]}
    async with running_app(tmp_path) as server, http_client(server) as client:
        first = await Api(client).create([added(both), ASK], tools=[WEATHER])
        (item, _) = (await Api(client).input_items(first["id"], order="asc"))["data"]
        reply = await client.post("/v1/responses", json={"input": [item, ASK], "tools": [WEATHER]})
        (again, _) = (await Api(client).input_items(reply.json()["id"], order="asc"))["data"]
    assert again == item
    assert reply.headers["x-antiphon-ignored"] == "input[0].tools[0].allowed_callers"


async def test_a_plan_pins_them(tmp_path: Path) -> None:
    """A run that goes on has its tools, whatever truncation has taken from its past."""
    engine = ScriptedEngine(max_model_len=700)
    filler = {"role": "user", "content": "word " * 300}
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create([added(WEATHER), filler, filler, ASK], truncation="auto")
        stored = await server.context.storage.get_response("local", response["id"])
    plan = orjson.loads(stored.plan)
    assert plan["num_dropped"] >= 1 and [tool["name"] for tool in plan["tools"]] == ["get_weather"]
    assert [each["name"] for each in calls(response)] == ["get_weather"]


async def test_a_tool_for_programs_alone_is_refused_or_left_out(tmp_path: Path) -> None:
    alone = {**WEATHER, "allowed_callers": ["programmatic"]}
    both = {**TIME, "allowed_callers": ["direct", "programmatic"]}
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        error = await Api(client).refused(400, "hi", tools=[both, alone])
        assert (error["code"], error["param"]) == ("unsupported_tool", "tools[1].allowed_callers")
        body = {"messages": [ASK], "tools": [{"type": "function", "function": alone}]}
        await Api(client).fails(400, "POST", "/v1/chat/completions", json=body)
    async with (
        running_app(tmp_path, engine, unsupported_tools="ignore") as server,
        http_client(server) as client,
    ):
        reply = await client.post("/v1/responses", json={"input": "say hi", "tools": [both, alone]})
        ignored = reply.headers["x-antiphon-ignored"]
        await client.post("/v1/chat/completions", json=body)
    assert ignored == "tools[0].allowed_callers,tools[1].allowed_callers"
    assert reply.json()["tools"] == [both, alone]
    for told in prompts(engine):
        assert "get_weather" not in told.split("<|im_start|>user")[0]
    assert "get_time" in prompts(engine)[0]
