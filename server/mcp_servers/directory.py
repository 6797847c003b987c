"""Finds the MCP server that a tool of a request means, or says why it cannot be reached."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from server.errors import ApiError
from server.mcp_servers.approvals import BUILTIN_URL, Approvals
from server.mcp_servers.reach import Reach
from server.mcp_servers.settings import McpSettings, ServerSettings
from tools import ConnectionPool, Egress, EgressError, McpServer

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_OURS = re.compile(
    r"(?i)(host|connection|content-.*|transfer-encoding|te|trailer|upgrade|expect|keep-alive|accept"
    r"|accept-encoding|proxy-.*|mcp-.*)"
)
"""Headers that the transport sets itself."""


class Directory:
    """The MCP servers of this process."""

    def __init__(self, settings: McpSettings, egress: Egress) -> None:
        """egress: what of the addresses that requests name may be reached."""
        self._settings = settings
        self._egress = egress
        self._pool = ConnectionPool(egress)

    def reach(
        self, tools: Sequence[Mapping[str, Any]], secrets: Mapping[str, Mapping[str, Any]], owner: str
    ) -> Reach:
        """What a run with these tools may reach. secrets: what the tools said besides, by their index. A
        server that cannot be reached any more is told to be so when it is called."""
        servers: dict[str, McpServer | str] = {}
        for index, tool in enumerate(tools):
            if not is_remote(tool):
                continue
            try:
                found: McpServer | str = self._find(
                    tool, secrets.get(str(index), {}), owner, f"tools[{index}]"
                )
            except ApiError as gone:
                found = gone.message
            servers[tool["server_label"]] = found
        return Reach(servers, self._pool, owner)

    async def close(self) -> None:
        """End the connections that no run uses."""
        await self._pool.close()

    def require(
        self, tools: Sequence[Mapping[str, Any]], secrets: Mapping[str, Mapping[str, Any]], owner: str
    ) -> None:
        """ApiError 400 unless all of a request's MCP servers can be reached, each by a label of its own."""
        remote: dict[str, bool] = {}  # by label
        for index, tool in enumerate(tools):
            if tool["type"] != "mcp":
                continue
            path, label = f"tools[{index}]", tool["server_label"]
            if is_remote(tool):
                self._find(tool, secrets.get(str(index), {}), owner, path)
            if label in remote and (remote[label] or is_remote(tool)):
                message = f"Two MCP servers are labelled {label!r}."
                raise _refused(f"{path}.server_label", message, "invalid_value")
            remote[label] = is_remote(tool)

    def approvals(self, tools: Sequence[Mapping[str, Any]], owner: str) -> Approvals:
        """Which calls of the MCP servers among these tools need approval."""
        trusted = []
        for tool in filter(is_remote, tools):
            with suppress(ApiError):  # one that cannot be reached any more is told to be so
                trusted += [tool["server_label"]] if self._find(tool, {}, owner, "tools").trusted else []
        return Approvals(self._settings.approval, tuple(trusted))

    def asking(self, tools: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Those of a request's tools whose calls may need approval: index -> why (`Approvals.why`)."""
        approvals = Approvals(self._settings.approval)
        found = {index: approvals.why(tool) for index, tool in enumerate(tools) if tool["type"] == "mcp"}
        return {index: why for index, why in found.items() if why is not None}

    def named(self, owner: str) -> list[dict[str, str]]:
        """The servers that an owner's requests reach by name, this server's own tools first: the
        `server_label` and `server_url` of a tool."""
        names = ["", *(name for name, each in self._settings.servers.items() if _allows(each, owner))]
        return [{"server_label": name or "builtin", "server_url": f"{BUILTIN_URL}{name}"} for name in names]

    def _find(self, tool: Mapping[str, Any], secret: Mapping[str, Any], owner: str, path: str) -> McpServer:
        url, connector = secret.get("server_url") or tool.get("server_url", ""), tool.get("connector_id")
        if tool.get("tunnel_id") is not None:
            raise _refused(f"{path}.tunnel_id", "This server has no tunnels. Give a server_url.")
        if connector is not None:
            server = self._connector(connector, owner, path)
        elif url.startswith(BUILTIN_URL):
            server = self._named(url.removeprefix(BUILTIN_URL), owner, path)
        else:
            server = self._elsewhere(url, path)
        given = _headers(secret, path)
        if given and server.command:
            member = "headers" if secret.get("headers") else "authorization"
            raise _refused(f"{path}.{member}", f"The MCP server {server.name!r} takes no headers.")
        # What the operator configured holds, in whatever case it is written.
        own = {key.lower(): value for key, value in server.headers.items()}
        return replace(server, headers={**given, **own})

    def _connector(self, connector: str, owner: str, path: str) -> McpServer:
        for name, settings in self._settings.servers.items():
            if settings.connector == connector and _allows(settings, owner):
                return server_of(name, settings)
        message = (
            f"This server has no connector {connector!r}. The operator may map it to an MCP server: "
            f'connector = "{connector}" in a table [mcp.servers.NAME] of antiphon.toml.'
        )
        raise _refused(f"{path}.connector_id", message)

    def _named(self, name: str, owner: str, path: str) -> McpServer:
        settings = self._settings.servers.get(name)
        if settings is None or not _allows(settings, owner):
            known = [name for name, each in self._settings.servers.items() if _allows(each, owner)]
            there = f" There are: {', '.join(known)}." if known else ""
            message = (
                f"There is no MCP server 'builtin:{name}' here.{there} The operator adds one as a table "
                f"[mcp.servers.{name}] of antiphon.toml."
            )
            raise _refused(f"{path}.server_url", message)
        return server_of(name, settings)

    def _elsewhere(self, url: str, path: str) -> McpServer:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:
            parts, host = urlsplit(""), None
        if not host or "@" in parts.netloc or not url.isprintable():
            message = f"Invalid '{path}.server_url': give http(s)://HOST/PATH, or builtin:NAME."
            if "@" in parts.netloc:
                message += " A user name and a password belong into 'authorization' or 'headers'."
            raise _refused(f"{path}.server_url", message, "invalid_value")
        try:
            self._egress.check(url)
        except EgressError as why:
            hint = (
                "The operator may allow it by --egress or --egress-allow, or add the server as a table "
                "[mcp.servers.NAME] of antiphon.toml, which requests reach as 'builtin:NAME'."
            )
            raise _refused(f"{path}.server_url", f"{why} {hint}") from None
        return McpServer(host, url=url)


def is_remote(tool: Mapping[str, Any]) -> bool:
    """Whether a tool of a request stands for an MCP server that is not in this process."""
    return tool["type"] == "mcp" and tool.get("server_url") != BUILTIN_URL


def _refused(param: str, message: str, code: str = "unsupported_parameter") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def _allows(settings: ServerSettings, owner: str) -> bool:
    return settings.owners is None or owner in settings.owners


def server_of(name: str, settings: ServerSettings) -> McpServer:
    """A server as the operator has configured it."""
    headers = {key.lower(): value for key, value in settings.headers.items()}
    if settings.token is not None:
        headers["authorization"] = f"Bearer {settings.token}"
    return McpServer(
        name,
        url=settings.url,
        command=settings.command,
        headers=headers,
        env=settings.env,
        guarded=False,
        trusted=settings.trust,
        idempotent=frozenset(settings.idempotent),
    )


def _headers(secret: Mapping[str, Any], path: str) -> dict[str, str]:
    """The headers that a request gives for its server. Raises ApiError 400 for one that it may not give."""
    found = {}
    for name, value in (secret.get("headers") or {}).items():
        if not _HEADER.fullmatch(name) or _OURS.fullmatch(name):
            message = f"Invalid '{path}.headers': {name[:64]!r} cannot be given."
            raise _refused(f"{path}.headers", message, "invalid_value")
        _require_printable(value, f"{path}.headers")
        found[name.lower()] = value
    token = secret.get("authorization")
    if token is not None:
        _require_printable(token, f"{path}.authorization")
        found["authorization"] = token if token.lower().startswith("bearer ") else f"Bearer {token}"
    return found


def _require_printable(value: str, path: str) -> None:
    if not (value.isascii() and value.isprintable()):
        message = f"Invalid '{path}': what is sent in a header is printable ASCII."
        raise _refused(path, message, "invalid_value")
