"""/v1/organization/projects/{id}/api_keys: the keys of one owner.

The official API makes a project's key at a service account; that path is here, and, as an extension, a
shorter one to the same. Rotation is an extension.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import ADMIN
from server.admin import keys, projects
from server.http import actor, choice, context, json_reply, life, read_body
from server.limits import used_by
from server.routes.documented import documented
from server.routes.operator import read_limit_changes, require_values
from server.routes.organization import asked
from server.routes.organization.projects import account
from server.usage import Prices
from storage import NotFound, Storage, StoredKey, StoredOwner

router = APIRouter(prefix="/v1/organization/projects/{project_id}", tags=["Organization"])


@router.get("/api_keys", **documented("ProjectKeys", ADMIN, query=("limit", "after", "owner_project_access")))
async def list_keys(request: Request, project_id: str) -> Response:
    """One page, oldest first."""
    query, storage = request.query_params, context(request).storage
    access = choice(query, "owner_project_access", ("active", "inactive", "any"))
    owner = await storage.get_owner(project_id)
    page = await storage.page_of_keys(owner=project_id, limit=asked.limit(query), after=asked.after(query))
    found = [projects.project_key(key, owner) for key in page.data]
    if access in ("active", "inactive"):
        found = [key for key in found if key["owner_project_access"] == access]
    return asked.page(found, has_more=page.has_more)


@router.post("/api_keys", **documented("MadeProjectKey", ADMIN, body="ProjectKeyChange", body_required=False))
async def create_key(request: Request, project_id: str) -> Response:
    """Make a key (extension); the reply is the only place of its value."""
    return await _made(request, await context(request).storage.get_owner(project_id))


@router.post(
    "/service_accounts/{account_id}/api_keys",
    **documented("MadeProjectKey", ADMIN, body="ProjectKeyChange", body_required=False),
)
async def create_account_key(request: Request, project_id: str, account_id: str) -> Response:
    """Make a key as the official API does; the account's id is the project's."""
    return await _made(request, await account(context(request).storage, project_id, account_id))


async def _made(request: Request, owner: StoredOwner) -> Response:
    body = await read_body(request, allow_empty=True, only=("name", "scopes", "expires_in_seconds", "limits"))
    made = await keys.make(
        context(request).storage,
        actor(request),
        owner=owner.id,
        name=asked.name_or(body, owner.name),
        scopes=asked.scopes(body) or (),
        expires_in_s=asked.seconds(body, "expires_in_seconds"),
        limits=read_limit_changes(request, body),
    )
    life(request).keys.forget()
    return json_reply(orjson.dumps(projects.made_key(made.stored, made.key)))


@router.get("/api_keys/{key_id}", **documented("ProjectKey", ADMIN))
async def get_key(request: Request, project_id: str, key_id: str) -> Response:
    """One key, never its value; what it has used of budgets, and whether its end opens or locks the server
    (extensions)."""
    here = context(request)
    storage = here.storage
    key = await _key(storage, project_id, key_id)
    found = projects.project_key(key, await storage.get_owner(project_id))
    await here.meter.flush()
    family = await storage.key_family(key_id)
    used = await used_by(storage, Prices(here.config).cost, project_id, family)
    end = await life(request).keys.without(key_id)
    return json_reply(orjson.dumps({**found, "used": used.as_json(), **end}))


@router.post("/api_keys/{key_id}", **documented("ProjectKey", ADMIN, body="ProjectKeyChange"))
async def update_key(request: Request, project_id: str, key_id: str) -> Response:
    """Change a key's name, scopes, limits or end; what is left out stays. An end that is null is taken away,
    and so is a single limit; null for anything else is refused."""
    body = await read_body(request, only=("name", "scopes", "expires_in_seconds", "limits"))
    require_values(body, "name", "scopes", "limits")
    storage = context(request).storage
    await _key(storage, project_id, key_id)
    changed = await keys.change(
        storage,
        actor(request),
        key_id,
        name=None if body.get("name") is None else asked.name(body),
        scopes=asked.scopes(body),
        expires_in_s=asked.seconds(body, "expires_in_seconds"),
        never_expires="expires_in_seconds" in body and body["expires_in_seconds"] is None,
        limits=read_limit_changes(request, body),
    )
    life(request).keys.forget()
    return json_reply(orjson.dumps(projects.project_key(changed, await storage.get_owner(project_id))))


@router.post(
    "/api_keys/{key_id}/rotate", **documented("MadeProjectKey", ADMIN, body="RotateKey", body_required=False)
)
async def rotate_key(request: Request, project_id: str, key_id: str) -> Response:
    """Make a key's successor (extension); the key itself is accepted for `grace_seconds` more."""
    body = await read_body(request, allow_empty=True, only=("grace_seconds", "expires_in_seconds"))
    storage = context(request).storage
    await _key(storage, project_id, key_id)
    grace_s = asked.seconds(body, "grace_seconds", least=0)
    made = await keys.rotate(
        storage,
        actor(request),
        key_id,
        grace_s=keys.GRACE_S if grace_s is None else grace_s,
        expires_in_s=asked.seconds(body, "expires_in_seconds"),
        never_expires="expires_in_seconds" in body and body["expires_in_seconds"] is None,
    )
    life(request).keys.forget()
    until = keys.unix((await storage.get_key(key_id)).expires_at)
    reply = {**projects.made_key(made.stored, made.key), "replaced_accepted_until": until}
    return json_reply(orjson.dumps(reply))


@router.delete("/api_keys/{key_id}", **documented("DeletedKey", ADMIN))
async def delete_key(request: Request, project_id: str, key_id: str) -> Response:
    """End a key: at once on this server, within a second on others."""
    storage = context(request).storage
    await _key(storage, project_id, key_id)
    return await asked.deleted_key(request, key_id, "organization.project.api_key.deleted")


async def _key(storage: Storage, project_id: str, key_id: str) -> StoredKey:
    """The key of this id, if it is the project's and not revoked. NotFound."""
    await storage.get_owner(project_id)
    key = await storage.get_key(key_id)
    if key.owner != project_id or key.revoked_at is not None:
        raise NotFound("key", key_id)
    return key
