"""GET /v1/models and /v1/models/{id}: what is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.access import require_use
from server.http import context, principal
from server.model_registry import PooledModel, ServedModel, SpeechModel
from server.routes.documented import documented

router = APIRouter(prefix="/v1")


def model_object(model: ServedModel) -> dict[str, Any]:
    """The official Model object, with the extensions that other servers have too: `parent` is the model that
    an adapter stands beside, `input_modalities` what its input may hold."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "antiphon",
        "root": model.root,
        "parent": model.root if model.adapter else None,
        "max_model_len": model.info.max_model_len,
        "input_modalities": sorted(model.info.modalities, reverse=True),
    }


def pooled_object(model: PooledModel) -> dict[str, Any]:
    """The Model object of a model that makes vectors, scores or labels, with what its checkpoint says."""
    info = model.info
    embeds = info.kind == "embedding"
    pooling = {
        "modes": info.pooling,
        "source": info.pooling_source,
        "normalized": info.normalized if embeds else None,
        "attention": "causal" if info.causal else "bidirectional",
        "activation": info.activation,
    }
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "antiphon",
        "root": model.name,
        "parent": None,
        "max_model_len": info.max_model_len,
        "used_for": info.kind,
        "architecture": info.architecture,
        "engine": info.engine,
        "pooling": {name: value for name, value in pooling.items() if value is not None},
        **({"dimensions": info.default_dimensions} if embeds else {"labels": info.labels}),
        **({"prompts": dict(info.prompts), "default_prompt": info.default_prompt} if embeds else {}),
    }


def speech_object(model: SpeechModel) -> dict[str, Any]:
    """The Model object of a model that turns sound into text."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "antiphon",
        "root": model.name,
        "parent": None,
        "used_for": "speech",
        "architecture": model.info.architecture,
        "languages": model.info.languages or ("en",),
        "window_seconds": model.info.window_s,
    }


@router.get("/models", **documented("Models", "models.read"))
async def list_models(request: Request) -> Response:
    """Every name that the key may use, the default model first."""
    scopes, models = principal(request).scopes, context(request).models
    usable = [model_object(model) for model in models if scopes.allow(f"model:{model.name}")]
    usable += [pooled_object(model) for model in models.pooled if scopes.allow(f"model:{model.name}")]
    usable += [speech_object(model) for model in models.speech if scopes.allow(f"model:{model.name}")]
    return JSONResponse({"object": "list", "data": usable})


@router.get("/models/{model_id:path}", **documented("Model", "models.read"))
async def get_model(model_id: str, request: Request) -> Response:
    """One model; ids may hold slashes."""
    models = context(request).models
    shown: dict[str, dict[str, Any]] = {
        **{model.name: pooled_object(model) for model in models.pooled if model.name == model_id},
        **{model.name: speech_object(model) for model in models.speech if model.name == model_id},
    }
    require_use(principal(request), model_id if shown else models.get(model_id).name)
    return JSONResponse(shown[model_id] if shown else model_object(models.get(model_id)))
