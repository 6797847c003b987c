"""What is known of an MCP server before anything is sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
