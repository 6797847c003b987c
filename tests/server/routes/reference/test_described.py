"""What is sent is what is described: each member that is sent is in the document, and the other way round."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from starlette.responses import JSONResponse, Response, StreamingResponse

from server.schema import components
from tests.support.described import ROUTES, described, problem

ROOT = Path(__file__).parents[4]

# ------------------------------------------------------------------------------------------------------------
# What is sent is described


def application(path: str, reply: Response) -> FastAPI:
    """One that answers a GET at a path."""
    app = FastAPI()
    app.state.life = SimpleNamespace(config=SimpleNamespace(responses_profile="openai", root_path=""))
    app.add_api_route(path, lambda: reply)
    return app


def streamed(*frames: str) -> StreamingResponse:
    return StreamingResponse(iter([f"data: {frame}\n\n" for frame in frames]), media_type="text/event-stream")


ERROR = {"message": "No.", "type": "x", "param": None, "code": None}
SECOND = '{"type": "response.output_text.delta", "sequence_number": 1}'


@pytest.mark.parametrize(
    ("path", "reply", "wrong"),
    [
        ("/version", JSONResponse({"version": "1"}), None),
        ("/version", JSONResponse({"version": 1}), r"200: no Version at \.version"),
        ("/version", JSONResponse({}), "200: no Version at its top"),
        ("/version", JSONResponse({"version": "1", "more": 1}), "no Version at its top: .*'more'"),
        ("/version", JSONResponse({"error": ERROR}, 400), None),
        ("/version", JSONResponse({"error": {**ERROR, "more": 1}}, 400), r"400: no Error at \.error"),
        ("/version", Response("No.", 503, media_type="text/plain"), "503: text/plain is none of"),
        ("/v1/messages/x", JSONResponse({"error": ERROR}, 404), "404: no MessagesError"),
        ("/version", Response("1", media_type="text/plain"), "200: text/plain is none of .*application/json"),
        ("/nowhere", JSONResponse({"anything": 1}), None),
        ("/v1/responses/{response_id}", streamed(SECOND), 'no ResponseEvent at its top: "item_id" is a'),
        ("/v1/responses/{response_id}", streamed('{"error": {"message": "No."}}'), "no Error"),
        ("/v1/responses/{response_id}", streamed("[DONE]"), None),
    ],
)
async def test_what_is_not_described_is_seen(path: str, reply: Response, wrong: str | None) -> None:
    app = application(path, reply)

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a.localhost") as client:
            with described(app):
                await client.get(path)

    if wrong is None:
        await ask()
        return
    with pytest.raises(AssertionError, match=wrong):
        await ask()


def test_frames_of_sockets_are_looked_at_too() -> None:
    from starlette.testclient import TestClient

    app = application("/version", Response())

    @app.websocket("/v1/responses")
    async def socket(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text('{"type": "response.inject.created", "sequence_number": 1}')

    with (
        pytest.raises(AssertionError, match=r"WEBSOCKET /v1/responses 0: no SocketEvent .*response_id"),
        described(app),
        TestClient(app).websocket_connect("/v1/responses") as client,
    ):
        client.receive_text()


def test_an_item_has_the_members_of_its_type_alone() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
    assert problem({**call, "status": "completed"}, "Item") is None
    assert problem({**call, "status": "completed", "server_label": "a"}, "Item") is not None


# ------------------------------------------------------------------------------------------------------------
# What is described is sent

MADE_UP = {"failed_at", "expired_at", "cancelled_at"}
"""Members whose names code puts together."""


def replies() -> set[str]:
    """The names of all schemas that replies, events and frames of this server are made of."""
    found: set[str] = set()
    todo = {"SocketEvent"}
    for route in ROUTES:
        todo |= set(named(route.responses))
    while todo - found:
        name = (todo - found).pop()
        found.add(name)
        todo |= set(named(components()[name]))
    return found


def named(schema: Any) -> Iterator[str]:
    yield from re.findall(r"#/components/schemas/(\w+)", repr(schema))


def members(schema: Any) -> Iterator[str]:
    """The names of all members of the objects in a schema."""
    if isinstance(schema, dict):
        properties = schema.get("properties", {})
        yield from properties
        for each in (*properties.values(), *(value for key, value in schema.items() if key != "properties")):
            yield from members(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from members(each)


def words() -> set[str]:
    """What the code of the server says by name: texts that are no docstrings, arguments, fields."""
    found: set[str] = set()
    files = (file for room in ("server", "tools") for file in (ROOT / room).rglob("*.py"))
    for file in files:
        if file.is_relative_to(ROOT / "server" / "schema" / "description"):
            continue
        tree = ast.parse(file.read_text("utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(text)) if id(node) not in prose:
                    found.update(text.split())
                case ast.Constant(value=bytes(text)):
                    found.update(re.findall(r'"(\w+)":', text.decode("latin-1")))
                case ast.keyword(arg=str(name)) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
    return found


def test_no_member_is_described_that_no_code_names() -> None:
    """Members that must be there are missed where they are not sent; this is about all others."""
    described = {member for name in replies() for member in members(components()[name])}
    assert len(described) > 400
    assert described - words() == MADE_UP
