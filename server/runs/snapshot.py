"""The Response object as bytes: the part that changes, its output, and its echo, joined.

Owns the one composition of a stored response; events are joined from the same parts by the journal and the channel.
Refuses to know where the parts come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from server.runs.steps import pending_calls
from storage import StoredResponse


def echo_members(echo: Mapping[str, Any]) -> bytes:
    """The echo as JSON members without braces, ready to be spliced."""
    return orjson.dumps(echo)[1:-1]


def response_json(stored: StoredResponse) -> bytes:
    """A stored response on the wire. While it waits, `pending_tool_calls` (extension) names what it waits for."""
    output = b",".join(item.body for item in stored.output)
    extra = b""
    if stored.waiting:
        pending = pending_calls([orjson.loads(item.body) for item in stored.output])
        listed = [{"call_id": call_id, "name": name} for call_id, name in pending.items()]
        extra = b',"pending_tool_calls":' + orjson.dumps(listed)
    return stored.head[:-1] + b',"output":[' + output + b"]" + extra + b"," + stored.echo + b"}"


def terminal_response(data: bytes) -> bytes:
    """The Response object inside frames whose last event is a lifecycle event."""
    event = data[data.rindex(b"\ndata: ", 0, len(data) - 2) + 7 : -2]
    return event[event.index(b'"response":') + 11 : -1]
