"""Which model answers a request: decided once, before anything is done for it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from starlette.requests import HTTPConnection

from engine import PoolingKind
from server.access import require_use
from server.http import context, owner, principal
from server.model_registry import Models, PooledModel, ServedModel, SpeechModel
from server.schema import CreateResponse
from server.settings import ModelEntry
from storage import NotFound

log = logging.getLogger("antiphon.models")

WARN_S = 86400.0
"""How often the log tells that a model is used which is to go."""

_warned: dict[str, float] = {}


async def chosen_model(request: HTTPConnection, name: str | None, key: str | None = None) -> ServedModel:
    """The model that answers a request for this name, loaded; see `Models.choose`. key: requests with the
    same one have the same model of a canary. ApiError 403 where the request's key may not use it, and 429
    where it is one too many, which is found out before anything is loaded."""
    models = context(request).models
    require_use(principal(request), models.meant(name))
    await _require_limits(request, models.meant(name))
    served = await models.choose(name, owner(request), key)
    _warn(served.entry)
    return served


async def chosen_pooled(request: HTTPConnection, name: str | None, *kinds: PoolingKind) -> PooledModel:
    """The same of a model that makes vectors, scores or labels; see `Models.load_pooled`."""
    served = await (await _allowed(request, name)).load_pooled(name, *kinds)
    _warn(context(request).models.entry(served.name))
    return served


async def chosen_speech(request: HTTPConnection, name: str | None) -> SpeechModel:
    """The same of a model that turns sound into text; see `Models.load_speech`."""
    served = await (await _allowed(request, name)).load_speech(name)
    _warn(context(request).models.entry(served.name))
    return served


async def _allowed(request: HTTPConnection, name: str | None) -> Models:
    """The models, of which the request's key may use the one of this name. ApiError as `chosen_model`."""
    models = context(request).models
    if name is not None and name in models.names:
        require_use(principal(request), name)
    await _require_limits(request, name)
    return models


async def _require_limits(request: HTTPConnection, name: str | None) -> None:
    """Raise ApiError 429, and 403 for a budget, where a model would be loaded for a request that is refused;
    what is unloaded for it is missed by others."""
    here = context(request)
    if here.models.may_load(name):
        await here.limiter.require(principal(request).subjects, name)


async def with_model(request: HTTPConnection, parsed: CreateResponse) -> CreateResponse:
    """A request for a response by the name of the model that answers it. A response goes on with the model of
    the one before it, where a canary leads only some of them elsewhere."""
    models = context(request).models
    key = parsed.conversation_id or parsed.prompt_cache_key
    name = parsed.model
    before = parsed.previous_response_id
    if before is not None and len(ways := models.ways(name)) > 1:
        with suppress(NotFound):  # whoever plans it says so
            stored = await context(request).storage.get_response(owner(request), before)
            if stored.model in ways:
                require_use(principal(request), models.meant(name))
                await _require_limits(request, stored.model)
                await models.load(stored.model)
                return parsed.model_copy(update={"model": stored.model, "asked_model": models.meant(name)})
    served = await chosen_model(request, name, key)
    if name is None and served.name == models.first.name:
        return parsed
    return parsed.model_copy(update={"model": served.name, "asked_model": served.allowed_as})


def _warn(entry: ModelEntry | None) -> None:
    """Tell the operator that clients use a model which is to go, once a day."""
    if entry is None or entry.deprecation_date is None:
        return
    now = time.monotonic()
    if now - _warned.get(entry.id, -WARN_S) >= WARN_S:
        _warned[entry.id] = now
        log.warning("%s is used, and is deprecated from %s on", entry.id, entry.deprecation_date)
