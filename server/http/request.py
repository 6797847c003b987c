"""Gives routes the server's long-lived objects and a request's principal."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection, Request

from server.access import Actor, Principal
from server.errors import WHILE_LOADING, ApiError
from server.http.state import Context, ServerState
from server.limits import Standing, Subject


def life(request: HTTPConnection) -> ServerState:
    """The process's life: configuration, phase, telemetry; there from the first request on. request: or a
    WebSocket, here and in what follows."""
    found: ServerState = request.app.state.life
    return found


def context(request: HTTPConnection) -> Context:
    """The context; ApiError 503 `not_ready` before the server can serve."""
    found = life(request).context
    if found is None:
        raise ApiError(503, "The server is starting.", code="not_ready", headers=WHILE_LOADING)
    return found


def principal(request: HTTPConnection) -> Principal:
    """Who makes the request, and what they may do."""
    found: Principal = request.state.principal
    return found


def standing_of(request: HTTPConnection) -> Standing | None:
    """What is left to whoever makes a request; None where it has no limits."""
    found: Standing | None = getattr(request.state, "standing", None)
    return found


def limited(request: HTTPConnection, model: str) -> tuple[Subject, ...]:
    """Whose limits concern a request for a model; the headers of its reply tell of that model's, too."""
    standing = standing_of(request)
    if standing is not None:
        standing.model = model
    return principal(request).subjects


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request: the model that answered, the official usage object, None where the reply has
    none, and the error of a response that has failed."""

    model: str
    usage: Mapping[str, Any] | None
    failure: Mapping[str, Any] | None = None


def tell_outcome(request: HTTPConnection, outcome: Outcome) -> None:
    """Tell whoever carries a batch out what came of its request, so that nobody parses the reply for it."""
    request.state.outcome = outcome


async def require_stored_bytes(request: Request, num_bytes: int) -> None:
    """Count bytes that are about to be stored. ApiError 429 `insufficient_quota` where they are too many."""
    here, who = context(request), principal(request)
    await here.quota.require(who.owner, num_bytes, here.limiter.stored_bytes(who.subjects))


def owner(request: HTTPConnection) -> str:
    """Whose request this is: the owner that scopes every row it may see."""
    return principal(request).owner


def actor(request: HTTPConnection) -> Actor:
    """Who makes the request, as the audit log names them."""
    who = principal(request)
    try:
        ip = str(ipaddress.ip_address(request.client.host if request.client else ""))
    except ValueError:
        ip = None
    return Actor(who.key_id or who.owner, request.state.request_id, ip)
