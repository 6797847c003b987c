"""The short form of the fuzzer of what the OpenAPI document describes, and that it sees what is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from urllib3 import HTTPResponse

from tests.fuzz.openapi import Server, ask_all, problems, serving

HEAVIEST = 20_000
"""Characters of the schemas of a body: those with items are left to `make fuzz`."""


@pytest.mark.long
async def test_replies_are_those_that_the_document_describes(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        found = await asyncio.to_thread(ask_all, server, examples=2, heaviest=HEAVIEST)
    assert found.wrong == {}
    assert found.statuses[200] > 50 and found.statuses[400] > 50
    assert found.num_requests == found.statuses.total() > 200


ERROR = '{"error": {"message": "No.", "type": "x", "param": null, "code": null}}'


@pytest.mark.parametrize(
    ("status", "media_type", "text", "wrong"),
    [
        (400, "application/json", ERROR, None),
        (500, "application/json", ERROR, "a 500"),
        (302, "application/json", "{}", "UndefinedStatusCode"),
        (200, "text/html", "<p>", "UndefinedContentType"),
        (200, "application/json", '{"id": 3}', "JsonSchemaError"),
        (422, "application/json", '{"detail": []}', "JsonSchemaError"),
        (200, "text/event-stream", 'data: {"object": "text_completion"}\n\n', "an event is no Completion"),
        (200, "text/event-stream", f"data: {ERROR}\n\ndata: [DONE]\n\n", None),
    ],
)
async def test_it_sees_what_is_wrong(
    document: dict[str, Any], status: int, media_type: str, text: str, wrong: str | None
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    operation = schema["/v1/completions"]["POST"]
    case = operation.Case(body={"prompt": "x"}, media_type="application/json")
    reply = requests.Response()
    reply.status_code, reply._content = status, text.encode()
    reply.raw = HTTPResponse(headers={"content-type": media_type}, preload_content=False)  # which are read
    reply.headers["content-type"] = media_type
    reply.request = requests.Request("POST", "http://127.0.0.1/v1/completions").prepare()
    told = [
        *problems(
            Server("", document, "", {}), operation, case, schemathesis.Response.from_requests(reply, True)
        )
    ]
    told = [each for each in told if not each.startswith("MissingHeaders")]  # a made-up reply has few
    assert (told == []) if wrong is None else any(each.startswith(wrong) for each in told), told


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    from fastapi import FastAPI

    from server.routes import ROUTERS
    from server.routes.reference import document

    app = FastAPI(title="x")
    for router in ROUTERS:
        app.include_router(router)
    made: dict[str, Any] = json.loads(json.dumps(document(app)))
    return made
