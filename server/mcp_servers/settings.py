"""The operator's MCP servers: the table `[mcp]` of `antiphon.toml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from server.masking import bare
from server.mcp_servers.approvals import Policy
from server.settings import HeaderText, SettingsTable, read_table

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_URL = re.compile(r"https?://[^\s/@]+(/\S*)?")
CONNECTORS = (
    "connector_dropbox", "connector_gmail", "connector_googlecalendar", "connector_googledrive",
    "connector_microsoftteams", "connector_outlookcalendar", "connector_outlookemail", "connector_sharepoint",
)  # fmt: skip
"""The official ids of connectors, each of which the operator may map to a server."""


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no name: it has letters, digits, _ and -")
    return value


def _url(value: str) -> str:
    if not _URL.fullmatch(value):
        given = "give http://HOST/PATH or https://HOST/PATH"
        if "@" in value:
            given += ", and a user, password or token in token or headers"
        raise ValueError(f"{bare(value)!r} is no address: {given}")
    return value


class ServerSettings(SettingsTable):
    """One server, its secrets read. connector: the `connector_id` that stands for it as well. owners: who may
    use it; None is everybody. token: sent as `Authorization: Bearer`. trust, idempotent: see `McpServer`."""

    url: Annotated[str, AfterValidator(_url)] | None = None
    command: tuple[str, ...] = ()
    headers: dict[str, HeaderText] = Field(default_factory=dict, repr=False)
    token: HeaderText | None = Field(None, repr=False)
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    connector: Literal[CONNECTORS] | None = None  # type: ignore[valid-type]
    owners: tuple[str, ...] | None = None
    trust: bool = False
    idempotent: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_way(self) -> ServerSettings:
        if (self.url is None) is (not self.command):
            raise ValueError("give exactly one of url and command")
        if self.command and (self.headers or self.token):
            raise ValueError("headers and token are for a url; a command takes env")
        if self.url is not None and self.env:
            raise ValueError("env is for a command; a url takes headers and token")
        return self


class McpSettings(SettingsTable):
    """`[mcp]`: the servers, by their names. approval: which calls a client has to approve; `request` leaves
    that to each request."""

    approval: Policy = "request"
    servers: dict[Annotated[str, AfterValidator(_name)], ServerSettings] = Field(default_factory=dict)


def read_mcp_settings(table: Any, env: Mapping[str, str]) -> McpSettings:
    """The table as it stands in the file. Raises ValueError, which names the place."""
    return read_table(McpSettings, "mcp", table, env)
