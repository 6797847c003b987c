"""The queue: runs that wait for a process to carry them on, in the order in which they begin.

What an earlier owner left at work goes on before anything new begins. Then comes the lowest priority number,
then the owner with the fewest runs at work and in front of it, counted against its weight, then age.

So every owner that has runs in the queue holds places of all processes together in proportion to its weight:
never fewer than its share rounded down, once as many runs have ended as it is short of. A place is worth a
token a step in every engine, whoever holds it, which makes shares of tokens of shares of places, but for
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, Float, Subquery, and_, case, cast, func, literal, select

from storage.records import TooManyQueued
from storage.tables import owners, runs

FREE = and_(runs.c.runner.is_(None), runs.c.state.in_(("queued", "running")))
"""Nobody owns it, and it does not wait for its client: queued, or its owner gave it back or lost it."""


def _weights(conn: Connection) -> dict[str, float]:
    """The weights of the owners of free runs, where their limits name any."""
    query = select(owners.c.id, owners.c.limits).where(
        owners.c.limits.is_not(None), owners.c.id.in_(select(runs.c.owner).where(FREE))
    )
    found = {id: orjson.loads(limits).get("weight") for id, limits in conn.execute(query).all()}
    return {id: float(weight) for id, weight in found.items() if weight is not None}


def _fair(weights: Mapping[str, float]) -> Subquery:
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
    weight = case(weights, value=runs.c.owner, else_=1.0) if weights else literal(1.0)
    return (
        select(*columns, (cast(turn + func.coalesce(busy.c.num, 0), Float) / weight).label("turn"))
        .join_from(runs, busy, busy.c.owner == runs.c.owner, isouter=True)
        .where(FREE)
        .subquery()
    )


def _order(fair: Subquery) -> tuple[ColumnElement[Any], ...]:
    begun_first = fair.c.state.desc()  # running, queued
    return begun_first, fair.c.priority, fair.c.turn, fair.c.created_at, fair.c.response_id


def first(conn: Connection, limit: int) -> Sequence[str]:
    """The runs whose turn it is, at most `limit`, the next one first."""
    fair = _fair(_weights(conn))
    return conn.execute(select(fair.c.response_id).order_by(*_order(fair)).limit(limit)).scalars().all()


def places(conn: Connection, response_ids: Sequence[str]) -> dict[str, int]:
    """The places of those of these runs that are in the queue; 1 is next."""
    if not response_ids:
        return {}
    fair = _fair(_weights(conn))
    place = func.row_number().over(order_by=_order(fair)).label("place")
    queue = select(fair.c.response_id, place).subquery()
    query = select(queue).where(queue.c.response_id.in_(list(response_ids)))
    return {row.response_id: row.place for row in conn.execute(query).all()}


def require_room(conn: Connection, owner: str, limit: int) -> None:
    """TooManyQueued if `limit` runs of the owner are queued already."""
    query = select(func.count()).where(runs.c.owner == owner, runs.c.state == "queued")
    if conn.execute(query).scalar_one() >= limit:
        raise TooManyQueued(limit)
