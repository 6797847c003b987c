"""The MCP servers that one run may reach: asked for their tools, and called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tools import ConnectionPool, Connections, Listing, McpServer, ToolResult, with_doubt


class Reach:
    """The servers of a run, by their labels, with a connection for each one that is needed.

    servers: why not, for one that cannot be reached.
    """

    def __init__(self, servers: Mapping[str, McpServer | str], pool: ConnectionPool, owner: str) -> None:
        self._servers = servers
        self._tools: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._connections = Connections(pool, owner)

    def has(self, label: str) -> bool:
        """Whether there is a server of this label, reachable or not."""
        return label in self._servers

    def learn(self, label: str, tools: Iterable[Mapping[str, Any]]) -> None:
        """Take in the tools that a server has listed, as items say them."""
        self._tools.update({(label, tool["name"]): tool for tool in tools})

    async def list_tools(self, label: str) -> Listing:
        """Ask a server for its tools. Never raises, except when it is cancelled."""
        server = self._server(label)
        if isinstance(server, str):
            return Listing(error=server)
        return await self._connections.list_tools(label, server)

    async def call(self, label: str, name: str, arguments: str, call_id: str) -> ToolResult:
        """Call a tool with the JSON text of its arguments. call_id: the same where a call is repeated. Never
        raises, except when it is cancelled."""
        server, tool = self._server(label), self._tools.get((label, name))
        if isinstance(server, str):
            return ToolResult(error=server)
        if tool is None:
            return ToolResult(error=f"The MCP server {label!r} has listed no tool {name!r}.")
        schema = tool["input_schema"]
        result = await self._connections.call(label, server, name, schema, arguments, call_id)
        return with_doubt(result, repeatable=self.may_repeat(label, name))

    def may_repeat(self, label: str, name: str) -> bool:
        """Whether a call may be made twice. What a server says of its tools counts only where the operator
        trusts it."""
        server = self._server(label)
        if isinstance(server, str):
            return False
        said = self._tools.get((label, name), {}).get("annotations") or {}
        hinted = said.get("readOnlyHint") is True or said.get("idempotentHint") is True
        return name in server.idempotent or (server.trusted and hinted)

    def close(self) -> None:
        """Leave the connections to the next run."""
        self._connections.close()

    def _server(self, label: str) -> McpServer | str:
        return self._servers.get(label, f"There is no MCP server labelled {label!r} any more.")
