"""POST /v1/completions.

Owns the way from the request to the view, and its two kinds of reply. Nothing is kept: a client that leaves
ends its generations.
"""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.access import require_use
from server.http import EventStream, context, json_reply, limited, owner, principal, read_as, while_connected
from server.routes.documented import documented
from server.schema import parse_completion
from server.stateless import begin, prepare_completion

router = APIRouter(prefix="/v1")


@router.post(
    "/completions", **documented("Completion", "chat.write", body="CreateCompletion", stream="Completion")
)
async def create_completion(request: Request) -> Response:
    """Answer with completions, or (`stream`) with their chunks."""
    here = context(request)
    asked = await read_as(request, parse_completion)
    served = here.models.get(asked.model)
    require_use(principal(request), served.name)
    subjects = limited(request, served.name)
    visit = await here.limiter.enter(subjects, served.name)
    with ExitStack() as stack:
        stack.callback(visit.leave)
        if asked.stream:
            stack.enter_context(here.limiter.stream(subjects))
        # Before anything is done for it: a refusal must cost next to nothing.
        place = stack.enter_context(served.engine.admission.enter())
        preparing = prepare_completion(asked, served, place, owner=owner(request), telemetry=here.telemetry)
        completion = await while_connected(request, preparing)
        visit.used = completion.usage.limited
        await visit.reserve(*completion.tokens(), answers=len(completion.requests))
        if not asked.stream:
            return json_reply(await while_connected(request, completion.whole("text_completion")))
        include_usage = asked.stream_options.include_usage
        frames = await begin(completion.frames("text_completion", include_usage=include_usage))
        return EventStream(frames, on_close=stack.pop_all().close)
