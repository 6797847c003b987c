"""The Response object as bytes: the part that changes, its output, and its echo, joined.

Owns the one composition of a response outside its events, which are joined from the same parts by the
channel. Refuses to know where the parts come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from storage import StoredResponse


def echo_members(echo: Mapping[str, Any]) -> bytes:
    """The echo as JSON members without braces, ready to be spliced."""
    return orjson.dumps(echo)[1:-1]


def join_response(head: bytes, output: Sequence[bytes], echo: bytes, extra: bytes = b"") -> bytes:
    """A Response object from its parts; `extra` holds members of ours, each with its comma before it."""
    return head[:-1] + b',"output":[' + b",".join(output) + b"]" + extra + b"," + echo + b"}"


def response_json(stored: StoredResponse, pending: Mapping[str, str] | None = None) -> bytes:
    """A stored response on the wire. While it waits, `pending_tool_calls` (extension) names what it waits
    for: `pending`, call_id -> name."""
    extra = b""
    if pending is not None:
        listed = [{"call_id": call_id, "name": name} for call_id, name in pending.items()]
        extra = b',"pending_tool_calls":' + orjson.dumps(listed)
    return join_response(stored.head, [item.body for item in stored.output], stored.echo, extra)


def terminal_response(data: bytes) -> bytes:
    """The Response object inside frames whose last event is a lifecycle event."""
    event = data[data.rindex(b"\ndata: ", 0, len(data) - 2) + 7 : -2]
    return event[event.index(b'"response":') + 11 : -1]
