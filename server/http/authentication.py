"""Admits requests by their API key and notes which owner each belongs to.

Routes under `/admin/` need the admin token instead. Health, version and documentation paths need no key, and
neither does `/metrics` on a server that listens on loopback only.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api_keys import unauthorized

if TYPE_CHECKING:
    from server.http.state import ServerState


OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/openapi.json", "/docs"})
METRICS_PATH = "/metrics"
ADMIN_PATHS = "/admin/"


def presented_key(headers: Headers) -> str | None:
    """The key of a request: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key")


class Admission:
    """ASGI: lets a request or a WebSocket in when the server serves and its key is good; leaves
    `request.state.owner` behind."""

    def __init__(self, app: ASGIApp, life: ServerState) -> None:
        self._app = app
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit or raise ApiError (401, 503)."""
        if scope["type"] != "lifespan" and not self._is_open(scope):
            # A WebSocket is there to begin work, as a POST is.
            self._life.admit(scope.get("method", "POST"), scope["path"])
            key = presented_key(Headers(scope=scope))
            if scope["path"].startswith(ADMIN_PATHS):
                if not hmac.compare_digest((key or "").encode(), self._life.admin_token.encode()):
                    raise unauthorized(
                        "This route needs the admin token that the server left in its data folder."
                    )
            else:
                scope.setdefault("state", {})["owner"] = await self._life.keys.owner(key)
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["type"] == "http" and (
            path in OPEN_PATHS or (path == METRICS_PATH and self._life.config.loopback)
        )
