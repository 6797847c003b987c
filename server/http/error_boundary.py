"""The rim of the application: what every reply carries, and where exceptions become replies.

Owns the request id, the standard headers, and the one place where an exception before the headers is caught
(the other is `server.http.sse`, after them). Refuses to know routes and what any error means
(`server.errors`). Pure ASGI: nothing here buffers or adds a task.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import EngineDead
from server import __version__
from server.errors import ApiError, to_api_error
from server.http.sse import StreamCut

if TYPE_CHECKING:
    from server.http.state import ServerState

log = logging.getLogger("antiphon")
access = logging.getLogger("antiphon.access")

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
PROBES = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds, so logged only for debugging
MAX_ECHO = 512
MAX_LOGGED = 512
CLIENT_LEFT = 499  # nginx's number for a request whose client did not wait; it is counted, never sent


class Envelope:
    """ASGI, outermost: gives each request an id and a clock, each reply its headers, and counts both."""

    def __init__(self, app: ASGIApp, life: ServerState) -> None:
        self._app = app
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Headers: x-request-id, x-client-request-id (echo), openai-processing-ms, x-antiphon-version."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_LEFT
        echo = Headers(scope=scope).get("x-client-request-id", "")

        async def with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ms = int((time.perf_counter() - began) * 1000)
                headers = list(message.get("headers", ()))
                headers += (
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", b"%d" % ms),
                    (b"x-antiphon-version", __version__.encode()),
                )
                if echo.isascii() and echo.isprintable() and 0 < len(echo) <= MAX_ECHO:
                    headers.append((b"x-client-request-id", echo.encode()))
                message = {**message, "headers": headers}
            await send(message)

        telemetry = self._life.telemetry
        telemetry.request_started()
        try:
            with self._life.at_work(scope["method"]):
                await self._app(scope, receive, with_headers)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "unmatched")
            telemetry.request_ended(route, scope["method"], status, seconds)
            level = logging.DEBUG if route in PROBES else logging.INFO
            access.log(
                level,
                "%s %s %d %.0f ms %s",
                scope["method"],
                _logged(scope),
                status,
                seconds * 1000,
                request_id,
            )


class Boundary:
    """ASGI: turns exceptions into replies, or, once headers are out, into a dropped connection."""

    def __init__(self, app: ASGIApp, life: ServerState) -> None:
        self._app = app
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing but the cancellation of a server that goes on passes this point."""
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # The process is ending and its server cancels what is left: whoever still listens is told so.
            if self._life.phase not in ("draining", "dead"):
                raise
            if not started:
                await self._life.refusal().response()(scope, receive, send)
        except Exception as exc:
            if isinstance(exc, StreamCut | EngineDead) and started:
                return
            error = _routing_error(exc, scope) or to_api_error(exc)
            if error.status == 500:
                log.error("%s %s", scope["method"], _logged(scope), exc_info=exc, extra=scope["state"])
                error.message += f" (request id {scope['state']['request_id']})"
            if not started:
                await error.response()(scope, receive, send)


def _logged(scope: Scope) -> str:
    """The path as it came: it has no spaces, so that the rest of a line cannot be forged by it."""
    path: str = scope.get("raw_path", b"").decode("latin-1") or quote(scope["path"])
    return path if len(path) <= MAX_LOGGED else path[:MAX_LOGGED] + "..."


def _routing_error(exc: Exception, scope: Scope) -> ApiError | None:
    """The router's own two errors, in our shape."""
    if not isinstance(exc, HTTPException):
        return None
    method, path = scope["method"], scope["path"]
    if exc.status_code == 404:
        return ApiError(404, f"Invalid URL ({method} {path})", code="unknown_url")
    if exc.status_code == 405:
        allow = ", ".join(allowed_methods(scope["app"].routes, scope))
        message = f"Not allowed to {method} on {path} (allowed: {allow})."
        return ApiError(405, message, code="method_not_allowed", headers={"allow": allow})
    return None


def allowed_methods(routes: list[BaseRoute], scope: Scope) -> list[str]:
    """The methods under which some route would have matched this path."""
    return [
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
