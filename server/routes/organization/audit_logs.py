"""/v1/organization/audit_logs: who did what to keys, owners, webhooks and the data of owners."""

from __future__ import annotations

from collections.abc import Callable

import orjson
from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from server.access import ADMIN
from server.admin import audit
from server.http import context, integer, json_reply, query_text
from server.routes.documented import documented
from server.routes.organization import asked
from storage import AuditFilter

router = APIRouter(prefix="/v1/organization/audit_logs", tags=["Organization"])

MAX_SECONDS = 10**11

LISTS = ("event_types", "actor_ids", "actor_emails", "resource_ids", "project_ids")
"""By what entries may be looked for."""


@router.get("", **documented("AuditLogs", ADMIN, query=("limit", "after", "before", "effective_at", *LISTS)))
async def list_audit_logs(request: Request) -> Response:
    """One page, newest first."""
    query = request.query_params
    wanted = AuditFilter(
        since=_bound(query, "gt", "gte", later=max),
        before=_bound(query, "lte", "lt", later=min),
        actions=asked.listed(query, "event_types"),
        actors=asked.listed(query, "actor_ids"),
        targets=asked.listed(query, "resource_ids"),
        owners=asked.listed(query, "project_ids"),
    )
    before = query_text(query, "before")
    page = await audit.listed(
        context(request).storage, wanted, limit=asked.limit(query), after=asked.after(query), before=before
    )
    if asked.listed(query, "actor_emails"):  # nobody here has one
        page.update(data=[], first_id=None, last_id=None, has_more=False)
    return json_reply(orjson.dumps(page))


@router.get("/verify", **documented("AuditVerification", ADMIN, query=("number",)))
async def verify_audit_logs(request: Request) -> Response:
    """Whether nothing was changed or removed (extension). `number`: of an entry whose hash is wanted too."""
    number = integer(request.query_params, "number", minimum=0)
    return json_reply(orjson.dumps(await audit.verified(context(request).storage, number)))


def _bound(query: QueryParams, past: str, at: str, *, later: Callable[[int, int], int]) -> int | None:
    """One end of the range of times, in microseconds: `past` (gt, lte) ends or begins a second later than
    `at` (gte, lt), because what counts of an entry are its whole seconds."""
    ends = []
    for name, shift in ((past, 1), (at, 0)):
        seconds = integer(query, f"effective_at[{name}]", minimum=0, maximum=MAX_SECONDS)
        if seconds is not None:
            ends.append((seconds + shift) * 1_000_000)
    return None if not ends else later(ends[0], ends[-1])
