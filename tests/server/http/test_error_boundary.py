"""Which parameter an error names, where storage found the fault and no route knows it."""

from __future__ import annotations

import re

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from server.http.error_boundary import REQUEST_PATIENCE_S, Boundary
from server.runs.execution import tasks
from server.runs.execution.loop import Loop
from server.runs.execution.run import Run
from storage import PATIENCE_S, patience_s
from tests.server.routes.test_ignored_header import (
    ADMIN,
    FORMS,
    PARAMETERS,
    ROUTES,
    UPLOAD,
)
from tests.support.running import Running
from tests.support.sandboxes import with_sandbox

NOT_BY_ID = ("{kind}", "{model_id:path}")
"""Parameters of paths that are no ids of rows: a word of a list, and the field `model`."""


async def test_an_unknown_id_is_told_by_the_name_of_its_parameter(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    made = await client.post("/v1/files", files={"file": b"x"}, data={"purpose": "user_data"})
    file_id = made.json()["id"]
    known = {"file_id": file_id, "file_ids": [file_id], "tool_outputs": [{"call_id": "c", "output": "1"}]}
    for (method, path), body in ROUTES.items():
        if "{" not in path or path.endswith(NOT_BY_ID):
            continue
        wanted = re.findall(r"{(\w+)", path)[0]
        headers = {"authorization": f"Bearer {server_app.life.admin_token}"} if path.startswith(ADMIN) else {}
        said = {name: known.get(name, value) for name, value in (body or {}).items()}
        sent = {"files": {FORMS[path]: b"x"}} if path in FORMS else {"json": said}
        unknown = re.sub("{[^}]*}", "unknown", path.replace("{version}", "1"))  # versions are numbers
        reply = await client.request(method, unknown, headers=headers, **sent)
        assert reply.status_code == 404, (method, path, reply.text)
        error = reply.json()["error"]
        named = error["code"], error["param"]
        assert named == ("not_found", PARAMETERS.get(wanted, wanted)), (method, path, reply.text)


@with_sandbox
async def test_an_unknown_id_within_what_is_known_is_told_by_its_own_name(client: httpx.AsyncClient) -> None:
    conversation = f"/v1/conversations/{(await client.post('/v1/conversations', json={})).json()['id']}"
    store = f"/v1/vector_stores/{(await client.post('/v1/vector_stores', json={})).json()['id']}"
    container = f"/v1/containers/{(await client.post('/v1/containers', json={'name': 'c'})).json()['id']}"
    response = f"/v1/responses/{(await client.post('/v1/responses', json={'input': 'hi'})).json()['id']}"
    for path, named in (
        (f"{conversation}/items/unknown", "item_id"),
        (f"{store}/files/unknown", "file_id"),
        (f"{store}/files/unknown/content", "file_id"),
        (f"{store}/file_batches/unknown", "batch_id"),
        (f"{container}/files/unknown", "file_id"),
        (f"{container}/files?after=unknown", "after"),
        (f"{conversation}/items?after=unknown", "after"),
        (f"{response}/input_items?after=unknown", "after"),
        ("/v1/vector_stores?before=unknown", "before"),
        ("/v1/files?after=unknown", "after"),
        ("/v1/batches?after=unknown", "after"),
    ):
        reply = await client.get(path)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (404, named), (path, reply.text)


async def test_what_has_ended_is_told_by_the_name_of_its_parameter(client: httpx.AsyncClient) -> None:
    upload = f"/v1/uploads/{(await client.post('/v1/uploads', json=UPLOAD)).json()['id']}/cancel"
    assert (await client.post(upload)).status_code == 200
    assert (await client.post(upload)).json()["error"]["param"] == "upload_id"


async def test_a_request_waits_shortly_for_a_database_that_is_away(server_app: Running) -> None:
    """What has begun to be sent waits longer, and what a run does, longest."""
    seen: list[float] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(patience_s.get())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append(patience_s.get())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None: ...

    await Boundary(app, server_app.life)({"type": "http", "path": "/", "state": {}}, receive, send)
    assert seen == [REQUEST_PATIENCE_S, PATIENCE_S] and patience_s.get() == PATIENCE_S


async def test_a_run_waits_long_for_a_database_that_is_away(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    advance = Loop.advance

    async def looked_at(self: Loop, run: Run) -> None:
        seen.append(patience_s.get())
        await advance(self, run)

    monkeypatch.setattr(Loop, "advance", looked_at)
    assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 200
    assert seen == [tasks.PATIENCE_S]
