"""/admin/export, backups, purge, owners, tiers: what these commands ask of a server that holds the database.

Reached with the admin token only, which the server leaves in its data folder for its own user.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.access import OPERATOR_ONLY
from server.admin import UnknownOwner, backup, projects, tenants, tiers
from server.admin.exports import exported, note_export
from server.clock import now_us
from server.errors import ApiError, invalid_value
from server.http import actor, choice, context, json_reply, life, query_text, read_body
from server.routes.documented import needs
from server.schema import boolean, missing
from server.shapes import label, whole
from storage import Storage

router = APIRouter(prefix="/admin", include_in_schema=False)


@router.get("/owners", **needs(OPERATOR_ONLY))
async def list_owners(request: Request) -> Response:
    """All owners, archived ones too."""
    stored = choice(request.query_params, "stored", ("true", "false")) == "true"
    return json_reply(orjson.dumps(await projects.list_all(context(request).storage, stored=stored)))


@router.get("/tiers/{id}", **needs(OPERATOR_ONLY))
async def show_tiers(request: Request, id: str) -> Response:
    """How the requests of an owner or a key are served."""
    return json_reply(orjson.dumps(await tiers.shown(context(request).storage, id)))


@router.post("/tiers/{id}", **needs(OPERATOR_ONLY))
async def change_tiers(request: Request, id: str) -> Response:
    """Change how the requests of an owner or a key are served."""
    body = await read_body(request, only=tiers.MEMBERS)
    changes = {name: value for name, value in body.items() if name in tiers.MEMBERS}
    try:
        changed = await tiers.change(context(request).storage, actor(request), id, **changes)
    except ValueError as error:
        raise invalid_value(str(error).partition(":")[0], str(error)) from None
    life(request).keys.forget()
    return json_reply(orjson.dumps(changed))


@router.post("/backups", **needs(OPERATOR_ONLY))
async def note_backup(request: Request) -> Response:
    """Write down that the command copies the database, which it does by itself."""
    body = await read_body(request, only=("file",))
    file = label(1)(body.get("file") or missing("file"), "file")
    return json_reply(orjson.dumps(await backup.note(context(request).storage, actor(request), file)))


@router.get("/export", **needs(OPERATOR_ONLY))
async def export(request: Request) -> Response:
    """All that an owner can read, as JSON lines, whether or not the audit log can tell of it."""
    owner = query_text(request.query_params, "owner") or missing("owner")
    storage = context(request).storage
    await _require(storage, owner)
    missed = await note_export(storage, owner, actor(request))
    return StreamingResponse(
        exported(storage, owner),
        media_type="application/x-ndjson",
        headers={} if missed is None else {tenants.UNAUDITED: missed},
    )


@router.get("/purge", **needs(OPERATOR_ONLY))
async def purgeable(request: Request) -> Response:
    """What a purge of an owner would remove."""
    owner = query_text(request.query_params, "owner") or missing("owner")
    storage = context(request).storage
    await _require(storage, owner)
    return json_reply(orjson.dumps(await tenants.purgeable(storage, owner)))


@router.post("/purge", **needs(OPERATOR_ONLY))
async def purge(request: Request) -> Response:
    """Remove an owner's everything; where that takes long, only a part, and the reply says so."""
    body = await read_body(request, only=("owner", "before", "keys"))
    owner = label(1)(body.get("owner", ""), "owner")
    before = whole(0, (1 << 63) - 1)(body.get("before", now_us()), "before")
    with_keys = boolean(body.get("keys", False), "keys")
    here = context(request)
    await _require(here.storage, owner)

    def begun() -> None:
        here.completions.cancel_all(owner)
        here.runs.cancel_unstored(owner)
        life(request).sockets.forget(owner)

    went = await tenants.purge(
        here.storage,
        owner,
        by=actor(request),
        before=before,
        with_keys=with_keys,
        limit_s=tenants.SLICE_S,
        begun=begun,
        cut=here.runs.gone,
    )
    life(request).keys.forget()
    here.runs.saved.forget_owner(owner)
    return json_reply(orjson.dumps(went))


async def _require(storage: Storage, owner: str) -> None:
    """Raise ApiError 404 for an owner of whom nothing is known."""
    try:
        await tenants.require_owner(storage, owner)
    except UnknownOwner as error:
        raise ApiError(404, str(error), code="not_found", param="owner") from None
