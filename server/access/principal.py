"""Who makes a request: one value that goes with it from the door to whatever it starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.access.scopes import ADMIN, ALL, OPERATOR_ONLY, Scopes, tool_scope
from server.access.tiers import EVERY_TIER, Service
from server.items import is_offered
from server.limits import NONE, LimitSet, ServedTier, Subject

OWNER_PREFIX = "own_"
"""What the ids of owners begin with that nobody has named."""
LOCAL_OWNER = "local"
"""The owner of everything on a server that needs no keys."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a request, and what they may do.

    owner: whose rows the request may see; the API calls an owner a project. key_id: of the key that it came
    with, None without one. A run's plan keeps both, so that they are known after a crash as well. scopes:
    what the key may do. key_limits, owner_limits: what the key, and all keys of the owner together, may
    use, as it was at most `FRESH_S` seconds ago. tiers: those of service that may be used where no limits
    say which. batch: the request is one of a batch.
    """

    owner: str
    key_id: str | None
    scopes: Scopes
    key_limits: LimitSet = NONE
    owner_limits: LimitSet = NONE
    tiers: tuple[ServedTier, ...] = EVERY_TIER
    batch: bool = False

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """Whose limits concern the request; the owner last."""
        owner = Subject("owner", self.owner, self.owner_limits)
        return (owner,) if self.key_id is None else (Subject("key", self.key_id, self.key_limits), owner)

    @property
    def service(self) -> Service:
        """How the request may be served."""
        return Service.of(self.key_limits, self.owner_limits, self.tiers, keyed=self.key_id is not None)

    def require(self, *scopes: str) -> None:
        """ApiError 403 `insufficient_permissions` that names those of these scopes that are missing."""
        self.scopes.require(*scopes)


def require_use(principal: Principal, model: str, tools: Iterable[Mapping[str, Any]] = ()) -> None:
    """ApiError 403 `insufficient_permissions` unless a principal may use a model, by the name that it is
    served under, and those of a request's tools that are offered to it; others are only echoed."""
    offered = dict.fromkeys(tool_scope(tool) for tool in tools if is_offered(tool))
    principal.require(f"model:{model}", *offered)


LOCAL = Principal(LOCAL_OWNER, None, Scopes((ALL,)))
"""Everybody, on a server that needs no keys."""

THE_OPERATOR = Principal("operator", None, Scopes((OPERATOR_ONLY, ADMIN)))
"""Whoever holds the admin token that the server left in its data folder."""
