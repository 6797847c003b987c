"""Decides which calls of MCP tools a client has to approve before they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

BUILTIN_URL = "builtin:"
"""The `server_url` of this server's own tools; a server of the operator's is `builtin:NAME`."""

Policy = Literal["request", "always", "never"]


@dataclass(frozen=True, slots=True)
class Approvals:
    """What decides besides a request's own `require_approval`. It is pinned in a run's plan, so that a run
    that goes on after a restart asks for the same approvals.

    policy: the operator's; `request` leaves the choice to requests. trusted: the labels of those servers
    whose hints about their own tools the operator believes.
    """

    policy: Policy = "request"
    trusted: tuple[str, ...] = ()

    def ask(self, tool: Mapping[str, Any], name: str, annotations: Mapping[str, Any] | None = None) -> bool:
        """Whether calls of one function need approval.

        tool: of the request, as it was normalised. name, annotations: what the server says of the function.
        """
        if self.policy != "request":
            return self.policy == "always"
        wanted = _wanted(tool)
        if isinstance(wanted, str):
            return wanted == "always"
        hint: bool | None = None  # nobody can say whether the function only reads
        if tool["server_label"] in self.trusted:
            hint = (annotations or {}).get("readOnlyHint") is True
        # A doubt is decided for asking, and so is what neither filter names.
        always, never = wanted.get("always"), wanted.get("never")
        if always is not None and _fits(always, name, hint, doubt=True):
            return True
        return never is None or not _fits(never, name, hint, doubt=False)

    def why(self, tool: Mapping[str, Any]) -> str | None:
        """Why calls of a tool of a request may need approval, and what would change that, as sentences; None
        where none of them can."""
        if self.policy == "always":
            return "The operator of this server has every call of an MCP tool approved."
        if self.policy == "never" or _wanted(tool) == "never":
            return None
        return "Set 'require_approval' to 'never', and name the tools that may be called in 'allowed_tools'."


def _wanted(tool: Mapping[str, Any]) -> Any:
    """What a tool of a request says of approvals, or means by saying nothing."""
    return tool.get("require_approval", "never" if tool.get("server_url") == BUILTIN_URL else "always")


def _fits(wanted: Mapping[str, Any], name: str, hint: bool | None, *, doubt: bool) -> bool:
    """Whether a filter names a function. doubt: the answer where that depends on a hint nobody believes."""
    names, reads = wanted.get("tool_names"), wanted.get("read_only")
    if names is not None and name not in names:
        return False
    if reads is None:
        return True
    return doubt if hint is None else reads == hint
