"""Tools of MCP servers elsewhere: the SDK's own server on loopback, over every transport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine import ScriptedEngine
from server.items import ITEM_TYPES
from server.mcp_servers import read_mcp_settings
from tests.support.mcp_servers import Kind, Seen, make_server, mcp_server, noting, serving, stdio_command
from tests.support.processes import free_port, listens
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, gated, loose, prompts, text
from tests.support.wire import Json
from tools import UNKNOWN_EFFECT, Listing, McpTool

DESK: Json = {
    "type": "mcp",
    "server_label": "desk",
    "server_url": "builtin:desk",
    "require_approval": "never",
}
ELSE: Json = {"type": "mcp", "server_label": "m", "require_approval": "never"}
LOOK_UP = 'call look_up {"word": "home"}'


def settings(**servers: Mapping[str, Any]) -> dict[str, Any]:
    """The setting that has these servers."""
    return {"mcp": read_mcp_settings({"servers": servers}, {})}


def kinds(response: Json) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_a_listing_leaves_out_what_the_server_has_not_said() -> None:
    call = ITEM_TYPES["mcp_call"].call
    assert call is not None and call.execution is not None and call.execution.elsewhere is not None
    listing = Listing((McpTool("bare", None, {"type": "object"}, None),))
    assert call.execution.elsewhere.listed(listing) == {
        "tools": [{"name": "bare", "input_schema": {"type": "object"}}]
    }


@pytest.mark.parametrize("kind", get_args(Kind))
async def test_a_server_is_listed_once_and_its_tools_are_called(tmp_path: Path, kind: Kind) -> None:
    seen = Seen()
    async with (
        mcp_server(seen, kind) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        stream = await api.stream(LOOK_UP, tools=[DESK])
        again = await api.create(
            'call files_list {}\ncall book {"room": 12}',
            tools=[DESK],
            previous_response_id=stream.response["id"],
        )
        assert await api.ended(stream.response["id"]) == stream.response
    listing, made, _ = stream.response["output"]
    assert (listing["type"], listing["server_label"]) == ("mcp_list_tools", "desk")
    assert "error" not in listing, "clients refuse a null here"
    names = [tool["name"] for tool in listing["tools"]]
    assert names == ["look_up", "book", "files.list", "picture", "hold", "hold_safely", "meet"]
    assert listing["tools"][0]["annotations"]["readOnlyHint"] is True
    assert (made["name"], made["status"], made["output"]) == ("look_up", "completed", "home means much")
    assert json.loads(made["arguments"]) == {"word": "home"}
    assert [t for t in stream.types if t.startswith("mcp_")] == [
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "mcp_call.in_progress",
        *[t for t in stream.types if t == "mcp_call_arguments.delta"],
        "mcp_call_arguments.done",
        "mcp_call.completed",
    ]
    assert text(stream.response) == "The tool said: home means much"
    assert kinds(again) == ["mcp_call", "mcp_call", "message"], "it is listed once in a conversation"
    files, booked = again["output"][:2]
    assert (files["name"], files["output"]) == ("files.list", "a.txt")
    assert (booked["status"], booked["error"]["type"]) == ("failed", "mcp_tool_execution_error")
    assert seen.called[0] == "look_up" and sorted(seen.called[1:]) == ["book", "files.list"]
    assert any("mcp-session-id" in headers for headers in seen.headers) is (kind == "old http")
    assert seen.metas[0]["antiphon/call"] == made["id"]


async def test_calls_of_one_turn_are_made_side_by_side_and_told_in_order(tmp_path: Path) -> None:
    async with (
        mcp_server(Seen()) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        asked = 'call meet {"name": "Ann"}\ncall calculator {"expression": "1+1"}\ncall meet {"name": "Bob"}'
        stream = await Api(client).stream(asked, tools=[DESK, BUILTIN], max_tool_calls=3)
    made = [item for item in stream.response["output"] if item["type"] == "mcp_call"]
    assert [call["output"] for call in made] == ["Ann met somebody", "2", "Bob met somebody"]


async def test_an_outcome_is_shown_and_kept_as_soon_as_it_is_there(tmp_path: Path) -> None:
    seen = Seen()
    async with mcp_server(seen) as url:
        known = settings(desk={"url": url})
        async with (
            live_app(tmp_path, **known) as server,
            http_client(server) as client,
            Api(client).open(f"call hold {{}}\n{LOOK_UP}", tools=[DESK], background=True) as live,
        ):
            async with asyncio.timeout(20):
                told = await live.until("mcp_call.completed")
                done = await live.until("output_item.done")
                await seen.held.wait()
            assert told["output_index"] == done["output_index"] == 2
            await server.context.runs.drain(0.0)
        engine = ScriptedEngine()
        async with running_app(tmp_path, engine, **known) as server, http_client(server) as client:
            ended = await Api(client).ended(live.id)
            assert (await Api(client).replay(live.id)).startswith(live.raw)
    _, held, found, _ = ended["output"]
    assert held["error"]["content"][0]["text"].endswith(UNKNOWN_EFFECT)
    assert (found, sorted(seen.called)) == (done["item"], ["hold", "look_up"])
    shown = prompts(engine)[-1]
    assert shown.index(UNKNOWN_EFFECT) < shown.rindex("home means much"), "in the order of the calls"


async def test_calls_beyond_the_limit_are_not_made_beside_the_others(tmp_path: Path) -> None:
    seen = Seen()
    async with (
        mcp_server(seen) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        asked = "\n".join(f'call book {{"room": {room}}}' for room in (1, 2, 3))
        response = await Api(client).create(asked, tools=[DESK], max_tool_calls=2)
    statuses = [item["status"] for item in response["output"] if item["type"] == "mcp_call"]
    assert (statuses, seen.called) == (["completed", "completed", "failed"], ["book", "book"])


async def test_a_program_is_a_server_over_its_standard_streams(tmp_path: Path) -> None:
    log = tmp_path / "log"
    desk = {"command": stdio_command(log), "env": {"DESK": "seven"}}
    async with running_app(tmp_path, **settings(desk=desk)) as server, http_client(server) as client:
        response = await Api(client).create('call append {"line": "hello"}', tools=[DESK])
    assert response["output"][1]["output"] == "hello seven"
    assert log.read_text() == "hello\n"


async def test_what_does_not_fit_a_schema_is_told_and_never_sent(tmp_path: Path) -> None:
    seen, engine = Seen(), loose()
    async with (
        mcp_server(seen) as url,
        running_app(tmp_path, engine, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        response = await Api(client).create('call book {"room": "three"}', tools=[DESK])
    made = response["output"][1]
    assert (made["status"], seen.called) == ("failed", [])
    assert "is not of type 'integer'" in made["error"]["content"][0]["text"]
    assert "is not of type 'integer'" in prompts(engine)[-1]


async def test_arguments_are_under_the_grammar_where_the_engine_takes_the_schema(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with (
        mcp_server(Seen()) as url,
        running_app(tmp_path, engine, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        await Api(client).create("say hi", tools=[DESK])
    constraint = engine.requests[-1].constraint
    assert constraint is not None
    schemas = {shape.name: json.loads(shape.parameters) for shape in constraint.tools}
    assert schemas["book"]["required"] == ["room"]


@pytest.mark.parametrize(
    ("allowed", "offered"),
    [
        (["book"], {"book"}),
        ({"tool_names": ["book", "look_up"]}, {"book", "look_up"}),
        ({"read_only": True}, {"look_up"}),
        ({"read_only": False, "tool_names": ["book", "look_up"]}, {"book"}),
    ],
)
async def test_allowed_tools(tmp_path: Path, allowed: Any, offered: set[str]) -> None:
    engine = ScriptedEngine()
    async with (
        mcp_server(Seen()) as url,
        running_app(tmp_path, engine, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        await Api(client).create("say hi", tools=[{**DESK, "allowed_tools": allowed}])
    constraint = engine.requests[-1].constraint
    assert constraint is not None
    assert {shape.name for shape in constraint.tools} == offered


async def test_names_that_collide_are_told_apart(tmp_path: Path) -> None:
    """A client's function keeps its name; the second server's tools are shown with its label."""
    seen, other = Seen(), Seen()
    mine = {**WEATHER, "name": "book"}
    second = {**DESK, "server_label": "other", "server_url": "builtin:other"}
    async with (
        mcp_server(seen) as url,
        mcp_server(other) as other_url,
        running_app(tmp_path, **settings(desk={"url": url}, other={"url": other_url})) as server,
        http_client(server) as client,
    ):
        asked = f'{LOOK_UP}\ncall other__look_up {{"word": "away"}}\ncall desk__book {{"room": 1}}'
        response = await Api(client).create(asked, tools=[DESK, second, mine])
    made = [(item["server_label"], item["name"], item["output"]) for item in response["output"][2:5]]
    assert made == [
        ("desk", "look_up", "home means much"),
        ("other", "look_up", "away means much"),
        ("desk", "book", "booked 1"),
    ]


@pytest.mark.parametrize(
    "choice",
    [{"type": "mcp", "server_label": "desk"}, {"type": "mcp", "server_label": "desk", "name": "files.list"}],
)
async def test_a_server_can_be_forced_before_it_was_listed(tmp_path: Path, choice: Json) -> None:
    async with (
        mcp_server(seen := Seen()) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        response = await Api(client).create("call files_list {}", tools=[DESK], tool_choice=choice)
    assert seen.called == ["files.list"] and response["status"] == "completed"


NOTHING: Json = {"type": "mcp", "server_label": "desk", "name": "lok_up"}


@pytest.mark.parametrize(
    ("tool", "choice", "param"),
    [
        ({}, NOTHING, "tool_choice"),
        ({}, {"type": "allowed_tools", "mode": "auto", "tools": [NOTHING]}, "tool_choice"),
        ({"allowed_tools": ["look_up", "lok_up"]}, "auto", "tools[0].allowed_tools"),
        ({"allowed_tools": {"tool_names": ["lok_up"]}}, "auto", "tools[0].allowed_tools"),
        (
            {"require_approval": {"never": {"tool_names": ["lok_up"]}}},
            "auto",
            "tools[0].require_approval.never",
        ),
        (
            {"require_approval": {"always": {"tool_names": ["lok_up"]}}},
            "auto",
            "tools[0].require_approval.always",
        ),
    ],
)
async def test_a_name_that_a_server_does_not_list_is_refused(
    tmp_path: Path, tool: Json, choice: Any, param: str
) -> None:
    engine = ScriptedEngine()
    async with (
        mcp_server(Seen()) as url,
        running_app(tmp_path, engine, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        asked: Json = {"tools": [{**DESK, **tool}], "tool_choice": choice}
        refused = await api.refused(400, "say hi", **asked)
        stream = await api.stream("say hi", **asked)
        assert not engine.requests, "the model is not asked"
        first = await api.create("say hi", tools=[DESK])
        known = await api.refused(400, "say hi", previous_response_id=first["id"], **asked)
    assert [error["param"] for error in (refused, known)] == [param, param]
    assert refused["message"] == known["message"]
    assert "'lok_up'" in refused["message"] and "look_up, book" in refused["message"]
    assert kinds(stream.response) == ["mcp_list_tools"]
    assert stream.response["error"] == {"code": "invalid_prompt", "message": refused["message"]}


async def test_a_server_that_cannot_be_reached_fails_the_response(tmp_path: Path) -> None:
    nobody = {"url": "http://127.0.0.1:9/mcp"}
    async with running_app(tmp_path, **settings(desk=nobody)) as server, http_client(server) as client:
        stream = await Api(client).stream(LOOK_UP, tools=[DESK])
        refused = await client.post("/v1/responses", json={"input": LOOK_UP, "tools": [DESK]})
    [listing] = stream.response["output"]
    assert stream.types[-4:] == [
        "mcp_list_tools.in_progress",
        "mcp_list_tools.failed",
        "output_item.done",
        "failed",
    ]
    assert "accepts no connection" in listing["error"] and listing["tools"] == []
    assert stream.response["error"]["message"] == listing["error"]
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (424, "external_connector_error")
    assert "'desk'" in error["message"] and refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("status", [401, 404])
async def test_a_server_that_lets_nobody_in_is_named_without_its_credentials(
    tmp_path: Path, status: int
) -> None:
    def turn_away(_: Request) -> Response:
        return Response(status_code=status)

    async with (
        serving(Starlette(routes=[Route("/mcp", turn_away, methods=["GET", "POST"])])) as url,
        running_app(tmp_path, egress="any") as server,
        http_client(server) as client,
    ):
        tool = {**ELSE, "server_url": f"{url}/mcp?key=secret", "authorization": "secret"}
        reply = await client.post("/v1/responses", json={"input": "hi", "tools": [tool]})
    told = reply.json()["error"]["message"]
    asked = f"The MCP server 'm' ({url}/mcp) could not be asked for its tools: "
    assert reply.status_code == 424 and told.startswith(f"{asked}it answered with HTTP status {status}")
    assert ("the tool's 'authorization'" in told) is (status == 401) and "secret" not in told


async def test_a_repeat_of_a_refused_request_is_refused_too(tmp_path: Path) -> None:
    async with (
        mcp_server(Seen()) as url,
        running_app(
            tmp_path, **settings(desk={"url": url}, gone={"url": "http://127.0.0.1:9/mcp"})
        ) as server,
        http_client(server) as client,
    ):
        unknown = {**DESK, "allowed_tools": ["lok_up"]}
        for number, (tool, status) in enumerate(
            ((unknown, 400), ({**DESK, "server_url": "builtin:gone"}, 424))
        ):
            body = {"input": "say hi", "tools": [tool]}
            key = {"Idempotency-Key": f"turn-{number}"}
            first, again = [await client.post("/v1/responses", json=body, headers=key) for _ in range(2)]
            assert (first.status_code, again.status_code) == (status, status), again.text
            assert first.json()["error"]["message"] == again.json()["error"]["message"]


async def test_a_server_without_tools_is_listed_once(tmp_path: Path) -> None:
    async with (
        serving(noting(MCPServer("bare").streamable_http_app(), seen := Seen())) as url,
        running_app(tmp_path, **settings(desk={"url": f"{url}/mcp"})) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        first = await api.create("say hi", tools=[DESK])
        second = await api.create("say bye", tools=[DESK], previous_response_id=first["id"])
    assert (kinds(first), kinds(second)) == (["mcp_list_tools", "message"], ["message"])
    assert first["output"][0]["tools"] == [] and seen.listings == ["tools/list"]


async def test_after_a_failed_listing_the_server_is_asked_again(tmp_path: Path) -> None:
    seen = Seen()
    async with mcp_server(seen) as url:
        port = int(url.split(":")[2].split("/")[0])
    nobody = settings(desk={"url": f"http://127.0.0.1:{port}/mcp"})
    async with running_app(tmp_path, **nobody) as server, http_client(server) as client:
        conversation = await Api(client).conversation()
        failed = await Api(client).stream("say hi", tools=[DESK], conversation=conversation)
    async with (
        mcp_server(seen) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        response = await Api(client).create(LOOK_UP, tools=[DESK], conversation=conversation)
    assert failed.response["status"] == "failed"
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]


@pytest.mark.parametrize(
    ("offered", "param", "told"),
    [
        ([{**DESK, "server_url": "https://mcp.example/mcp"}], "tools[0].server_url", "--egress-allow"),
        ([{**DESK, "server_url": "builtin:shop"}], "tools[0].server_url", "[mcp.servers.shop]"),
        ([{**DESK, "server_url": "builtin:theirs"}], "tools[0].server_url", "There are: desk."),
        ([{**DESK, "server_url": "ftp://x/y"}], "tools[0].server_url", "https:// or http://"),
        ([BUILTIN, {**DESK, "server_label": "antiphon"}], "tools[1].server_label", "labelled"),
        ([{**DESK, "headers": {"Host": "x"}}], "tools[0].headers", "'Host'"),
        ([{**DESK, "headers": {"x": "a\nb"}}], "tools[0].headers", "printable"),
        ([{**DESK, "allowed_tools": 7}], "tools[0].allowed_tools", ""),
        ([{**DESK, "require_approval": "sometimes"}], "tools[0].require_approval", "'always', 'never'"),
        ([{**DESK, "require_approval": 7}], "tools[0].require_approval", "a string"),
        ([{**DESK, "require_approval": {"never": []}}], "tools[0].require_approval.never", "an object"),
        (
            [{**ELSE, "connector_id": "connector_gmail"}],
            "tools[0].connector_id",
            'connector = "connector_gmail"',
        ),
        (
            [{**ELSE, "tunnel_id": f"tunnel_{'a' * 32}"}],
            "tools[0].tunnel_id",
            "no tunnels",
        ),
    ],
)
async def test_what_cannot_be_reached_is_refused(
    tmp_path: Path, offered: list[Json], param: str, told: str
) -> None:
    nobody = {"url": "http://127.0.0.1:9/mcp"}
    known = settings(desk=nobody, theirs={**nobody, "owners": ["somebody-else"]})
    async with running_app(tmp_path, **known) as server, http_client(server) as client:
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            reply = await client.post(path, json={"input": "say hi", "tools": offered})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
            assert told in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("offered", "param", "code"),
    [
        ([DESK, DESK], "tools[1].server_label", "invalid_value"),
        ([{**DESK, "headers": {"x": "grün"}}], "tools[0].headers", "invalid_value"),
        ([{**DESK, "headers": {"content-length": "1"}}], "tools[0].headers", "invalid_value"),
        ([{**DESK, "authorization": "a\nb"}], "tools[0].authorization", "invalid_value"),
        (
            [{**DESK, "server_url": "builtin:own", "authorization": "tk"}],
            "tools[0].authorization",
            "unsupported_parameter",
        ),
    ],
)
async def test_a_refusal_names_what_is_wrong(
    tmp_path: Path, offered: list[Json], param: str, code: str
) -> None:
    known = settings(desk={"url": "http://127.0.0.1:9/mcp"}, own={"command": ["true"]})
    async with running_app(tmp_path, **known) as server, http_client(server) as client:
        error = await Api(client).refused(400, "hi", tools=offered)
    assert (error["param"], error["code"]) == (param, code)


async def test_a_connector_is_what_the_operator_makes_it(tmp_path: Path) -> None:
    tool = {
        "type": "mcp",
        "server_label": "mail",
        "connector_id": "connector_gmail",
        "require_approval": "never",
    }
    async with (
        mcp_server(Seen()) as url,
        running_app(tmp_path, **settings(desk={"url": url, "connector": "connector_gmail"})) as server,
        http_client(server) as client,
    ):
        response = await Api(client).create(LOOK_UP, tools=[tool])
    assert response["output"][1]["output"] == "home means much"


@pytest.mark.parametrize("repeatable", [False, True], ids=["may not run twice", "may run twice"])
async def test_a_cancelled_response_cancels_its_call(tmp_path: Path, repeatable: bool) -> None:
    seen, engine = Seen(), ScriptedEngine()
    rights = {"idempotent": ["hold"]} if repeatable else {}
    async with (
        mcp_server(seen) as url,
        live_app(tmp_path, engine, **settings(desk={"url": url, **rights})) as server,
        http_client(server) as client,
    ):
        body = {"input": "call hold {}", "tools": [DESK], "background": True}
        begun = (await client.post("/v1/responses", json=body)).json()
        await asyncio.wait_for(seen.held.wait(), 20)
        ended = (await client.post(f"/v1/responses/{begun['id']}/cancel")).json()
        await asyncio.wait_for(seen.cancelled.wait(), 20)
        await Api(client).create("say k", previous_response_id=ended["id"], tools=[DESK])
    assert ended["status"] == "cancelled"
    told = "The response ended before the tool did." + f" {UNKNOWN_EFFECT}" * (not repeatable)
    assert ended["output"][1]["error"]["content"][0]["text"] == told
    assert told in prompts(engine)[-1]


async def test_an_error_of_a_server_is_told_as_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        mcp_server(Seen()) as url,
        running_app(tmp_path, **settings(front={"url": url})) as server,
        http_client(server) as client,
    ):
        desk = {**DESK, "server_url": "builtin:front"}
        asked = 'call book {"room": 13}\ncall book {"room": 3}'
        response = await Api(client).create(asked, tools=[desk])
        error = await Api(client).refused(400, "hi", tools=[desk], tool_choice={"type": "shell"})
    failed, booked = response["output"][1:3]
    told = {"type": "mcp_protocol_error", "code": -32000, "message": "no room is given this number"}
    assert (failed["error"], booked["output"]) == (told, "booked 3")
    assert error["param"] == "tool_choice"
    logged = f"tool book failed in run {response['id']}: protocol error -32000, at the MCP server front"
    assert logged in [record.getMessage() for record in caplog.records]


async def test_a_limit_of_time_begins_anew_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.mcp import connections

    monkeypatch.setattr(connections, "CALL_S", 1.0)
    async with (
        mcp_server(Seen()) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        asked = 'call hold {"seconds": 2.4, "steps": 6}\ncall hold {"seconds": 30, "steps": 1}'
        response = await Api(client).create(asked, tools=[DESK])
    lively, silent = response["output"][1:3]
    assert lively["output"] == "held"
    told = f"The MCP server 'desk' failed: it did not answer within 1 s. {UNKNOWN_EFFECT}"
    assert silent["error"] == {"type": "http_error", "code": 504, "message": told}


def ended(program: asyncio.subprocess.Process) -> None:
    if program.returncode is None:
        program.kill()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transport", ["stdio", "streamable-http", "sse"])
@pytest.mark.parametrize("repeatable", [False, True], ids=["may not run twice", "may run twice"])
async def test_a_call_that_a_server_breaks_off_may_have_had_an_effect(
    tmp_path: Path, transport: str, repeatable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log, command = tmp_path / "log", stdio_command(tmp_path / "log")
    rights = {"idempotent": ["crash"]} if repeatable else {}
    async with AsyncExitStack() as stack:
        if transport == "stdio":
            desk: dict[str, Any] = {"command": command}
        else:
            port = free_port()
            program = await asyncio.create_subprocess_exec(*command, transport, str(port))
            stack.callback(ended, program)
            await listens(port)
            desk = {"url": f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}"}
        known = settings(desk={**desk, **rights})
        server = await stack.enter_async_context(running_app(tmp_path / "data", **known))
        api = Api(await stack.enter_async_context(http_client(server)))
        response = await api.create("call crash {}", tools=[DESK])
        gone = None
        if transport == "streamable-http":  # nobody listens any more
            again = {"previous_response_id": response["id"], "tools": [DESK]}
            gone = (await api.create('call append {"line": "x"}', **again))["output"][0]
    made = response["output"][1]
    if transport == "stdio":
        told = "the MCP server desk has closed its connection; it wrote last: the desk is gone"
        assert told in [record.getMessage() for record in caplog.records]
    assert log.read_text() == "crashed\n", "it had its effect, once"
    assert "could not be reached" not in made["error"]["message"]
    assert made["error"]["message"].endswith(UNKNOWN_EFFECT) is not repeatable, made["error"]
    assert gone is None or UNKNOWN_EFFECT not in gone["error"]["message"], gone


async def test_input_tokens_are_counted_without_asking_a_server(tmp_path: Path) -> None:
    async with (
        mcp_server(seen := Seen()) as url,
        running_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        reply = await client.post("/v1/responses/input_tokens", json={"input": "hi", "tools": [DESK]})
    assert reply.status_code == 200 and seen.headers == []


# ------------------------------------------------------------------------------------------------------------
# The end of the process in the middle of a call


@pytest.mark.parametrize(
    ("rights", "tool", "repeated"),
    [
        pytest.param({}, "hold", False, id="anybody's"),
        pytest.param({"trust": True}, "hold", False, id="a trusted server's that says nothing"),
        pytest.param({"trust": True}, "hold_safely", True, id="a trusted server's that may run twice"),
        pytest.param({}, "hold_safely", False, id="what a server says that is not trusted"),
        pytest.param({"idempotent": ["hold"]}, "hold", True, id="what the operator says"),
    ],
)
async def test_a_call_is_repeated_only_where_it_may_be(
    tmp_path: Path, rights: Json, tool: str, repeated: bool
) -> None:
    seen = Seen()
    async with mcp_server(seen) as url:
        known = settings(desk={"url": url, **rights})
        async with live_app(tmp_path, **known) as server, http_client(server) as client:
            body = {"input": f"call {tool} {{}}", "tools": [DESK], "background": True}
            begun = (await client.post("/v1/responses", json=body)).json()
            await asyncio.wait_for(seen.held.wait(), 20)
            await server.context.runs.drain(0.0)
        listed = len(seen.listings)
        seen.free.set()
        async with running_app(tmp_path, ScriptedEngine(), **known) as server, http_client(server) as client:
            ended = await Api(client).ended(begun["id"])
    made = ended["output"][1]
    assert (ended["status"], seen.called) == ("completed", [tool] * (1 + repeated))
    assert {meta["antiphon/call"] for meta in seen.metas} == {made["id"]}
    assert len(seen.listings) == listed, "the prompt is made of items, not of what the server says now"
    if repeated:
        assert made["output"] == "held"
    else:
        assert "not known" in made["error"]["content"][0]["text"]
        assert "not known" in text(ended)


async def test_a_generation_goes_on_with_its_prompt_when_the_server_is_gone(tmp_path: Path) -> None:
    """The tools are those that were listed, and what the first prompt left out stays left out."""
    gate = Gate()
    engine = ScriptedEngine(gated(gate), max_model_len=3000)
    history = [{"role": "user", "content": f"{number} {'word ' * 300}"} for number in range(8)]
    async with mcp_server(Seen()) as url:
        known = settings(desk={"url": url})
        async with live_app(tmp_path, engine, **known) as server, http_client(server) as client:
            api = Api(client)
            asked: Json = {"tools": [DESK], "truncation": "auto", "background": True}
            begun = await api.create(history, **asked)
            await asyncio.wait_for(gate.reached.wait(), 20)
            await server.context.runs.drain(0)
    other = ScriptedEngine(gated(Gate(release=gate.release)), max_model_len=3000)
    gate.release.set()
    async with running_app(tmp_path, other, **known) as server, http_client(server) as client:
        ended = await Api(client).ended(begun["id"])
    assert (ended["status"], text(ended)) == ("completed", "one two three four")
    assert len(engine.requests) == len(other.requests) == 1
    assert other.requests[0].prompt_ids == engine.requests[0].prompt_ids
    [shown] = prompts(engine)
    assert "hold_safely" in shown and "7 word" in shown and "0 word" not in shown


# ------------------------------------------------------------------------------------------------------------
# A server that takes its time to list its tools


@asynccontextmanager
async def slow_server(free: asyncio.Event, asked: asyncio.Event) -> AsyncIterator[str]:
    """The server, whose tools are listed once it is free; yields its URL."""
    app = make_server(Seen()).streamable_http_app()

    async def slowly(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if headers.get(b"mcp-method") == b"tools/list":
            asked.set()
            await free.wait()
        await app(scope, receive, send)

    async with serving(slowly) as url:
        yield f"{url}/mcp"


async def test_a_listing_is_shown_while_the_server_is_asked(tmp_path: Path) -> None:
    free, asked = asyncio.Event(), asyncio.Event()
    async with (
        slow_server(free, asked) as url,
        live_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
        Api(client).open(LOOK_UP, tools=[DESK]) as live,
    ):
        await live.until("mcp_list_tools.in_progress")
        await asyncio.wait_for(asked.wait(), 20)
        assert not free.is_set(), "the server has not answered yet"
        free.set()
        response = await live.done()
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
    assert len(response["output"][0]["tools"]) == 7


async def test_a_response_that_is_cancelled_while_a_server_is_asked(tmp_path: Path) -> None:
    """Its listing has failed, and the next response asks again."""
    free, asked = asyncio.Event(), asyncio.Event()
    async with (
        slow_server(free, asked) as url,
        live_app(tmp_path, **settings(desk={"url": url})) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        conversation = await api.conversation()
        begun = await api.create(LOOK_UP, tools=[DESK], background=True)
        await asyncio.wait_for(asked.wait(), 20)
        await api.cancel(begun["id"])
        ended = await api.ended(begun["id"])
        free.set()
        again = await api.create(LOOK_UP, tools=[DESK], conversation=conversation)
    assert ended["status"] == "cancelled"
    assert "ended before the server had answered" in ended["output"][0]["error"]
    assert kinds(again) == ["mcp_list_tools", "mcp_call", "message"]


async def test_a_listing_that_the_end_of_the_process_cuts_is_taken_up(tmp_path: Path) -> None:
    free, asked = asyncio.Event(), asyncio.Event()
    async with slow_server(free, asked) as url:
        known = settings(desk={"url": url})
        async with live_app(tmp_path, **known) as server, http_client(server) as client:
            begun = await Api(client).create(LOOK_UP, tools=[DESK], background=True)
            await asyncio.wait_for(asked.wait(), 20)
            await server.context.runs.drain(0.0)
        free.set()
        async with running_app(tmp_path, **known) as server, http_client(server) as client:
            ended = await Api(client).ended(begun["id"])
    assert (ended["status"], kinds(ended)) == ("completed", ["mcp_list_tools", "mcp_call", "message"])
    assert len(ended["output"][0]["tools"]) == 7
