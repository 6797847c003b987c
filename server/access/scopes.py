"""What a key may do: its scopes, how they are written, and which of them a request needs.

A scope is one word: `all`, `all.read` or `admin`; a group of endpoints (`responses`), or one half of it
(`responses.read`, `responses.write`); `model:NAME` or `tool:NAME`, where the name may be a pattern with `*`.
A key that names no model may use every model, and likewise with tools. What no scope allows is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import urlsplit

from server.errors import ApiError
from server.items import ITEM_TYPES

ALL, ALL_READ, ADMIN = "all", "all.read", "admin"

ADMIN_READS = "usage.read"
"""Allowed by `admin` too: it is under `/v1/organization`."""

LOAD = "models.read or metrics.read"
"""Either is enough to see how busy the server is: a balancer may have a key that calls, a monitor one of its
own."""

OPEN = "open"
"""Declared by a route that needs no key."""

OPERATOR_ONLY = "operator"
"""Declared by a route that is for whoever holds the admin token of the data folder; no key can have it."""

GROUPS: Mapping[str, tuple[str, str]] = {
    "responses": (
        "retrieve, list and follow responses, list their input, count tokens",
        "create, cancel and delete responses, give the outputs of tools",
    ),
    "conversations": (
        "retrieve conversations and their items",
        "create, change and delete conversations and their items",
    ),
    "chat": (
        "retrieve and list stored chat completions",
        "make chat completions and text completions; change and delete stored ones",
    ),
    "models": ("list the models that the key may use; tokenize and detokenize", ""),
    "files": ("list and download files", "upload and delete files"),
    "vector_stores": ("list and search vector stores", "create, change and delete vector stores"),
    "containers": ("list containers and download their files", "create and delete containers"),
    "embeddings": ("", "embed, rerank, score and classify texts"),
    "audio": ("", "transcribe and translate sound"),
    "batches": ("retrieve and list batches", "create and cancel batches"),
    "prompts": ("retrieve and list prompt templates", "create, change and delete prompt templates"),
    "usage": ("see what the key's owner has used", ""),
    "metrics": ("read `/metrics`, where it needs a key at all, and `/load`", ""),
}
"""Group of endpoints -> what reading and writing mean there; empty where there is nothing of the kind."""

HALVES = tuple(
    f"{group}.{half}"
    for group, meanings in GROUPS.items()
    for half, meaning in zip(("read", "write"), meanings, strict=True)
    if meaning
)
"""Every half of a group in which there is something: the others would allow nothing, and no key gets one."""

MAX_SCOPES = 64
MAX_SCOPE = 128

_OFFICIAL = {"api.all": ALL, "api.all.read": ALL_READ}
"""How the official API writes them."""

_NAMED = re.compile(r"(model|tool):([!-+\--~]+)")  # printable, no space and no comma


@dataclass(frozen=True, slots=True)
class Scopes:
    """The scopes of a key. One that nothing here knows allows nothing."""

    names: tuple[str, ...]
    _words: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_words", frozenset(self.names))

    def allow(self, scope: str) -> bool:
        """Whether they allow what needs this one: `model:NAME`, `tool:NAME`, `GROUP.read`, `GROUP.write`,
        `admin`, or several of the last three with ` or ` between them, of which one is enough."""
        kind, colon, name = scope.partition(":")
        if colon:  # the name is a client's, and may have any words in it
            patterns = [given.partition(":")[2] for given in self.names if given.startswith(f"{kind}:")]
            # `tool:mcp` is every server, but `tool:mcp:builtin` not every `tool:mcp:builtin:NAME`.
            names = (name, name.partition(":")[0]) if kind == "tool" else (name,)
            return not patterns or any(fnmatchcase(each, pattern) for each in names for pattern in patterns)
        if " or " in scope:
            return any(map(self.allow, scope.split(" or ")))
        if scope in self._words or (scope == ADMIN_READS and ADMIN in self._words):
            return True
        group, dot, half = scope.partition(".")
        if not dot:
            return False
        return group in self._words or ALL in self._words or (half == "read" and ALL_READ in self._words)

    def require(self, *scopes: str) -> None:
        """ApiError 403 `insufficient_permissions` that names those of these scopes that are missing."""
        missing = [scope for scope in scopes if not self.allow(scope)]
        if missing:
            raise ApiError(
                403,
                "You have insufficient permissions for this operation. "
                f"Missing scopes: {', '.join(missing)}.",
                code="insufficient_permissions",
            )


def read_scopes(names: Sequence[str]) -> tuple[str, ...]:
    """Scopes as somebody wrote them, checked, each once; none at all means `all`.

    ValueError, with a message for whoever wrote them, for what is no scope, and for models or tools without
    an endpoint that they could be used at.
    """
    if len(names) > MAX_SCOPES:
        raise ValueError(f"a key has at most {MAX_SCOPES} scopes")
    found = tuple(dict.fromkeys(_read(name) for name in names)) or (ALL,)
    if all(":" in name for name in found):
        raise ValueError(
            f"{', '.join(found)}: no endpoint is named; add 'all', or groups such as 'responses'"
        )
    return found


def _read(name: str) -> str:
    name = _OFFICIAL.get(name, name)
    if len(name) > MAX_SCOPE:
        raise ValueError(f"a scope has at most {MAX_SCOPE} characters")
    if named := _NAMED.fullmatch(name):
        kind, value = named.groups()
        return f"tool:{_canonical(value)}" if kind == "tool" else name
    if name not in (ALL, ALL_READ, ADMIN, *GROUPS) and name not in HALVES:
        raise ValueError(
            f"there is no scope {name!r}: scopes are 'all', 'all.read', 'admin', 'model:NAME', 'tool:NAME', "
            f"groups of endpoints ({', '.join(GROUPS)}), and halves of them ({', '.join(HALVES)})"
        )
    return name


def tool_scope(tool: Mapping[str, Any]) -> str:
    """The scope that a tool of a request needs: `tool:TYPE`, and of an MCP server `tool:mcp:SERVER`.

    SERVER is the host of its `server_url` (`builtin` for this server's own tools, `builtin:NAME` for a server
    that the operator has configured), its connector's or tunnel's id, or, where the request names none of
    them, its label. The label alone would say nothing: each client chooses it.
    """
    if tool["type"] != "mcp":
        return f"tool:{_canonical(tool['type'])}"
    url = tool.get("server_url")
    if url:
        parts = urlsplit(url)
        place = parts.hostname or (f"{parts.scheme}:{parts.path}" if parts.path else parts.scheme)
    else:
        place = tool.get("connector_id") or tool.get("tunnel_id") or tool.get("server_label") or ""
    return f"tool:mcp:{place}"


def _canonical(kind: str) -> str:
    """The first name of a tool's type, which may have several: `web_search` for `web_search_preview`."""
    row = next((row for row in ITEM_TYPES.values() if kind in row.tools), None)
    return kind if row is None else next(iter(row.tools))
