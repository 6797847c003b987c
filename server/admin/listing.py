"""Lists of what an operator keeps: keys, webhooks and sealing keys, as a table or as JSON."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson

from server.admin.database_access import AdminError, carry_out
from server.admin.owner_names import with_owner_names
from server.config import Config
from server.masking import one_line
from storage import Storage

Columns = Mapping[str, Callable[[dict[str, Any]], str]]
"""A table's columns: the title of each, and what it shows of an object."""


def list_lines(
    config: Config,
    options: argparse.Namespace,
    path: str,
    in_database: Callable[[Storage], Awaitable[dict[str, Any]]],
    columns: Columns,
    *,
    of: str | None = None,
    keep: Callable[[dict[str, Any]], bool] = lambda one: True,
) -> Iterator[str]:
    """Carry out a verb `list`; yields the lines to print. Raises AdminError.

    path: of the same list at a running server. in_database: the list, as `{"data": [object, ...]}`. Objects
    that have an `owner` get its name too. of: only objects of this owner. keep: only those of which this is
    true.
    """
    objects = carry_out(config, in_database, "GET", path)["data"]
    objects = [one for one in objects if keep(one)]
    if of is not None:
        objects = [one for one in objects if one["owner"] == of]
    if any("owner" in one for one in objects):
        objects = with_owner_names(config, objects)
    if options.json:
        yield orjson.dumps(objects, option=orjson.OPT_INDENT_2).decode()
        return
    yield from table(columns, objects)


def table(columns: Columns, objects: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table, with its titles first; whoever looks at it is told of one without rows."""
    rows = [
        tuple(columns),
        *(tuple(one_line(show(object)) for show in columns.values()) for object in objects),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if not objects:
        print("antiphon: there are none", file=sys.stderr)


@contextmanager
def shown_once(undo: Callable[[], object], undone: str, kept: str) -> Iterator[None]:
    """Around the line that shows a secret, which nobody can see again. Where it cannot be written, `undo`
    ends what the secret is of: AdminError, which says what is `undone`, or, where that failed, what is `kept`
    and how to end it."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "standard output is closed")
        yield
    except OSError as error:
        try:
            undo()
        except AdminError as failed:
            undone = f"{kept} ({failed})"
        raise AdminError(f"what nobody can see again cannot be written: {error.strerror}. {undone}") from None


def shown_time(object: dict[str, Any], at: str = "created_at") -> str:
    """When an object was created, or the time of its field `at`, in UTC."""
    return datetime.fromtimestamp(object[at], UTC).strftime("%Y-%m-%d %H:%M")
