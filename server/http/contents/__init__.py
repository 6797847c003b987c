"""Contents of files on the wire: forms that bring them, streamed into storage, and replies that are one."""

from __future__ import annotations

from server.http.contents.downloads import content_reply
from server.http.contents.forms import MAX_PART_BYTES, Form, ReceivedFile, load_form, shown_name, takes_form

__all__ = [
    "MAX_PART_BYTES",
    "Form",
    "ReceivedFile",
    "content_reply",
    "load_form",
    "shown_name",
    "takes_form",
]
