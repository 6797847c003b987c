"""Whether all that servers send in tests is what the OpenAPI document describes, to the last member.

The replies, the events of streams and the frames of WebSockets of every server in the process of the tests
are held to the document, in which an object has the members that are named there, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jsonschema_rs
from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import Config
from server.errors import is_of_messages
from server.items import ITEM_TYPES
from server.routes import ROUTERS
from server.schema import components

JSON, EVENTS = "application/json", "text/event-stream"
"""The media types of what is described."""

DOCUMENT = "urn:openapi"
"""Where schemas find each other."""

ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]

SOCKETS = frozenset(
    route.path for router in ROUTERS for route in router.routes if isinstance(route, APIWebSocketRoute)
)
"""The paths of WebSockets, all of which speak of responses."""


@contextmanager
def described(app: FastAPI) -> Iterator[None]:
    """Held while an application serves: AssertionError at the end where it sent what is not described.

    What is sent is only kept until then, as tests measure how long requests hold the event loop.
    """
    sent: list[_Sent] = []
    app.add_middleware(Watch, config=app.state.life.config, sent=sent)
    yield
    faults = dict.fromkeys(fault for each in sent for fault in each.faults())
    assert not faults, "\n".join(faults)


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
        {"$ref": f"{DOCUMENT}#/components/schemas/{name}"}, registry=registry(item_types)
    )


@cache
def registry(_item_types: frozenset[str]) -> jsonschema_rs.Registry:
    """The document's schemas, closed."""
    schemas = {name: closed(schema) for name, schema in components.__wrapped__().items()}
    return jsonschema_rs.Registry([(DOCUMENT, {"components": {"schemas": schemas}})])


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
    """A middleware that keeps what an application sends. sent: where to."""

    def __init__(self, inner: ASGIApp, *, config: Config, sent: list[_Sent]) -> None:
        self._inner, self._config, self._sent = inner, config, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer, and keep what it sends."""
        if scope["type"] == "lifespan" or self._profile(scope) != "openai":
            await self._inner(scope, receive, send)
            return
        path = scope["path"].removeprefix(self._config.root_path)
        sent = _Sent(scope.get("method", "WEBSOCKET"), path, is_of_messages({**scope, "path": path}))
        self._sent.append(sent)

        async def watch(message: Message) -> None:
            sent.keep(message)
            await send(message)

        await self._inner(scope, receive, watch)

    def _profile(self, scope: Scope) -> str:
        """The profile of a reply: the older ones name events and items as other servers do."""
        return Headers(scope=scope).get("x-antiphon-profile", self._config.responses_profile)


def _contents(sent: _Sent) -> Mapping[str, str] | None:
    """The schemas that the document names for what is sent, by media type, empty for texts; None where it
    does not show the route."""
    method, path, status = sent.method, sent.path, sent.status
    kind = 200 if status < 400 else f"{status // 100}XX"
    for route in ROUTES:
        if method in (route.methods or ()) and route.path_regex.match(path):
            if kind in route.responses:
                contents = route.responses[kind]["content"].items()
                return {name: each["schema"].get("$ref", "").rpartition("/")[2] for name, each in contents}
            break
    if status < 400:
        return None
    return {JSON: "MessagesError" if sent.of_messages else "Error"}


@dataclass(slots=True)
class _Sent:
    """A reply, or the frames of a WebSocket."""

    method: str
    path: str
    of_messages: bool
    status: int = 0
    media_type: str = ""
    body: list[bytes] = field(default_factory=list)
    whole: bool = False
    frames: list[str] = field(default_factory=list)

    def keep(self, message: Message) -> None:
        """Take over a message of the application."""
        match message["type"].removeprefix("websocket."):
            case "http.response.start":
                self.status = message["status"]
                self.media_type = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
            case "http.response.body" if self.media_type in (JSON, EVENTS):
                self.body.append(message.get("body", b""))
                self.whole = not message.get("more_body")
            case "send" if self.path in SOCKETS:
                self.frames.append(message["text"])

    def faults(self) -> Iterator[str]:
        """What in it is not described, one line each."""
        yield from self._misfits(self.frames, "SocketEvent")
        contents = _contents(self) if self.status else None
        if contents is None:
            return
        if self.media_type not in contents:
            yield self._told(f"{self.media_type} is none of {[*contents]}")
        elif name := contents[self.media_type]:
            yield from self._look(name)

    def _look(self, name: str) -> Iterator[str]:
        body = b"".join(self.body)
        if self.media_type == EVENTS:
            *events, _ = body.split(b"\n\n")
            lines = (line for event in events for line in event.splitlines() if line.startswith(b"data: "))
            yield from self._misfits((line[6:] for line in lines if line != b"data: [DONE]"), name)
        elif self.whole and body:
            yield from self._misfits([body], name)

    def _misfits(self, texts: Iterable[str | bytes], name: str) -> Iterator[str]:
        for value in map(json.loads, texts):
            failed = self.media_type == EVENTS and value.keys() == {"error"}
            if (found := problem(value, "Error" if failed else name)) is not None:
                yield self._told(found)

    def _told(self, fault: str) -> str:
        return f"{self.method} {self.path} {self.status}: {fault}"
