"""GET /v1/models and /v1/models/{id}: what is served, in the shape of OpenAI's API or of Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.access import require_use
from server.errors import is_of_messages
from server.http import context, principal
from server.model_registry import Models, PooledModel, ServedModel, SpeechModel
from server.routes.documented import documented
from server.settings import ModelEntry

router = APIRouter(prefix="/v1", tags=["Models"])


def started_object(model: ServedModel | PooledModel | SpeechModel) -> dict[str, Any]:
    """The Model object of one that has started."""
    match model:
        case ServedModel():
            return model_object(model)
        case PooledModel():
            return pooled_object(model)
        case SpeechModel():
            return speech_object(model)


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
        **_of_entry(model.entry),
    }


def entry_object(entry: ModelEntry, models: Models, name: str) -> dict[str, Any]:
    """The Model object of one of the file that may not be loaded. name: one that means it."""
    held = models.shelf.get(entry.id)
    state = "loaded" if held is None else held.state
    if (started := models.started(entry.id)) is not None:
        return {**started_object(started), "id": name, "root": entry.id, "state": state, **_of_entry(entry)}
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "antiphon",
        "root": entry.id,
        "parent": None,
        "max_model_len": None,
        "state": state,
        **({} if entry.use == "text" else {"used_for": entry.use}),
        **_of_entry(entry),
    }


def _of_entry(entry: ModelEntry | None) -> dict[str, Any]:
    if entry is None or entry.deprecation_date is None:
        return {}
    return {"deprecation_date": entry.deprecation_date.isoformat()}


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
        "max_model_len": None,
        "used_for": "speech",
        "architecture": model.info.architecture,
        "languages": model.info.languages or ("en",),
        "window_seconds": model.info.window_s,
    }


def _in_anthropics_shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """A Model object as Anthropic's API has it."""
    most, sunset = model.get("max_model_len"), model.get("deprecation_date")
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active" if sunset is None else "deprecated",
        "retires_at": None if sunset is None else f"{sunset}T00:00:00Z",
        "max_input_tokens": most,
        "max_tokens": most,
    }


def _anthropics_list(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A list of Model objects as Anthropic's API has it: all of them on one page."""
    ids = [model["id"] for model in models]
    return {
        "data": [_in_anthropics_shape(model) for model in models],
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def _objects(models: Models) -> dict[str, dict[str, Any]]:
    """Every name that a request may give, the default model's first, and its Model object."""
    found: dict[str, dict[str, Any]] = {}
    for name in models.names:
        if (entry := models.entry(name)) is not None:
            found[name] = entry_object(entry, models, name)
        elif (started := models.started(name)) is not None:
            found[name] = started_object(started)
    return found


@router.get(
    "/models",
    **documented("ListedModels", "models.read", error="EitherError", headers=("anthropic-version",)),
)
async def list_models(request: Request) -> Response:
    """Every name that the key may use, the default model first."""
    scopes, models = principal(request).scopes, context(request).models
    usable = [object for name, object in _objects(models).items() if scopes.allow(f"model:{name}")]
    if is_of_messages(request.scope):
        return JSONResponse(_anthropics_list(usable))
    return JSONResponse({"object": "list", "data": usable})


@router.get(
    "/models/{model_id:path}",
    **documented("ShownModel", "models.read", error="EitherError", headers=("anthropic-version",)),
)
async def get_model(model_id: str, request: Request) -> Response:
    """One model; ids may hold slashes."""
    models = context(request).models
    if (found := _objects(models).get(model_id)) is None:
        models.get(model_id)
        raise AssertionError(f"{model_id} is served, and has no object")
    require_use(principal(request), model_id)
    return JSONResponse(_in_anthropics_shape(found) if is_of_messages(request.scope) else found)
