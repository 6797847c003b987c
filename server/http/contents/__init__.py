"""Contents of files on the wire: forms that bring them, streamed into storage, and replies that are one."""

from __future__ import annotations

from server.http.contents.downloads import IMAGES, content_reply
from server.http.contents.forms import MAX_PART_BYTES, Form, ReceivedFile, load_form, shown_name, takes_form
from server.http.contents.intake import EndsIntake

__all__ = [
    "IMAGES",
    "MAX_PART_BYTES",
    "EndsIntake",
    "Form",
    "ReceivedFile",
    "content_reply",
    "load_form",
    "shown_name",
    "takes_form",
]
