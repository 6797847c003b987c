"""One connection with an MCP server: made when it is first needed, used by one run after the other.

The SDK's client has to be entered and left in one task, so each connection belongs to a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from tools.egress import GATEWAY_STATUSES, Caps, Egress, EgressError, guarded_client
from tools.mcp.messages import TOO_MANY, Messages, first_fault
from tools.mcp.server import McpServer
from tools.spec import ToolError, ToolResult

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

T = TypeVar("T")

CONNECT_S = 20.0
"""Seconds that a server may take to be connected with, and again to list its tools."""

MOST_CALL_S = 15 * 60.0
"""Seconds that a call may take, whatever progress it makes."""

PING_S = 2.0
"""Seconds that a server has for saying that it still knows a connection."""

CLOSE_S = 5.0
"""Seconds that a connection has for its end."""

MAX_REPLY = 8 << 20
"""Bytes of one HTTP reply: an image of 6 MB, though the model is told only that there is one."""

CAPS = Caps(
    max_bytes=MAX_REPLY,
    total_s=MOST_CALL_S + CONNECT_S,
    max_values=300_000,  # the longest text that is kept passes even where all of it is commas
    values_per_s=50_000,  # some tenth of a processor, whatever is sent
)
"""Of one HTTP exchange, which a stream of events is as long as it lasts. The SDK parses on the event loop."""

LASTING_CAPS = replace(CAPS, total_s=None, per_event=True)
"""Of the older way over HTTP, where one stream has the replies to all calls of a connection."""

MAX_COMPLAINT = 500
"""Characters of a program's last line on its standard error that the log repeats."""

CALL_KEY = "antiphon/call"
"""The key in `_meta` of a call under which a server finds an id of it, the same when the call is repeated."""

MAX_CODE = 1 << 53
"""Error codes from here on are told as 0. They may have any length, and no JSON of ours does."""

CONNECTION_CLOSED = (-32000, "Connection closed")
"""The SDK's code and words for a request whose connection is gone; the code alone may be a server's own."""

INVALID = re.compile(r"\d+ validation errors? for |Failed to parse SSE message")
"""How the SDK begins what it says of a reply that is none of the protocol, or of an event that is none; parts
of it follow."""

NOT_UNDERSTOOD = "its answer could not be understood"

OTHER_CONTENT = re.compile(r"Unexpected content type: *(?P<type>.*)", re.DOTALL)
"""How the SDK says that a reply is neither JSON nor a stream of events. `type` is empty where it has none."""

NO_ANSWER = re.compile(
    r"SSE stream (ended|failed)|server answered a request with 202 "
    rf"|Unexpected content type|Failed to parse JSON|{TOO_MANY}"
)
"""How the SDK words an error of its own for a request whose reply ended, or began otherwise than the protocol
says; or ours. Their codes may be a server's own, too."""

log = logging.getLogger("antiphon.mcp")


class Connection:
    """A connection with one server, and the task that it belongs to.

    status: of the last HTTP reply. statuses: of the HTTP replies to calls, by the ids of these. sound:
    nothing has failed in it, so that another run may use it.
    """

    def __init__(self, server: McpServer, egress: Egress) -> None:
        self._server = server
        self._egress = egress
        self._task: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self.status: int | None = None
        self.statuses: dict[str, int] = {}
        self._complaint = ""
        self.sound = True

    @property
    def lost(self) -> bool:
        """Whether it has ended."""
        return self._task is not None and self._task.done()

    async def use(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """work(client), which ends with the connection. Raises what work does, and why there is no
        connection."""
        if self._task is None:
            # It outlives the run that it is made for, and so belongs to no request.
            name, context = f"mcp {self._server.name}", Context()
            self._task = asyncio.create_task(self._hold(), name=name, context=context)
        try:
            client = await self._unless_lost(self._client, keep=True)
            return await self._unless_lost(asyncio.ensure_future(work(client)))
        except BaseException:
            self.sound = False
            raise

    async def answers(self) -> bool:
        """Ask the server whether it still knows it. Never raises, except when it is cancelled."""

        async def ping(client: Client) -> None:
            version = client.protocol_version
            async with asyncio.timeout(PING_S):
                if version in HANDSHAKE_PROTOCOL_VERSIONS:
                    await client.session.send_ping()
                else:  # pings are gone
                    await client.session.send_discover(version)

        if self.lost:
            self.sound = False
            return False
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        try:
            await self.use(ping)
        except Exception as exc:
            log.debug("the connection with %s is of no use any more: %r", self._server.name, exc)
        return self.sound

    async def _unless_lost(self, future: asyncio.Future[T], *, keep: bool = False) -> T:
        task = self._task
        assert task is not None, "it is used"
        try:
            await asyncio.wait((future, task), return_when=asyncio.FIRST_COMPLETED)
            if future.done() and not _is_closed(future.exception()):
                return future.result()
            # What closed the connection is known to its task, which may need a moment more to say it.
            await asyncio.wait((task,), timeout=CLOSE_S)
            if task.done():
                task.result()  # raises why
            self._tell_lost()
            raise ConnectionError("the connection was closed")
        finally:
            if not keep:
                future.cancel()

    def _tell_lost(self) -> None:
        said = f"; it wrote last: {self._complaint}" if self._complaint else ""
        log.warning("the MCP server %s has closed its connection%s", self._server.name, said)

    async def close(self) -> None:
        """End it, and wait for that."""
        self._closing.set()
        if self._task is None:
            return
        if not self._client.done():
            self._task.cancel()
        _, late = await asyncio.wait((self._task,), timeout=CLOSE_S)
        for task in late:
            task.cancel()
            await asyncio.wait((task,), timeout=CLOSE_S)
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.debug("the connection with %s ended: %r", self._server.name, error)

    async def _hold(self) -> None:
        """Connect, in one way after the other, and stay until the connection is closed or lost."""
        await asyncio.to_thread(prepare_mcp)
        from mcp import Client

        why: BaseException | None = None
        status: int | None = None  # of the first way, which is the one that most servers have
        for way in self._ways():
            try:
                async with asyncio.timeout(CONNECT_S) as limit, Client(way(), cache=None) as client:
                    # Checking results against the server's schemas would run the server's patterns.
                    client.session.validate_tool_result = _taken_as_it_is  # type: ignore[assignment, method-assign]
                    limit.reschedule(None)
                    self._client.set_result(client)
                    await self._closing.wait()
                return
            except Exception as exc:
                if why is None:
                    why, status = exc, self.status
                if self._client.done() or self.status in (401, 403) or isinstance(exc, TimeoutError):
                    break
        assert why is not None, "there is a way to each server"
        if self.status not in (401, 403):
            self.status = status
        if _is_closed(_first(why)):
            self._tell_lost()
        raise why

    def _ways(self) -> Iterator[Callable[[], Any]]:
        if self._server.command:
            yield self._over_streams
        else:
            yield self._over_http
            yield self._over_sse

    @asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Any]:
        from mcp.client.streamable_http import streamable_http_client

        url = self._server.url or ""
        async with self._http(CAPS) as http:
            connecting = streamable_http_client(url, http_client=http, max_sse_event_size=MAX_REPLY)
            async with connecting as (read, write):
                yield Messages(read), write

    @asynccontextmanager
    async def _over_sse(self) -> AsyncIterator[Any]:
        from mcp.client.sse import sse_client

        def made(
            headers: dict[str, str] | None = None,
            timeout: httpx2.Timeout | None = None,
            auth: httpx2.Auth | None = None,
        ) -> httpx2.AsyncClient:
            return self._http(LASTING_CAPS)

        async with sse_client(self._server.url or "", httpx_client_factory=made) as (read, write):
            yield Messages(read), write

    @asynccontextmanager
    async def _over_streams(self) -> AsyncIterator[Any]:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        program, *arguments = self._server.command
        parameters = StdioServerParameters(command=program, args=arguments, env=dict(self._server.env))
        source, sink = os.pipe()
        threading.Thread(target=self._pass_on, args=(source,), name="mcp stderr", daemon=True).start()
        with open(sink, "w") as errlog:
            async with stdio_client(parameters, errlog=errlog) as (read, write):
                errlog.close()  # the program's own end is left, which closes with it
                yield Messages(read), write

    def _pass_on(self, source: int) -> None:
        """Pass on what a program complains of, line by line, and keep the last one."""
        with open(source, errors="replace") as lines:
            for line in lines:
                self._complaint = line.strip()[:MAX_COMPLAINT] or self._complaint
                print(line, end="", file=sys.__stderr__ or sys.stderr, flush=True)

    def _http(self, caps: Caps) -> httpx2.AsyncClient:
        url = self._server.url or ""
        egress = self._egress if self._server.guarded else self._egress.allowing(url)
        http = guarded_client(egress, caps, headers=self._server.headers)
        http.event_hooks = {"request": [_mark], "response": [self._note]}
        return http

    async def _note(self, response: httpx2.Response) -> None:
        self.status = response.status_code
        if (call := response.request.extensions.get(CALL_KEY)) is not None:
            self.statuses[call] = response.status_code


async def _mark(request: httpx2.Request) -> None:
    """Have a request say which call it makes: what fails in a connection fails in one of its requests, and
    says nothing of the calls that others have made. A redirect has the extensions of its origin."""
    import httpx2

    try:
        message = orjson.loads(request.content)
        request.extensions.setdefault(CALL_KEY, message["params"]["_meta"][CALL_KEY])
    except (httpx2.RequestNotRead, orjson.JSONDecodeError, LookupError, TypeError):
        pass  # it makes none


async def _taken_as_it_is(*_: Any) -> None:
    return None


def prepare_mcp() -> None:
    """Import the SDK, which takes from half a second to many on a slow machine; its own words in the log can
    hold arguments and replies."""
    import_module("mcp.client.sse")
    for name in ("mcp", "httpx2", "httpcore2", "client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


# ------------------------------------------------------------------------------------------------------------
# Failures


def failure(
    exc: BaseException,
    status: int | None,
    *,
    limit_s: float,
    lead: str = "",
    call: str | None = None,
) -> ToolResult:
    """What is told of an exception that a connection ended with, or a call. status: of the HTTP reply to it,
    or of the last one. limit_s: the seconds that there were. lead: what stands before all but the server's
    own words. call: its id, where there was a connection and it was on its way.

    A call on its way may have had its effect, except where its own request was not sent, or the server
    itself has answered: by an error of the protocol, or by an HTTP status that is not a gateway's.
    """
    import httpx2
    from mcp.shared.exceptions import MCPError

    cause, begun = _first(exc), call is not None
    if isinstance(cause, EgressError):
        codes = {"too_slow": 504, "refused": 403}
        is_own = cause.extensions.get(CALL_KEY) == call
        code, uncertain = codes.get(cause.kind, 502), begun and (cause.uncertain or not is_own)
        return ToolResult(error=f"{lead}{cause}", source="http", code=code, uncertain=uncertain)
    if isinstance(cause, ToolError):
        return ToolResult(error=str(cause))
    if isinstance(cause, TimeoutError | httpx2.TimeoutException):
        told = f"{lead}it did not answer within {limit_s:g} s"
        return ToolResult(error=told, source="http", code=504, uncertain=begun)
    if isinstance(cause, httpx2.HTTPStatusError):
        return _refusal(lead, cause.response.status_code, begun)
    if isinstance(cause, MCPError):
        code = cause.code if abs(cause.code) < MAX_CODE else 0
        if INVALID.match(cause.message):
            return ToolResult(error=f"{lead}{NOT_UNDERSTOOD}", source="protocol", code=code, uncertain=begun)
        if NO_ANSWER.match(cause.message):  # whatever was answered to a try to read on
            told = f"{lead}{_no_answer(cause.message)}"
            return ToolResult(error=told, source="protocol", code=code, uncertain=begun)
        if status is not None and status >= 300:
            return _refusal(lead, status, begun)
        return ToolResult(error=cause.message[:1000], source="protocol", code=code)
    if isinstance(cause, httpx2.HTTPError | OSError | EOFError):
        what = "it broke off" if begun else "it could not be reached"
        return ToolResult(error=f"{lead}{what} ({_said(cause)})", source="http", code=502, uncertain=begun)
    log.warning("an MCP server failed: %s", first_fault(cause))
    return ToolResult(error=f"{lead}{NOT_UNDERSTOOD}", source="protocol", code=-32700, uncertain=begun)


def _no_answer(said: str) -> str:
    """What is told of an error of the SDK's own, in the words that `NO_ANSWER` matches."""
    if (other := OTHER_CONTENT.match(said)) is None:
        return said[:1000]
    kind = f"of content type '{other['type'][:200]}'" if other["type"] else "without a content type"
    return f"what answers there does not speak MCP over streamable HTTP: it sent a reply {kind}"


def _refusal(lead: str, status: int, begun: bool) -> ToolResult:
    """For an HTTP status that is an error. A gateway's own says that the server behind it did not answer."""
    told = f"{lead}it answered with HTTP status {status}"
    return ToolResult(error=told, source="http", code=status, uncertain=begun and status in GATEWAY_STATUSES)


def _is_closed(exc: BaseException | None) -> bool:
    """Whether the SDK says of a request only that its connection is gone."""
    from mcp.shared.exceptions import MCPError

    return isinstance(exc, MCPError) and (exc.code, exc.message) == CONNECTION_CLOSED


def _first(exc: BaseException) -> BaseException:
    """The exception itself, or the first one of a group."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


def _said(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__
