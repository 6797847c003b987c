"""Reads a dead server's database from a copy of its files: the log of each response as frames, and rows that
nothing refers to."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from storage import ECHO_MARK
from tests.support.making import check, query

FILES = ("antiphon.db", "antiphon.db-wal")

_LOGS = """
SELECT p.id, p.echo, r.events FROM responses p
JOIN segments s ON s.response_id = p.id JOIN records r ON r.segment = s.id
WHERE p.id IN ({ids}) ORDER BY p.id, r.first_seq
"""


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of the database of a server that is dead, so that looking at it mends nothing."""
    with tempfile.TemporaryDirectory() as there:
        for name in FILES:
            if (folder / name).exists():
                shutil.copy(folder / name, there)
        yield Path(there) / FILES[0]


def look(database: Path | str, ids: Iterable[str]) -> tuple[dict[str, bytes], list[str]]:
    """The log of each response that has one, as the frames of its stream; and what is wrong with the
    database.
    """
    logs: dict[str, bytes] = {}
    quoted = ", ".join(f"'{id}'" for id in ids)
    for id, echo, events in query(database, _LOGS.format(ids=quoted or "''")):
        logs[id] = logs.get(id, b"") + b"".join(_frame(event, echo) for event in events.split(b"\n"))
    try:
        check(database, killed=True)
    except AssertionError as error:
        return logs, [f"I1 the database is not sound: {str(error)[:500]}"]
    return logs, []


def _frame(event: bytes, echo: bytes) -> bytes:
    name = event[9 : event.index(b'"', 9)]
    return b"event: " + name + b"\ndata: " + event.replace(ECHO_MARK, echo) + b"\n\n"
