"""/v1/organization/runs: the runs in flight of all owners, listed and cancelled (extension).

The same list stands at /admin/runs, where `antiphon runs` asks for it with the admin token, and below it what
only the operator's commands do: reading the events of a response of any owner, and forking it.
"""

from __future__ import annotations

from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import ADMIN, OPERATOR_ONLY
from server.admin import live_runs
from server.errors import ApiError
from server.http import actor, context, flag, integer, json_reply, read_as, read_body
from server.items import identifier
from server.routes.documented import documented, needs
from server.schema import parse_fork
from server.stateless import Completion, LiveCompletions

router = APIRouter(tags=["Organization"])


@router.get(live_runs.PATH, **needs(OPERATOR_ONLY), include_in_schema=False)
@router.get(live_runs.ORGANIZATION_PATH, **documented("LiveRuns", ADMIN))
async def list_live_runs(request: Request) -> Response:
    """The runs in flight: those of the database, and those of this process that are stored nowhere, chat and
    text completions among them."""
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
    for completion in here.completions:
        found["data"].append(
            {
                "id": completion.head["id"],
                "owner": completion.account.owner,
                "model": completion.head["model"],
                "state": "running",
                "background": False,
                "created_at": completion.head["created"],
                "output_tokens": completion.usage.num_tokens,
                "attempt": 1,
                "node": here.storage.runner,
            }
        )
    return json_reply(orjson.dumps(found))


@router.post(
    f"{live_runs.ORGANIZATION_PATH}/{{run_id}}/cancel",
    **documented("CancelledRun", ADMIN, body="CancelRun", body_required=False),
)
async def cancel_live_run(request: Request, run_id: str) -> Response:
    """Cancel a run of any owner, whichever server carries it on (extension); what it has made stays."""
    body = await read_body(request, allow_empty=True, only=("owner",))
    owner = None if body.get("owner") is None else identifier(body["owner"], "owner")
    here, over = context(request), True
    if (completion := _completion(here.completions, owner, run_id)) is not None:
        entry = actor(request).did("run.cancelled", run_id, completion.account.owner)
        await here.storage.add_audit(entry)
        if over := completion.cancellation.cancel():
            await completion.cancellation.over.wait()
    else:
        await here.runs.cancel_any(run_id, actor(request), owner=owner)
    return json_reply(orjson.dumps(live_runs.cancelled(run_id, over=over)))


@router.get(f"{live_runs.PATH}/{{run_id}}/events", **needs(OPERATOR_ONLY), include_in_schema=False)
async def read_events(request: Request, run_id: str) -> Response:
    """Some events of a response of any owner, behind the one with the number `after`."""
    query = request.query_params
    after = integer(query, "after", minimum=-1)
    page = await live_runs.events_after(
        context(request).storage,
        actor(request),
        run_id,
        -1 if after is None else after,
        begins=flag(query, "begins"),
    )
    return json_reply(orjson.dumps(page))


@router.post(f"{live_runs.PATH}/{{run_id}}/fork", **needs(OPERATOR_ONLY), include_in_schema=False)
async def fork_run(request: Request, run_id: str) -> Response:
    """Fork a response of any owner, for that owner."""
    wanted = await read_as(request, partial(parse_fork, at_event=True), allow_empty=True)
    made = await live_runs.fork(context(request).storage, actor(request), run_id, wanted)
    return json_reply(orjson.dumps(made))


def _completion(completions: LiveCompletions, owner: str | None, id: str) -> Completion | None:
    """The completion that is meant, if one is made here. Raises ApiError 409 where it could be that of
    several owners and none is named."""
    owners = completions.owners_of(id) if owner is None else [owner]
    if len(owners) > 1:
        message = f"Several owners have a completion '{id}' made now: name one of {owners} as 'owner'."
        raise ApiError(409, message, code="ambiguous_run", param="owner", headers={"x-should-retry": "false"})
    return completions.get(owners[0], id) if owners else None
