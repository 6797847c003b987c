"""The route `/v1/responses/{id}/events` (extension): the events of a response as pages of JSON.

They are the stored events, official and as they were first sent, whatever profile streams are read in. Their
times stand beside them, so that an event has no member that its stream did not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http import choice, context, integer, json_reply, owner, page_json
from server.routes.documented import documented
from server.runs import no_events
from server.runs.events import Events
from storage import NotFound

if TYPE_CHECKING:
    from server.http import Context
    from storage import StoredResponse

router = APIRouter(prefix="/v1/responses", tags=["Responses"])

MAX_EVENTS = 1000
"""Of one page."""


@router.get(
    "/{response_id}/events",
    **documented("Events", "responses.read", query=("limit:events", "order:oldest_event", "after:event")),
)
async def list_events(request: Request, response_id: str) -> Response:
    """One page of a response's events, the first ones first unless `order=desc`; of a response that is being
    made, those that it has by now. `after` is the number of an event, behind which the page begins. `times`
    says of each event of `data` when it was made."""
    query, here = request.query_params, context(request)
    limit = integer(query, "limit", minimum=1, maximum=MAX_EVENTS) or 100
    newest_first = choice(query, "order", ("asc", "desc")) == "desc"
    after = integer(query, "after", minimum=-1)
    reader, stored = await here.runs.views.rejoin(owner(request), response_id)
    reader.close()
    if stored.fork_of is not None:
        raise no_events(stored)
    end = await here.storage.log_end(stored.id)
    if newest_first:
        high = end if after is None else max(0, min(after, end))
        low = max(0, high - limit)
    else:
        low = min(end, 0 if after is None else after + 1)
        high = min(end, low + limit)
    events = await _events(here, stored, low, high)
    numbers = [*map(str, range(low, high))]
    if newest_first:
        events, numbers = events[::-1], numbers[::-1]
    more = low > 0 if newest_first else high < end
    page = page_json([body for body, _ in events], numbers, has_more=more)
    times = orjson.dumps([made and made / 1_000_000 for _, made in events])
    return json_reply(page[:-1] + b',"times":' + times + b"}")


async def _events(
    here: Context, stored: StoredResponse, low: int, high: int
) -> list[tuple[bytes, int | None]]:
    """The events from number `low` up to, and without, `high`, all of which the log has, each with the
    microsecond that it was made in, where that is known. Raises EventsExpired."""
    found: list[tuple[bytes, int | None]] = []
    while low + len(found) < high:
        after = low + len(found) - 1
        page = await here.storage.records(stored.id, after=after)
        if not page:
            raise NotFound("response", stored.id)  # it was deleted in this very moment
        for record in page:
            events = Events.of(record, stored.echo).after(low + len(found) - 1)
            found += [(body, record.created_at) for body in events.bodies]
    return found[: high - low]
