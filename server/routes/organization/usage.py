"""/v1/organization/usage and /costs: what was used, and what it cost.

An administrator's key sees all projects; every other key that may read usage sees its own project alone.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from server.access import ADMIN, ADMIN_READS, Principal
from server.clock import now_us
from server.http import choice, context, integer, json_reply, principal, query_text
from server.routes.documented import NOBODY_HAS, documented
from server.routes.organization import asked
from server.shapes import missing, refuse
from server.usage import (
    COST_BUCKETS,
    COSTS_GROUP_BY,
    KINDS,
    WIDTHS,
    Asked,
    Prices,
    TooManyResults,
    costs_page,
    usage_page,
)
from storage import NotFound

router = APIRouter(prefix="/v1/organization", tags=["Organization"])


MAX_SECONDS = 10**11

HOUR = 3600

_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)
"""What `server.telemetry.end_user` gives."""

RANGE = ("start_time", "end_time", "page")
FILTERS = ("group_by", "project_ids", "api_key_ids", "models", "safety_identifiers", "batch", *NOBODY_HAS)
"""Parameters of every query."""


@router.get(
    "/usage/{kind}",
    **documented("UsagePage", ADMIN_READS, query=(*RANGE, "bucket_width", "limit:buckets", *FILTERS)),
)
async def get_usage(request: Request, kind: str) -> Response:
    """One page of buckets, oldest first."""
    if kind not in KINDS:
        raise NotFound("kind of usage", kind)
    query, here = request.query_params, context(request)
    width = choice(query, "bucket_width", tuple(WIDTHS)) or "1d"
    seconds, usual, most = WIDTHS[width]
    wanted = _wanted(query, principal(request), seconds, (usual, most), KINDS[kind].group_by)
    await here.meter.flush()
    return await _reply(usage_page(here.storage, kind, wanted))


@router.get(
    "/costs",
    **documented(
        "CostsPage", ADMIN_READS, query=(*RANGE, "bucket_width:day", "limit:days", *FILTERS, "line_items")
    ),
)
async def get_costs(request: Request) -> Response:
    """One page of days, oldest first."""
    query, here = request.query_params, context(request)
    choice(query, "bucket_width", ("1d",))
    wanted = _wanted(query, principal(request), WIDTHS["1d"][0], COST_BUCKETS, COSTS_GROUP_BY)
    await here.meter.flush()
    return await _reply(costs_page(here.storage, Prices(here.config), wanted))


async def _reply(page: Awaitable[dict[str, Any]]) -> Response:
    try:
        return json_reply(orjson.dumps(await page))
    except TooManyResults as error:
        refuse("group_by", f"Invalid 'group_by': {error}.")


def _wanted(
    query: QueryParams, who: Principal, width: int, sizes: tuple[int, int], groups: tuple[str, ...]
) -> Asked:
    """What a query asks for. sizes: how many buckets a page has by default, and at most. Raises ApiError."""
    start = integer(query, "start_time", minimum=0, maximum=MAX_SECONDS)
    if start is None:
        missing("start_time")
    end = integer(query, "end_time", minimum=0, maximum=MAX_SECONDS)
    if end is not None and end <= start:
        refuse("end_time", "Invalid 'end_time': it must be later than 'start_time'.")
    usual, most = sizes
    limit = integer(query, "limit", minimum=1, maximum=most)
    owners = asked.listed(query, "project_ids")
    nothing = any([asked.listed(query, name) for name in NOBODY_HAS])
    if not who.scopes.allow(ADMIN):
        nothing = nothing or bool(owners and who.owner not in owners)
        owners = (who.owner,)
    batch = choice(query, "batch", ("true", "false"))
    until = max(now_us() // 1_000_000, start) + 1 if end is None else end
    whole = Asked(
        start=start,
        end=until,
        width=width,
        limit=usual if limit is None else limit,
        first=start,
        open=end is None,
        nothing=nothing,
        group_by=_group_by(query, groups),
        owners=owners,
        key_ids=asked.listed(query, "api_key_ids"),
        models=asked.listed(query, "models"),
        batch=None if batch is None else batch == "true",
        line_items=asked.listed(query, "line_items"),
        persons=_persons(query),
    )
    if whole.by_person and width < HOUR:
        message = "Invalid 'bucket_width': what persons use is counted by the hour, so it is '1h' or '1d'."
        refuse("bucket_width", message)
    page = query_text(query, "page")
    try:
        return whole if page is None else whole.at(page)
    except ValueError as error:
        refuse("page", f"Invalid 'page': {error}.")


def _persons(query: QueryParams) -> tuple[str, ...]:
    """The digests of persons. ApiError 400 for what is none: identifiers as clients send them have no place
    in URLs, which proxies write down."""
    found = asked.listed(query, "safety_identifiers")
    if not all(map(_DIGEST.fullmatch, found)):
        message = (
            "Invalid 'safety_identifiers': expected digests of 16 hexadecimal digits, as results of "
            "'group_by=safety_identifier' and log lines have them, not identifiers as requests have them."
        )
        refuse("safety_identifiers", message)
    return found


def _group_by(query: QueryParams, groups: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(asked.listed(query, "group_by")))
    for name in found:
        if name not in groups:
            wanted = ", ".join(f"'{known}'" for known in groups)
            refuse("group_by", f"Invalid 'group_by'. Supported values are: {wanted}.")
    return found
