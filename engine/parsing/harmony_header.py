"""Reads the headers of messages within a turn (`ChannelMarks`): each message's channel and recipient."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from engine.dialects import ChannelMarks
from engine.parsing.json_call import MAX_HEADER


class Header(NamedTuple):
    """What stands after the first `length` characters. `name` is the function's, for a call."""

    kind: Literal["text", "preamble", "thought", "call"]
    name: str
    length: int


def read_header(text: str, marks: ChannelMarks) -> Header | Literal["more"] | None:
    """The header at the front of a text, white space aside; "more" while it may become one, None where it is
    none. The header of a turn's first message may lack what the prompt has said already."""
    body = text.lstrip()
    begins = (marks.start, marks.channel, marks.message, "to=")
    if not body.startswith(begins):
        return "more" if any(tag.startswith(body) for tag in begins) else None
    end = body.find(marks.message)
    if max(end, len(body) if end < 0 else 0) > MAX_HEADER:
        return None
    if end < 0:
        return "more"
    said = body[body.rfind(marks.start, 0, end) + 1 : end]
    length = len(text) - len(body) + end + len(marks.message)
    name = next(reversed(re.findall(re.escape(marks.channel) + r"\s*(\w*)", said)), "")
    recipients = [each for each in re.findall(r"\bto=([^\s<]+)", said) if each not in marks.people]
    if recipients:
        return Header("call", recipients[0].removeprefix(marks.prefix), length)
    if name in marks.thoughts:
        return Header("thought", "", length)
    return Header("preamble" if name in marks.preambles else "text", "", length)


def is_header(text: str, marks: ChannelMarks) -> bool:
    """Whether a text that ended here was a header: no word of it is for a reader."""
    body = text.strip()
    return not body or body.startswith((marks.start, marks.channel, marks.message, "to="))
