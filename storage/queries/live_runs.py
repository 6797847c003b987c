"""The runs in flight, as an operator looks at them."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from storage.queries.events import TOKEN_BYTES
from storage.records import LiveRun, NotFound, RunEnded
from storage.tables import records, responses, runs, segments


def live_runs(conn: Connection, limit: int) -> tuple[LiveRun, ...]:
    """The runs of all owners that have not ended, the oldest first, at most `limit`."""
    # These first, and then their responses: SQLite would rather walk through all responses that are stored.
    names = ("response_id", "owner", "state", "runner", "attempt", "created_at")
    oldest_first = select(*(runs.c[name] for name in names)).order_by(runs.c.created_at, runs.c.response_id)
    oldest = oldest_first.limit(limit).cte("oldest")
    num_bytes = (
        select(func.coalesce(func.sum(func.length(records.c.token_ids)), 0))
        .join_from(segments, records, records.c.segment == segments.c.id)
        .where(segments.c.response_id == oldest.c.response_id)
        .scalar_subquery()
    )
    query = (
        select(
            *(oldest.c[name] for name in names[:-1]),
            *(responses.c.model, responses.c.background, responses.c.created_at),
            num_bytes.label("num_bytes"),
        )
        .join_from(oldest, responses, responses.c.id == oldest.c.response_id)
        .order_by(oldest.c.created_at, oldest.c.response_id)
    )
    return tuple(
        LiveRun(
            row.response_id,
            row.owner,
            row.model,
            row.state,
            row.runner,
            row.background,
            row.created_at,
            row.attempt,
            int(row.num_bytes) // TOKEN_BYTES,
        )
        for row in conn.execute(query).all()
    )


def num_live_runs(conn: Connection) -> dict[str, int]:
    """How many runs of all owners have not ended, by their state."""
    query = select(runs.c.state, func.count().label("num")).group_by(runs.c.state)
    return {row.state: row.num for row in conn.execute(query).all()}


def run_owner(conn: Connection, response_id: str) -> str:
    """Whose run in flight this is. NotFound("run"), RunEnded."""
    owner = conn.execute(select(runs.c.owner).where(runs.c.response_id == response_id)).scalar()
    if owner is None:
        there = (
            responses.c.id == response_id,
            responses.c.deleted_at.is_(None),
            responses.c.fork_of.is_(None),
        )
        status = conn.execute(select(responses.c.status).where(*there)).scalar()
        raise NotFound("run", response_id) if status is None else RunEnded(response_id, status)
    return str(owner)


def response_owner(conn: Connection, response_id: str) -> str:
    """Whose response this is, whether or not it has ended. NotFound("response")."""
    owner = conn.execute(select(responses.c.owner).where(responses.c.id == response_id)).scalar()
    if owner is None:
        raise NotFound("response", response_id)
    return str(owner)
