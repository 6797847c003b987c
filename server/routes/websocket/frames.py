"""What goes over a WebSocket: events, errors, and what a client may ask of its lane."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from server.errors import ApiError

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


def event_frame(event: bytes, stream_id: str | None, headers: Mapping[str, str] | None = None) -> str:
    """An event as a frame: its JSON, with the lane that it belongs to. headers: what the reply over HTTP
    would have had besides."""
    if stream_id is None and not headers:
        return event.decode()
    more: dict[str, Any] = {} if stream_id is None else {"stream_id": stream_id}
    if headers:
        more["headers"] = headers
    return (event[:-1] + b"," + orjson.dumps(more)[1:]).decode()


def error_frame(error: ApiError, stream_id: str | None) -> str:
    """An error as a frame: nested, unlike the `error` event of a stream over HTTP."""
    told: dict[str, Any] = {"type": "error", "status": error.status}
    if stream_id is not None:
        told["stream_id"] = stream_id
    shown = error.error()
    if error.headers:
        shown["headers"] = error.headers
    return orjson.dumps({**told, "error": shown}).decode()


def own_frame(kind: str, sequence_number: int, stream_id: str | None, **fields: Any) -> str:
    """An event of the connection, which is in no log. sequence_number: of the last event of the response that
    it is about, so that a client which counts on from there misses nothing."""
    told = {"type": kind, "sequence_number": sequence_number, **fields}
    if stream_id is not None:
        told["stream_id"] = stream_id
    return orjson.dumps(told).decode()


def stream_id_of(body: Mapping[str, Any]) -> str | None:
    """The lane that a frame names; None is the default lane. ApiError 400 `invalid_stream_id`."""
    found = body.get("stream_id")
    if found is None:
        return None
    if not isinstance(found, str) or not _STREAM_ID.fullmatch(found):
        message = "A 'stream_id' has 1 to 256 ASCII letters, digits, underscores, hyphens or periods."
        raise ApiError(400, message, code="invalid_stream_id", param="stream_id")
    return found
