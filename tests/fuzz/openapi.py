"""Requests that the OpenAPI document describes, made by schemathesis, and whether the replies are those that
it describes.

Owns which ids paths name, and what of a reply is wrong. Run it as

    python -m tests.fuzz.openapi --requests 20000 --seed 7

which starts a server in this process, prints what was wrong, and exits with 1 if anything was. Wrong is: a
5xx, a status, a media type or a header that the document lacks, a reply or an event that does not fit its
schema, an error without its official form, a reply that has not begun after LIMIT_S.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.routes.reference import document
from tests.support.running import Running, http_client, live_app

LIMIT_S = 30.0
STREAM_S = 1.0
"""So long a stream is read: some go on until their client leaves."""

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
METHODS = ("get", "post", "delete")
"""In the order in which they are asked: what deletes comes last."""

ENDING = ("/archive", "/rotate", "/cancel", "/complete")
"""What ends something comes after what asks for it, too."""

KEY = "sk-fuzz"

OFTEN = 0.8
"""Of the paths with ids, so many have those of what there is."""

OPERATIONS = 250
"""About as many there are, those counted twice whose requests may fit the document or not."""

Json = dict[str, Any]


@dataclass(slots=True)
class Found:
    """What was asked, and what was wrong, one text for each kind of fault of an operation."""

    num_requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Server:
    """A server, its document, the token of its operator, and the ids of what it has, by path and
    parameter."""

    url: str
    document: Json
    token: str
    ids: dict[str, str]


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    """A server that has one of everything."""
    settings = {"api_key": (KEY,), "tool_timeout_s": 2.0, **settings}
    own = {"authorization": f"Bearer {KEY}"}
    async with live_app(folder, **settings) as running, http_client(running, **own) as client:
        ids = await _one_of_everything(running, client)
        yield Server(
            running.base_url,
            json.loads(json.dumps(document(running.app))),
            running.life.admin_token,
            ids,
        )


async def _one_of_everything(running: Running, client: httpx.AsyncClient) -> dict[str, str]:
    operator = {"authorization": f"Bearer {running.life.admin_token}"}

    async def made(path: str, body: Json, **headers: str) -> Json:
        reply = await client.post(path, json=body, headers=headers)
        assert reply.status_code == 200, (path, reply.text)
        found: Json = reply.json()
        return found

    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    response = await made("/v1/responses", {"input": 'call f {"x": 1}', "tools": [tool]})
    item = {"type": "message", "role": "user", "content": "say hello"}
    conversation = await made("/v1/conversations", {"items": [item]})
    items = (await client.get(f"/v1/conversations/{conversation['id']}/items")).json()["data"]
    messages = [{"role": "user", "content": "say hello"}]
    completion = await made("/v1/chat/completions", {"messages": messages, "store": True})
    prompt = await made("/v1/prompts", {"name": "p", "template": {"instructions": "Be brief."}})
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "say hello"}}

    async def put(name: str, text: str, purpose: str) -> str:
        reply = await client.post(
            "/v1/files", data={"purpose": purpose}, files={"file": (name, text.encode())}
        )
        id: str = reply.json()["id"]
        return id

    file = await put("tides.md", "# Tides\n\nThe spring tide is highest.", "assistants")
    lines = await put("lines.jsonl", json.dumps(line), "batch")
    other = await put("other.md", "# Other", "assistants")
    batch = {"input_file_id": lines, "endpoint": "/v1/responses", "completion_window": "24h"}
    whole = await made("/v1/batches", batch)
    upload = {"filename": "a.txt", "purpose": "user_data", "bytes": 5, "mime_type": "text/plain"}
    store = await made("/v1/vector_stores", {"name": "shelf", "file_ids": [file]})
    part = await made(f"/v1/vector_stores/{store['id']}/file_batches", {"file_ids": [other]})
    project = await made("/v1/organization/projects", {"name": "team"}, **operator)
    key = await made(f"/v1/organization/projects/{project['id']}/api_keys", {"name": "key"}, **operator)
    admin = await made("/v1/organization/admin_api_keys", {"name": "root"}, **operator)
    return {
        "model_id": "antiphon-scripted",
        "response_id": response["id"],
        "run_id": response["id"],
        "conversation_id": conversation["id"],
        "item_id": items[0]["id"],
        "completion_id": completion["id"],
        "prompt_id": prompt["id"],
        "version": "1",
        "file_id": file,
        "/v1/batches batch_id": whole["id"],
        "batch_id": part["id"],
        "upload_id": (await made("/v1/uploads", upload))["id"],
        "vector_store_id": store["id"],
        "project_id": project["id"],
        "/v1/organization/admin_api_keys key_id": admin["id"],
        "key_id": key["id"],
        "kind": "completions",
    }


def ask_all(
    server: Server, *, examples: int, seed: int | None = None, only: str = "", heaviest: int | None = None
) -> Found:
    """Ask everything that the document describes: so many requests of each operation that fit it, and as many
    that do not. seed: None for the same ones every time. only: what the operations' names have in them.
    heaviest: operations whose bodies have longer schemas are left out; for those of conversations it takes
    schemathesis seconds to make the first request."""
    found, session = Found(), requests.Session()
    schema = schemathesis.openapi.from_dict(server.document)
    operations = [cast(Any, result).ok() for result in schema.get_all_operations()]
    dice = random.Random(seed or 0)
    for operation in sorted(operations, key=_turn):
        if only not in operation.label or (heaviest is not None and _weight(operation, server) > heaviest):
            continue
        modes = [GenerationMode.POSITIVE]
        if operation.body or operation.query:
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            _ask(server, operation, mode, found, session, dice, examples=examples, seed=seed)
    return found


def _turn(operation: Any) -> tuple[int, bool, str]:
    return METHODS.index(operation.method), operation.path.endswith(ENDING), operation.path


def _ask(
    server: Server,
    operation: Any,
    mode: GenerationMode,
    found: Found,
    session: requests.Session,
    dice: random.Random,
    *,
    examples: int,
    seed: int | None,
) -> None:
    """The requests of one operation."""

    @hypothesis.settings(
        max_examples=examples,
        derandomize=seed is None,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def requests_of(case: Any) -> None:
        for name in case.path_parameters or {}:
            known = _known(server, operation.path, name)
            if known is not None and dice.random() < OFTEN:
                case.path_parameters[name] = known
        _one(server, operation, case, found, session)

    if seed is not None:
        requests_of = hypothesis.seed(seed)(requests_of)
    with suppress(hypothesis.errors.Unsatisfiable):  # where nothing of this operation can be wrong
        requests_of()


def _known(server: Server, path: str, name: str) -> str | None:
    """The id of what there is for a parameter of a path; one that is told for its family alone goes first."""
    families = (each.split() for each in server.ids if " " in each)
    of_family = (f"{family} {each}" for family, each in families if path.startswith(family) and each == name)
    return server.ids.get(next(of_family, name))


def _weight(operation: Any, server: Server) -> int:
    """Characters of all schemas that the body of an operation refers to."""
    found: set[str] = set()
    todo = [json.dumps(operation.definition.raw.get("requestBody", {}))]
    schemas, weight = server.document["components"]["schemas"], 0
    while todo:
        text = todo.pop()
        for name in re.findall(r"#/components/schemas/(\w+)", text):
            if name not in found:
                found.add(name)
                todo.append(json.dumps(schemas[name]))
                weight += len(todo[-1])
    return weight


def _one(server: Server, operation: Any, case: Any, found: Found, session: requests.Session) -> None:
    """Send one request, and look at its reply."""
    for name in ("wait",):
        if name in (case.query or {}):
            case.query[name] = "0.1"
    operators = operation.path.startswith("/v1/organization")
    headers = {"authorization": f"Bearer {server.token if operators else KEY}"}
    found.num_requests += 1
    try:
        reply = case.call(
            base_url=server.url, session=session, headers=headers, timeout=LIMIT_S, allow_redirects=False
        )
    except requests.RequestException as error:
        found.wrong.setdefault(f"{operation.label}: {type(error).__name__}", str(error)[:500])
        return
    found.statuses[reply.status_code] += 1
    for problem in problems(server, operation, case, reply):
        kind = f"{operation.label} {reply.status_code}: {problem.splitlines()[0][:100]}"
        found.wrong.setdefault(kind, f"{problem[:1500]}\n{case.as_curl_command()[:1500]}")


def problems(server: Server, operation: Any, case: Any, reply: Any) -> Iterator[str]:
    """What is wrong with a reply."""
    if reply.status_code >= 500:
        yield f"a {reply.status_code}: {reply.text[:500]}"
    # In a query, what is not known is named in a header, and a client may write an object in many ways.
    checks = [*CHECKS, negative_data_rejection] if operation.method != "get" else [*CHECKS]
    streams = reply.headers.get("content-type", [""])[0].startswith("text/event-stream")
    if streams:  # whose schema is that of the JSON in its data, and not of the frames around it
        checks.remove(response_schema_conformance)
    try:
        case.validate_response(reply, checks=checks)
    except FailureGroup as failures:
        for each in failures.exceptions:
            yield f"{type(each).__name__}: {each}"
    if streams:
        yield from _events(server, operation, reply.text)


def _events(server: Server, operation: Any, text: str) -> Iterator[str]:
    """What is wrong with the events of a stream."""
    described = operation.definition.raw["responses"]["200"]["content"]["text/event-stream"]["schema"]
    name = described["$ref"].rpartition("/")[2]
    check = _validator(name, json.dumps(server.document["components"]["schemas"]))
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event and len(event) == 1:
            continue  # the official form of a failure after the headers
        problem = next(iter(check.iter_errors(event)), None)
        if problem is not None:
            yield f"an event is no {name}: {problem.message[:300]}\n{line[:500]}"


@cache
def _validator(name: str, schemas: str) -> Draft202012Validator:
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": json.loads(schemas)}}
    )


async def main(arguments: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", default="")
    told = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder)) as server:
            found = await asyncio.to_thread(
                ask_all, server, examples=max(1, told.requests // OPERATIONS), seed=told.seed, only=told.only
            )
    for kind, fault in found.wrong.items():
        print(f"== {kind}\n{fault}\n")
    print(f"{found.num_requests} requests, {dict(found.statuses)}, {len(found.wrong)} faults")
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
