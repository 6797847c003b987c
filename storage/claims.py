"""Which rows of work a process may claim: a condition on the column that says which process has a row.

A claim is a write, and a process can lose the answer to one: then the row is the process's own, and no task
of it knows. Such a row would be nobody's for as long as the process lives. So whoever claims says which rows
its tasks hold, and every other row of its own is free. Should a task hold one after all, the fence of the
newer claim refuses what the older one writes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select, tuple_

from storage.tables import runners


def claimable(
    holder: ColumnElement[Any],
    runner: str,
    key: Sequence[ColumnElement[Any]],
    held: Collection[tuple[Any, ...]],
    *,
    shared: bool,
) -> ColumnElement[bool]:
    """The rows that no task works on: those of no process, those of this one that none of its tasks holds,
    and, where other processes write to the database too, those of processes that have gone.

    holder: the column with the process of a row. runner: this process. key: the columns that tell rows
    apart. held: their values in the rows that tasks of this process hold.
    """
    mine: ColumnElement[bool] = holder == runner
    if held:
        mine = and_(mine, tuple_(*key).not_in(list(held)))
    free = or_(holder.is_(None), mine)
    if shared:
        known = select(runners.c.id).where(runners.c.id == holder).exists()
        free = or_(free, and_(holder != runner, ~known))
    return free
