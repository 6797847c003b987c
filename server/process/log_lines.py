"""The form of log lines: one record is one line, whatever a client put into it."""

from __future__ import annotations

import logging
import re

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_UNSAFE = re.compile(
    # Controls of C0 and C1, DEL; line and paragraph separators; what is invisible or turns the direction of
    # writing; half of a character, which no stream of UTF-8 can write.
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def printable(text: str) -> str:
    """A text in which nothing ends a line, moves a cursor, colours or turns around: such characters, and
    backslashes, are written as Python writes them."""
    return _UNSAFE.sub(_escape, text.replace("\\", "\\\\"))


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


class Lines(logging.Formatter):
    """Writes a record's message as one line. The lines of a traceback follow, each behind a bar: none of
    them can pass for a record of its own."""

    def __init__(self) -> None:
        super().__init__(FORM)

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        head, _, rest = super().format(record).partition("\n")
        return head + "".join(f"\n    | {printable(line)}" for line in rest.splitlines()) if rest else head

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's own line."""
        record.message = printable(record.message)
        return super().formatMessage(record)
