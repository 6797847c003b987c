"""Admits requests by their API key, and only to what the key's scopes allow.

Every route declares the scope that it needs (`server.routes.documented`); it is looked up here, before the
request's body is read. Routes under `/admin/` need the admin token instead of a key, and those
under `/v1/organization/` take it too. A WebSocket may come with a ticket in place of a key. Health, version
and documentation paths need no key, and neither does `/metrics` for clients on this machine, of a server that
listens on loopback only.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access import ADMIN, ADMIN_READS, THE_OPERATOR, EndedKey, Principal, unauthorized
from server.http.proxies import ThisMachine
from server.http.request import actor
from server.http.websocket import offered_ticket, redeem
from server.limits import Standing
from server.threads import LoopTurns

if TYPE_CHECKING:
    from server.http.state import ServerState


OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/openapi.json", "/docs", "/"})
CONSOLE_PATHS = "/console/"
"""Below it lie the files of the console, which anybody may have."""

METRICS_PATH = "/metrics"
ADMIN_PATHS = "/admin/"
ORGANIZATION_PATHS = "/v1/organization/"

BEGUN_AT_ONCE = 8
"""POSTs that begin in one turn of the event loop, each of which takes it one to four milliseconds. With a
lower number, fewer of them are stored by one transaction. [measured] a probe that comes behind 64 streams is
answered within 0.12 s, and not after all have begun, which takes 0.3 s."""

INSIDE = "antiphon.principal"
"""In the ASGI scope of a request that the server makes of itself, for a batch: whom it makes it for."""

SCOPE = "x-antiphon-scope"
"""Under this name a route's entry in the OpenAPI document says which scope it needs."""


def presented_key(headers: Headers) -> str | None:
    """The key of a request: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key")


class Admission:
    """ASGI: lets a request or a WebSocket in when the server serves and its key is good for the route;
    leaves `request.state.principal`, the `standing` of its limits, and the pattern of its `route` behind."""

    def __init__(self, app: ASGIApp, life: ServerState, routes: Sequence[BaseRoute]) -> None:
        """routes: all that the application has, in the order in which it asks them."""
        self._app = app
        self._life = life
        self._here = ThisMachine(life.config.trusted_proxy)
        self._turns = LoopTurns(BEGUN_AT_ONCE)
        self._plain: dict[tuple[str, str], str] = {}
        self._patterns: dict[str, list[tuple[re.Pattern[str], str, str]]] = {}
        # A WebSocket needs what a POST to its path needs. One at a path without any is for nobody.
        for route in sorted(routes, key=lambda route: not isinstance(route, Route)):
            assert isinstance(route, Route | WebSocketRoute), f"{route} cannot say which scope it needs"
            for method in getattr(route, "methods", None) or ("POST",):
                if "{" in route.path:
                    found = self._patterns.setdefault(method, [])
                    found.append((route.path_regex, route.path, declared_scope(route)))
                else:
                    self._plain.setdefault((method, route.path), declared_scope(route))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit or raise ApiError (401, 403, 503)."""
        if scope["type"] != "lifespan" and not self._is_open(scope):
            state = scope.setdefault("state", {})
            pattern, needed = self._found(scope)
            if pattern is not None:
                state["route"] = pattern
            # A WebSocket is there to begin work, as a POST is.
            self._life.admit(scope.get("method", "POST"), scope["path"])
            try:
                principal = await self._principal(scope)
            except EndedKey as error:
                state["refused"] = error.principal  # for the log: nothing is let in by it
                raise
            state["principal"] = principal
            if self._life.context is not None:
                state["standing"] = Standing(self._life.context.limiter, principal.subjects)
            if needed is not None:
                principal.require(needed)
                if needed in (ADMIN, ADMIN_READS):
                    await self._note_read(scope, principal)
            if scope.get("method") == "POST":
                await self._turns.take()
        await self._app(scope, receive, send)

    async def _note_read(self, scope: Scope, principal: Principal) -> None:
        """Have the audit log tell that an administrator reads; changes tell of themselves. Whoever has the
        admin token could read the database itself."""
        reads = scope.get("method") in ("GET", "HEAD")
        if reads and principal is not THE_OPERATOR and principal.scopes.allow(ADMIN):
            assert self._life.context is not None
            await self._life.accesses.note(self._life.context.storage, actor(Request(scope)), scope["path"])

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["type"] == "http" and (
            path in OPEN_PATHS
            or path.startswith(CONSOLE_PATHS)
            or (path == METRICS_PATH and self._life.config.loopback and self._here.has_client(scope))
        )

    async def _principal(self, scope: Scope) -> Principal:
        inside: Principal | None = scope.get(INSIDE)
        if inside is not None:
            return inside
        key = presented_key(Headers(scope=scope))
        path = scope["path"]
        if path.startswith((ADMIN_PATHS, ORGANIZATION_PATHS)) and hmac.compare_digest(
            (key or "").encode(), self._life.admin_token.encode()
        ):
            return THE_OPERATOR
        if path.startswith(ADMIN_PATHS):
            raise unauthorized("This route needs the admin token that the server left in its data folder.")
        context = self._life.context
        if key is None and context is not None and (ticket := offered_ticket(scope.get("subprotocols", ()))):
            return await redeem(ticket, context.sealing, self._life.keys, context.storage)
        return await self._life.keys.principal(key)

    def _found(self, scope: Scope) -> tuple[str, str] | tuple[None, None]:
        """The pattern of a request's route and the scope that it needs; None where no route takes it, which
        the router will say."""
        method, path = scope.get("method", "POST"), scope["path"]  # a WebSocket begins what a POST does
        if (needed := self._plain.get((method, path))) is not None:
            return path, needed
        patterns = self._patterns.get(method, ())
        return next(((route, needed) for regex, route, needed in patterns if regex.match(path)), (None, None))


def declared_scope(route: BaseRoute) -> str:
    """The scope that a route declares; one that declares none is for nobody."""
    extra = getattr(route, "openapi_extra", None) or {}
    return str(extra.get(SCOPE, "undeclared"))
