"""Adds standard headers to every reply, logs and counts requests, and turns exceptions into error replies.

`Envelope` is the outermost middleware and gives each request its id. `Boundary` catches exceptions: before
the headers are out it answers with an error, afterwards it drops the connection, and an open WebSocket is
closed with a code. `NameIgnored`, innermost, names what a route made nothing of. They are plain ASGI
middlewares, so they neither buffer a reply nor add a task to a request.
"""

from __future__ import annotations

import asyncio
import difflib
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from engine import EngineDead
from server import __version__, ignored
from server.errors import ApiError, names_of, to_api_error
from server.http.authentication import INSIDE
from server.http.refusal import tell
from server.http.sse import StreamCut
from server.telemetry import (
    LOAD_ASKED,
    LOAD_REPORT,
    RequestRecord,
    current,
    load_report,
    read_traceparent,
)
from storage import PATIENCE_S, StorageError, patience_s

if TYPE_CHECKING:
    from server.http.state import ServerState

log = logging.getLogger("antiphon")
access = logging.getLogger("antiphon.access")

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
PROBES = frozenset({"/health", "/ping", "/ready", "/load", "/metrics"})
"""Paths that are asked every few seconds: they are logged only for debugging, and have no spans."""
CONSOLE = frozenset({"/", "/console/{path:path}"})
"""Routes of the console's page and its files."""
MAX_ECHO = 512
MAX_REQUEST_ID = 128
MAX_LOGGED = 512
REQUEST_PATIENCE_S = 1.0
"""How long a request waits for a database that is away: its client can ask again, and is told when."""
CLIENT_LEFT = 499  # nginx's number for a request whose client did not wait; it is counted, never sent

ECHOED = ("x-client-request-id", "x-request-trace")
"""Headers that a reply repeats as they came: a client's own names for its request."""

UNBUILT = {
    "/v1/audio/speech": (
        "this server does not make speech. It makes texts of recordings: POST "
        "/v1/audio/transcriptions and /v1/audio/translations."
    ),
    "/v1/messages/batches": (
        "batches of messages are part of Anthropic's API, and this server does not have them. POST "
        "/v1/batches takes files of requests."
    ),
}
"""Paths of official APIs beside those that are here, and what to do instead."""

UNBUILT_FAMILIES = frozenset(
    {
        "assistants",
        "audio",
        "chatkit",
        "containers",
        "evals",
        "fine_tuning",
        "images",
        "realtime",
        "skills",
        "threads",
        "videos",
    }
)
"""What stands behind /v1 in the paths of endpoints that clients know from other servers, and of which not all
are here."""

UNBUILT_ADMINISTRATION = re.compile(
    r"/v1/organization/(?:projects/[^/]+/)?("
    r"certificates|data_retention|groups|hosted_tool_permissions|invites|model_permissions|roles|spend_alerts|"
    r"spend_limits|users)(?:/|$)"
)
"""The same of what administrators ask, for the whole organization and for one project."""

_STATUS = {"websocket.accept": 101, "websocket.close": 403}
"""What the first message to a WebSocket's client comes to in HTTP, where the message does not say."""


class Envelope:
    """ASGI, outermost: gives each request an id and a clock, each reply its headers, and counts both. The
    reply to a WebSocket's request is the one that accepts or denies it."""

    def __init__(self, app: ASGIApp, life: ServerState) -> None:
        self._app = app
        self._life = life
        config = life.config
        self._defaults = {
            "openai-organization": config.default_openai_organization,
            "openai-version": config.default_openai_version,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Headers: x-request-id (the client's own, if it can be one), on the Messages API request-id, too,
        x-client-request-id and x-request-trace (echo), traceparent (of the request's span, or the client's
        own), openai-organization and openai-version (echo or default), openai-processing-ms,
        x-antiphon-version; x-ratelimit-* where the key or its owner has such limits; endpoint-load-metrics
        where it is asked for."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        asked = Headers(scope=scope)
        method = _method(scope)
        record = self._record(scope, asked, method)
        request_id = record.request_id
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def with_headers(message: Message) -> None:
            nonlocal status
            if not status:
                status = message["status"] if "status" in message else _STATUS[message["type"]]
                if message["type"] != "websocket.close":
                    given = message.get("headers", ())
                    replied = {name.decode("latin-1").lower() for name, _ in given}
                    message = {**message, "headers": [*given, *own_headers(replied)]}
            await send(message)

        def own_headers(replied: Collection[str]) -> Iterator[tuple[bytes, bytes]]:
            yield from names_of(request_id, scope)
            yield b"openai-processing-ms", b"%d" % ((time.perf_counter() - began) * 1000)
            yield b"x-antiphon-version", __version__.encode()
            if record.traceparent is not None:
                yield b"traceparent", record.traceparent.encode()
            if (standing := scope["state"].get("standing")) is not None:
                for name, value in standing.headers():
                    if name not in replied:
                        yield name.encode(), value.encode()
            if (load := self._load(asked, scope)) is not None:
                yield LOAD_REPORT.encode(), load.encode()
            for name in ECHOED:
                if _can_be_echoed(value := asked.get(name, "")):
                    yield name.encode(), value.encode()
            for name, default in self._defaults.items():
                value = asked.get(name, "")
                if shown := value if _can_be_echoed(value) else default:
                    yield name.encode(), shown.encode()

        self._life.telemetry.request_started()
        working_for = current.set(record)
        try:
            with self._life.at_work(method):
                await self._app(scope, receive, with_headers)
        finally:
            self._ended(scope, record, status or CLIENT_LEFT, time.perf_counter() - began)
            current.reset(working_for)

    def _load(self, asked: Headers, scope: Scope) -> str | None:
        """How busy the server is, for a balancer that asks for it and whose request was let in."""
        context = self._life.context
        if LOAD_ASKED not in asked or context is None or "principal" not in scope["state"]:
            return None
        load = context.models.at_work()
        return load_report(asked[LOAD_ASKED], kv_cache_usage=load.kv_cache_usage, num_waiting=load.waiting)

    def _record(self, scope: Scope, asked: Headers, method: str) -> RequestRecord:
        """A request's record, and its span where spans are made."""
        request_id = asked.get("x-request-id", "")
        if not _is_request_id(request_id):
            request_id = f"req_{uuid.uuid4().hex}"
        record = RequestRecord(request_id)
        if "traceparent" in asked:
            record.traceparent = read_traceparent(asked["traceparent"])
            if _can_be_echoed(state := asked.get("tracestate", "")):
                record.trace_state = state
        if _can_be_echoed(trace := asked.get("x-request-trace", "")):
            record.request_trace = trace
        tracing = self._life.telemetry.tracing
        if tracing is not None and scope["path"] not in PROBES:
            tracing.request(record, method, _logged(scope), _client(scope))
        return record

    def _ended(self, scope: Scope, record: RequestRecord, status: int, seconds: float) -> None:
        """Count a request whose reply is over, log it, and end its span."""
        telemetry = self._life.telemetry
        method, path = _method(scope), _logged(scope)
        route = getattr(scope.get("route"), "path", None) or scope["state"].get("route", "unmatched")
        telemetry.request_ended(route, method, status, seconds, record.error_code)
        if telemetry.tracing is not None and record.span is not None:
            telemetry.tracing.replied(record, method, route, status)
        quiet = route in PROBES or (status < 400 and _is_of_console(scope, method, route))
        level = logging.DEBUG if quiet else logging.INFO
        if not access.isEnabledFor(level):
            return
        principal, client = scope["state"].get("principal") or scope["state"].get("refused"), _client(scope)
        said = {
            "method": method,
            "path": path,
            "route": route,
            "status": status,
            "duration_ms": round(seconds * 1000, 3),
            "client": client,
            "owner": principal and principal.owner,
            "key_id": principal and principal.key_id,
            **record.fields(),
        }
        line = "%s %s %d %.0f ms %s %s"
        words: tuple[object, ...] = (method, path, status, seconds * 1000, record.request_id, client)
        refused = [] if record.error_code is None else [record.error_code, said["owner"], said["key_id"]]
        for each in filter(None, refused):  # why, and for whom: what an operator is asked
            line, words = f"{line} %s", (*words, each)
        access.log(level, line, *words, extra=said)


def _is_of_console(scope: Scope, method: str, route: str) -> bool:
    """Whether the console loads itself or looks for news, as it does every few seconds: a browser says of
    what it reads for a page of this server that it is of the same origin."""
    by_page = Headers(scope=scope).get("sec-fetch-site") == "same-origin"
    return method in ("GET", "HEAD") and (by_page or route in CONSOLE)


class Boundary:
    """ASGI: turns exceptions into replies, or, once headers are out, into a dropped connection. A WebSocket
    is denied with the reply, or, once it is open, closed with a code."""

    def __init__(self, app: ASGIApp, life: ServerState) -> None:
        self._app = app
        self._life = life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing but a cancellation passes this point, and none of a request from outside once the server
        ends."""
        started = accepted = closed = False

        async def noting(message: Message) -> None:
            nonlocal started, accepted, closed
            kind = message["type"]
            if not started:
                patience_s.set(PATIENCE_S)  # what is sent cannot be asked for again without loss
            started = True
            accepted = accepted or kind == "websocket.accept"
            closed = closed or kind == "websocket.close"
            try:
                await send(message)
            except OSError as gone:  # the way of ASGI to tell that nobody is there any more
                raise WebSocketDisconnect(1006) if kind.startswith("websocket.") else gone from gone

        async def answer(error: ApiError) -> None:
            if not started or (accepted and not closed):
                await tell(error, scope, receive, send, accepted=accepted)

        before = patience_s.set(REQUEST_PATIENCE_S)
        try:
            await self._app(scope, receive, noting)
        except (ClientDisconnect, WebSocketDisconnect):
            return
        except asyncio.CancelledError:
            # The process is ending and its server cancels what is left: whoever still listens is told so. A
            # request from inside is cancelled by the one who listens.
            if INSIDE in scope or self._life.phase not in ("draining", "dead"):
                raise
            await answer(self._life.refusal())
        except Exception as exc:
            if isinstance(exc, StreamCut | EngineDead) and started and not accepted:
                return
            # Under no name here: an exception that this frame held would hold this frame, and the request's
            # body would stay in memory until the garbage collector comes by.
            await answer(_error_of(exc, scope, cut=started and not accepted))
        finally:
            patience_s.reset(before)


class NameIgnored:
    """ASGI, next to the routes, so that a reply kept for repeats is kept with its header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect while the route reads its request, and name what was ignored in a header unless the reply
        is an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                query = scope["query_string"].decode("latin-1")
                named = [(name.encode(), value.encode()) for name, value in found.headers(query).items()]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        with ignored.collecting() as found:
            await self._app(scope, receive, naming)


def _error_of(exc: Exception, scope: Scope, *, cut: bool) -> ApiError:
    """What the client of a request is told of an exception. One that nobody expected is logged, and so is one
    that cuts a reply that has begun, of which nobody would hear otherwise."""
    error = _routing_error(exc, scope) or to_api_error(exc, param=_asker_of(exc, scope))
    if error.status == 500:
        log.error("%s %s", _method(scope), _logged(scope), exc_info=exc, extra=scope["state"])
        error.message += f" (request id {scope['state']['request_id']})"
    elif cut:
        log.warning("%s %s was cut: %s", _method(scope), _logged(scope), exc, extra=scope["state"])
    return error


def _is_request_id(value: str) -> bool:
    """Whether a client's id can stand in a header and in a log line as one word."""
    return 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable() and " " not in value


def _can_be_echoed(value: str) -> bool:
    return value.isascii() and value.isprintable() and 0 < len(value) <= MAX_ECHO


def _method(scope: Scope) -> str:
    """The method of a request; a WebSocket's has none that tells anything."""
    method: str = scope.get("method", "WEBSOCKET")
    return method


def _client(scope: Scope) -> str:
    """The client's address. A proxy may say anything about it, but only an address is repeated."""
    try:
        return str(ipaddress.ip_address((scope.get("client") or ("",))[0]))
    except ValueError:
        return "-"


def _logged(scope: Scope) -> str:
    """The path as it came: it has no spaces, so that the rest of a line cannot be forged by it."""
    path: str = scope.get("raw_path", b"").decode("latin-1") or quote(scope["path"])
    return path if len(path) <= MAX_LOGGED else path[:MAX_LOGGED] + "..."


def _routing_error(exc: Exception, scope: Scope) -> ApiError | None:
    """The router's own two errors, in our shape."""
    if not isinstance(exc, HTTPException):
        return None
    method, path = _method(scope), scope["path"]
    if exc.status_code == 404:
        near = _instead(path) or _near(scope)
        told = ": ".join(filter(None, (f"Invalid URL ({method} {path})", near)))
        return ApiError(404, told, code="unknown_url")
    if exc.status_code == 405:
        allow = ", ".join(allowed_methods(scope["app"].routes, scope))
        message = f"Not allowed to {method} on {path} (allowed: {allow})."
        return ApiError(405, message, code="method_not_allowed", headers={"allow": allow})
    return None


def _asker_of(exc: Exception, scope: Scope) -> str | None:
    """The parameter of a path or a query by which a request named what is not there, or cannot be changed any
    more: the one whose value is the id that storage's error names. None where it came in no such way."""
    if not isinstance(exc, StorageError) or (id := getattr(exc, "id", None)) is None:
        return None
    given = {**QueryParams(scope.get("query_string", b"")), **scope.get("path_params", {})}
    return next((name for name, value in given.items() if value == id), None)


def _instead(path: str) -> str | None:
    """What to do in the place of a route of an official API that is not here, or of one below it."""
    return next((told for unbuilt, told in UNBUILT.items() if f"{path}/".startswith(f"{unbuilt}/")), None)


def _near(scope: Scope) -> str:
    """What to tell of a path that is not here besides that; empty where nothing is known."""
    path: str = scope["path"]
    paths: Collection[str] = scope["app"].state.paths

    def matches(other: str) -> bool:
        return bool(allowed_methods(scope["app"].routes, {**scope, "path": other, "root_path": ""}))

    if path.strip("/") in ("", "v1"):
        told = "the endpoints are under /v1"
        return f"{told}, and the page /docs lists them." if matches("/docs") else f"{told}."
    family = path.removeprefix("/v1/").partition("/")[0]
    within = UNBUILT_ADMINISTRATION.match(path)
    under = path[: within.end(1)] if within is not None else f"/v1/{family}"
    is_unbuilt = within is not None or (path.startswith("/v1/") and family in UNBUILT_FAMILIES)
    is_partly_built = any(own == under or own.startswith(f"{under}/") for own in paths)
    if is_unbuilt and not is_partly_built:
        told = f"this server does not have the endpoints under {under}."
        return f"{told} Its page /docs lists those that it has." if matches("/docs") else told
    if scope["type"] == "websocket" and path in paths:
        return "a WebSocket is opened at /v1/responses, and this path is one for requests."
    moved = path.replace("/v3/", "/v1/", 1)  # as OpenVINO's model server has them
    joined = re.sub("/+", "/", path)  # a base URL that ends in a slash, and a path behind it
    for other in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/"), moved, joined):
        if other != path and matches(other):
            return f"did you mean {other}?"
    if (meant := _spelled_nearly(path, paths)) is not None:
        return f"did you mean {meant}?"
    if is_unbuilt:
        told = f"this server has other endpoints under {under}, but not this one."
        return f"{told} Its page /docs lists them." if matches("/docs") else told
    return ""


LONGEST_COMPARED = 200
"""Characters of a path that is compared with those of the routes."""


def _spelled_nearly(path: str, own_paths: Iterable[str]) -> str | None:
    """The path of a route whose words are nearly those of this path, with the ids of this path; None where
    there is none, and for a path that is too long to be compared: what that takes grows with its square."""
    if len(path) > LONGEST_COMPARED:
        return None
    asked = path.rstrip("/").split("/")
    near = []
    for own_path in own_paths:
        words = own_path.split("/")
        if len(words) == len(asked) and all(map(_is_near, asked, words)):
            pairs = zip(asked, words, strict=True)
            near.append("/".join(given if _is_parameter(word) else word for given, word in pairs))
    return next(iter(difflib.get_close_matches(path, near, n=1, cutoff=0)), None)


def _is_near(given: str, word: str) -> bool:
    """Whether a segment of a path may have been meant as this one of a route's."""
    if _is_parameter(word):
        return given != ""
    return given == word or bool(difflib.get_close_matches(given, [word], cutoff=0.75))


def _is_parameter(word: str) -> bool:
    return word.startswith("{")


def allowed_methods(routes: list[BaseRoute], scope: Scope) -> list[str]:
    """The methods under which some route would have matched this path."""
    return [
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
