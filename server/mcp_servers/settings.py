"""The operator's MCP servers: the table `[mcp]` of `antiphon.toml`.

A value that is a secret is not written into the file but comes from a variable of the environment or from a
file of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from server.mcp_servers.approvals import Policy

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
        raise ValueError(f"{value!r} is no address: give http://HOST/PATH or https://HOST/PATH")
    return value


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ServerSettings(_Table):
    """One server, its secrets read. connector: the `connector_id` that stands for it as well. owners: who may
    use it; None is everybody. token: sent as `Authorization: Bearer`. trust, idempotent: see `McpServer`."""

    url: Annotated[str, AfterValidator(_url)] | None = None
    command: tuple[str, ...] = ()
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    token: str | None = Field(None, repr=False)
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


class McpSettings(_Table):
    """`[mcp]`: the servers, by their names. approval: which calls a client has to approve; `request` leaves
    that to each request."""

    approval: Policy = "request"
    servers: dict[Annotated[str, AfterValidator(_name)], ServerSettings] = Field(default_factory=dict)


def read_mcp_settings(table: Any, env: Mapping[str, str]) -> McpSettings:
    """The table as it stands in the file, with `{ env = "NAME" }` and `{ file = "PATH" }` in place of a text
    replaced by what is there. Raises ValueError, which names the place."""
    try:
        return McpSettings.model_validate(resolved(table, env, "mcp"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(["mcp", *map(str, first["loc"])])
        raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None


def resolved(value: Any, env: Mapping[str, str], path: str) -> Any:
    """A value of the file with what its secrets refer to. path: where it stands, for the ValueError."""
    if isinstance(value, dict) and value.keys() in ({"env"}, {"file"}) and _is_text(value):
        ((kind, name),) = value.items()
        if kind == "env":
            if name not in env:
                raise ValueError(f"{path}: there is no variable {name!r} in the environment")
            return env[name]
        try:
            return Path(name).expanduser().read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
    if isinstance(value, dict):
        return {key: resolved(part, env, f"{path}.{key}") for key, part in value.items()}
    return value


def _is_text(value: Mapping[str, Any]) -> bool:
    return all(isinstance(part, str) for part in value.values())
