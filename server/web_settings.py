"""The operator's search provider: the table `[web]` of `antiphon.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from server.mcp_servers import McpSettings, server_of
from server.settings import Address, HeaderText, SettingsTable, read_table
from tools import PROVIDERS, McpSearch, WebSearch, read_name


class WebSettings(SettingsTable):
    """`[web]`, its secrets read.

    provider: one of `tools.PROVIDERS`, or `mcp:NAME/TOOL`, a tool of an MCP server of the operator's; None:
    there is no web search. url: where it answers, where that is not the same for everybody. open: whether the
    model may open only URLs that were seen before, or any.
    """

    provider: str | None = None
    url: Address | None = None
    api_key: HeaderText | None = Field(None, repr=False)
    open: Literal["seen", "any"] = "seen"

    @field_validator("provider")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in PROVIDERS and read_name(value) is None:
            raise ValueError(f"{value!r} is no provider; there are: {', '.join(PROVIDERS)}, mcp:NAME/TOOL")
        return value

    @model_validator(mode="after")
    def _whole(self) -> WebSettings:
        if self.provider is None:
            if self.url is not None or self.api_key is not None:
                raise ValueError("a url and an api_key are those of a provider: give provider, too")
            return self
        if self.provider not in PROVIDERS:
            if self.url is not None or self.api_key is not None:
                raise ValueError("an MCP server has its address and its keys in its table [mcp.servers.NAME]")
            return self
        row = PROVIDERS[self.provider]
        if row.url is None and self.url is None:
            raise ValueError(
                f"{self.provider} answers where you run it: give url, such as http://127.0.0.1:8080"
            )
        if row.needs_key and not self.api_key:
            raise ValueError(f'{self.provider} needs a key: give api_key, such as {{ env = "SEARCH_KEY" }}')
        return self

    def search(self, mcp: McpSettings) -> WebSearch | McpSearch | None:
        """The provider, where there is one. mcp: the operator's MCP servers. Raises ValueError for a server
        that is none of these."""
        if self.provider is None:
            return None
        if (named := read_name(self.provider)) is None:
            return WebSearch(self.provider, self.url, self.api_key)
        name, tool = named
        if name not in mcp.servers:
            message = f"web.provider: there is no MCP server {name!r}: give it a table [mcp.servers.{name}]"
            raise ValueError(message)
        return McpSearch(self.provider, server_of(name, mcp.servers[name]), tool)


def read_web_settings(table: Any, env: Mapping[str, str]) -> WebSettings:
    """The table as it stands in the file. Raises ValueError, which names the place."""
    return read_table(WebSettings, "web", table, env)
