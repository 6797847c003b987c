"""How events become server-sent events: one frame each, as bytes.

Source of the format: the HTML standard, section 9.2. Lines end in line feeds only, and a frame is never split
over two writes, because some readers lose an event whose blank line arrives alone.
"""

from __future__ import annotations

from collections.abc import Iterable


def frame(event_type: str | None, data: bytes) -> bytes:
    """One event; `data` is JSON on one line. Without a type (chat) only the data line is sent."""
    if event_type is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event_type.encode() + b"\ndata: " + data + b"\n\n"


def frames(events: Iterable[tuple[int, bytes]], *, numbered: bool = False) -> bytes:
    """Events of a response, joined: an `event:` line with the type of each, and its JSON.

    events: their numbers, and JSON objects that begin with their `type`, as the journal stamps them.
    numbered: for readers that want `id:` lines.
    """
    lines: list[bytes] = []
    for number, event in events:
        if numbered:
            lines.append(b"id: %d\n" % number)
        lines += (b"event: ", event_type(event), b"\ndata: ", event, b"\n\n")
    return b"".join(lines)


def event_type(event: bytes) -> bytes:
    """The type of an event. It is the first member of every stamped event, so its name needs no parser."""
    return event[9 : event.index(b'"', 9)]
