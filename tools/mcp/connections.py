"""Connections with MCP servers: one for each server of a run, kept for the next run of the same owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tools.egress import Egress
from tools.mcp.arguments import read_arguments
from tools.mcp.connection import CALL_KEY, CONNECT_S, MOST_CALL_S, Connection, failure
from tools.mcp.listing import Listing, all_tools
from tools.mcp.results import read_result
from tools.mcp.server import McpServer
from tools.runtime import shortened
from tools.spec import ToolError, ToolResult

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger("antiphon.mcp")

CALL_S = 60.0
"""Seconds that a call may take; each notice of progress begins them anew."""

CREDENTIALS = (
    "Its credentials stand in the tool's 'authorization', or the operator gives them in antiphon.toml."
)
"""What a client is told where a server does not let it in."""

IDLE_S = 60.0
"""Seconds for which a connection waits for its next run."""

MOST_IDLE = 64
"""Connections that wait, of all owners."""


@dataclass(eq=False, slots=True)
class _Idle:
    owner: str
    server: McpServer
    connection: Connection
    timer: asyncio.TimerHandle = field(init=False)


class ConnectionPool:
    """Connections that wait for their next run.

    A connection is one run's at a time, because a server may keep a state for it, and it passes only between
    runs of one owner, which reach the same server with the same credentials.
    """

    def __init__(self, egress: Egress) -> None:
        """egress: where requests may lead; servers of the operator may be anywhere."""
        self._egress = egress
        self._idle: list[_Idle] = []  # the one that waits longest first
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, owner: str, server: McpServer) -> Connection:
        """One for a run. Never raises, except when it is cancelled."""
        same = [idle for idle in self._idle if (idle.owner, idle.server) == (owner, server)]
        if same:
            newest = same.pop()
            newest.timer.cancel()
            self._idle.remove(newest)
            try:
                if await newest.connection.answers():
                    return newest.connection
            finally:
                if not newest.connection.sound:
                    self._end(newest.connection)
            for older in same:  # a server that has forgotten one has forgotten them all
                self._expire(older)
        return Connection(server, self._egress)

    def give_back(self, owner: str, server: McpServer, connection: Connection) -> None:
        """Keep it for a while, or end it where something failed in it."""
        if not connection.sound or connection.lost:
            self._end(connection)
            return
        idle = _Idle(owner, server, connection)
        idle.timer = asyncio.get_running_loop().call_later(IDLE_S, self._expire, idle)
        self._idle.append(idle)
        if len(self._idle) > MOST_IDLE:
            self._expire(self._idle[0])

    async def close(self) -> None:
        """End those that wait, and wait for the ends of all that were given back."""
        for idle in self._idle.copy():
            self._expire(idle)
        await asyncio.gather(*self._ending)

    def _expire(self, idle: _Idle) -> None:
        if idle in self._idle:
            idle.timer.cancel()
            self._idle.remove(idle)
            self._end(idle.connection)

    def _end(self, connection: Connection) -> None:
        task = asyncio.create_task(connection.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class Connections:
    """The connections of one run."""

    def __init__(self, pool: ConnectionPool, owner: str) -> None:
        self._pool = pool
        self._owner = owner
        self._open: dict[str, tuple[McpServer, Connection]] = {}  # by the server's label
        self._taking: dict[str, asyncio.Lock] = {}

    async def list_tools(self, label: str, server: McpServer) -> Listing:
        """Ask a server for its tools. Never raises, except when it is cancelled."""

        async def ask(client: Client) -> Listing:
            async with asyncio.timeout(CONNECT_S):
                return await all_tools(client)

        connection = await self._connection(label, server)
        try:
            listing = await connection.use(ask)
            for name, reason in listing.left_out.items():
                log.warning("the tool '%s' of the MCP server %s is left out: %s", name, server.name, reason)
            return listing
        except Exception as exc:
            why = failure(exc, connection.status, limit_s=CONNECT_S).error or ""
            error = f"The MCP server '{label}'{server.told_place} could not be asked for its tools: {why}"
            if connection.status in (401, 403):
                error = f"{error.rstrip('.')}. {CREDENTIALS}"
            return Listing(error=error)

    async def call(
        self,
        label: str,
        server: McpServer,
        name: str,
        schema: Mapping[str, Any],
        arguments: str,
        call_id: str,
    ) -> ToolResult:
        """Call a tool with the JSON text of its arguments, which are checked first. Never raises, except when
        it is cancelled, which cancels the call at the server."""
        try:
            given = await asyncio.to_thread(read_arguments, schema, arguments)
        except ToolError as misfit:
            return ToolResult(error=str(misfit))
        clock = asyncio.get_running_loop().time
        connection = await self._connection(label, server)
        until: float | None = None  # the last moment of the call, once it is on its way

        async def make(client: Client) -> ToolResult:
            nonlocal until
            until = last = clock() + MOST_CALL_S
            async with asyncio.timeout(CALL_S) as limit:

                async def on_progress(progress: float, total: float | None, message: str | None) -> None:
                    if not limit.expired():
                        limit.reschedule(min(clock() + CALL_S, last))

                meta: Any = {CALL_KEY: call_id}
                result = await client.call_tool(name, given, progress_callback=on_progress, meta=meta)
            return read_result(result)

        try:
            result = shortened(await connection.use(make))
        except Exception as exc:
            lead = f"The MCP server '{label}' failed: "
            if until is None:
                result = failure(exc, connection.status, limit_s=CONNECT_S, lead=lead)
            else:
                limit_s = CALL_S if clock() < until else MOST_CALL_S
                status = connection.statuses.get(call_id)
                result = failure(exc, status, limit_s=limit_s, lead=lead, call=call_id)
        finally:
            connection.statuses.pop(call_id, None)
        if result.error is None:
            return result
        kind = "an error of its own" if result.source == "tool" else f"{result.source} error {result.code}"
        return replace(result, fault=f"{kind}, at the MCP server {server.name}")

    async def _connection(self, label: str, server: McpServer) -> Connection:
        async with self._taking.setdefault(label, asyncio.Lock()):  # parallel calls share one
            known = self._open.get(label)
            if known is not None and not known[1].lost:
                return known[1]
            taken = await self._pool.take(self._owner, server)
            self._open[label] = (server, taken)
            return taken

    def close(self) -> None:
        """Leave them to the next run, where nothing failed in them."""
        open_, self._open = list(self._open.values()), {}
        for server, connection in open_:
            self._pool.give_back(self._owner, server, connection)
