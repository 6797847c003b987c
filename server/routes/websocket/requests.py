"""What a frame asks for, as a request of its own: who asks by now, its id, its line in the log, its numbers.

A connection outlives the keys that it was opened with, so each frame asks anew whether its key is good.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.websockets import WebSocketDisconnect

from server.access import Principal
from server.errors import ApiError, to_api_error
from server.http import POLICY_VIOLATION, presented_key, principal
from server.limits import Standing
from server.routes.websocket.session import Session
from server.telemetry import RequestRecord, current

log = logging.getLogger("antiphon")
access = logging.getLogger("antiphon.access")

METHOD = "WEBSOCKET"
CLIENT_LEFT = 499  # as `server.http.error_boundary` counts it
SCOPE = "responses.write"


async def asked_by(connection: Session) -> HTTPConnection:
    """A frame as a request, with its principal. ApiError 401 where the connection's key is good no more: then
    it takes nothing else."""
    scope = connection.socket.scope
    try:
        who = await _principal(connection)
    except ApiError as error:
        connection.leave(POLICY_VIOLATION, error.code or error.type)
        raise
    who.require(SCOPE)
    record = current.get()
    assert record is not None, "a frame is carried out under its record"
    state = {
        "principal": who,
        "request_id": record.request_id,
        "standing": Standing(connection.here.limiter, who.subjects),
    }
    return HTTPConnection({**scope, "state": state})


async def _principal(connection: Session) -> Principal:
    keys, opened_by = connection.life.keys, principal(connection.socket)
    key = presented_key(connection.socket.headers)
    if key is None and opened_by.key_id is not None:  # by a ticket
        return await keys.of(opened_by.owner, opened_by.key_id)
    return await keys.principal(key)


@dataclass(slots=True)
class Told:
    """How a request ends. error: that it is to be answered with, if it is."""

    status: int = CLIENT_LEFT
    error: ApiError | None = None


@contextmanager
def one_request(connection: Session, what: str) -> Iterator[Told]:
    """Held while a frame is carried out: counts and logs it, and catches what it raises, for its caller to
    tell. what: the frame's type."""
    telemetry, began = connection.life.telemetry, time.perf_counter()
    scope, record = connection.socket.scope, RequestRecord(f"req_{uuid.uuid4().hex}")
    client = (scope.get("client") or ("-",))[0]
    opened_by = current.get()
    if opened_by is not None:
        record.traceparent, record.trace_state = opened_by.traceparent, opened_by.trace_state
    if telemetry.tracing is not None:
        telemetry.tracing.request(record, METHOD, scope["path"], client)
    current.set(record)  # in the task of this frame alone
    telemetry.request_started()
    told = Told()
    try:
        yield told
        told.status = 200
    except (WebSocketDisconnect, ClientDisconnect):
        pass
    except Exception as failure:
        told.error = to_api_error(failure)
        told.status = told.error.status
        record.error_code = told.error.code or told.error.type
        if told.error.status == 500:
            log.error("%s %s", METHOD, scope["path"], exc_info=failure)
            told.error.message += f" (request id {record.request_id})"
    finally:
        status, seconds = told.status, time.perf_counter() - began
        telemetry.request_ended(scope["path"], METHOD, status, seconds, record.error_code)
        if telemetry.tracing is not None and record.span is not None:
            telemetry.tracing.replied(record, METHOD, scope["path"], status)
        line, words = "%s %s %s %d %.0f ms %s %s", (METHOD, scope["path"], what, status, seconds * 1000)
        who = principal(connection.socket)
        said = {"method": METHOD, "path": scope["path"], "route": scope["path"], "status": status}
        said |= {"duration_ms": round(seconds * 1000, 3), "client": client}
        said |= {"owner": who.owner, "key_id": who.key_id, **record.fields()}
        access.info(line, *words, record.request_id, client, extra=said)
