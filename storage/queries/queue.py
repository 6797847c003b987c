"""The queue: runs that wait for a process to carry them on, in the order in which they begin.

What an earlier owner left at work goes on before anything new begins. Then comes the lowest priority number,
then the owner with the fewest runs at work and in front of it, then age.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Subquery, and_, func, select

from storage.records import TooManyQueued
from storage.tables import runs

FREE = and_(runs.c.runner.is_(None), runs.c.state.in_(("queued", "running")))
"""Nobody owns it, and it does not wait for its client: queued, or its owner gave it back or lost it."""


def _fair() -> Subquery:
    """Every free run and its turn among those of all owners. An index has the rows of an owner in order."""
    busy = (
        select(runs.c.owner, func.count().label("num"))
        .where(runs.c.state == "running", runs.c.runner.is_not(None))
        .group_by(runs.c.owner)
        .subquery()
    )
    turn = func.row_number().over(
        partition_by=(runs.c.state, runs.c.owner),
        order_by=(runs.c.priority, runs.c.created_at, runs.c.response_id),
    )
    columns = (runs.c.response_id, runs.c.state, runs.c.priority, runs.c.created_at)
    return (
        select(*columns, (turn + func.coalesce(busy.c.num, 0)).label("turn"))
        .join_from(runs, busy, busy.c.owner == runs.c.owner, isouter=True)
        .where(FREE)
        .subquery()
    )


def _order(fair: Subquery) -> tuple[ColumnElement[Any], ...]:
    begun_first = fair.c.state.desc()  # running, queued
    return begun_first, fair.c.priority, fair.c.turn, fair.c.created_at, fair.c.response_id


def first(conn: Connection, limit: int) -> Sequence[str]:
    """The runs whose turn it is, at most `limit`, the next one first."""
    fair = _fair()
    return conn.execute(select(fair.c.response_id).order_by(*_order(fair)).limit(limit)).scalars().all()


def places(conn: Connection, response_ids: Sequence[str]) -> dict[str, int]:
    """The places of those of these runs that are in the queue; 1 is next."""
    if not response_ids:
        return {}
    fair = _fair()
    place = func.row_number().over(order_by=_order(fair)).label("place")
    queue = select(fair.c.response_id, place).subquery()
    query = select(queue).where(queue.c.response_id.in_(list(response_ids)))
    return {row.response_id: row.place for row in conn.execute(query).all()}


def require_room(conn: Connection, owner: str, limit: int) -> None:
    """TooManyQueued if `limit` runs of the owner are queued already."""
    query = select(func.count()).where(runs.c.owner == owner, runs.c.state == "queued")
    if conn.execute(query).scalar_one() >= limit:
        raise TooManyQueued(limit)
