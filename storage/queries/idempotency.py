"""Requests that came with an `Idempotency-Key`, and the run or reply that came of each.

The primary key of the table makes one of two equal requests the first. What was kept for repeats alone is
removed here, too.

A request that starts a run is recorded in that run's own start transaction. Any other is recorded before its
work begins, under the process that does it, and again with its reply, or, where it is one transaction, in
that; should the process die in between, the next one to ask takes its place.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, exists, select, update

from storage.drivers import insert_unless_taken
from storage.queries import responses
from storage.records import KeyedRequest, KnownRequest, RequestKnown
from storage.tables import idempotency, runners, runs
from storage.tables import responses as response_rows

SWEEP_ROWS = 16


def find(conn: Connection, request: KeyedRequest) -> KnownRequest | None:
    """What is known of a request with this owner, route and key."""
    named = {"owner": request.owner, "route": request.route, "key": request.key}
    row = conn.execute(_FIND, named).first()
    return None if row is None else _known(row)


def begin(conn: Connection, request: KeyedRequest, runner: str) -> KnownRequest | None:
    """Records that `runner` begins to work on a request; otherwise what is known of it, and nothing changes.

    It takes the place of a process that died at it, and of itself: `runner` knows what it has at work.
    """
    if _insert(conn, request, runner=runner):
        return None
    row = conn.execute(select(idempotency).where(*_same(request)).with_for_update()).first()
    if row is None:  # it went in this very moment
        return begin(conn, request, runner)
    if row.body_hash != request.body_hash or row.response_id is not None or row.status is not None:
        return _known(row)
    alive = select(runners.c.id).where(runners.c.id == row.runner)
    if row.runner != runner and conn.execute(alive).first() is not None:
        return _known(row)
    conn.execute(
        update(idempotency).where(*_same(request)).values(runner=runner, created_at=request.created_at)
    )
    return None


def start(conn: Connection, request: KeyedRequest, response_id: str, runner: str | None) -> None:
    """Records the run that a request starts, in whose transaction this is. RequestKnown.

    A request that this very `runner` has begun gets the run's id.
    """
    if _insert(conn, request, response_id=response_id):
        return
    begun = (idempotency.c.runner == runner, idempotency.c.status.is_(None))
    changed = conn.execute(
        update(idempotency).where(*_same(request), *begun).values(response_id=response_id, runner=None)
    )
    if changed.rowcount == 0:
        raise RequestKnown


def complete(
    conn: Connection,
    request: KeyedRequest,
    runner: str,
    status: int,
    headers: bytes,
    body: bytes | None,
    about: str | None = None,
) -> bool:
    """Keeps the reply to a request that `runner` has begun; False if another process has taken its place.

    body: None for a reply that is not to be kept. about: the id of what it tells of.
    """
    reply: dict[str, Any] = {"status": status, "about": about}
    if body is not None:
        reply |= {"headers": headers, "body": body, "num_bytes": len(headers) + len(body)}
    kept = conn.execute(
        update(idempotency)
        .where(*_same(request), idempotency.c.runner == runner)
        .values(runner=None, **reply)
    )
    return kept.rowcount > 0


def drop_reply(conn: Connection, request: KeyedRequest) -> None:
    """Keeps the reply to a request no longer; that it was carried out stays known."""
    conn.execute(update(idempotency).where(*_same(request)).values(headers=None, body=None, num_bytes=0))


def release(conn: Connection, request: KeyedRequest, runner: str) -> None:
    """Makes the key of a request free again that `runner` has begun and that has no result."""
    conn.execute(delete(idempotency).where(*_same(request), idempotency.c.runner == runner))


def sweep(conn: Connection, before: int) -> int:
    """Forgets the oldest requests from before this time, and deletes the responses kept for their repeats
    alone, which are then to be erased.

    One whose run still goes on stays. Returns how many went: 0 when there are no more.
    """
    at_work = exists().where(runs.c.response_id == idempotency.c.response_id)
    rows = conn.execute(
        select(idempotency.c.owner, idempotency.c.route, idempotency.c.key, response_rows.c.id)
        .join_from(
            idempotency,
            response_rows,
            (response_rows.c.id == idempotency.c.response_id) & response_rows.c.hidden,
            isouter=True,
        )
        .where(idempotency.c.created_at < before, ~at_work)
        .order_by(idempotency.c.created_at)
        .limit(SWEEP_ROWS)
        .with_for_update(of=idempotency, skip_locked=True)
    ).all()
    responses.hide(conn, [row.id for row in rows if row.id is not None], before)
    for owner, route, key, _ in rows:
        conn.execute(delete(idempotency).where(*_at(owner, route, key)))
    return len(rows)


# ------------------------------------------------------------------------------------------------------------


def _insert(conn: Connection, request: KeyedRequest, **values: Any) -> bool:
    """False where the key is taken: decided by the table's key, so by no race."""
    values |= {
        "owner": request.owner,
        "route": request.route,
        "key": request.key,
        "body_hash": request.body_hash,
        "created_at": request.created_at,
    }
    return insert_unless_taken(conn, idempotency, values)


def _same(request: KeyedRequest) -> tuple[ColumnElement[bool], ...]:
    return _at(request.owner, request.route, request.key)


def _at(owner: str, route: str, key: str) -> tuple[ColumnElement[bool], ...]:
    return idempotency.c.owner == owner, idempotency.c.route == route, idempotency.c.key == key


_FIND = select(idempotency).where(
    *(idempotency.c[name] == bindparam(name) for name in ("owner", "route", "key"))
)


def _known(row: Row[*tuple[Any, ...]]) -> KnownRequest:
    return KnownRequest(row.body_hash, row.response_id, row.status, row.headers, row.body)
