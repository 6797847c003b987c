"""The reference is the server's own: what it says of bodies, queries and replies holds for real ones."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from engine import RemoteEngine, ScriptedEngine
from server.errors import ApiError
from server.model_registry.children import ChildText
from server.process.app import create_app
from server.routes import ROUTERS
from server.routes.reference import document
from server.schema import components
from server.schema.anthropic import parse_count, parse_messages
from server.schema.chat import parse_chat
from server.schema.completions import parse_completion
from server.schema.items import normalize_input
from server.schema.responses import parse_compact, parse_create, parse_input_tokens
from server.settings import ModelsFile
from tests.server.schema.test_responses import AGENTS, CODEX, LLAMA_INDEX, VERCEL
from tests.server.schema.test_unheard_members import BODIES, create, tool_outputs
from tests.support import wire
from tests.support.libraries import put_file
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.sandboxes import with_sandbox
from tests.support.talk import WEATHER, call

Json = dict[str, Any]
HEADER = "x-antiphon-ignored"

SCHEMA_OF: dict[Any, str] = {
    create: "CreateResponse",
    tool_outputs: "ToolOutputs",
    parse_input_tokens: "CountInputTokens",
    parse_compact: "CompactResponse",
    parse_chat: "CreateChatCompletion",
    parse_completion: "CreateCompletion",
    parse_messages: "CreateMessage",
    parse_count: "CountMessageTokens",
}


@cache
def validator(name: str) -> Draft202012Validator:
    whole = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": dict(components())}}
    return Draft202012Validator(whole)


def check(name: str, value: Any) -> None:
    """A value fits the schema of this name; says where it does not."""
    problems = [
        f"{list(error.absolute_path)}: {error.message}"[:500] for error in validator(name).iter_errors(value)
    ]
    assert not problems, "\n".join(problems)


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from refs(each)
    elif isinstance(value, list):
        for each in value:
            yield from refs(each)


HIDDEN = re.compile(r"^/(openapi.json|docs|health|ping|ready)$|/service_accounts(/\{account_id\})?$")


async def test_the_document_names_every_route_and_every_schema(client: httpx.AsyncClient) -> None:
    found = (await client.get("/openapi.json")).json()
    assert found["openapi"].startswith("3.1")
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    public = [route for route in routes if route.include_in_schema]
    for route in routes:  # the commands' own way into a server, and what is never carried out
        assert route in public or route.path.startswith("/admin") or HIDDEN.search(route.path), route.path
    expected = {
        (route.path.replace(":path", ""), method.lower())
        for route in public
        for method in route.methods or ()
    }
    documented = {(path, method) for path, methods in found["paths"].items() for method in methods}
    assert documented == {(path, method) for path, method in expected if method != "head"}
    for ref in refs(found):
        assert ref.removeprefix("#/components/schemas/") in found["components"]["schemas"]
    for schema in found["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for methods in found["paths"].values():
        for operation in methods.values():
            assert set(operation["responses"]) == {"200", "4XX", "5XX"} and operation["description"]


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_the_server_takes_fit_the_document(name: str) -> None:
    parse, body = BODIES[name]
    check(SCHEMA_OF[parse], body)


@pytest.mark.parametrize("body", [CODEX, LLAMA_INDEX, VERCEL, AGENTS])
def test_what_clients_send_fits_the_document(body: Json) -> None:
    check("CreateResponse", body)
    check("SocketRequest", {"type": "response.create", "stream_id": "a", **body})


def test_frames_of_clients_fit_the_document() -> None:
    answer = {"type": "function_call_output", "call_id": "c", "output": "1"}
    check("SocketRequest", {"type": "response.inject", "response_id": "resp_1", "input": [answer]})
    check("SocketRequest", {"type": "response.steer", "previous_response_id": "resp_1", "input": "x"})
    check("SocketRequest", {"type": "response.processed", "response_id": "resp_1"})
    for frame in ({"type": "response.cancel"}, {"input": "x"}, {"type": "response.create", "input": 1}):
        assert not validator("SocketRequest").is_valid(frame)


MESSAGE: Json = {"model": "claude", "messages": [{"role": "user", "content": "x"}]}
APIS: dict[str, tuple[Callable[[Json], Any], Json]] = {
    "CreateResponse": (parse_create, {"input": "x"}),
    "CountInputTokens": (parse_input_tokens, {"input": "x"}),
    "CompactResponse": (parse_compact, {"input": "x"}),
    "CreateChatCompletion": (parse_chat, {"messages": [{"role": "user", "content": "x"}]}),
    "CreateCompletion": (parse_completion, {"prompt": "x"}),
    "CreateMessage": (parse_messages, {**MESSAGE, "max_tokens": 1}),
    "CountMessageTokens": (parse_count, MESSAGE),
}
ODD: tuple[Any, ...] = ({"odd": [None]}, [[{}]], "odd", -(10**6), 0.123456789, True)


@pytest.mark.parametrize("api", APIS)
def test_what_the_document_refuses_the_server_refuses_too(api: str) -> None:
    """Every field, at values that mean nothing to most: the document is never the stricter of the two."""
    parse, body = APIS[api]
    for field in components()[api]["properties"]:
        for value in ODD:
            asked = {**body, field: value}
            if validator(api).is_valid(asked):
                continue
            with pytest.raises(ApiError):
                request: Any = parse(asked)
                if api in ("CreateResponse", "CountInputTokens", "CompactResponse"):
                    normalize_input(request.input, new_id=lambda prefix: prefix)
                pytest.fail(f"the server takes {field}: {value!r}")


CALL = 'call f {"x": 1}'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


async def test_replies_fit_the_document(client: httpx.AsyncClient) -> None:
    async def got(schema: str, method: str, path: str, body: Json | None = None) -> Json:
        reply = await client.request(method, path, json=body)
        found: Json = reply.json()
        check(schema, found)
        return found

    await got("Status", "GET", "/health")
    await got("Status", "GET", "/ping")
    await got("Ready", "GET", "/ready?probe=1")
    await got("Load", "GET", "/load")
    await got("Version", "GET", "/version")
    await got("Models", "GET", "/v1/models")
    await got("Model", "GET", "/v1/models/antiphon-scripted")
    asked = {"input": "think hm then " + CALL, "tools": [TOOL], "metadata": {"a": "b"}, "user": "u"}
    made = await got("Response", "POST", "/v1/responses", asked)
    path = f"/v1/responses/{made['id']}"
    await got("Response", "GET", path)
    await got("Response", "POST", "/v1/responses", {"input": "say hi", "background": True})
    await got("Items", "GET", f"{path}/input_items")
    outputs = {"tool_outputs": [{"call_id": made["output"][-1]["call_id"], "output": "1"}]}
    check("ToolOutputs", outputs)
    await got("Response", "POST", f"{path}/tool_outputs", outputs)
    await got("Responses", "GET", "/v1/responses")
    await got("InputTokens", "POST", "/v1/responses/input_tokens", {"input": "x"})
    await got("Compaction", "POST", "/v1/responses/compact", {"input": "x"})
    await got("Error", "POST", f"{path}/cancel")
    await got("Deleted", "DELETE", path)
    await got("Error", "GET", path)
    first = {"items": [{"role": "user", "content": "x"}], "metadata": {"a": "b"}}
    check("CreateConversation", first)
    conversation = (await got("Conversation", "POST", "/v1/conversations", first))["id"]
    here = f"/v1/conversations/{conversation}"
    listed = await got("Items", "GET", f"{here}/items")
    await got("Item", "GET", f"{here}/items/{listed['data'][0]['id']}")
    await got("Items", "POST", f"{here}/items", {"items": [{"role": "assistant", "content": "y"}]})
    await got("Conversation", "POST", here, {"metadata": None})
    await got("Deleted", "DELETE", here)
    chat: Json = {"messages": [{"role": "user", "content": "think hm then " + CALL}], "logprobs": True}
    nested = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    await got("ChatCompletion", "POST", "/v1/chat/completions", {**chat, "tools": [nested]})
    await got("Completion", "POST", "/v1/completions", {"prompt": "say hi", "logprobs": 1})
    function = {"name": "f", "input_schema": {"type": "object"}}
    said = {**chat["messages"][0], "content": f"think hm then say hi\n{CALL}"}
    message = {"model": "claude", "max_tokens": 99, "messages": [said], "tools": [function]}
    thinking = {"thinking": {"type": "adaptive"}}
    await got("Message", "POST", "/v1/messages", {**message, **thinking})
    await got("MessageTokens", "POST", "/v1/messages/count_tokens", {**MESSAGE, "tools": [function]})
    await got("MessagesError", "POST", "/v1/messages", {})
    generation = {"token_ids": [115, 97, 121, 32, 97], "sampling_params": {"logprobs": 1}}
    check("CreateGeneration", generation)
    await got("Generation", "POST", "/inference/v1/generate", generation)
    tokens = await got("Tokens", "POST", "/tokenize", {"prompt": "x", "return_token_strs": True})
    check("Tokenize", {"prompt": "x", "return_token_strs": True})
    await got("Text", "POST", "/detokenize", {"tokens": tokens["tokens"]})
    await got("Error", "POST", "/v1/responses", {})


async def test_replies_to_administrators_fit_the_document(server_app: Running) -> None:
    found = document(create_app(server_app.life))["paths"]
    asked: set[tuple[str, str]] = set()
    base = "/v1/organization"

    async with http_client(server_app, authorization=f"Bearer {server_app.life.admin_token}") as client:

        async def got(
            method: str, template: str, body: Json | None = None, query: str = "", **ids: str
        ) -> Json:
            operation = found[base + template][method.lower()]
            asked.add((base + template, method.lower()))
            if body is not None:
                said = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                check(said.rpartition("/")[2], body)
            reply = await client.request(method, base + template.format(**ids) + query, json=body)
            assert reply.status_code == 200 and HEADER not in reply.headers, reply.text
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
            check(schema.rpartition("/")[2], reply.json())
            known = {each["name"] for each in operation["parameters"] if each["in"] == "query"}
            told = httpx.QueryParams(query.removeprefix("?")).keys()
            assert {name.partition("[")[0] for name in told} <= known
            answer: Json = reply.json()
            return answer

        chat = {"messages": [{"role": "user", "content": "say hi"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        waits = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
        run = (await client.post("/v1/responses", json={"input": call(), **waits})).json()["id"]
        team = (await got("POST", "/projects", {"name": "Sales"}))["id"]
        at = {"project_id": team, "account_id": team}
        await got("POST", "/projects/{project_id}", {"name": "Buying"}, **at)
        await got("GET", "/projects/{project_id}", **at)
        await got("GET", "/projects", query="?limit=5&after=&include_archived=true")
        await got("GET", "/projects/{project_id}/service_accounts", query="?limit=5&after=", **at)
        await got("GET", "/projects/{project_id}/service_accounts/{account_id}", **at)
        keys, limits = (
            "/projects/{project_id}/api_keys",
            {"total_cost": 2.5, "models": {"antiphon-scripted": {"tokens_per_day": 1}}},
        )
        told = {"name": "x", "scopes": ["responses"], "limits": limits, "expires_in_seconds": 60}
        await got("POST", "/projects/{project_id}/service_accounts/{account_id}/api_keys", told, **at)
        at["key_id"] = (await got("POST", keys, told, **at))["id"]
        await got("GET", keys, query="?limit=5&after=&owner_project_access=active", **at)
        await got("POST", f"{keys}/{{key_id}}", {"name": "y", "limits": {"total_cost": None}}, **at)
        assert (await got("GET", f"{keys}/{{key_id}}", **at))["used"]["total_tokens"] == 0
        await got("POST", f"{keys}/{{key_id}}/rotate", {"grace_seconds": 0}, **at)
        at["rate_limit_id"] = "rl-antiphon-scripted"
        rates = "/projects/{project_id}/rate_limits"
        await got("POST", f"{rates}/{{rate_limit_id}}", {"max_requests_per_1_minute": 3}, **at)
        await got("GET", rates, query="?limit=5", **at)
        await got("POST", "/projects/{project_id}/limits", {"limits": {"total_tokens": 9, "weight": 2}}, **at)
        await got("GET", "/projects/{project_id}/limits", **at)
        made = await got("POST", "/admin_api_keys", {"name": "ops", "expires_in_seconds": 60})
        await got("GET", "/admin_api_keys", query="?limit=5&order=desc&after=")
        await got("GET", "/admin_api_keys/{key_id}", key_id=made["id"])
        await got("DELETE", "/admin_api_keys/{key_id}", key_id=made["id"])
        other = (await got("POST", keys, {"name": "z"}, **at))["id"]
        await got("DELETE", f"{keys}/{{key_id}}", **{**at, "key_id": other})
        query = f"?limit=5&effective_at[gte]=1&event_types=project.created&resource_ids={team}"
        query += f"&project_ids={team}&actor_ids=operator"
        [log] = (await got("GET", "/audit_logs", query=query))["data"]
        assert log["type"] == "project.created"
        await got("GET", "/audit_logs/verify", query="?number=1")
        assert [each["id"] for each in (await got("GET", "/runs"))["data"]] == [run]
        await got("POST", "/runs/{run_id}/cancel", run_id=run)
        within = f"?start_time={int(time.time()) - 60}&group_by=model&models=antiphon-scripted&limit=3"
        page = await got(
            "GET", "/usage/{kind}", query=within + "&bucket_width=1h&batch=false", kind="completions"
        )
        assert page["data"][-1]["results"]
        await got("GET", "/costs", query=within.replace("model&", "line_item&"))
        await got("POST", "/projects/{project_id}/archive", **at)
    of_models = f"{base}/models"  # they need a model that can be loaded: see below
    administered = [path for path in found if path.startswith(base) and not path.startswith(of_models)]
    assert asked == {(path, method) for path in administered for method in found[path]}


async def test_replies_about_models_fit_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bool] = []

    async def load(self: ChildText) -> None:
        await (engine := ScriptedEngine()).start()
        self.engine = cast("RemoteEngine", engine)
        loaded.append(True)

    async def unload(self: ChildText) -> None:
        loaded.clear()

    monkeypatch.setattr(ChildText, "load", load)
    monkeypatch.setattr(ChildText, "unload", unload)
    monkeypatch.setattr(ChildText, "state", lambda self: "loaded" if loaded else "unloaded")
    entry = {"name": "far", "engine": "scripted", "child": True, "deprecation_date": "2027-01-31"}
    led = {**entry, "name": "near", "canary": {"to": "far", "percent": 1}, "fallback": ["far"], "idle_s": 9}
    entries = ModelsFile.model_validate({"models": [entry, led]})
    async with (
        running_app(tmp_path, entries=entries) as server,
        http_client(server, authorization=f"Bearer {server.life.admin_token}") as client,
    ):
        for verb, state in (("load", "loaded"), ("unload", "unloaded")):
            reply = await client.post(f"/v1/organization/models/near/{verb}")
            assert (reply.status_code, reply.json()["state"]) == (200, state)
            check("ModelState", reply.json())
        listed = (await client.get("/v1/organization/models")).json()
        check("ModelStates", listed)
        assert [model["id"] for model in listed["data"]] == ["far", "near"]
        for model in (await client.get("/v1/models")).json()["data"]:
            check("Model", model)
        logs = (await client.get("/v1/organization/audit_logs?event_types[]=model.unloaded")).json()["data"]
        assert [log["model.unloaded"]["id"] for log in logs] == ["near"]


@pytest.mark.parametrize("path", ["", "/{id}", "/another"])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_service_accounts_are_not_made_by_themselves(
    server_app: Running, path: str, method: str
) -> None:
    async with http_client(server_app, authorization=f"Bearer {server_app.life.admin_token}") as client:
        at = "/v1/organization/projects/local/service_accounts" + path.format(id="local")
        reply = await client.request(method, at, json={"name": "bot"})
        if (method, path) == ("DELETE", ""):
            assert reply.status_code == 405
            return
        error = wire.validate_error(reply.json())
        assert (reply.status_code, error["code"]) == (404, "not_found")
        assert "/projects/local/api_keys" in error["message"]


async def test_streams_fit_the_document(tmp_path: Path) -> None:
    async with live_app(tmp_path) as running, http_client(running) as client:
        for path, schema, body in (
            ("/v1/responses", "ResponseEvent", {"input": "think hm then say hi"}),
            (
                "/v1/chat/completions",
                "ChatCompletionChunk",
                {"messages": [{"role": "user", "content": CALL}]},
            ),
            ("/v1/completions", "Completion", {"prompt": "say hi"}),
            ("/inference/v1/generate", "Generation", {"token_ids": list(b"say hi")}),
        ):
            text = (await client.post(path, json={**body, "stream": True})).text
            events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
            assert len(events) > 1
            for event in events:
                check(schema, httpx.Response(200, content=event).json())


@with_sandbox
async def test_queries_have_the_parameters_of_the_document(
    client: httpx.AsyncClient, server_app: Running
) -> None:
    """Each one is read where the document names it; `include` alone changes nothing, and says so."""
    found = (await client.get("/openapi.json")).json()
    made = (await client.post("/v1/responses", json={"input": "say hi"})).json()["id"]
    items = {"items": [{"type": "message", "id": "msg_a", "role": "user", "content": "x"}]}
    conversation = (await client.post("/v1/conversations", json=items)).json()["id"]
    file = await put_file(server_app, "a.md", "A note.")
    store = (await client.post("/v1/vector_stores", json={})).json()["id"]
    batches = f"/v1/vector_stores/{store}/file_batches"
    batch = (await client.post(batches, json={"file_ids": [file]})).json()["id"]
    container = (await client.post("/v1/containers", json={"name": "mine"})).json()["id"]
    chat = {"messages": [{"role": "user", "content": "say hi"}], "store": True}
    completion = (await client.post("/v1/chat/completions", json=chat)).json()["id"]
    template = {"template": {"instructions": "hi"}}
    prompt = (await client.post("/v1/prompts", json=template)).json()["id"]
    values = {"created_after": "1", "created_before": "99999999999", "starting_after": "0", "wait": "0"}
    values |= {
        "probe": "true",
        "limit": "3",
        "order": "asc",
        "after": "",
        "status": "completed",
        "scope": "all",
        "purpose": "user_data",
        "before": "",
        "filter": "completed",
        "page": "0",
        "name": "mine",
        "model": "antiphon-scripted",
        "metadata": "b",
        "include_obfuscation": "true",
        "timestamps": "true",
        "beta": "true",
        "conversation": conversation,
    }
    written = {"metadata": "metadata[a]"}
    for template, methods in found["paths"].items():
        if template.startswith("/v1/organization"):
            continue  # another test asks as an administrator
        path = template.format(
            response_id=made,
            conversation_id=conversation,
            item_id="msg_a",
            model_id="antiphon-scripted",
            file_id=file,
            vector_store_id=store,
            batch_id=batch,
            container_id=container,
            prompt_id=prompt,
            version="1",
            upload_id="upload_none",
            completion_id=completion,
        )
        for parameter in methods.get("get", {}).get("parameters", ()):
            name, schema = parameter["name"], parameter["schema"]
            if parameter["in"] != "query" or name in ("include", "stream"):
                continue
            value = values[name]
            if value not in schema.get("enum", (value,)):
                value = schema["enum"][0]
            elif not value and schema.get("type") == "integer":
                value = "0"
            of_streams = name in ("starting_after", "include_obfuscation")
            query = {written.get(name, name): value, **({"stream": "true"} if of_streams else {})}
            reply = await client.get(path, params=query)
            assert reply.status_code == 200 and HEADER not in reply.headers, (path, name, reply.text)


async def test_the_page_is_whole_and_asks_nobody(client: httpx.AsyncClient, server_app: Running) -> None:
    reply = await client.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    text = reply.text
    assert not re.search(r"<(script|img|link|iframe|form)\b|src=|url\(|@import|//\w+\.", text)
    for target in re.findall(r"href='#([^']+)'", text):
        assert f"id='{target}'" in text, target
    for path in document(create_app(server_app.life))["paths"]:
        assert path in text


def test_every_operation_is_in_one_family_that_is_shown(server_app: Running) -> None:
    found = document(create_app(server_app.life))
    of_operations = [each["tags"] for methods in found["paths"].values() for each in methods.values()]
    assert all(len(tags) == 1 for tags in of_operations)
    assert {tags[0] for tags in of_operations} == {tag["name"] for tag in found["tags"]}


async def test_it_needs_no_key_and_can_be_turned_off(tmp_path: Path) -> None:
    async with running_app(tmp_path / "a", api_key=("secret",)) as running, http_client(running) as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (
            (await client.get("/docs")).status_code == (await client.get("/openapi.json")).status_code == 200
        )
    async with running_app(tmp_path / "b", docs=False) as running, http_client(running) as client:
        assert (
            (await client.get("/docs")).status_code == (await client.get("/openapi.json")).status_code == 404
        )


async def test_headers_and_members_of_this_server_are_documented(tmp_path: Path) -> None:
    """Whatever real replies have beside the official API is in the document."""

    def told(operation: Json, status: int) -> set[str]:
        kind = "200" if status == 200 else f"{status // 100}XX"
        return {name.lower() for name in operation["responses"][kind]["headers"]}

    async with live_app(tmp_path) as running, http_client(running) as client:
        found = (await client.get("/openapi.json")).json()
        create = found["paths"]["/v1/responses"]["post"]
        retrieve = found["paths"]["/v1/responses/{response_id}"]["get"]
        members = found["components"]["schemas"]["Response"]["properties"]

        async def answer(operation: Json, method: str, path: str, **how: Any) -> httpx.Response:
            reply = await client.request(method, path, **how)
            usual = {"content-type", "content-length", "transfer-encoding", "date", "cache-control"}
            usual |= {"connection", "x-accel-buffering"}
            assert set(reply.headers) <= usual | told(operation, reply.status_code), path
            for name in how.get("headers", {}):
                assert name in {each["name"] for each in operation["parameters"]}, name
            return reply

        key = {"Idempotency-Key": "k", "X-Request-Id": "mine"}
        waits = {"tools": [TOOL], "background": True, "await_tool_outputs": True, "no_such_field": 1}
        body = {"input": CALL, **waits}
        made = (await answer(create, "POST", "/v1/responses", json=body, headers=key)).json()
        again = await answer(create, "POST", "/v1/responses", json=body, headers=key)
        assert again.headers["idempotent-replayed"] == "true"
        conflict = await answer(create, "POST", "/v1/responses", json={"input": "x"}, headers=key)
        assert conflict.status_code >= 400 and "x-should-retry" in conflict.headers
        path = f"/v1/responses/{made['id']}"
        async with client.stream("GET", f"{path}?stream=true") as stream:
            async for line in stream.aiter_lines():
                if "response.output_item.done" in line:
                    break
        while "pending_tool_calls" not in (waiting := await answer(retrieve, "GET", path)).json():
            pass
        assert "openai-poll-after-ms" in waiting.headers
        assert waiting.json().keys() <= members.keys() and {"attempt", "queue_position"} <= members.keys()
        check("Response", waiting.json())
        await client.post(f"{path}/cancel")
        resumed = {"headers": {"Last-Event-ID": "0"}}
        assert (await answer(retrieve, "GET", f"{path}?stream=true", **resumed)).status_code == 200
