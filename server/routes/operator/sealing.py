"""/admin/sealing_keys: what `antiphon sealing` asks of a server that holds the database.

Reached with the admin token only, which the server leaves in its data folder for its own user.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import OPERATOR_ONLY
from server.admin import sealing_keys
from server.errors import ApiError
from server.http import actor, context, json_reply, read_body
from server.routes.documented import needs

router = APIRouter(prefix=sealing_keys.PATH, include_in_schema=False)


@router.get("", **needs(OPERATOR_ONLY))
async def list_sealing_keys(request: Request) -> Response:
    """All keys, never their secrets."""
    here = context(request)
    return json_reply(orjson.dumps(await sealing_keys.listed(here.storage, here.sealing.given)))


@router.post("", **needs(OPERATOR_ONLY))
async def make_sealing_key(request: Request) -> Response:
    """Have a new key seal from now on."""
    await read_body(request, allow_empty=True, only=())
    try:
        key = await context(request).sealing.rotate(actor(request))
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    return json_reply(orjson.dumps(sealing_keys.as_json(key, seals=True)))
