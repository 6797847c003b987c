"""GET /v1/models and /v1/models/{id}: what is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.access import require_use
from server.http import context, principal
from server.model_registry import ServedModel
from server.routes.documented import documented

router = APIRouter(prefix="/v1")


def model_object(model: ServedModel) -> dict[str, Any]:
    """The official Model object, with the extensions that other servers have too: `parent` is the model that
    an adapter stands beside."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "antiphon",
        "root": model.root,
        "parent": model.root if model.adapter else None,
        "max_model_len": model.info.max_model_len,
    }


@router.get("/models", **documented("Models", "models.read"))
async def list_models(request: Request) -> Response:
    """Every name that the key may use, the default model first."""
    scopes = principal(request).scopes
    usable = [model for model in context(request).models if scopes.allow(f"model:{model.name}")]
    return JSONResponse({"object": "list", "data": [model_object(model) for model in usable]})


@router.get("/models/{model_id:path}", **documented("Model", "models.read"))
async def get_model(model_id: str, request: Request) -> Response:
    """One model; ids may hold slashes."""
    model = context(request).models.get(model_id)
    require_use(principal(request), model.name)
    return JSONResponse(model_object(model))
