"""Every route names what it does not read: parameters of its query and fields of its body."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi.routing import APIRoute

from server.routes import ROUTERS
from tests.support.running import Running, http_client, running_app
from tests.support.sandboxes import with_sandbox

Json = dict[str, Any]

HEADER = "x-antiphon-ignored"
CALL = 'call f {"x": 1}'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
KEPT = {"type": "message", "id": "msg_kept", "role": "user", "content": "hi"}

BATCH = {"input_file_id": "", "endpoint": "/v1/responses", "completion_window": "24h"}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "say hi"}}
STORED = {"messages": [{"role": "user", "content": "say hi"}], "store": True}
ASKED = {"model": "antiphon-scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "say hi"}]}
UPLOAD = {"filename": "a", "purpose": "user_data", "bytes": 0, "mime_type": "text/plain"}

FORMS = {"/v1/files": "file", "/v1/uploads/{upload_id}/parts": "data"}
"""Routes whose bodies are forms, and the names of the files in them."""

ROUTES: dict[tuple[str, str], Json | None] = {
    ("GET", "/health"): None,
    ("GET", "/ping"): None,
    ("GET", "/ready"): None,
    ("GET", "/load"): None,
    ("GET", "/version"): None,
    ("GET", "/metrics"): None,
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{model_id:path}"): None,
    ("GET", "/v1/tools"): None,
    ("POST", "/v1/responses"): {"input": "say hi"},
    ("GET", "/v1/responses"): None,
    ("GET", "/v1/responses/{response_id}"): None,
    ("GET", "/v1/responses/{response_id}/input_items"): None,
    ("GET", "/v1/responses/{response_id}/events"): None,
    ("POST", "/v1/responses/input_tokens"): {"input": "hi"},
    ("POST", "/v1/responses/compact"): {"input": "say hi"},
    ("POST", "/v1/messages"): ASKED,
    ("POST", "/v1/messages/count_tokens"): {name: ASKED[name] for name in ("model", "messages")},
    ("GET", "/admin/models"): None,
    ("GET", "/v1/organization/models"): None,
    ("POST", "/v1/responses/{response_id}/cancel"): {},
    ("POST", "/v1/responses/{response_id}/fork"): {},
    ("POST", "/v1/responses/{response_id}/tool_outputs"): {"tool_outputs": [{"call_id": "", "output": "1"}]},
    ("POST", "/v1/conversations"): {"items": [KEPT]},
    ("GET", "/v1/conversations"): None,
    ("GET", "/v1/conversations/{conversation_id}"): None,
    ("POST", "/v1/conversations/{conversation_id}"): {"metadata": {}},
    ("POST", "/v1/conversations/{conversation_id}/fork"): {},
    ("POST", "/v1/conversations/{conversation_id}/items"): {"items": [{"role": "user", "content": "x"}]},
    ("GET", "/v1/conversations/{conversation_id}/items"): None,
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): None,
    ("POST", "/v1/prompts"): {"template": {"instructions": "hi"}},
    ("GET", "/v1/prompts"): None,
    ("GET", "/v1/prompts/{prompt_id}"): None,
    ("POST", "/v1/prompts/{prompt_id}"): {"name": "another"},
    ("GET", "/v1/prompts/{prompt_id}/versions"): None,
    ("GET", "/v1/prompts/{prompt_id}/versions/{version}"): None,
    ("POST", "/v1/chat/completions"): {"messages": [{"role": "user", "content": "say hi"}]},
    ("GET", "/v1/chat/completions"): None,
    ("GET", "/v1/chat/completions/{completion_id}"): None,
    ("POST", "/v1/chat/completions/{completion_id}"): {"metadata": {}},
    ("GET", "/v1/chat/completions/{completion_id}/messages"): None,
    ("POST", "/v1/completions"): {"prompt": "say hi"},
    ("POST", "/inference/v1/generate"): {"token_ids": [115, 97, 121, 32, 97]},
    ("POST", "/v1/ws_tickets"): None,
    ("POST", "/tokenize"): {"prompt": "hi"},
    ("POST", "/detokenize"): {"tokens": [5]},
    ("POST", "/admin/keys"): {"owner": "somebody"},
    ("GET", "/admin/runs"): None,
    ("GET", "/admin/runs/{run_id}/events"): None,
    ("POST", "/admin/runs/{run_id}/fork"): {"starting_after": -1},
    ("GET", "/admin/keys"): None,
    ("POST", "/admin/keys/{key_id}"): {"name": "another"},
    ("POST", "/admin/keys/{key_id}/rotate"): {},
    ("DELETE", "/admin/keys/{key_id}"): None,
    ("POST", "/admin/webhooks"): {"url": "http://127.0.0.1:9/told"},
    ("GET", "/admin/webhooks"): None,
    ("POST", "/admin/webhooks/{webhook_id}/enable"): {},
    ("POST", "/admin/webhooks/{webhook_id}/test"): {},
    ("DELETE", "/admin/webhooks/{webhook_id}"): None,
    ("GET", "/admin/sealing_keys"): None,
    ("POST", "/admin/sealing_keys"): {},
    ("GET", "/admin/kv"): None,
    ("GET", "/admin/owners"): None,
    ("GET", "/admin/tiers/{id}"): None,
    ("POST", "/admin/tiers/{id}"): {"max_priority": 3},
    ("GET", "/admin/export"): None,
    ("POST", "/admin/backups"): {"file": "copy.db"},
    ("GET", "/admin/purge"): None,
    ("POST", "/admin/purge"): {"owner": "somebody"},
    ("GET", "/v1/organization/admin_api_keys"): None,
    ("POST", "/v1/organization/admin_api_keys"): {"name": "ops"},
    ("GET", "/v1/organization/admin_api_keys/{admin_key_id}"): None,
    ("GET", "/v1/organization/projects"): None,
    ("POST", "/v1/organization/projects"): {"name": "Sales"},
    ("GET", "/v1/organization/projects/{project_id}"): None,
    ("POST", "/v1/organization/projects/{project_id}"): {"name": "Buying"},
    ("GET", "/v1/organization/projects/{project_id}/service_accounts"): None,
    ("GET", "/v1/organization/projects/{project_id}/service_accounts/{account_id}"): None,
    ("POST", "/v1/organization/projects/{project_id}/service_accounts/{account_id}/api_keys"): {},
    ("GET", "/v1/organization/projects/{project_id}/api_keys"): None,
    ("POST", "/v1/organization/projects/{project_id}/api_keys"): {},
    ("GET", "/v1/organization/projects/{project_id}/api_keys/{project_key_id}"): None,
    ("POST", "/v1/organization/projects/{project_id}/api_keys/{project_key_id}"): {"name": "another"},
    ("POST", "/v1/organization/projects/{project_id}/api_keys/{project_key_id}/rotate"): {},
    ("GET", "/v1/organization/projects/{project_id}/limits"): None,
    ("POST", "/v1/organization/projects/{project_id}/limits"): {"limits": {"stored_bytes": 1000000}},
    ("GET", "/v1/organization/projects/{project_id}/rate_limits"): None,
    ("POST", "/v1/organization/projects/{project_id}/rate_limits/{rate_limit_id:path}"): {},
    ("GET", "/v1/organization/runs"): None,
    ("POST", "/v1/organization/runs/{run_id}/cancel"): {},
    ("GET", "/v1/organization/audit_logs"): None,
    ("GET", "/v1/organization/audit_logs/verify"): None,
    ("GET", "/v1/organization/usage/{kind}"): None,
    ("GET", "/v1/organization/costs"): None,
    ("POST", "/v1/files"): {"purpose": "user_data"},
    ("GET", "/v1/files"): None,
    ("GET", "/v1/files/{file_id}"): None,
    ("GET", "/v1/files/{file_id}/content"): None,
    ("POST", "/v1/uploads"): UPLOAD,
    ("POST", "/v1/uploads/{upload_id}/parts"): {},
    ("POST", "/v1/uploads/{upload_id}/complete"): {"part_ids": []},
    ("POST", "/v1/uploads/{upload_id}/cancel"): {},
    ("POST", "/v1/batches"): BATCH,
    ("GET", "/v1/batches"): None,
    ("GET", "/v1/batches/{batch_id}"): None,
    ("POST", "/v1/batches/{batch_id}/cancel"): None,
    ("POST", "/v1/containers"): {"name": "c"},
    ("GET", "/v1/containers"): None,
    ("GET", "/v1/containers/{container_id}"): None,
    ("POST", "/v1/containers/{container_id}/files"): {"file_id": ""},
    ("GET", "/v1/containers/{container_id}/files"): None,
    ("GET", "/v1/containers/{container_id}/files/{container_file_id}"): None,
    ("GET", "/v1/containers/{container_id}/files/{container_file_id}/content"): None,
    ("POST", "/v1/vector_stores"): {},
    ("GET", "/v1/vector_stores"): None,
    ("GET", "/v1/vector_stores/{vector_store_id}"): None,
    ("POST", "/v1/vector_stores/{vector_store_id}"): {},
    ("POST", "/v1/vector_stores/{vector_store_id}/search"): {"query": "x"},
    ("POST", "/v1/vector_stores/{vector_store_id}/files"): {"file_id": ""},
    ("GET", "/v1/vector_stores/{vector_store_id}/files"): None,
    ("GET", "/v1/vector_stores/{vector_store_id}/files/{file_id}"): None,
    ("POST", "/v1/vector_stores/{vector_store_id}/files/{file_id}"): {"attributes": {}},
    ("GET", "/v1/vector_stores/{vector_store_id}/files/{file_id}/content"): None,
    ("POST", "/v1/vector_stores/{vector_store_id}/file_batches"): {"file_ids": [""]},
    ("GET", "/v1/vector_stores/{vector_store_id}/file_batches/{file_batch_id}"): None,
    ("POST", "/v1/vector_stores/{vector_store_id}/file_batches/{file_batch_id}/cancel"): None,
    ("GET", "/v1/vector_stores/{vector_store_id}/file_batches/{file_batch_id}/files"): None,
    # These come last: they take away what the others are about.
    ("DELETE", "/v1/containers/{container_id}/files/{container_file_id}"): None,
    ("DELETE", "/v1/containers/{container_id}"): None,
    ("DELETE", "/v1/vector_stores/{vector_store_id}/files/{file_id}"): None,
    ("DELETE", "/v1/vector_stores/{vector_store_id}"): None,
    ("DELETE", "/v1/organization/admin_api_keys/{admin_key_id}"): None,
    ("DELETE", "/v1/organization/projects/{project_id}/api_keys/{project_key_id}"): None,
    ("POST", "/v1/organization/projects/{project_id}/archive"): {},
    ("DELETE", "/v1/files/{file_id}"): None,
    ("DELETE", "/v1/chat/completions/{completion_id}"): None,
    ("DELETE", "/v1/responses/{response_id}"): None,
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): None,
    ("DELETE", "/v1/conversations/{conversation_id}/items"): None,
    ("DELETE", "/v1/conversations/{conversation_id}"): None,
    ("DELETE", "/v1/prompts/{prompt_id}/versions/{version}"): None,
    ("DELETE", "/v1/prompts/{prompt_id}"): None,
}
"""Every route, and a body that it takes."""

ACCOUNTS = "/v1/organization/projects/{project_id}/service_accounts"
REFUSED = {
    ("POST", ACCOUNTS),
    ("POST", f"{ACCOUNTS}/{{account_id}}"),
    ("DELETE", f"{ACCOUNTS}/{{account_id}}"),
}
"""Routes that only say why there is no such thing."""

POOLED = {
    ("POST", path)
    for path in (
        *("/v1/embeddings", "/pooling", "/v1/classify", "/classify", "/v1/moderations"),
        *("/v1/embed", "/v2/embed", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"),
    )
}
"""Routes that need models of their own; `tests/server/pooling` has the same test of them."""

HEARD = {("POST", "/v1/audio/transcriptions"), ("POST", "/v1/audio/translations")}
"""Routes that need a model that hears; `tests/server/speech` has the same test of them."""

LOADED = {
    ("POST", f"{prefix}/models/{{model_id:path}}/{verb}")
    for prefix in ("/admin", "/v1/organization")
    for verb in ("load", "unload")
}
"""Routes that need models which come and go; `tests/server/model_registry` asks them."""

PARAMETERS = {
    "admin_key_id": "key_id",
    "project_key_id": "key_id",
    "container_file_id": "file_id",
    "file_batch_id": "batch_id",
}
"""Names of parameters here that are others in the routes: what they stand for is another thing there."""

ADMIN = ("/admin/", "/v1/organization/")
STRICT = re.compile(rf"({'|'.join(ADMIN)}|/v1/vector_stores)|.*/fork$")
"""At these paths an unknown field is refused, and only a parameter of the query is named."""


def test_there_is_a_row_for_every_route() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    assert {(method, route.path) for route in routes for method in (route.methods or set()) - {"HEAD"}} == {
        (method, _as_declared(path)) for method, path in ROUTES.keys() | REFUSED | POOLED | HEARD | LOADED
    }


LISTS = {
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    if {"after", "start_time"} & {each["name"] for each in (route.openapi_extra or {}).get("parameters", ())}
    for method in route.methods or ()
}
"""Lists and sums refuse a parameter that they do not know: without a filter they would be of too much."""


async def test_a_list_says_which_parameters_it_has(client: httpx.AsyncClient) -> None:
    assert ("GET", "/v1/responses") in LISTS and len(LISTS) >= 10
    usage = "/v1/organization/usage"
    for path, query, told in (
        ("/v1/responses", {"stauts": "completed"}, "Unknown parameter: 'stauts'. Did you mean 'status'?"),
        ("/v1/conversations", {"colour": "red"}, "There are: limit, order, after, status, metadata."),
        ("/v1/chat/completions", {"metadatas[a]": "b"}, "Unknown parameter: 'metadatas[a]'."),
        (f"{usage}/completions", {"project_id": "x", "start_time": 0}, "Did you mean 'project_ids'?"),
        ("/v1/organization/costs", {"projects[]": "x", "start_time": 0}, "parameter: 'projects[]'."),
        (f"{usage}/images", {"bucketwidth": "1h", "start_time": 0}, "Did you mean 'bucket_width'?"),
    ):
        refused = await client.get(path, params=query)
        assert refused.status_code == 400 and told in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == next(iter(query))
    assert (await client.get("/v1/chat/completions", params={"metadata[a]": "b"})).status_code == 200


def _as_declared(path: str) -> str:
    for here, there in PARAMETERS.items():
        path = path.replace(f"{{{here}}}", f"{{{there}}}")
    return path


@with_sandbox
async def test_every_route_names_what_it_does_not_read(
    server_app: Running, client: httpx.AsyncClient
) -> None:
    admin = {"authorization": f"Bearer {server_app.life.admin_token}"}

    async def made(path: str, body: Json) -> Json:
        found: Json = (
            await client.post(path, json=body, headers=admin if path.startswith(ADMIN) else {})
        ).json()
        return found

    asked = {"input": CALL, "tools": [TOOL]}
    ended = await made("/v1/responses", asked)
    waits = {**asked, "background": True, "await_tool_outputs": True}
    waiting, of_anybody = await made("/v1/responses", waits), await made("/v1/responses", waits)
    file = await client.post("/v1/files", files={"file": b"x"}, data={"purpose": "user_data"})
    file_id = file.json()["id"]
    store = f"/v1/vector_stores/{(await made('/v1/vector_stores', {}))['id']}"
    await made(f"{store}/files", {"file_id": file_id})
    assert server_app.life._batches is not None
    await server_app.life._batches.close()  # so that a batch is still there when it is to be cancelled
    container = (await made("/v1/containers", {"name": "mine"}))["id"]
    content = {"file": ("lines.jsonl", json.dumps(LINE).encode())}
    lines = (await client.post("/v1/files", files=content, data={"purpose": "batch"})).json()["id"]
    prompt = (await made("/v1/prompts", {"template": {"instructions": "hi"}}))["id"]
    await made(f"/v1/prompts/{prompt}", {"template": {"instructions": "ho"}})
    batch = (await made("/v1/batches", {**BATCH, "input_file_id": lines}))["id"]
    paths = {
        "{container_file_id}": (await made(f"/v1/containers/{container}/files", {"file_id": file_id}))["id"],
        "{container_id}": container,
        "{vector_store_id}": store.rpartition("/")[2],
        "{file_batch_id}": (await made(f"{store}/file_batches", {"file_ids": [file_id]}))["id"],
        "{batch_id}": batch,
        "{file_id}": file_id,
        "{upload_id}/cancel": (await made("/v1/uploads", UPLOAD))["id"] + "/cancel",
        "{upload_id}": (await made("/v1/uploads", UPLOAD))["id"],
        "{response_id}/cancel": waiting["id"] + "/cancel",
        "{response_id}": ended["id"],
        "{run_id}": of_anybody["id"],
        "{completion_id}": (await made("/v1/chat/completions", STORED))["id"],
        "{model_id:path}": "antiphon-scripted",
        "{conversation_id}": (await made("/v1/conversations", {"items": [KEPT]}))["id"],
        "{item_id}": "msg_kept",
        "{prompt_id}": prompt,
        "{version}": "1",
        "{webhook_id}": (await made("/admin/webhooks", {"url": "http://127.0.0.1:9/", "allow_http": True}))[
            "id"
        ],
        "{key_id}": (await made("/admin/keys", {"owner": "other"}))["id"],
        "{id}": "other",
        "{project_id}": "team",
        "{kind}": "completions",
        "{account_id}": "team",
        "{rate_limit_id:path}": "rl-antiphon-scripted",
        "{project_key_id}": (await made("/admin/keys", {"owner": "team"}))["id"],
        "{admin_key_id}": (await made("/v1/organization/admin_api_keys", {"name": "ops"}))["id"],
    }
    key = (await made("/admin/keys", {"owner": "local"}))["key"]
    for (method, path), body in ROUTES.items():
        is_list = (method, _as_declared(path)) in LISTS
        field = FORMS.get(path) if method == "POST" else None
        for name, value in paths.items():
            path = path.replace(name, value)
        strict = STRICT.match(path) is not None
        if body is not None and not strict:
            body = {**body, "unheard_of": 1}
        if body is not None and path != "/v1/uploads":
            given = {"file_id": file_id, "file_ids": [file_id], "input_file_id": lines}
            body |= {name: value for name, value in given.items() if name in body}
        if body is not None and "tool_outputs" in body:
            body["tool_outputs"] = [{"call_id": ended["output"][0]["call_id"], "output": "1"}]
        headers = admin if path.startswith(ADMIN) else {"authorization": f"Bearer {key}"}
        query = {"unheard_of": ""}
        if method == "GET" and path in ("/admin/export", "/admin/purge"):
            query["owner"] = "somebody"
        if path.endswith(("/usage/completions", "/costs")):
            query["start_time"] = "0"
        said = {"json": body} if field is None else {"data": body, "files": {field: b"x"}}
        reply = await client.request(method, path, params=query, headers=headers, **said)
        if is_list:
            assert reply.status_code == 400, (method, path, reply.text)
            assert reply.json()["error"]["code"] == "unknown_parameter"
            continue
        assert reply.status_code == 200, (method, path, reply.text)
        expected = "?unheard_of" if body is None or strict else "unheard_of,?unheard_of"
        assert reply.headers[HEADER] == expected, (method, path)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/conversations", {"metdata": {}}, "metdata"),
        ("{conversation}", {"title": "x", "metdata": {}}, "metdata"),
        ("{conversation}/items", {"items": [KEPT], "itemss": []}, "itemss"),
        ("{response}/tool_outputs", {"tool_outputs": [], "strem": True}, "strem"),
        (
            "{response}/tool_outputs",
            {"tool_outputs": [{"call_id": "c", "outputs": 1}]},
            "tool_outputs[0].outputs",
        ),
        ("/v1/uploads", {**UPLOAD, "expire_after": {}}, "expire_after"),
        ("/v1/batches", {**BATCH, "metdata": {}}, "metdata"),
        ("/v1/prompts", {"template": {"instructions": "x", "temprature": 0}}, "template.temprature"),
        ("/v1/prompts", {"template": {"instructions": "x"}, "metdata": {}}, "metdata"),
        ("/tokenize", {"prompt": "x", "add_special_token": False}, "add_special_token"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"max_token": 1}},
            "sampling_params.max_token",
        ),
    ],
)
async def test_a_misspelt_field_is_refused_in_every_body(
    client: httpx.AsyncClient, path: str, body: Json, param: str
) -> None:
    conversation = (await client.post("/v1/conversations")).json()["id"]
    response = (await client.post("/v1/responses", json={"input": "say hi"})).json()["id"]
    reply = await client.post(
        path.format(conversation=f"/v1/conversations/{conversation}", response=f"/v1/responses/{response}"),
        json=body,
    )
    error = reply.json().get("error") or {}
    assert (reply.status_code, error.get("code"), error.get("param")) == (400, "unknown_parameter", param)
    assert "Did you mean '" in error["message"]


async def test_parameters_that_are_read_are_not_named(client: httpx.AsyncClient) -> None:
    made = (await client.post("/v1/responses", json={"input": "say hi"})).json()["id"]
    listed = {"limit": "1", "order": "asc", "after": "", "status": "completed", "created_after": "1"}
    for path, query, named in (
        ("/v1/responses", listed, None),
        (f"/v1/responses/{made}", {"stream": "true", "starting_after": "1"}, None),
        (f"/v1/responses/{made}", {"starting_after": "1"}, "?starting_after"),  # it is for streams
        (f"/v1/responses/{made}", {"wait": "1", "stream": "false"}, None),
        (f"/v1/responses/{made}/input_items", {"limit": "1", "scope": "all"}, None),
        (f"/v1/responses/{made}/input_items", {"beta": "true"}, None),
        (f"/v1/responses/{made}", {"a,b": "1"}, "?a%2Cb"),
        (f"/v1/responses/{made}/input_items", {"include[]": "reasoning.encrypted_content"}, "?include[]"),
        (f"/v1/responses/{made}/input_items", {"include": "message.input_image.image_url"}, "?include"),
    ):
        reply = await client.get(path, params=query)
        assert reply.status_code == 200, reply.text
        assert reply.headers.get(HEADER) == named, (path, query)


INCLUDED: list[tuple[Json, list[str], list[int]]] = [
    ({}, ["file_search_call.results", "code_interpreter_call.outputs"], [0, 1]),
    ({}, ["web_search_call.action.sources", "web_search_call.results"], [0, 1]),
    ({}, ["computer_call_output.output.image_url", "message.input_image.image_url"], [0, 1]),
    ({"tools": [TOOL]}, ["code_interpreter_call.outputs", "reasoning.encrypted_content"], [0]),
    ({"tools": [{"type": "web_search"}]}, ["message.output_text.logprobs", "web_search_call.results"], []),
    ({"tools": [{"type": "web_search"}]}, ["file_search_call.results"], [0]),
    ({}, ["compaction.summary"], [0]),
    ({"context_management": [{"type": "compaction"}]}, ["compaction.summary"], []),
    (
        {
            "tools": [{"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}],
            "await_tool_outputs": True,
            "background": True,
        },
        ["web_search_call.results"],  # the client may bring a search of the web
        [],
    ),
]


@asynccontextmanager
async def searching(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that searches the web."""
    (folder / "pages").mkdir()
    (folder / "pages" / "a.md").write_text("# A page")
    async with (
        running_app(folder / "data", registry=None, demo_web=folder / "pages") as server,
        http_client(server) as client,
    ):
        yield client


@pytest.mark.parametrize(("body", "include", "vain"), INCLUDED)
async def test_what_nothing_in_a_response_can_fill_is_named(
    tmp_path: Path, body: Json, include: list[str], vain: list[int]
) -> None:
    async with searching(tmp_path) as client:
        reply = await client.post("/v1/responses", json={"input": "say hi", "include": include, **body})
        assert reply.status_code == 200, reply.text
        named = [unquote(name) for name in reply.headers.get(HEADER, "").split(",") if name]
        assert named == [f"include[{index}]" for index in vain]


async def test_tools_of_earlier_turns_can_fill_what_is_asked_for(tmp_path: Path) -> None:
    async with searching(tmp_path) as client:
        added = {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]}
        body: Json = {"input": [added, {"role": "user", "content": "say hi"}]}
        first = (await client.post("/v1/responses", json=body)).json()
        body = {"input": "say ho", "include": ["web_search_call.results", "file_search_call.results"]}
        reply = await client.post("/v1/responses", json={**body, "previous_response_id": first["id"]})
        assert unquote(reply.headers[HEADER]) == "include[1]"


async def test_a_continuation_does_not_name_what_its_parent_asked_for_in_vain(
    client: httpx.AsyncClient,
) -> None:
    first = {"input": CALL, "tools": [TOOL], "include": ["file_search_call.results"]}
    made = await client.post("/v1/responses", json=first)
    assert unquote(made.headers[HEADER]) == "include[0]"
    outputs = {"tool_outputs": [{"call_id": made.json()["output"][0]["call_id"], "output": "1"}]}
    reply = await client.post(f"/v1/responses/{made.json()['id']}/tool_outputs", json=outputs)
    assert reply.status_code == 200 and HEADER not in reply.headers


async def test_a_stream_names_it_too_and_an_error_does_not(client: httpx.AsyncClient) -> None:
    body = {"input": "say hi", "stream": True, "unheard_of": 1}
    assert (await client.post("/v1/responses", json=body)).headers[HEADER] == "unheard_of"
    refused = await client.post("/v1/responses", json={"unheard_of": 1})
    assert refused.status_code == 400 and HEADER not in refused.headers


async def test_what_the_server_sent_is_heard_when_it_comes_back(client: httpx.AsyncClient) -> None:
    """Items of a response are taken back whole, with nothing in them that would be named."""
    first = {"role": "user", "content": "think hm then " + CALL}
    asked = {"tools": [TOOL], "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}
    reply = (await client.post("/v1/responses", json={"input": [first], **asked})).json()
    answer = {"type": "function_call_output", "call_id": reply["output"][-1]["call_id"], "output": "1"}
    again = await client.post("/v1/responses", json={"input": [first, *reply["output"], answer], **asked})
    assert again.status_code == 200 and HEADER not in again.headers, again.headers
    chat = {"messages": [{"role": "user", "content": "think hm then say hi"}]}
    message = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["message"]
    more = [*chat["messages"], message, {"role": "user", "content": "say ho"}]
    reply_to_more = await client.post("/v1/chat/completions", json={"messages": more})
    assert reply_to_more.status_code == 200 and HEADER not in reply_to_more.headers, reply_to_more.headers


async def test_a_continuation_by_tool_outputs_names_only_its_own(client: httpx.AsyncClient) -> None:
    first = {"input": CALL, "tools": [TOOL], "text": {"verbosity": "low"}}
    made = await client.post("/v1/responses", json=first)
    assert made.headers[HEADER] == "text.verbosity"
    call = made.json()["output"][0]["call_id"]
    outputs = {"tool_outputs": [{"call_id": call, "output": "1", "more": 1}]}
    reply = await client.post(f"/v1/responses/{made.json()['id']}/tool_outputs", json=outputs)
    assert reply.headers[HEADER] == "tool_outputs[0].more"


async def test_a_large_body_is_read_in_a_thread_and_named_all_the_same(client: httpx.AsyncClient) -> None:
    part = {"type": "input_text", "text": "x" * 100_000, "unheard_of": 1}
    body = {"input": [{"role": "user", "content": [part]}, {"role": "user", "content": "say hi"}]}
    reply = await client.post("/v1/responses/input_tokens", json=body)
    assert reply.headers[HEADER] == "input[0].content[0].unheard_of"


async def test_tokens_of_messages_are_asked_for_with_the_fields_of_a_prompt(tmp_path: Path) -> None:
    async with running_app(tmp_path) as running, http_client(running) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "prompt": "x"}
        reply = await client.post("/tokenize", json={**body, "return_token_strs": True})
        assert reply.headers[HEADER] == "temperature,prompt" and reply.json()["token_strs"]
