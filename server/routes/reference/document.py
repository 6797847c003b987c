"""GET /openapi.json and /docs: the reference of the API, as the server itself would tell it.

Owns the document, which is put together from the routes and from the schemas that check their bodies, and
serves it as JSON and as a page. Both are open to all, as they say nothing of what the server holds; the
setting `docs` takes them away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from server import __version__
from server.access import OPEN
from server.http import json_reply, life
from server.routes.documented import add_common_headers, needs
from server.routes.reference.page import CONTENT_SECURITY_POLICY, page
from server.schema import components

router = APIRouter(include_in_schema=False)

DESCRIPTION = (
    "Stateful conversations with language models. Null means absent everywhere. Members that no schema here "
    "knows are taken, and named in the header `x-antiphon-ignored` of the reply. Over a WebSocket at "
    "`/v1/responses` a client sends frames of the form `SocketRequest`, and gets those of `SocketEvent`."
)

TAGS: Mapping[str, str] = {
    "Responses": "Answers of models, and what was said before them.",
    "Conversations": "What was said, under an id of its own.",
    "Prompts": "Texts with variables, in versions, that responses may name.",
    "Completions": "Chats, texts and tokens that a model completes.",
    "Messages": "Answers of models, as Anthropic's API gives them.",
    "Embeddings": "Vectors and classes of inputs.",
    "Ranking": "How well documents fit a query.",
    "Moderations": "Whether inputs may do harm.",
    "Audio": "What is said in a recording.",
    "Files": "Files, also in parts.",
    "Vector stores": "Files that are searched by their meaning.",
    "Containers": "Machines in which models run code, and their files.",
    "Batches": "Files of many requests.",
    "Tokens": "Texts as the tokens of a model.",
    "Models": "The models that there are.",
    "Tools": "The tools of this server that a request may have.",
    "Organization": "For administrators: keys, projects, limits, usage, runs and loaded models.",
    "Server": "Whether the server is well, and what it is.",
}
"""The families of operations, in the order in which they are shown, and what each is about."""


def document(app: FastAPI, root_path: str = "") -> dict[str, Any]:
    """The OpenAPI document of an application, made once. root_path: where a proxy shows it, since the root of
    that host may have something else.
    """
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=__version__,
            description=DESCRIPTION,
            routes=app.routes,
            servers=[{"url": root_path}] if root_path else None,
            tags=[{"name": name, "description": about} for name, about in TAGS.items()],
            separate_input_output_schemas=False,
        )
        add_common_headers(made["paths"])
        made["components"] = {
            "schemas": dict(components()),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        }
        app.openapi_schema = made
    return app.openapi_schema


@router.get("/openapi.json", **needs(OPEN))
async def openapi(request: Request) -> Response:
    """The document."""
    return json_reply(orjson.dumps(_document(request)))


@router.get("/docs", **needs(OPEN))
async def docs(request: Request) -> Response:
    """The document as a page, whole, without scripts and without a request to anywhere."""
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(page(_document(request)), headers=headers)


def _document(request: Request) -> dict[str, Any]:
    return document(request.app, life(request).config.root_path)
