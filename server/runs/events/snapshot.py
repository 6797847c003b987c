"""Joins the stored parts of a Response object into its JSON bytes.

The parts are the head (the fields that change), the output items, and the echo of the request's fields. A
response in flight also gets this server's own members, such as `queue_position`. The Response objects inside
events have the same parts, but there the channel fills in the echo.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from server.items import answer_field, filled_body
from storage import StoredResponse, WaitingInputs

POLL_AFTER_MS = {"queued": 2000, "in_progress": 1000}
"""When it may be worth to look at an unfinished response again, by its status."""

POLL_WAITING_MS = 5000
"""The same for one that waits for tool outputs: it is the client's turn."""


_LONG = re.compile(rb',"(?:input_messages|output)":\[')
"""Where the members begin that grow with what was said; none of those before them has such a name in it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A Response object as it stood.

    poll_after_ms: a hint for whoever asks again; None once it has ended. queue_position: its turn, 1 is next;
    None once it has begun. model: the name of the model of a stored one.
    """

    body: bytes
    poll_after_ms: int | None = None
    queue_position: int | None = None
    model: str = ""


def echo_members(echo: Mapping[str, Any]) -> bytes:
    """The echo as JSON members without braces, ready to be spliced."""
    return orjson.dumps(echo)[1:-1]


def join_response(head: bytes, output: Sequence[bytes], echo: bytes, extra: bytes = b"") -> bytes:
    """A Response object from its parts; `extra` holds members of ours, each with its comma before it."""
    return head[:-1] + b',"output":[' + b",".join(output) + b"]" + extra + b"," + echo + b"}"


def snapshot(
    stored: StoredResponse, waits: WaitingInputs | None = None, include: Sequence[str] = ()
) -> Snapshot:
    """A stored response on the wire, with members of ours while it is in flight.

    attempt: how often an engine was given it. queue_position: its turn, 1 is next, until it begins.
    pending_tool_calls: what it waits for, as `waits` has it; each under the field by which the answer names
    it, with the type of its item, which has the rest. tool_timeout_at: until when it waits. include: what its
    items are to say besides.
    """
    extra = b""
    place = None if stored.run is None else stored.run.place
    if stored.run is not None:
        extra += b',"attempt":%d' % stored.run.attempt
        if place is not None:
            extra += b',"queue_position":%d' % place
    if waits is not None:
        kinds = {item.call_id: item.kind for item in stored.output if item.name is not None}
        listed = [_pending_call(key, name, kinds.get(key)) for key, name in waits.pending.items()]
        extra += b',"pending_tool_calls":' + orjson.dumps(listed)
        if waits.deadline is not None:
            extra += b',"tool_timeout_at":%d' % (waits.deadline // 1_000_000)
    output = [filled_body(item.body, item.private, include) for item in stored.output]
    body = join_response(stored.head, output, stored.echo, extra)
    poll_after_ms = POLL_AFTER_MS.get(stored.status) if waits is None else POLL_WAITING_MS
    return Snapshot(body, poll_after_ms, place, stored.model)


def _pending_call(key: str, name: str, kind: str | None) -> dict[str, str]:
    """One of `pending_tool_calls`. kind: None for a call that was made since the output was read."""
    return (
        {"call_id": key, "name": name}
        if kind is None
        else {answer_field(kind): key, "type": kind, "name": name}
    )


def terminal_response(event: bytes) -> bytes:
    """The Response object inside a lifecycle event, whose last member it is."""
    return event[event.index(b'"response":') + 11 : -1]


def short_members(response: bytes) -> dict[str, Any]:
    """The members of a Response object that are short however long its output is: its status, error and usage
    among them. What is long is not parsed."""
    long = _LONG.search(response)
    assert long is not None, "every Response object has an output"
    members: dict[str, Any] = orjson.loads(response[: long.start()] + b"}")
    return members
