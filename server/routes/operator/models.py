"""/v1/organization/models: the models of the file, what they do, and loading and unloading one (extension).

The same stands at /admin/models, where `antiphon models` asks for it with the admin token.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine import LoadError
from server.access import ADMIN, OPERATOR_ONLY
from server.errors import ApiError
from server.http import actor, context, json_reply, read_body
from server.routes.documented import documented, needs

router = APIRouter(tags=["Organization"])

PATH = "/admin/models"
ORGANIZATION_PATH = "/v1/organization/models"


@router.get(PATH, **needs(OPERATOR_ONLY), include_in_schema=False)
@router.get(ORGANIZATION_PATH, **documented("ModelStates", ADMIN))
async def list_model_states(request: Request) -> Response:
    """Every model of the file: whether it is loaded, what it takes, and who waits for it."""
    found = context(request).several.described()
    return json_reply(orjson.dumps({"object": "list", "data": found}))


@router.post(PATH + "/{model_id:path}/load", **needs(OPERATOR_ONLY), include_in_schema=False)
@router.post(ORGANIZATION_PATH + "/{model_id:path}/load", **documented("ModelState", ADMIN))
async def load_model(request: Request, model_id: str) -> Response:
    """Load a model that has a process of its own, and answer when it serves."""
    return await _changed(request, model_id, "load")


@router.post(PATH + "/{model_id:path}/unload", **needs(OPERATOR_ONLY), include_in_schema=False)
@router.post(ORGANIZATION_PATH + "/{model_id:path}/unload", **documented("ModelState", ADMIN))
async def unload_model(request: Request, model_id: str) -> Response:
    """Unload one that nobody uses now; the next request for it loads it again."""
    return await _changed(request, model_id, "unload")


async def _changed(request: Request, model_id: str, verb: str) -> Response:
    await read_body(request, allow_empty=True, only=())
    here = context(request)
    id = here.several.id_of(model_id)
    if verb == "load":
        await here.storage.add_audit(actor(request).did("model.loaded", id))
        try:
            await here.several.load(id)
        except LoadError as error:  # clients are not told of folders and files, operators are
            message = f"The model '{id}' cannot be loaded: {error}"
            raise ApiError(503, message, code="model_not_loaded") from None
    else:
        await here.several.unload(id)
        await here.storage.add_audit(actor(request).did("model.unloaded", id))
    found = next(model for model in here.several.described() if model["id"] == id)
    return json_reply(orjson.dumps(found))
