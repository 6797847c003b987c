"""Connections with MCP servers: whom they pass to, and their ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from tests.support.blocking import until
from tests.support.mcp_servers import Seen, make_server, serving, stdio_command
from tests.support.processes import ROOT, free_port, listens
from tools.egress import Egress, EgressError
from tools.egress.transport import GuardedTransport
from tools.mcp import ConnectionPool, Connections, McpServer
from tools.spec import ToolResult


def held() -> list[asyncio.Task[object]]:
    """The tasks of connections that have not ended."""
    return [task for task in asyncio.all_tasks() if task.get_name() == "mcp desk"]


async def listed(pool: ConnectionPool, owner: str, server: McpServer) -> None:
    connections = Connections(pool, owner)
    listing = await connections.list_tools("desk", server)
    assert listing.error is None and listing.tools
    connections.close()


@pytest.mark.long
async def test_a_program_serves_one_run_of_its_owner_after_the_other(tmp_path: Path) -> None:
    pool = ConnectionPool(Egress())
    server = McpServer("desk", command=stdio_command(tmp_path / "log"))
    await listed(pool, "ann", server)
    first = held()
    await listed(pool, "ann", server)
    assert held() == first and len(first) == 1
    await listed(pool, "bob", server)
    await listed(pool, "ann", McpServer("desk", command=server.command, env={"DESK": "other"}))
    assert len(held()) == 3
    both = [Connections(pool, "ann"), Connections(pool, "ann")]
    await asyncio.gather(*(each.list_tools("desk", server) for each in both))
    assert len(held()) == 4, "two runs at once have a connection each"
    for each in both:
        each.close()
    await pool.close()
    assert not held()


async def test_what_waits_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.mcp import connections

    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    pool = ConnectionPool(Egress())
    await listed(pool, "ann", McpServer("desk", command=stdio_command(tmp_path / "log")))
    await asyncio.wait_for(asyncio.gather(*held()), 20)
    await pool.close()


async def test_only_so_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.mcp import connections

    monkeypatch.setattr(connections, "MOST_IDLE", 1)
    pool = ConnectionPool(Egress())
    server = McpServer("desk", command=stdio_command(tmp_path / "log"))
    await listed(pool, "ann", server)
    (first,) = held()
    await listed(pool, "bob", server)
    await asyncio.wait_for(first, 20)
    assert len(held()) == 1
    await pool.close()


@asynccontextmanager
async def sse_program(log: Path, port: int) -> AsyncIterator[str]:
    """A server in a process that is killed at the end; yields its URL."""
    child = await asyncio.create_subprocess_exec(*stdio_command(log), "sse", str(port), cwd=ROOT)
    try:
        await listens(port)
        yield f"http://127.0.0.1:{port}/sse"
    finally:
        child.kill()
        await child.wait()


async def test_a_server_that_began_anew_is_connected_with_anew(tmp_path: Path) -> None:
    port = free_port()
    pool = ConnectionPool(Egress(mode="any"))
    async with sse_program(tmp_path / "log", port) as url:
        server = McpServer("desk", url=url)
        await listed(pool, "ann", server)
        first = held()
        await listed(pool, "ann", server)
        assert held() == first, "its session goes on"
    async with sse_program(tmp_path / "log", port):
        await listed(pool, "ann", server)
        await pool.close()
    assert not held()


def stream(text: str) -> Callable[[Any], Response]:
    return lambda _: Response(text, media_type="text/event-stream")


def page(text: str, status: int = 200, kind: str | None = "application/json") -> Callable[[Any], Response]:
    return lambda _: Response(text, status, media_type=kind)


def own_error(call_id: Any) -> Response:
    error = {"code": -32000, "message": "the room is locked"}
    return JSONResponse({"jsonrpc": "2.0", "id": call_id, "error": error})


PROGRESS = json.dumps(
    {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 1, "progress": 1}}
)


@pytest.mark.parametrize(
    ("reply", "told", "uncertain"),
    [
        pytest.param(stream(""), "SSE stream ended", True, id="a stream without events"),
        pytest.param(stream(f"data: {PROGRESS}\n\n"), "SSE stream ended", True, id="a stream that is cut"),
        pytest.param(
            stream(f"id: 7\nretry: 1\ndata: {PROGRESS}\n\n"),
            "SSE stream ended",
            True,
            id="a stream that cannot be read on",
        ),
        pytest.param(page('{"jsonrpc": "2.0", "id"'), "Failed to parse", True, id="half a reply"),
        pytest.param(
            page("<html>", kind="text/html"), "a reply of content type 'text/html", True, id="a page"
        ),
        pytest.param(page("ok", kind=None), "a reply without a content type", True, id="no type"),
        pytest.param(page("", 202), "202 Accepted", True, id="accepted, and no reply"),
        pytest.param(page("slow", 504, "text/plain"), "status 504", True, id="a gateway that gave up"),
        pytest.param(
            page("lost", 502, "text/plain"), "status 502", True, id="a gateway that lost the server"
        ),
        pytest.param(page("no", 500, "text/plain"), "status 500", False, id="a status of the server"),
        pytest.param(page("no", 403, "text/plain"), "status 403", False, id="a refusal"),
        pytest.param(own_error, "the room is locked", False, id="an error of the server"),
    ],
)
async def test_a_call_without_an_answer_may_have_had_an_effect(
    reply: Callable[[Any], Response], told: str, uncertain: bool
) -> None:
    """All but what the server itself has answered: here it is asked over HTTP, and replies to a call."""
    app = make_server(Seen()).streamable_http_app()

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if headers.get(b"mcp-method") == b"tools/call":
            call = await Request(scope, receive).json()
            await reply(call["id"])(scope, receive, send)
        else:
            await app(scope, receive, send)

    pool = ConnectionPool(Egress(mode="any"))
    async with serving(asked) as url:
        connections = Connections(pool, "ann")
        server = McpServer("desk", url=f"{url}/mcp")
        result = await connections.call("desk", server, "book", {"type": "object"}, '{"room": 1}', "mcp_1")
        connections.close()
        await pool.close()
    assert told in str(result.error)
    assert result.uncertain is uncertain
    assert str(result.error).startswith("The MCP server 'desk' failed: ") is (reply is not own_error)


@pytest.mark.parametrize(
    ("kind", "told"),
    [(None, "without a content type"), ("text/html", "of content type 'text/html; charset=utf-8'")],
)
async def test_what_does_not_speak_the_protocol_is_told_so(kind: str | None, told: str) -> None:
    pool = ConnectionPool(Egress(mode="any"))
    app = Starlette(routes=[Mount("/", app=page("ok", kind=kind)(None))])
    async with serving(app) as url:
        connections = Connections(pool, "ann")
        listing = await connections.list_tools("desk", McpServer("desk", url=url))
        connections.close()
        await pool.close()
    why = f"what answers there does not speak MCP over streamable HTTP: it sent a reply {told}"
    assert str(listing.error).endswith(f"could not be asked for its tools: {why}")


async def test_what_fails_for_one_call_says_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls share a connection: what ends it may come of another call's request than the one that is told."""
    seen = Seen()
    send = GuardedTransport.handle_async_request

    async def unreachable(self: GuardedTransport, request: Any) -> Any:
        if b'"book"' in await request.aread():
            await seen.held.wait()
            raise EgressError("127.0.0.1 accepts no connection.", "unreachable")
        return await send(self, request)

    monkeypatch.setattr(GuardedTransport, "handle_async_request", unreachable)
    pool = ConnectionPool(Egress(mode="any"))
    async with serving(make_server(seen).streamable_http_app()) as url:
        connections = Connections(pool, "ann")
        server = McpServer("desk", url=f"{url}/mcp")
        made, unmade = await asyncio.gather(
            connections.call("desk", server, "hold", {"type": "object"}, "{}", "mcp_1"),
            connections.call("desk", server, "book", {"type": "object"}, '{"room": 1}', "mcp_2"),
        )
        seen.free.set()
        connections.close()
        await pool.close()
    assert made.error is not None and made.uncertain
    assert unmade.error is not None and not unmade.uncertain


async def test_a_status_is_that_of_the_reply_to_the_same_call() -> None:
    app = make_server(Seen()).streamable_http_app()
    answered = asyncio.Event()

    async def lost() -> AsyncIterator[bytes]:
        yield b"{"
        await answered.wait()

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if headers.get(b"mcp-method") != b"tools/call":
            await app(scope, receive, send)
            return
        call = await Request(scope, receive).json()
        if call["params"]["name"] == "first":
            await StreamingResponse(lost(), 502, media_type="application/json")(scope, receive, send)
        else:
            await own_error(call["id"])(scope, receive, send)

    async def second() -> ToolResult:
        await until(lambda: any(connection.statuses for _, connection in connections._open.values()))
        result = await connections.call("desk", server, "second", {"type": "object"}, "{}", "mcp_2")
        answered.set()
        return result

    pool = ConnectionPool(Egress(mode="any"))
    async with serving(asked) as url:
        connections = Connections(pool, "ann")
        server = McpServer("desk", url=f"{url}/mcp")
        one, other = await asyncio.gather(
            connections.call("desk", server, "first", {"type": "object"}, "{}", "mcp_1"), second()
        )
        connections.close()
        await pool.close()
    assert (one.code, one.uncertain) == (502, True)
    assert (other.error, other.uncertain) == ("the room is locked", False)
