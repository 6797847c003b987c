"""What is used up of rate limits: one number for each, which the server reads and computes.

A row is held until the commit, so that servers that share the database never give the same units out twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sqlalchemy import BigInteger, Connection, cast, delete, func, select, update

from storage.drivers import insert_unless_taken
from storage.tables import quota_state

T = TypeVar("T")

Move = Callable[[Mapping[str, int], int], tuple[Mapping[str, int], T]]
"""From the states of limits by their ids, 0 for one that is new, and the time, to the states to be written
and a result. It may be called again where a transaction is repeated."""


def move(conn: Connection, ids: Sequence[str], move: Move[T]) -> T:
    """Changes the states of some limits. Times are nanoseconds by the database's clock."""
    rows = select(quota_state).where(quota_state.c.id.in_(ids)).order_by(quota_state.c.id).with_for_update()
    found = {row.id: row.arrival for row in conn.execute(rows).all()}
    if new := sorted(set(ids) - found.keys()):
        for id in new:
            insert_unless_taken(conn, quota_state, {"id": id, "arrival": 0})
        found = {row.id: row.arrival for row in conn.execute(rows).all()}
    written, result = move(found, _now(conn))
    for id in sorted(written):
        conn.execute(update(quota_state).where(quota_state.c.id == id).values(arrival=written[id]))
    return result


def sweep(conn: Connection) -> int:
    """Removes the rows of limits of which nothing is used; returns how many."""
    return conn.execute(delete(quota_state).where(quota_state.c.arrival < _now(conn))).rowcount


def _now(conn: Connection) -> int:
    if conn.dialect.name == "sqlite":
        return time.time_ns()
    seconds = func.extract("epoch", func.clock_timestamp())
    now: int = conn.execute(select(cast(seconds * 1_000_000_000, BigInteger))).scalar_one()
    return now
