"""The forms of log lines: one record is one line, whatever a client put into it."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from typing import Any

from server.telemetry import current

log = logging.getLogger("antiphon")

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

    def __init__(self, process: str = "") -> None:
        """process: which of several processes writes it, as lines are to say."""
        super().__init__(FORM.replace("%(name)s", f"%(name)s[{process}]") if process else FORM)

    def format(self, record: logging.LogRecord) -> str:
        """The text of a record."""
        head, _, rest = super().format(record).partition("\n")
        return head + "".join(f"\n    | {printable(line)}" for line in rest.splitlines()) if rest else head

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's own line."""
        record.message = printable(record.message)
        return super().formatMessage(record)


def json_lines(process: str = "") -> logging.Formatter:
    """Writes a record as one JSON object: time (UTC), level, logger, message, the fields that were logged
    with it, and the ids of the request that its task works for. A traceback is the field `exc_info`.

    process: which of several processes writes it, as the field of this name.
    """
    from pythonjsonlogger.json import JsonFormatter

    class JsonLines(JsonFormatter):
        def add_fields(
            self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
        ) -> None:
            """Fill in what stands on a line, in its order; what is not known is left out."""
            at = datetime.fromtimestamp(record.created, UTC)
            log_data["time"] = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            log_data["level"] = record.levelname.lower()
            log_data["logger"] = record.name
            log_data["message"] = record.message
            log_data["process"] = process or None
            working_for = current.get()
            if working_for is not None:
                log_data["request_id"] = working_for.request_id
                log_data["trace_id"] = working_for.trace_id
            super().add_fields(log_data, record, message_dict)
            for name in [name for name, value in log_data.items() if value is None]:
                del log_data[name]

    return JsonLines("%(message)s", json_ensure_ascii=True)


def set_up_logging(level: str, form: str = "text", process: str = "") -> None:
    """Lines on standard error: ours from `level` on, those of libraries only when they warn.

    form: `text`, or `json` for an object a line. process: which of several processes this one is.
    """
    lines = logging.StreamHandler()
    lines.setFormatter(json_lines(process) if form == "json" else Lines(process))
    logging.basicConfig(level=logging.WARNING, handlers=[lines])
    log.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of bad requests, which have their replies
    logging.getLogger("uvicorn.error").addFilter(_not_a_cut)


def _not_a_cut(record: logging.LogRecord) -> bool:
    # A reply that is dropped on purpose (server.http.error_boundary) is no error of the application.
    return "without completing response" not in record.getMessage()
