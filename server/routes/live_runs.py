"""/admin/runs: what `antiphon runs` asks of a server that holds the database.

Reached with the admin token only, which the server leaves in its data folder for its own user.
"""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import OPERATOR_ONLY
from server.admin import live_runs
from server.http import context, json_reply
from server.routes.documented import needs

router = APIRouter(prefix=live_runs.PATH, include_in_schema=False)


@router.get("", **needs(OPERATOR_ONLY))
async def list_live_runs(request: Request) -> Response:
    """The runs in flight: those of the database, and those of this process that are stored nowhere."""
    here = context(request)
    found = await live_runs.listed(here.storage)
    for plan, num_tokens in here.runs.unstored():
        found["data"].append(
            {
                "id": plan.response_id,
                "owner": plan.owner,
                "model": plan.model,
                "state": "running",
                "background": plan.background,
                "created_at": plan.created_at // 1_000_000,
                "output_tokens": num_tokens,
                "attempt": 1,
                "node": here.storage.runner,
            }
        )
    return json_reply(orjson.dumps(found))
