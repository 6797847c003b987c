"""The operator's search provider: the table `[web]` of `antiphon.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from server.settings_table import SettingsTable, read_table
from tools import PROVIDERS, WebSearch


class WebSettings(SettingsTable):
    """`[web]`, its secrets read.

    provider: one of `tools.PROVIDERS`; None: there is no web search. url: where it answers, where that is not
    the same for everybody. open: whether the model may open only URLs that were seen before, or any.
    """

    provider: str | None = None
    url: str | None = None
    api_key: str | None = Field(None, repr=False)
    open: Literal["seen", "any"] = "seen"

    @field_validator("provider")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in PROVIDERS:
            raise ValueError(f"{value!r} is no provider; there are: {', '.join(PROVIDERS)}")
        return value

    @field_validator("url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no address: give http://HOST or https://HOST")
        return value

    @model_validator(mode="after")
    def _whole(self) -> WebSettings:
        if self.provider is None:
            if self.url is not None or self.api_key is not None:
                raise ValueError("a url and an api_key are those of a provider: give provider, too")
            return self
        row = PROVIDERS[self.provider]
        if row.url is None and self.url is None:
            raise ValueError(
                f"{self.provider} answers where you run it: give url, such as http://127.0.0.1:8080"
            )
        if row.needs_key and not self.api_key:
            raise ValueError(f'{self.provider} needs a key: give api_key, such as {{ env = "SEARCH_KEY" }}')
        return self

    @property
    def search(self) -> WebSearch | None:
        """The provider, where there is one."""
        return None if self.provider is None else WebSearch(self.provider, self.url, self.api_key)


def read_web_settings(table: Any, env: Mapping[str, str]) -> WebSettings:
    """The table as it stands in the file. Raises ValueError, which names the place."""
    return read_table(WebSettings, "web", table, env)
