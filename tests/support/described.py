"""Whether all that servers send in tests is what the OpenAPI document describes, to the last member.

The replies, the events of streams and the frames of WebSockets of every server in the process of the tests
are held to the document, in which an object has the members that are named there, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jsonschema_rs
from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import is_of_messages
from server.items import ITEM_TYPES
from server.routes import ROUTERS
from server.routes.reference import document
from server.schema import components

Json = dict[str, Any]

ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]

SOCKETS = frozenset(
    route.path for router in ROUTERS for route in router.routes if isinstance(route, APIWebSocketRoute)
)
"""The paths of WebSockets, all of which speak of responses."""


@contextmanager
def described(app: FastAPI) -> Iterator[None]:
    """Held while an application serves: AssertionError at the end where it sent what is not described."""
    faults: list[str] = []
    app.add_middleware(Watch, app=app, faults=faults)
    yield
    assert not faults, "\n".join(faults)


@cache
def paths() -> Json:
    """The operations of all routes, by path and method."""
    app = FastAPI(title="Antiphon")
    for router in ROUTERS:
        app.include_router(router)
    found: Json = document(app)["paths"]
    return found


def closed(schema: Any) -> Any:
    """A schema whose objects have no members but those that it names, where it names any."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in ("const", "enum") else closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        made.setdefault("additionalProperties", False)
    return made


@cache
def validator(name: str, item_types: frozenset[str]) -> Any:
    """What holds a value to the schema of this name. item_types: those that there are, to which tests add."""
    return jsonschema_rs.validator_for(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas(item_types)}}
    )


@cache
def schemas(_item_types: frozenset[str]) -> Json:
    """The schemas of the document, closed."""
    return {name: closed(schema) for name, schema in components.__wrapped__().items()}


def problem(value: Any, name: str) -> str | None:
    """Why a value does not fit the schema of this name; None where it does."""
    check = validator(name, frozenset(ITEM_TYPES))
    if check.is_valid(value):
        return None
    error = _innermost(next(iter(check.iter_errors(value))))
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.instance_path)
    return f"no {name} at {place or 'its top'}: {error.message[:300]}"


def _innermost(error: Any) -> Any:
    """The error of the alternative that a value is meant to be, by its `type`, where it fits none of
    several."""
    branches = error.kind.as_dict().get("context")
    if not branches:
        return error
    meant = [branch for branch in branches if not any(each.instance_path[-1:] == ["type"] for each in branch)]
    return max(
        (_innermost(branch[0]) for branch in meant or branches), key=lambda each: len(each.instance_path)
    )


class Watch:
    """A middleware that looks at what an application sends. faults: what was wrong, one line each."""

    def __init__(self, inner: ASGIApp, *, app: FastAPI, faults: list[str]) -> None:
        self._inner, self._app, self._faults = inner, app, faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, and look at what it sends."""
        if scope["type"] not in ("http", "websocket"):
            await self._inner(scope, receive, send)
            return
        seen = _Reply(self._app, scope)

        async def watch(message: Message) -> None:
            self._faults += seen.take(message)
            await send(message)

        await self._inner(scope, receive, watch)


def _operation(scope: Scope) -> Json | None:
    """What the document says of the route that a request has; None where it does not show it."""
    for route in ROUTES:
        if route.matches(scope)[0] is Match.FULL:
            found: Json | None = paths().get(route.path_format, {}).get(scope["method"].lower())
            return found
    return None


class _Reply:
    """A reply while it is sent, or the frames of a WebSocket."""

    def __init__(self, app: FastAPI, scope: Scope) -> None:
        self._app, self._scope = app, scope
        self._status, self._media_type = 0, ""
        self._name: str | None = None
        self._body = b""

    def take(self, message: Message) -> Iterator[str]:
        """What is wrong with a message of the application."""
        match message["type"].removeprefix("websocket."):
            case "http.response.start":
                self._status = message["status"]
                self._media_type = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
                self._name = self._described_as()
            case "http.response.body" if self._name is not None:  # others may be large
                self._body += message.get("body", b"")
                yield from self._look(self._name, over=not message.get("more_body"))
            case "send" if self._scope["path"] in SOCKETS:
                yield from self._fault(json.loads(message["text"]), "SocketEvent")

    def _look(self, name: str, *, over: bool) -> Iterator[str]:
        if self._media_type == "text/event-stream":
            *frames, self._body = self._body.split(b"\n\n")
            for line in (line for each in frames for line in each.splitlines()):
                data = line.removeprefix(b"data: ")
                if data not in (line, b"[DONE]"):
                    event = json.loads(data)
                    yield from self._fault(event, "Error" if event.keys() == {"error"} else name)
        elif over and self._media_type == "application/json" and self._body:
            yield from self._fault(json.loads(self._body), name)

    def _described_as(self) -> str | None:
        """The name of the schema of what is sent; None where nothing is described."""
        config = self._app.state.life.config
        if Headers(scope=self._scope).get("x-antiphon-profile", config.responses_profile) != "openai":
            return None  # older names of events and items are those of other servers
        if self._status >= 400:
            return "MessagesError" if is_of_messages(self._scope["path"]) else "Error"
        operation = _operation(self._scope)
        if operation is None:
            return None
        schema = operation["responses"]["200"]["content"].get(self._media_type, {}).get("schema", {})
        found: str | None = schema["$ref"].rpartition("/")[2] if "$ref" in schema else None
        return found

    def _fault(self, value: Any, name: str) -> Iterator[str]:
        if (found := problem(value, name)) is not None:
            yield f"{self._scope.get('method', 'WEBSOCKET')} {self._scope['path']} {self._status}: {found}"
