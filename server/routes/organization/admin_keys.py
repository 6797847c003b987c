"""/v1/organization/admin_api_keys: the keys that have the scope `admin`."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import ADMIN
from server.admin import keys, projects
from server.http import actor, context, json_reply, life, read_body
from server.routes.documented import documented
from server.routes.organization import asked
from storage import NotFound, Storage, StoredKey

router = APIRouter(prefix="/v1/organization/admin_api_keys", tags=["Organization"])


@router.get("", **documented("AdminKeys", ADMIN, query=("limit", "order:oldest", "after")))
async def list_admin_keys(request: Request) -> Response:
    """One page, oldest first unless `order=desc`."""
    query = request.query_params
    page = await context(request).storage.page_of_keys(
        scope=ADMIN, limit=asked.limit(query), order=asked.order(query), after=asked.after(query)
    )
    return asked.page([projects.admin_key(key) for key in page.data], has_more=page.has_more)


@router.post("", **documented("MadeAdminKey", ADMIN, body="CreateAdminKey"))
async def create_admin_key(request: Request) -> Response:
    """Make a key that may administer and nothing else; the reply is the only place of its value."""
    body = await read_body(request, only=("name", "expires_in_seconds"))
    made = await keys.make(
        context(request).storage,
        actor(request),
        name=asked.name(body),
        scopes=(ADMIN,),
        expires_in_s=asked.seconds(body, "expires_in_seconds"),
    )
    life(request).keys.forget()
    return json_reply(orjson.dumps({**projects.admin_key(made.stored), "value": made.key}))


@router.get("/{key_id}", **documented("AdminKey", ADMIN))
async def get_admin_key(request: Request, key_id: str) -> Response:
    """One key, never its value; and whether its end opens or locks the server (extensions)."""
    found = projects.admin_key(await _key(context(request).storage, key_id))
    return json_reply(orjson.dumps({**found, **await life(request).keys.without(key_id)}))


@router.delete("/{key_id}", **documented("DeletedKey", ADMIN))
async def delete_admin_key(request: Request, key_id: str) -> Response:
    """End a key: at once on this server, within a second on others."""
    await _key(context(request).storage, key_id)
    return await asked.deleted_key(request, key_id, "organization.admin_api_key.deleted")


async def _key(storage: Storage, key_id: str) -> StoredKey:
    """The key of this id, if it may administer and is not revoked. NotFound."""
    key = await storage.get_key(key_id)
    if ADMIN not in key.scopes or key.revoked_at is not None:
        raise NotFound("key", key_id)
    return key
