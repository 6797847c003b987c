"""GET /openapi.json and /docs: the reference of the API, as the server itself would tell it.

Owns the document, which is put together from the routes and from the schemas that check their bodies, and
serves it as JSON and as a page. Both are open to all, as they say nothing of what the server holds; the
setting `docs` takes them away.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from server import __version__
from server.access import OPEN
from server.http import json_reply
from server.routes.documented import add_common_headers, needs
from server.routes.reference.page import CONTENT_SECURITY_POLICY, page
from server.schema import components

router = APIRouter(include_in_schema=False)

DESCRIPTION = (
    "Stateful conversations with language models. Null means absent everywhere. Members that no schema here "
    "knows are taken, and named in the header `x-antiphon-ignored` of the reply. Over a WebSocket at "
    "`/v1/responses` a client sends frames of the form `SocketRequest`, and gets those of `SocketEvent`."
)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application, made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=__version__,
            description=DESCRIPTION,
            routes=app.routes,
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
    return json_reply(orjson.dumps(document(request.app)))


@router.get("/docs", **needs(OPEN))
async def docs(request: Request) -> Response:
    """The document as a page, whole, without scripts and without a request to anywhere."""
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return HTMLResponse(page(document(request.app)), headers=headers)
