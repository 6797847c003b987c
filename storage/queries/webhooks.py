"""Webhooks: the endpoints that are told where runs end or wait, and the deliveries that are still to be made.

A notice is written in the transaction that ends or parks its run, once for each webhook that wants it. An
attempt begins with a claim, which moves `due_at` ahead of it and counts `attempt` up: whoever dies in between
has only delayed the next one, and whoever comes back too late settles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from storage.drivers import Keys, by_keys
from storage.records import Delivery, DueDeliveries, NotFound, Notice, StoredWebhook
from storage.tables import deliveries, webhooks

DROPPED_AT_ONCE = 1000
"""Deliveries that one transaction looks at to find those that are too old."""

# ------------------------------------------------------------------------------------------------------------
# Who is told


def add(conn: Connection, webhook: StoredWebhook) -> None:
    """Stores a webhook; it is told of what comes from now on."""
    conn.execute(
        insert(webhooks).values(
            id=webhook.id,
            owner=webhook.owner,
            url=webhook.url,
            secret=webhook.secret,
            event_types=",".join(webhook.event_types),
            created_at=webhook.created_at,
            disabled_at=webhook.disabled_at,
        )
    )


def get(conn: Connection, id: str) -> StoredWebhook:
    """One webhook. NotFound("webhook")."""
    row = conn.execute(_with_pending().where(webhooks.c.id == id)).first()
    if row is None:
        raise NotFound("webhook", id)
    return _stored(row)


def list_(conn: Connection) -> tuple[StoredWebhook, ...]:
    """The webhooks of all owners, oldest first."""
    query = _with_pending().order_by(webhooks.c.created_at, webhooks.c.id)
    return tuple(_stored(row) for row in conn.execute(query).all())


def remove(conn: Connection, id: str) -> None:
    """Forgets a webhook and what it was still to be told. NotFound("webhook")."""
    if conn.execute(delete(webhooks).where(webhooks.c.id == id)).rowcount == 0:
        raise NotFound("webhook", id)
    conn.execute(delete(deliveries).where(deliveries.c.webhook_id == id))


def disable(conn: Connection, id: str, now: int) -> int | None:
    """Tells a webhook nothing until it is enabled; what it was still to be told is kept. Returns how much
    that is; None where it was disabled or removed already."""
    live = webhooks.c.id == id, webhooks.c.disabled_at.is_(None)
    if not conn.execute(update(webhooks).where(*live).values(disabled_at=now)).rowcount:
        return None
    pending = select(func.count()).select_from(deliveries).where(deliveries.c.webhook_id == id)
    return int(conn.execute(pending).scalar_one())


def enable(conn: Connection, id: str, now: int) -> int:
    """Tells a webhook again of what comes, and at once of what it was still to be told: returns how much that
    is. NotFound("webhook")."""
    if not conn.execute(update(webhooks).where(webhooks.c.id == id).values(disabled_at=None)).rowcount:
        raise NotFound("webhook", id)
    kept = update(deliveries).where(deliveries.c.webhook_id == id)
    return int(conn.execute(kept.values(due_at=now)).rowcount)


def _with_pending() -> Select[*tuple[Any, ...]]:
    """Webhooks, each with how many notices are to reach it, and the most attempts that one of these took."""
    its = deliveries.c.webhook_id == webhooks.c.id
    pending = select(func.count()).select_from(deliveries).where(its).scalar_subquery()
    attempts = select(func.coalesce(func.max(deliveries.c.attempt), 0)).where(its).scalar_subquery()
    return select(webhooks, pending.label("pending"), attempts.label("attempts"))


def _stored(row: Row[*tuple[Any, ...]]) -> StoredWebhook:
    return StoredWebhook(
        id=row.id,
        owner=row.owner,
        url=row.url,
        secret=row.secret,
        event_types=tuple(row.event_types.split(",")),
        created_at=row.created_at,
        disabled_at=row.disabled_at,
        pending=row.pending,
        attempts=row.attempts,
    )


# ------------------------------------------------------------------------------------------------------------
# What they are to be told


def announce(conn: Connection, told: Sequence[tuple[str, str, Notice]]) -> None:
    """Writes what the webhooks of each owner are to be told; `told`: owner, response id, notice."""
    if not told:
        return
    wanting = by_keys(conn, _live, sorted({owner for owner, _, _ in told}))
    rows = [
        {
            "webhook_id": webhook_id,
            "event_id": notice.id,
            "owner": owner,
            "response_id": response_id,
            "body": notice.body,
            "created_at": notice.created_at,
            "due_at": notice.created_at,
            "attempt": 0,
        }
        for owner, response_id, notice in told
        for webhook_id, its_owner, event_types in wanting
        if its_owner == owner and notice.type in event_types.split(",")
    ]
    if rows:
        conn.execute(insert(deliveries), rows)


def _live(keys: Keys) -> Select[*tuple[Any, ...]]:
    # Held until the commit, so that a webhook that is removed meanwhile takes these rows with it.
    columns = (webhooks.c.id, webhooks.c.owner, webhooks.c.event_types)
    live = webhooks.c.owner.in_(keys) & webhooks.c.disabled_at.is_(None)
    return select(*columns).where(live).with_for_update(read=True)


def forget(conn: Connection, response_ids: Sequence[str]) -> None:
    """Drops what is still to be told of these responses."""
    conn.execute(delete(deliveries).where(deliveries.c.response_id.in_(response_ids)))


def due(conn: Connection, now: int) -> DueDeliveries:
    """Which webhooks have deliveries that are due, when the next one is, and how many there are in all."""
    # A look into the index for each webhook, and not one at each delivery: many are due for a receiver that
    # answers nothing.
    its = select(deliveries.c.event_id).where(
        deliveries.c.webhook_id == webhooks.c.id, deliveries.c.due_at <= now
    )
    ids = select(webhooks.c.id).where(webhooks.c.disabled_at.is_(None), its.exists())
    next_at = select(func.min(deliveries.c.due_at)).where(deliveries.c.due_at > now)
    return DueDeliveries(
        webhook_ids=tuple(conn.execute(ids).scalars().all()),
        next_at=conn.execute(next_at).scalar(),
        num_pending=conn.execute(select(func.count()).select_from(deliveries)).scalar_one(),
    )


def hasten(conn: Connection, now: int, longest: int) -> None:
    """Makes due now what is due in more than `longest` microseconds: a clock that was ahead put it off."""
    conn.execute(update(deliveries).where(deliveries.c.due_at > now + longest).values(due_at=now))


def claim(conn: Connection, webhook_id: str, now: int, until: int, limit: int) -> tuple[Delivery, ...]:
    """Takes the oldest `limit` due deliveries of a webhook; nobody else tries them before `until`."""
    query = (
        select(deliveries, webhooks.c.url, webhooks.c.secret)
        .join_from(deliveries, webhooks, webhooks.c.id == deliveries.c.webhook_id)
        .where(deliveries.c.webhook_id == webhook_id, deliveries.c.due_at <= now)
        .where(webhooks.c.disabled_at.is_(None))
        .order_by(deliveries.c.due_at)
        .limit(limit)
        .with_for_update(of=deliveries, skip_locked=True)
    )
    claimed = []
    for row in conn.execute(query).all():
        delivery = Delivery(webhook_id, row.event_id, row.url, row.secret, row.body, row.attempt + 1)
        conn.execute(
            update(deliveries)
            .where(deliveries.c.webhook_id == webhook_id, deliveries.c.event_id == row.event_id)
            .values(due_at=until, attempt=delivery.attempt)
        )
        claimed.append(delivery)
    return tuple(claimed)


def settle(conn: Connection, delivery: Delivery, due_at: int | None) -> None:
    """Ends an attempt: the next one is due then, or never (None). Nothing if another attempt has begun."""
    mine = (
        deliveries.c.webhook_id == delivery.webhook_id,
        deliveries.c.event_id == delivery.event_id,
        deliveries.c.attempt == delivery.attempt,
    )
    if due_at is None:
        conn.execute(delete(deliveries).where(*mine))
    else:
        conn.execute(update(deliveries).where(*mine).values(due_at=due_at))


def put_off(conn: Connection, delivery: Delivery, due_at: int, now: int, before: int) -> int:
    """Ends an attempt that has failed: the next one is due then. Drops what is due for the same webhook and
    was to be told before `before`, DROPPED_AT_ONCE at most; returns how many these are."""
    settle(conn, delivery, due_at)
    oldest = (
        select(deliveries.c.event_id, deliveries.c.created_at)
        .where(deliveries.c.webhook_id == delivery.webhook_id, deliveries.c.due_at <= now)
        .order_by(deliveries.c.due_at)
        .limit(DROPPED_AT_ONCE)
        .with_for_update(skip_locked=True)
    )
    old = [row.event_id for row in conn.execute(oldest).all() if row.created_at < before]
    if old:
        its = deliveries.c.webhook_id == delivery.webhook_id, deliveries.c.event_id.in_(old)
        conn.execute(delete(deliveries).where(*its))
    return len(old)
