"""Forks a stored response: a new one that has ended, with the first items of the other and all that led to
it, so that `previous_response_id` goes on from any point of what was said.

No item is copied. A fork was not run: it has no events, used nothing, and belongs to no conversation, though
what it stands on may be one's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from server.clock import now_us
from server.errors import ApiError
from server.runs.events import Events, echo_members
from server.runs.planning import TERMINAL, Progress, RunPlan
from server.schema import Fork, refuse
from server.sse_frame import event_type
from server.threads import aside
from storage import NewResponseFork

if TYPE_CHECKING:
    from storage import Record, Storage, StoredResponse

ITEM_DONE = b"response.output_item.done"


async def prepare_fork(storage: Storage, owner: str, response_id: str, wanted: Fork) -> NewResponseFork:
    """A fork of a response as it is to be stored. Raises NotFound, EventsExpired, and ApiError 400 for an
    event that the response does not have, or not yet."""
    stored = await storage.get_response(owner, response_id)
    after, input_only = wanted.after, False
    if wanted.starting_after is not None:
        after = await _last_done(storage, stored, wanted.starting_after)
        input_only = after is None
    elif after is None and stored.status not in TERMINAL:
        message = (
            f"Response '{stored.id}' has not finished (status {stored.status}): say by 'after' or "
            "'starting_after' where it is to be forked."
        )
        refuse("after", message, "response_not_finished")
    elif after is None and stored.output:
        after = stored.output[-1].id
    return _as_stored(stored, wanted, after, input_only=input_only)


def _as_stored(
    stored: StoredResponse, wanted: Fork, after: str | None, *, input_only: bool
) -> NewResponseFork:
    """A response like the one that it is forked from, but that it ends now, and was not run."""
    now = now_us()
    id, at = f"resp_{secrets.token_hex(24)}", now // 1_000_000
    head = {
        **orjson.loads(stored.head),
        **{"id": id, "created_at": at, "status": "completed", "completed_at": at},
        **{"error": None, "incomplete_details": None, "usage": Progress().usage()},
    }
    for of_its_run in ("restarts", "cancel_reason"):
        head.pop(of_its_run, None)
    echo = orjson.loads(b"{" + stored.echo + b"}")
    echo |= {"background": False, "conversation": None}
    echo["forked_from"] = {"response_id": stored.id, "after": after}
    if wanted.metadata is not None:
        echo["metadata"] = wanted.metadata
    plan = replace(
        RunPlan.load(stored.plan),
        response_id=id,
        created_at=now,
        background=False,
        conversation_id=None,
        waits=False,
        charge=None,
        trace=None,
        secrets=None,
        batch=False,
    )
    return NewResponseFork(
        *(id, now, orjson.dumps(head), echo_members(echo), plan.dump()),
        after=after,
        input_only=input_only,
        metadata=echo["metadata"],
    )


async def _last_done(storage: Storage, stored: StoredResponse, event: int) -> str | None:
    """The last output item that was finished by an event, as were all before it; None for none."""
    if stored.fork_of is not None:
        raise no_events(stored)
    done: dict[int, str] = {}
    at = -1
    while at < event:
        records = await storage.records(stored.id, after=at)
        if not records:
            message = f"Response '{stored.id}' has no event {event}{'' if stored.run is None else ' yet'}."
            raise ApiError(400, message, code="cursor_beyond_log", param="starting_after")
        done |= await aside(True, _done_in, records, event)
        at = records[-1].first_seq + records[-1].num_events - 1
    last = None
    for index in range(len(done)):  # those that are carried out at once end in any order
        if index not in done:
            break
        last = done[index]
    return last


def _done_in(records: Iterable[Record], last: int) -> dict[int, str]:
    """The output items that records tell to be done, up to an event: index -> id."""
    found = {}
    for record in records:
        events = Events.of(record, b"")
        for body in events.bodies[: max(0, last + 1 - events.first_seq)]:
            if event_type(body) == ITEM_DONE:
                told = orjson.loads(body)
                found[told["output_index"]] = told["item"]["id"]
    return found


def no_events(stored: StoredResponse) -> ApiError:
    """400 `no_events`: a fork was not run."""
    message = (
        f"Response '{stored.id}' is a fork: it was not run, so it has no events. Retrieve it without "
        "'stream', and fork it at an item."
    )
    return ApiError(400, message, code="no_events")
