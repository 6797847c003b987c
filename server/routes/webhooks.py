"""/admin/webhooks: what `antiphon webhooks` asks of a server that holds the database.

Reached with the admin token only, which the server leaves in its data folder for its own user.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import LOCAL_OWNER, OPERATOR_ONLY
from server.admin import webhooks
from server.errors import ApiError
from server.http import actor, context, json_reply, read_body
from server.routes.documented import needs
from server.schema import array, boolean, text
from server.shapes import label

router = APIRouter(prefix="/admin/webhooks", include_in_schema=False)


@router.post("", **needs(OPERATOR_ONLY))
async def add_webhook(request: Request) -> Response:
    """Add a webhook."""
    body = await read_body(request, only=("url", "owner", "event_types", "allow_http"))
    url = text(1)(body.get("url", ""), "url")
    owner = label(1)(body.get("owner", LOCAL_OWNER), "owner")
    event_types = array(text())(body.get("event_types", []), "event_types")
    allow_http = boolean(body.get("allow_http", False), "allow_http")
    try:
        made = await webhooks.add(
            context(request).storage,
            actor(request),
            url=url,
            owner=owner,
            event_types=event_types,
            allow_http=allow_http,
        )
    except ValueError as exc:
        param = "event_types" if isinstance(exc, webhooks.NoSuchEvent) else "url"
        raise ApiError(400, str(exc), param=param, code="invalid_webhook") from None
    return json_reply(orjson.dumps(made))


@router.get("", **needs(OPERATOR_ONLY))
async def list_webhooks(request: Request) -> Response:
    """The webhooks of all owners."""
    return json_reply(orjson.dumps(await webhooks.list_all(context(request).storage)))


@router.delete("/{webhook_id}", **needs(OPERATOR_ONLY))
async def remove_webhook(request: Request, webhook_id: str) -> Response:
    """Remove a webhook and what it was still to be told."""
    return json_reply(
        orjson.dumps(await webhooks.remove(context(request).storage, actor(request), webhook_id))
    )


@router.post("/{webhook_id}/enable", **needs(OPERATOR_ONLY))
async def enable_webhook(request: Request, webhook_id: str) -> Response:
    """Tell a webhook again of what comes and of what was kept for it."""
    await read_body(request, allow_empty=True, only=())
    return json_reply(
        orjson.dumps(await webhooks.enable(context(request).storage, actor(request), webhook_id))
    )


@router.post("/{webhook_id}/test", **needs(OPERATOR_ONLY))
async def test_webhook(request: Request, webhook_id: str) -> Response:
    """Send a webhook a sample, once."""
    await read_body(request, allow_empty=True, only=())
    return json_reply(orjson.dumps(await webhooks.test(context(request).storage, webhook_id)))
