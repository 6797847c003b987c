"""/admin/keys: what `antiphon keys` asks of a server that holds the database.

Reached with the admin token only, which the server leaves in its data folder for its own user.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.admin import AdminError, keys
from server.errors import ApiError
from server.http import context, json_reply, life, read_body
from server.ignored import unread
from server.schema import mistyped

router = APIRouter(prefix="/admin/keys", include_in_schema=False)


@router.post("")
async def create_key(request: Request) -> Response:
    """Make a key."""
    body = await read_body(request, allow_empty=True)
    unread(body, ("name", "owner"))
    name, owner = body.get("name") or "", body.get("owner") or None
    for field, value in (("name", name), ("owner", owner)):
        if value is not None and not isinstance(value, str):
            mistyped(field, "a string", value)
    made = await keys.create(context(request).storage, name=name, owner=owner)
    life(request).keys.forget()
    return json_reply(orjson.dumps(made))


@router.get("")
async def list_keys(request: Request) -> Response:
    """All keys, revoked ones too."""
    return json_reply(orjson.dumps(await keys.list_all(context(request).storage)))


@router.delete("/{key_id}")
async def revoke_key(request: Request, key_id: str) -> Response:
    """End a key, at once on this server."""
    try:
        done = await keys.revoke(context(request).storage, key_id)
    except AdminError:
        raise ApiError(404, f"There is no live key with id '{key_id}'.", code="not_found") from None
    life(request).keys.forget()
    return json_reply(orjson.dumps(done))
