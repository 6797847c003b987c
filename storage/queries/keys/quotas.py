"""What is used up of rate limits: one number for each, which the server reads and computes.

A row is held until the commit, so that servers that share the database never give the same units out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sqlalchemy import Connection, delete, select, update

from storage.drivers import insert_unless_taken, shared_clock
from storage.tables import quota_state

T = TypeVar("T")

Move = Callable[[Mapping[str, int], int], tuple[Mapping[str, int], T]]
"""From the states of limits by their ids, 0 for one that is new, and the time, to the states to be written
and a result. It may be called again where a transaction is repeated."""


def move(conn: Connection, ids: Sequence[str], move: Move[T], now: int) -> T:
    """Changes the states of some limits. Times are nanoseconds by the clock of all processes; now: by this
    process's own, which is that clock where it has the database alone."""
    rows = select(quota_state).where(quota_state.c.id.in_(ids)).order_by(quota_state.c.id).with_for_update()
    found = {row.id: row.arrival for row in conn.execute(rows).all()}
    if new := sorted(set(ids) - found.keys()):
        for id in new:
            insert_unless_taken(conn, quota_state, {"id": id, "arrival": 0})
        found = {row.id: row.arrival for row in conn.execute(rows).all()}
    written, result = move(found, _shared(conn, now))
    for id in sorted(written):
        conn.execute(update(quota_state).where(quota_state.c.id == id).values(arrival=written[id]))
    return result


def sweep(conn: Connection, now: int) -> int:
    """Removes the rows of limits of which nothing is used; returns how many."""
    return conn.execute(delete(quota_state).where(quota_state.c.arrival < _shared(conn, now))).rowcount


def _shared(conn: Connection, now: int) -> int:
    return conn.execute(select(shared_clock(conn.dialect.name, now // 1000))).scalar_one() * 1000
