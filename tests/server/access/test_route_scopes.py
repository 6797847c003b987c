"""Every route declares the scope that it needs, and a key without it is told which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match, WebSocketRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from server.access import ADMIN, ADMIN_READS, LOAD, OPEN, OPERATOR, OPERATOR_ONLY
from server.access.scopes import HALVES
from server.admin import keys
from server.errors import ApiError, is_of_messages
from server.http import CONSOLE_PATHS, OPEN_PATHS, Admission, declared_scope
from server.routes import CONSOLE, REFERENCE, ROUTERS
from tests.support.running import Running, running_app
from tests.support.wire import Json

ROUTES: list[BaseRoute] = [route for router in (*ROUTERS, REFERENCE, CONSOLE) for route in router.routes]


def rows() -> Iterator[tuple[str, str, str]]:
    """Method, path and scope of every route; a WebSocket needs what a POST to its path needs."""
    for route in ROUTES:
        if isinstance(route, WebSocketRoute):
            continue
        assert isinstance(route, APIRoute), route
        for method in sorted(route.methods):
            yield method, route.path, declared_scope(route)


ROWS = list(rows())
KEYED = [row for row in ROWS if row[2] not in (OPEN, OPERATOR_ONLY)]


def test_every_route_declares_a_scope_that_there_is() -> None:
    known = {OPEN, OPERATOR_ONLY, ADMIN, LOAD, *HALVES}
    assert [row for row in ROWS if row[2] not in known] == []
    opened = {path for _, path, scope in ROWS if scope == OPEN}
    assert opened == {*OPEN_PATHS, CONSOLE_PATHS + "{path:path}"}
    assert all((scope == OPERATOR_ONLY) == path.startswith("/admin/") for _, path, scope in ROWS)
    of_admins = (ADMIN, ADMIN_READS)
    assert all((scope in of_admins) == path.startswith("/v1/organization/") for _, path, scope in ROWS)


def test_every_websocket_is_at_the_path_of_a_post() -> None:
    posts = {path for method, path, _ in ROWS if method == "POST"}
    sockets = {route.path for route in ROUTES if isinstance(route, WebSocketRoute)}
    assert sockets
    assert sockets <= posts


def test_every_half_of_a_group_allows_something() -> None:
    needed = {scope for _, _, scopes in ROWS for scope in scopes.split(" or ")}
    assert [half for half in HALVES if half not in needed] == []


def test_what_only_reads_needs_no_scope_to_write() -> None:
    assert [row for row in ROWS if row[0] in ("GET", "HEAD") and row[2].endswith(".write")] == []
    assert [row for row in ROWS if row[0] == "DELETE" and row[2].endswith(".read")] == []


def test_no_route_without_parameters_is_hidden_behind_one_with_them() -> None:
    """The door looks such a route up by its path: the router must come to the same one."""
    for method, path, scope in ROWS:
        asked = {"type": "http", "method": method, "path": path, "headers": []}
        first = next(route for route in ROUTES if route.matches(asked)[0] is Match.FULL)
        assert declared_scope(first) == scope, (method, path)


async def key_with(client: httpx.AsyncClient, running: Running, *scopes: str) -> dict[str, str]:
    reply = await client.post(
        "/admin/keys",
        json={"owner": "ann", "scopes": list(scopes)},
        headers={"authorization": f"Bearer {running.life.admin_token}"},
    )
    assert reply.status_code == 200, reply.text
    return {"authorization": f"Bearer {reply.json()['key']}"}


@pytest.mark.parametrize("scope", sorted({row[2] for row in KEYED} - {"metrics.read", LOAD}))
async def test_a_key_without_the_scope_is_told_and_one_with_it_gets_through(
    server_app: Running, client: httpx.AsyncClient, scope: str
) -> None:
    others = [other for other in HALVES if other != scope]
    others += [ADMIN] if scope not in (ADMIN, ADMIN_READS) else []
    without, having = await key_with(client, server_app, *others), await key_with(client, server_app, scope)
    for method, path, needed in KEYED:
        if needed != scope:
            continue
        path = path.replace("{model_id:path}", "antiphon-scripted")
        path = path.replace("{", "").replace("}", "")
        refused = await client.request(method, path, headers=without, json={"input": 0})
        assert refused.status_code == 403, (method, path, refused.text)
        error = refused.json()["error"]
        kind, code = "invalid_request_error", error.get("code")
        if is_of_messages({"path": path, "headers": []}):
            kind, code = "permission_error", error["details"]["error_code"]
        assert (code, error["type"]) == ("insufficient_permissions", kind)
        assert f"Missing scopes: {scope}." in error["message"]
        passed = await client.request(method, path, headers=having, json={})
        assert passed.status_code not in (401, 403, 405), (method, path, passed.text)
        assert (await client.request(method, path, json={})).status_code == 401


async def test_how_busy_it_is_may_be_seen_with_either_of_two_scopes(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    for scope in ("metrics", "models.read", "all.read"):
        headers = await key_with(client, server_app, scope)
        assert (await client.get("/load", headers=headers)).status_code == 200, scope
    refused = await client.get("/load", headers=await key_with(client, server_app, "responses"))
    assert refused.status_code == 403
    assert "Missing scopes: models.read or metrics.read." in refused.json()["error"]["message"]


async def test_models_and_tools_of_a_key(server_app: Running, client: httpx.AsyncClient) -> None:
    bound = await key_with(client, server_app, "all", "model:antiphon-*", "tool:function")
    elsewhere = await key_with(client, server_app, "all", "model:other")
    assert (await client.get("/v1/models", headers=elsewhere)).json()["data"] == []
    assert len((await client.get("/v1/models", headers=bound)).json()["data"]) == 1
    for path, body in (
        ("/v1/responses", {"input": "say hi"}),
        ("/v1/responses/input_tokens", {"input": "say hi"}),
        ("/v1/responses/compact", {"input": "say hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say hi"}]}),
        ("/v1/completions", {"prompt": "say hi"}),
        ("/tokenize", {"prompt": "hi"}),
    ):
        assert (await client.post(path, json=body, headers=bound)).status_code == 200
        refused = await client.post(path, json=body, headers=elsewhere)
        assert refused.status_code == 403
        assert "Missing scopes: model:antiphon-scripted." in refused.json()["error"]["message"]
    function = {"type": "function", "name": "f", "parameters": {}}
    builtin = {"type": "mcp", "server_label": "here", "server_url": "builtin:"}
    asked: Json = {"input": "say hi", "tools": [function]}
    assert (await client.post("/v1/responses", json=asked, headers=bound)).status_code == 200
    for url, scope in (
        ("builtin:", "builtin"),
        ("builtin:desk", "builtin:desk"),
        ("https://mcp.example.com", "mcp.example.com"),
    ):
        asked["tools"] = [function, {**builtin, "server_url": url}]
        refused = await client.post("/v1/responses", json=asked, headers=bound)
        assert refused.status_code == 403
        assert f"Missing scopes: tool:mcp:{scope}." in refused.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "say hi"}], "tools": asked["tools"]}
        assert (await client.post("/v1/chat/completions", json=chat, headers=bound)).json() == refused.json()


async def test_a_refused_repeat_shows_nothing(server_app: Running, client: httpx.AsyncClient) -> None:
    """The reply that an idempotency key keeps is not for a key of the same owner without the scope."""
    writes, reads = [
        await key_with(client, server_app, f"conversations.{half}") for half in ("write", "read")
    ]
    keyed = {"idempotency-key": "once"}
    first = await client.post("/v1/conversations", json={}, headers={**writes, **keyed})
    again = await client.post("/v1/conversations", json={}, headers={**writes, **keyed})
    assert first.json() == again.json() and "idempotent-replayed" in again.headers
    refused = await client.post("/v1/conversations", json={}, headers={**reads, **keyed})
    assert refused.status_code == 403


async def test_a_plan_keeps_the_id_of_its_key(server_app: Running, client: httpx.AsyncClient) -> None:
    from server.runs.planning import RunPlan

    headers = await key_with(client, server_app, "responses")
    made = await client.post("/v1/responses", json={"input": "say hi"}, headers=headers)
    storage = server_app.context.storage
    stored = await storage.get_response("ann", made.json()["id"])
    [key] = await storage.list_keys()
    assert RunPlan.load(stored.plan).key_id == key.id


async def test_a_websocket_needs_what_a_post_to_its_path_needs(tmp_path: Path) -> None:
    """One at a path of its own is for nobody until it declares a scope."""

    async def socket(websocket: WebSocket) -> None: ...

    async def passed(scope: Scope, receive: Receive, send: Send) -> None: ...

    async with running_app(tmp_path) as running:
        sockets = [WebSocketRoute("/v1/responses", socket), WebSocketRoute("/v1/other", socket)]
        door = Admission(passed, running.life, [*sockets, *ROUTES])
        outcomes = {}
        for name, scopes in (("writes", ("responses.write",)), ("reads", ("responses.read",))):
            made = await keys.make(running.context.storage, OPERATOR, name="", scopes=scopes)
            running.life.keys.forget()
            headers = [(b"authorization", f"Bearer {made.key}".encode())]
            for path in ("/v1/responses", "/v1/other"):
                try:
                    await door({"type": "websocket", "path": path, "headers": headers}, None, None)  # type: ignore[arg-type]
                    outcomes[name, path] = "in"
                except ApiError as error:
                    outcomes[name, path] = error.message.rpartition(": ")[2]
    assert outcomes == {
        ("writes", "/v1/responses"): "in",
        ("reads", "/v1/responses"): "responses.write.",
        ("writes", "/v1/other"): "undeclared.",
        ("reads", "/v1/other"): "undeclared.",
    }
