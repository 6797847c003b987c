"""What is known of an MCP server before anything is sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class McpServer:
    """Where an MCP server is, and how far it is trusted.

    name: for messages and logs. Exactly one of `url` (http or https, perhaps with a credential in its query)
    and `command` (a program and its arguments) is given. headers: of every HTTP request, credentials among
    them. env: variables of the program. guarded: a request named the address, so connections may only lead
    where the operator allows. trusted: what the server says of its tools counts, such as that one may run
    twice. idempotent: the names of tools that may run twice whatever the server says.
    """

    name: str
    url: str | None = field(default=None, repr=False)
    command: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    guarded: bool = True
    trusted: bool = False
    idempotent: frozenset[str] = frozenset()

    @property
    def told_place(self) -> str:
        """Where a client is told that the server is, in brackets: the address that it gave, without what may
        be a credential, and nothing of the operator's."""
        if self.url is None or not self.guarded:
            return ""
        parts = urlsplit(self.url)
        return f" ({parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path})"
