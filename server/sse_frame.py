"""One server-sent event as bytes.

Source of the format: the HTML standard, section 9.2. Line feeds only.
"""

from __future__ import annotations


def frame(event_type: str | None, data: bytes) -> bytes:
    """One event; `data` is JSON on one line. Without a type (chat) only the data line is sent."""
    if event_type is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event_type.encode() + b"\ndata: " + data + b"\n\n"
