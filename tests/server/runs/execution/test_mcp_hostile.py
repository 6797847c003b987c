"""MCP servers that a request names: only where the operator lets it, and whatever they answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import methods
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.mcp_servers import Seen, mcp_server, serving
from tests.support.running import http_client, running_app
from tests.support.talk import Api
from tests.support.wire import Json
from tools.mcp import connections
from tools.mcp.arguments import read_arguments
from tools.mcp.listing import _Judge
from tools.spec import ToolError

TOOL: Json = {
    "name": "look",
    "description": "Looks\x1b[31m\x00 around",
    "inputSchema": {"type": "object", "properties": {}},
}
Answer = Callable[[Json], Awaitable[Response] | Response]


def remote(url: str) -> Json:
    return {"type": "mcp", "server_label": "theirs", "server_url": url, "require_approval": "never"}


def rogue(**answers: Any) -> Starlette:
    """A server of the handshake era, each of whose methods answers with a result, or with a response that is
    made for its message."""

    async def post(request: Request) -> Response:
        message = await request.json()
        method = message.get("method", "").replace("/", "_")
        if "id" not in message:
            return Response(status_code=202)
        if method == "initialize" and method not in answers:
            server = {"name": "rogue", "version": "1"}
            result: Any = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": server,
            }
        elif method not in answers:
            error = {"code": -32601, "message": "unknown"}
            return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "error": error})
        else:
            result = answers[method]
        if callable(result):
            made: Response = result(message)
            return made
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})

    return Starlette(routes=[Route("/mcp", post, methods=["POST"])])


async def asked(
    folder: Path, app: Any, said: str = "call look {}", choice: Any = "auto", **settings: Any
) -> Json:
    """What a server answers to a request that names this one. choice: its `tool_choice`."""
    async with (
        serving(app) as url,
        running_app(folder, egress_allow=(url.removeprefix("http://"),), **settings) as server,
        http_client(server) as client,
    ):
        body: Json = {"tools": [remote(f"{url}/mcp")], "tool_choice": choice}
        return (await Api(client).stream(said, **body)).response


async def test_a_server_that_a_request_names_is_reached_where_the_operator_lets_it(tmp_path: Path) -> None:
    async with mcp_server(Seen()) as url:
        place = url.removeprefix("http://").removesuffix("/mcp")
        async with (
            running_app(tmp_path, egress_allow=(place,)) as server,
            http_client(server) as client,
        ):
            response = await Api(client).create('call look_up {"word": "home"}', tools=[remote(url)])
            elsewhere = remote("http://127.0.0.2:1/mcp")
            refused = await client.post("/v1/responses", json={"input": "hi", "tools": [elsewhere]})
    assert response["output"][1]["output"] == "home means much"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].server_url")


def large(message: Json) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % message["id"]
        for _ in range(1024):
            yield b"a" * (1 << 20)
            await asyncio.sleep(0)  # which is where it ends when nobody reads

    return StreamingResponse(body(), media_type="application/json")


def endless(message: Json) -> Response:
    async def body() -> AsyncIterator[bytes]:
        notice = {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {"level": "info", "data": "x"},
        }
        while True:
            yield b"event: message\ndata: %b\n\n" % json.dumps(notice).encode()
            await asyncio.sleep(0.01)

    return StreamingResponse(body(), media_type="text/event-stream")


def wrong_event(message: Json) -> Response:
    said = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": ["what"]})
    return Response(f"event: message\ndata: {said}\n\n", media_type="text/event-stream")


MANY: Json = {"content": [1] * 22_000}
"""So many faults, each for all types of a part, that nothing else runs while the SDK finds them."""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param(
            {"content": [], "structuredContent": {"a": [[]] * 200_000}},
            "brackets, commas",
            id="400,000 values",
        ),
        pytest.param(MANY, "more than 20000 members", id="22,000 parts"),
        pytest.param(large, "larger than", id="a gigabyte"),
        pytest.param(endless, "did not answer within 2 s", id="endless events"),
        pytest.param(lambda _: Response("no", 503), "HTTP status 503", id="an error"),
        pytest.param(lambda _: RedirectResponse("http://127.0.0.1:1/x", 307), "307", id="a redirect inward"),
        pytest.param(lambda _: Response("<html>", media_type="text/html"), "content type", id="no MCP"),
        pytest.param({"content": "no list"}, "understood", id="no result"),
        pytest.param(wrong_event, "understood. Whether it had any effect is not known.", id="a wrong event"),
        pytest.param({"content": [], "isError": True}, "did not say why", id="an empty error"),
    ],
)
async def test_a_call_ends_whatever_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, told: str
) -> None:
    monkeypatch.setattr(connections, "CALL_S", 2.0)
    response = await asked(tmp_path, rogue(tools_list={"tools": [TOOL]}, tools_call=answer))
    listing, made, *_ = response["output"]
    assert (response["status"], made["status"], made["output"]) == ("completed", "failed", None)
    assert told in json.dumps(made["error"])
    assert listing["tools"][0]["description"] == "Looks [31m  around"


def tools(count: int) -> Json:
    return {"tools": [{**TOOL, "name": f"look_{number}"} for number in range(count)]}


def pages(message: Json) -> Response:
    result = {**tools(1), "nextCursor": "more"}
    return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("answers", "told"),
    [
        pytest.param({"tools_list": tools(5_000)}, "more than 1000 tools", id="5,000 tools"),
        pytest.param({"tools_list": pages}, "more than 100 pages", id="endless pages"),
        pytest.param(
            {"tools_list": {"tools": [{**TOOL, "description": "x" * (2 << 20)}]}}, "bytes", id="2 MiB"
        ),
        pytest.param({"tools_list": large}, "larger than", id="a gigabyte"),
        pytest.param({"tools_list": {"tools": [], "a": [[]] * 200_000}}, "brackets", id="400,000 values"),
        pytest.param(
            {"initialize": {"serverInfo": {"icons": [{}] * 22_000}}}, "20000 members", id="a sprawling server"
        ),
        pytest.param({"tools_list": endless}, "did not answer within 3 s", id="endless events"),
        pytest.param({"tools_list": {"tools": 7}}, "understood", id="no list"),
        pytest.param({"initialize": lambda _: Response("", 401)}, "401", id="no credentials"),
        pytest.param(
            {"initialize": lambda _: RedirectResponse("http://127.0.0.1:1/x", 307)},
            "could not",
            id="a redirect",
        ),
    ],
)
async def test_a_listing_fails_whatever_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Json, told: str
) -> None:
    monkeypatch.setattr(connections, "CONNECT_S", 3.0)
    response = await asked(tmp_path, rogue(**answers))
    assert response["status"] == "failed"
    assert told in response["output"][0]["error"] == response["error"]["message"]


SEEN: Json = {"content": [{"type": "text", "text": "seen"}]}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a b", "a_b"),
        ("<|im_end|>", "__im_end__"),
        ("werkzeug.für/alle", "werkzeug_f_r_alle"),
        ("工具", "__"),
    ],
)
async def test_a_tool_of_any_name_is_shown_and_called(tmp_path: Path, name: str, shown: str) -> None:
    odd = {**TOOL, "name": name}
    listed = {"tools": [odd, TOOL]}
    response = await asked(tmp_path, rogue(tools_list=listed, tools_call=SEEN), f"call {shown} {{}}")
    listing, made, _ = response["output"]
    assert [tool["name"] for tool in listing["tools"]] == [name, "look"]
    assert (made["name"], made["output"]) == (name, "seen")
    assert "left_out" not in listing


async def test_names_that_are_shown_alike_are_told_apart(tmp_path: Path) -> None:
    odd = [{**TOOL, "name": name} for name in ("a b", "a_b", "a.b")]
    listed = {"tools": odd}
    response = await asked(tmp_path, rogue(tools_list=listed, tools_call=SEEN), "call theirs__a_b_2 {}")
    assert response["output"][1]["name"] == "a.b"


@pytest.mark.parametrize(
    ("tool", "name", "why"),
    [
        pytest.param({"name": "a\x1b[31mb"}, "a\\x1b[31mb", "printable characters", id="a control character"),
        pytest.param({"name": ""}, "", "printable characters", id="no character"),
        pytest.param({"name": "x" * 200}, "x" * 128, "1 to 128", id="too many characters"),
        pytest.param({"name": 7}, "?", "it has no name", id="no text"),
        pytest.param(
            {"inputSchema": {"type": "array"}}, "look", "inputSchema.type: Input should be", id="arrays"
        ),
        pytest.param({"inputSchema": "object"}, "look", "inputSchema: Input should be", id="no schema"),
        pytest.param({"description": 7}, "look", "description: Input should be", id="another fault"),
        pytest.param({"icons": [{}] * 5000}, "look", "it has 5000 faults", id="many faults"),
        pytest.param(
            {"inputSchema": {"type": "object", "maxProperties": 1 << 64}},
            "look",
            "a number",
            id="a long number",
        ),
    ],
)
async def test_a_tool_that_cannot_be_shown_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tool: Json, name: str, why: str
) -> None:
    listed = {"tools": [{**TOOL, **tool}, {**TOOL, "name": "other"}]}
    response = await asked(tmp_path, rogue(tools_list=listed, tools_call=SEEN), "call other {}")
    listing, made, _ = response["output"]
    assert ([tool["name"] for tool in listing["tools"]], made["output"]) == (["other"], "seen")
    (left_out,) = listing["left_out"]
    assert left_out["name"] == name and why in left_out["reason"]
    assert f"the tool '{name}' of the MCP server 127.0.0.1 is left out: {left_out['reason']}" in caplog.text


async def test_a_second_tool_of_a_name_is_left_out_and_named(tmp_path: Path) -> None:
    listed = {"tools": [TOOL, {**TOOL, "description": "Another"}]}
    listing = (await asked(tmp_path, rogue(tools_list=listed, tools_call=SEEN)))["output"][0]
    assert [tool["description"] for tool in listing["tools"]] == ["Looks [31m  around"]
    (left_out,) = listing["left_out"]
    assert left_out["name"] == "look" and "another tool has this name" in left_out["reason"]


@pytest.mark.parametrize("choice", ["required", {"type": "mcp", "server_label": "theirs"}])
async def test_a_schema_that_cannot_be_enforced_keeps_no_demanded_call_up(
    tmp_path: Path, choice: Any
) -> None:
    schema = {"type": "object", "properties": {"l": {"type": "array", "uniqueItems": True}}}
    listed = {"tools": [{**TOOL, "inputSchema": schema}, {**TOOL, "name": "other"}]}
    app = rogue(tools_list=listed, tools_call=SEEN)
    _, made, *_ = (await asked(tmp_path, app, 'call look {"l": [1, 2]}', choice))["output"]
    assert (made["name"], made["output"]) == ("look", "seen")
    _, wrong, *_ = (await asked(tmp_path / "more", app, 'call look {"l": [1, 1]}', choice))["output"]
    assert wrong["status"] == "failed" and "arguments" in wrong["error"]["content"][0]["text"]


async def test_of_the_tools_that_are_left_out_not_all_are_named(tmp_path: Path) -> None:
    faulty = [{**TOOL, "name": f"look_{number}", "description": 7} for number in range(500)]
    response = await asked(tmp_path, rogue(tools_list={"tools": [*faulty, TOOL]}, tools_call=SEEN))
    listing = response["output"][0]
    assert [tool["name"] for tool in listing["tools"]] == ["look"]
    assert len(listing["left_out"]) == 101 and listing["left_out"][-1]["name"] == "..."


def test_a_page_is_not_read_anew_for_each_of_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Json] = []
    monkeypatch.setattr(
        methods, "validate_server_result", lambda _method, _version, page: judged.append(page)
    )
    page = {**tools(3), "_meta": {"long": 1}, "more": 2, "ttlMs": 0, "nextCursor": "x"}
    assert _Judge("2026-07-28").page(page) == page
    assert judged == [{"tools": [tool], "ttlMs": 0} for tool in page["tools"]]


async def test_an_error_code_of_any_length_is_taken(tmp_path: Path) -> None:
    def refuse(message: Json) -> Response:
        error = {"code": 1 << 70, "message": "the room is locked"}
        text = json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error})
        return Response(text, media_type="application/json")

    response = await asked(tmp_path, rogue(tools_list={"tools": [TOOL]}, tools_call=refuse))
    assert response["status"] == "completed"
    assert response["output"][1]["error"]["code"] == 0


@pytest.mark.parametrize("schema", [{}, {"properties": {"a": {"type": "integer"}}}, None])
async def test_a_schema_without_a_type_is_that_of_an_object(tmp_path: Path, schema: Any) -> None:
    listed = {"tools": [{**TOOL, "inputSchema": schema}]}
    response = await asked(tmp_path, rogue(tools_list=listed, tools_call=SEEN), 'call look {"a": 1}')
    listing, made, _ = response["output"]
    assert listing["tools"][0]["input_schema"] == {"type": "object", **(schema or {})}
    assert made["output"] == "seen"


async def test_what_the_protocol_has_clients_drop_is_named(tmp_path: Path) -> None:
    """The newer form of the protocol: a tool whose headers cannot be is not to be offered."""
    server = MCPServer("desk")
    bad = {"type": "object", "properties": {"a": {"type": "object", "x-mcp-header": "not a header:"}}}
    server.tool(name="good")(lambda: "fine")
    server.tool(name="bad")(lambda: "never")
    server._tool_manager._tools["bad"].parameters = bad
    async with serving(server.streamable_http_app()) as url:
        place = url.removeprefix("http://")
        async with running_app(tmp_path, egress_allow=(place,)) as running, http_client(running) as client:
            response = await Api(client).create("call good {}", tools=[remote(f"{url}/mcp")])
    listing = response["output"][0]
    assert [tool["name"] for tool in listing["tools"]] == ["good"]
    assert listing["left_out"][0]["name"] == "bad" and "x-mcp-header" in listing["left_out"][0]["reason"]


def doubled(number: int) -> Json:
    """A schema that is twice another one."""
    return {"allOf": [{"$ref": f"#/$defs/a{number}"}] * 2}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "(a+)+$"}}},
        {"patternProperties": {"(a+)+$": {}}, "additionalProperties": False},
        {"$ref": "#/$defs/a0", "$defs": {f"a{n}": doubled(n + 1) for n in range(60)} | {"a60": {}}},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"$ref": "#"},
        {"type": 7, "properties": 3},
        {"properties": {"a": {"type": "teapot"}}},
    ],
)
def test_a_check_of_arguments_ends_whatever_the_schema_says(schema: Json) -> None:
    given = {"a": f"{'a' * 60}!", f"{'a' * 60}!": 1}
    assert read_arguments(schema, json.dumps(given)) == given


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"uniqueItems": True}}},
        {"properties": {"a": {"items": {"allOf": [{"type": ["array", "object"]}] * 1000}}}},
    ],
)
def test_many_arguments_are_checked_in_a_moment(schema: Json) -> None:
    given = {"a": [[number] if number % 2 else {"b": number} for number in range(20_000)]}
    assert read_arguments(schema, json.dumps(given)) == given


def test_what_stands_in_a_list_twice_is_told() -> None:
    schema = {"properties": {"a": {"uniqueItems": True}}}
    assert read_arguments(schema, '{"a": [1, true, "1", [1], {"x": 1}]}')
    for twice in ("[1, 2, 1.0]", '[{"x": 1, "y": 2}, {"y": 2, "x": 1}]'):
        with pytest.raises(ToolError, match=r"at \['a'\]: .* more than once"):
            read_arguments(schema, f'{{"a": {twice}}}')


def test_arguments_that_do_not_fit_are_told() -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"enum": [1, 2]}}}, "required": ["b"]}
    with pytest.raises(ToolError, match=r"'b' is a required property"):
        read_arguments(schema, '{"a": [1]}')
    with pytest.raises(ToolError, match=r"at \['a'\]\[1\]: 3 is not one of"):
        read_arguments(schema, '{"a": [1, 3], "b": 1}')
    with pytest.raises(ToolError, match="not valid JSON"):
        read_arguments(schema, "{")
    with pytest.raises(ToolError, match="object"):
        read_arguments(schema, "[]")
