"""/admin/keys: what `antiphon keys` asks of a server that holds the database.

Reached with the admin token only, which the server leaves in its data folder for its own user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import OPERATOR_ONLY
from server.admin import keys
from server.errors import invalid_value
from server.http import actor, context, json_reply, life, read_body
from server.routes.documented import needs
from server.routes.operator.limit_changes import read_limit_changes, require_values
from server.shapes import array, label, text, whole

router = APIRouter(prefix="/admin/keys", include_in_schema=False)

MAX_NAME = 256


@router.post("", **needs(OPERATOR_ONLY))
async def create_key(request: Request) -> Response:
    """Make a key."""
    body = await read_body(
        request, allow_empty=True, only=("name", "owner", "scopes", "expires_in_s", "limits")
    )
    asked = {
        "name": _text(body, "name") or "",
        "owner": _text(body, "owner") or None,
        "scopes": _scopes(body) or [],
        "expires_in_s": _seconds(body, "expires_in_s"),
        "limits": read_limit_changes(request, body),
    }
    try:
        made = await keys.create(context(request).storage, actor(request), **asked)
    except keys.NoSuchOwner as error:
        raise invalid_value("owner", str(error)) from None
    except ValueError as error:
        raise invalid_value("scopes", str(error)) from None
    life(request).keys.forget()
    return json_reply(orjson.dumps(made))


@router.get("", **needs(OPERATOR_ONLY))
async def list_keys(request: Request) -> Response:
    """All keys, revoked ones too."""
    return json_reply(orjson.dumps(await keys.list_all(context(request).storage)))


@router.post("/{key_id}", **needs(OPERATOR_ONLY))
async def update_key(request: Request, key_id: str) -> Response:
    """Change a key's name, scopes or end."""
    body = await read_body(request, allow_empty=True, only=("name", "scopes", "expires_in_s", "limits"))
    require_values(body, "name", "scopes", "limits")
    asked = {
        "name": _text(body, "name"),
        "scopes": _scopes(body),
        "expires_in_s": _seconds(body, "expires_in_s"),
        "never_expires": "expires_in_s" in body and body["expires_in_s"] is None,
        "limits": read_limit_changes(request, body),
    }
    try:
        changed = await keys.update(context(request).storage, actor(request), key_id, **asked)
    except ValueError as error:
        raise invalid_value("scopes", str(error)) from None
    life(request).keys.forget()
    return json_reply(orjson.dumps(changed))


@router.post("/{key_id}/rotate", **needs(OPERATOR_ONLY))
async def rotate_key(request: Request, key_id: str) -> Response:
    """Make a key's successor, and let the key itself be accepted a while longer."""
    body = await read_body(request, allow_empty=True, only=("grace_s", "expires_in_s"))
    grace_s = _seconds(body, "grace_s", least=0)
    made = await keys.succeed(
        context(request).storage,
        actor(request),
        key_id,
        grace_s=keys.GRACE_S if grace_s is None else grace_s,
        expires_in_s=_seconds(body, "expires_in_s"),
        never_expires="expires_in_s" in body and body["expires_in_s"] is None,
    )
    life(request).keys.forget()
    return json_reply(orjson.dumps(made))


@router.delete("/{key_id}", **needs(OPERATOR_ONLY))
async def revoke_key(request: Request, key_id: str) -> Response:
    """End a key, at once on this server."""
    done = await keys.revoke(context(request).storage, actor(request), key_id)
    life(request).keys.forget()
    return json_reply(orjson.dumps(done))


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    return None if value is None else label(0, MAX_NAME)(value, name)


def _scopes(body: Mapping[str, Any]) -> list[str] | None:
    value = body.get("scopes")
    return None if value is None else array(text(1), 1)(value, "scopes")


def _seconds(body: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    value = body.get(name)
    return None if value is None else whole(least, keys.MAX_S)(value, name)
