"""/v1/organization/projects/{id}/rate_limits and /limits: what the owners may use.

`rate_limits` has the official objects, one for each model. `limits` is an extension, with everything that can
be limited.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import ADMIN
from server.admin import projects
from server.errors import invalid_value
from server.http import MAX_PAGE, actor, context, integer, json_reply, life, query_text, read_body
from server.limits import load_limits, read_limits
from server.routes.documented import documented
from server.routes.operator import read_limit_changes
from server.routes.organization import asked
from server.shapes import missing
from server.usage import Prices
from storage import NotFound, StoredOwner

router = APIRouter(prefix="/v1/organization/projects/{project_id}", tags=["Organization"])


@router.get("/rate_limits", **documented("RateLimits", ADMIN, query=("limit:all", "after", "before")))
async def list_rate_limits(request: Request, project_id: str) -> Response:
    """One page, in the order in which the models are served. A model without limits of its own shows those of
    the whole project, or of every owner."""
    query = request.query_params
    limit = integer(query, "limit", minimum=1, maximum=MAX_PAGE) or MAX_PAGE
    after, before = asked.after(query), query_text(query, "before")
    here = context(request)
    owner = await here.storage.get_owner(project_id)
    every_owner, canonical = here.limiter.defaults, here.limiter.canonical
    found = [projects.rate_limit(owner, model, every_owner, canonical) for model in _models(request, owner)]
    ids = [each["id"] for each in found]
    for cursor in (after, before):
        if cursor is not None and cursor not in ids:
            raise NotFound("rate limit", cursor)
    first = 0 if after is None else ids.index(after) + 1
    last = len(found) if before is None else ids.index(before)
    if before is not None and after is None:
        first = max(0, last - limit)
    page = found[first:last][:limit]
    return asked.page(page, has_more=len(found[first:last]) > limit)


@router.post("/rate_limits/{rate_limit_id:path}", **documented("RateLimit", ADMIN, body="RateLimitChange"))
async def update_rate_limit(request: Request, project_id: str, rate_limit_id: str) -> Response:
    """Change what a project may use of one model; null ends a limit."""
    body = await read_body(request, only=tuple(projects.RATE_LIMIT_FIELDS))
    storage, limiter = context(request).storage, context(request).limiter
    model = rate_limit_id.removeprefix(projects.RATE_LIMIT_ID)
    if model == rate_limit_id or model not in _models(request, await storage.get_owner(project_id)):
        raise NotFound("rate limit", rate_limit_id)
    changes = {}
    for official, name in projects.RATE_LIMIT_FIELDS.items():
        if official in body:
            _check(official, name, body[official])
            changes[official] = body[official]
    after = await projects.limit_model(
        storage, limiter.defaults, limiter.canonical, actor(request), project_id, model, changes
    )
    life(request).keys.forget()
    return json_reply(orjson.dumps(after))


@router.get("/limits", **documented("ProjectLimits", ADMIN))
async def get_limits(request: Request, project_id: str) -> Response:
    """What limits a project, itself and together with the setting `owner_limit` (`in_force`), and what it has
    used of budgets (extension)."""
    here = context(request)
    await here.meter.flush()
    prices, every_owner = Prices(here.config), here.limiter.defaults
    return json_reply(orjson.dumps(await projects.limits(here.storage, prices, every_owner, project_id)))


@router.post("/limits", **documented("ProjectLimits", ADMIN, body="ProjectLimitsChange"))
async def update_limits(request: Request, project_id: str) -> Response:
    """Change limits of a project (extension): those that are not named stay, and null ends one."""
    body = await read_body(request, only=("limits",))
    if (changes := read_limit_changes(request, body)) is None:
        missing("limits")
    here = context(request)
    await here.meter.flush()
    prices, every_owner = Prices(here.config), here.limiter.defaults
    changed = await projects.limit(here.storage, prices, every_owner, actor(request), project_id, changes)
    life(request).keys.forget()
    return json_reply(orjson.dumps(changed))


def _check(official: str, name: str, value: Any) -> None:
    try:
        read_limits({name: value})
    except ValueError as error:
        raise invalid_value(official, str(error).replace(name, official)) from None


def _models(request: Request, owner: StoredOwner) -> list[str]:
    """The models that are served, and those that the owner has limits of all the same."""
    served = context(request).models.names
    return list(dict.fromkeys((*served, *load_limits(owner.limits).models)))
