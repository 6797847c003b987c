"""Carries out a `response.inject`: the outputs of a client's tools, for a response that waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from starlette.websockets import WebSocketDisconnect

from server.errors import ApiError, to_api_error
from server.http import actor, limited, principal
from server.items import identifier
from server.routes.responses import new_id
from server.routes.websocket.frames import error_frame, own_frame
from server.routes.websocket.requests import asked_by, one_request
from server.routes.websocket.session import Session
from server.runs.planning import TERMINAL
from server.schema import parse_tool_outputs
from server.shapes import member
from server.threads import aside, begin_large_request, in_large_request
from storage import NotFound, StorageError

LARGE_INPUT = 256
"""Items above which they are read beside the event loop."""


async def inject(connection: Session, body: dict[str, Any], held: ExitStack) -> None:
    """Feed a waiting response, and tell whether it was; raises nothing but the cancellation. held: given back
    at the end."""
    with held, suppress(WebSocketDisconnect):
        async with AsyncExitStack() as events_wait:
            await connection.send(await _told(connection, body, events_wait))


async def _told(connection: Session, body: dict[str, Any], events_wait: AsyncExitStack) -> str:
    """Feed a waiting response. Returns the frame that tells what came of it. events_wait: has the events of
    the response wait, once it is fed, so that what comes of it is told after this frame."""
    failure: str | None = None
    with one_request(connection, "response.inject") as told:
        failure = await _fed(connection, body, events_wait)
    response_id = body.get("response_id")
    lane = connection.lane_of(response_id)
    place = (0, None) if lane is None else (lane.last_seq, lane.stream_id)
    if told.error is not None:
        return error_frame(told.error, place[1])
    if failure is None:
        return own_frame("response.inject.created", *place, response_id=response_id)
    error = {"code": failure, "message": _FAILURES[failure]}
    fields: dict[str, Any] = {"response_id": response_id, "input": body.get("input"), "error": error}
    return own_frame("response.inject.failed", *place, **fields)


_FAILURES = {
    "response_not_found": "There is no such response.",
    "response_already_completed": "The response has ended, and takes no input any more.",
}


async def _fed(connection: Session, body: dict[str, Any], events_wait: AsyncExitStack) -> str | None:
    """Why a response could not be fed, as a code; None where it was. Raises ApiError for what it cannot be
    fed with."""
    asked = await asked_by(connection)
    response_id = member(body, "response_id", identifier)
    given = {"tool_outputs": body.get("input")}
    if isinstance(body.get("input"), list) and len(body["input"]) > LARGE_INPUT:
        begin_large_request()
    runs, who = connection.here.runs, principal(asked)
    with _words_of_input():
        outputs = await aside(in_large_request(), partial(parse_tool_outputs, new_id=new_id), given)
        try:
            stored, _ = await runs.tool_outputs.pending(who.owner, response_id)  # may be a matter of minutes
            if (lane := connection.lane_of(response_id)) is not None:
                await events_wait.enter_async_context(lane.sending)
            if stored.status in TERMINAL:
                return "response_already_completed"
            limited(asked, stored.model)
            await runs.tool_outputs.feed(who, stored, outputs.items, by=actor(asked))
        except NotFound as unknown:
            if unknown.kind != "response":
                raise
            return "response_not_found"
    return None


@contextmanager
def _words_of_input() -> Iterator[None]:
    """Have what is wrong with outputs of tools name the member of the frame that they came by."""
    try:
        yield
    except (ApiError, StorageError) as error:
        told = to_api_error(error)
        if told.param is not None and told.param.startswith("tool_outputs"):
            told.param = "input" + told.param.removeprefix("tool_outputs")
            told.message = told.message.replace("'tool_outputs", "'input")
        raise told from None
