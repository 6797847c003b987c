"""MCP servers on loopback for tests: the SDK's own over every transport, which count what is asked of
them."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError
from mcp.types import ImageContent, ToolAnnotations
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Kind = Literal["http", "old http", "sse"]
"""A transport; `old http` knows only the protocol before 2026-07-28, with its handshake and sessions."""


@dataclass
class Seen:
    """What a server was asked. listings: when its tools were listed, one entry each time. called: the names
    of tools. metas: what came with calls besides arguments, of some tools. headers, queries: of all
    requests."""

    listings: list[str] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    metas: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    held: asyncio.Event = field(default_factory=asyncio.Event)  # set when `hold` has begun
    meeting: asyncio.Barrier = field(default_factory=lambda: asyncio.Barrier(2))  # of calls of `meet`
    free: asyncio.Event = field(default_factory=asyncio.Event)  # `hold` does not wait once it is set
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)  # set when `hold` was cancelled


def make_server(seen: Seen) -> MCPServer:
    """A server with tools of every sort."""
    server = MCPServer("desk")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True))
    def look_up(word: str, ctx: Context[Any, Any]) -> str:
        """Look up a word."""
        seen.called.append("look_up")
        seen.metas.append(ctx.request_context.meta)
        return f"{word} means much"

    @server.tool()
    def book(room: int) -> str:
        """Book a room."""
        seen.called.append("book")
        if room == 13:
            raise MCPError(code=-32000, message="no room is given this number")
        if room > 9:
            raise ValueError(f"there is no room {room}")
        return f"booked {room}"

    @server.tool(name="files.list")
    def list_files() -> str:
        """List files."""
        seen.called.append("files.list")
        return "a.txt"

    @server.tool()
    def picture() -> ImageContent:
        """Draw a picture."""
        return ImageContent(type="image", data="A" * 4000, mime_type="image/png")

    @server.tool()
    async def hold(ctx: Context[Any, Any], seconds: float = 3600.0, steps: int = 1) -> str:
        """Take a while, with notices of progress."""
        seen.called.append("hold")
        return await _hold(seen, ctx, seconds, steps)

    @server.tool(annotations=ToolAnnotations(idempotent_hint=True))
    async def hold_safely(ctx: Context[Any, Any]) -> str:
        """Take a while, as often as is wanted."""
        seen.called.append("hold_safely")
        return await _hold(seen, ctx, 3600.0, 1)

    @server.tool()
    async def meet(name: str) -> str:
        """Wait for one more."""
        await seen.meeting.wait()
        return f"{name} met somebody"

    return server


def large_server(called: list[str]) -> MCPServer:
    """A server with a hundred tools, which notes the names of those that are called."""
    server = MCPServer("large")
    things = (
        "invoice",
        "parcel",
        "meeting",
        "ticket",
        "contract",
        "vehicle",
        "patient",
        "lesson",
        "recipe",
        "song",
    )
    verbs = ("create", "find", "update", "archive", "share", "count", "print", "merge", "split", "rate")
    for thing in things:
        for verb in verbs:

            def act(
                identifier: str, comment: str = "", quantity: int = 1, name: str = f"{verb}_{thing}"
            ) -> str:
                called.append(name)
                return f"{name} of {identifier}"

            server.tool(
                name=f"{verb}_{thing}", description=f"{verb.title()} a {thing} in the archive of the house."
            )(act)
    return server


async def _hold(seen: Seen, ctx: Context[Any, Any], seconds: float, steps: int) -> str:
    seen.metas.append(ctx.request_context.meta)
    seen.held.set()
    try:
        for step in range(steps):
            if not seen.free.is_set():
                await asyncio.sleep(seconds / steps)
            await ctx.report_progress(step, steps)
    except asyncio.CancelledError:
        seen.cancelled.set()
        raise
    return "held"


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """An ASGI application on a free port of loopback; yields its address, without a slash."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # which gets TCP_NODELAY
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task
        sock.close()


def without_discovery(app: ASGIApp) -> ASGIApp:
    """The same application, as a server that does not know the protocol's newer form."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        method = dict(scope["headers"]).get(b"mcp-method") if scope["type"] == "http" else None
        if method == b"server/discover":
            await Response(status_code=400)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return asked


def noting(app: ASGIApp, seen: Seen) -> ASGIApp:
    """The same application; the headers of its requests are kept."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {key.decode(): value.decode() for key, value in scope["headers"]}
            seen.headers.append(headers)
            seen.queries.append(scope["query_string"].decode())
            if (method := headers.get("mcp-method")) == "tools/list":
                seen.listings.append(method)
        await app(scope, receive, send)

    return asked


@asynccontextmanager
async def mcp_server(seen: Seen, kind: Kind = "http", **options: Any) -> AsyncIterator[str]:
    """The server over one of the transports; yields the URL to give to clients."""
    server = make_server(seen)
    app: ASGIApp = server.sse_app(**options) if kind == "sse" else server.streamable_http_app(**options)
    if kind == "old http":
        app = without_discovery(app)
    async with serving(noting(app, seen)) as url:
        yield f"{url}/sse" if kind == "sse" else f"{url}/mcp"


def stdio_command(log: Path) -> tuple[str, ...]:
    """A command that is the server over its standard streams; what is called is appended to a file."""
    return (sys.executable, "-m", "tests.support.mcp_program", str(log))
