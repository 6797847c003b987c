"""Owners: the tenants that keys speak for. The API calls them projects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, or_, select, update

from storage.drivers import insert_unless_taken
from storage.records import LimitsChange, NotFound, OwnerArchived, Page, StoredOwner
from storage.tables import api_keys, owners


def ensure(conn: Connection, id: str, name: str, now: int) -> StoredOwner:
    """The owner of this id, made if there is none yet. OwnerArchived."""
    insert_unless_taken(conn, owners, {"id": id, "name": name, "created_at": now})
    owner = get(conn, id)
    if owner.archived_at is not None:
        raise OwnerArchived(id)
    return owner


def ensure_all(conn: Connection, ids: Sequence[str], now: int) -> None:
    """Makes those of these owners that are not there yet, each named by its id."""
    for id in ids:
        insert_unless_taken(conn, owners, {"id": id, "name": id, "created_at": now})


def get(conn: Connection, id: str, *, hold: bool = False) -> StoredOwner:
    """One owner. hold: nobody else changes it until the commit. NotFound("owner")."""
    query = select(owners).where(owners.c.id == id)
    row = conn.execute(query.with_for_update() if hold else query).first()
    if row is None:
        raise NotFound("owner", id)
    return stored(row)


def list_(conn: Connection, limit: int, after: str | None, archived: bool) -> Page[StoredOwner]:
    """One page, oldest first. archived: with those that are. NotFound("owner") for `after`."""
    query: Select[*tuple[Any, ...]] = select(owners)
    if not archived:
        query = query.where(owners.c.archived_at.is_(None))
    if after is not None:
        last = get(conn, after)
        same = and_(owners.c.created_at == last.created_at, owners.c.id > last.id)
        query = query.where(or_(owners.c.created_at > last.created_at, same))
    rows = conn.execute(query.order_by(owners.c.created_at, owners.c.id).limit(limit + 1)).all()
    return Page(tuple(stored(row) for row in rows[:limit]), len(rows) > limit)


def limits(conn: Connection) -> dict[str, bytes]:
    """The limits of the owners that have some of their own and are not archived, by id."""
    query = select(owners.c.id, owners.c.limits).where(
        owners.c.limits.is_not(None), owners.c.archived_at.is_(None)
    )
    return {row.id: row.limits for row in conn.execute(query.order_by(owners.c.id))}


def rename(conn: Connection, id: str, name: str) -> StoredOwner:
    """Gives an owner another name. NotFound("owner"), OwnerArchived."""
    return _change(conn, id, {"name": name})


def limit(conn: Connection, id: str, change: LimitsChange) -> StoredOwner:
    """Changes an owner's limits. NotFound("owner"), OwnerArchived."""
    return _change(conn, id, {"limits": change(get(conn, id, hold=True).limits)})


def archive(conn: Connection, id: str, now: int) -> StoredOwner:
    """Ends an owner's keys, for good; its data stays. NotFound("owner"), OwnerArchived."""
    ended = _change(conn, id, {"archived_at": now})
    live = update(api_keys).where(api_keys.c.owner == id, api_keys.c.revoked_at.is_(None))
    conn.execute(live.values(revoked_at=now))
    return ended


def _change(conn: Connection, id: str, values: dict[str, Any]) -> StoredOwner:
    live = update(owners).where(owners.c.id == id, owners.c.archived_at.is_(None))
    if not conn.execute(live.values(**values)).rowcount:
        get(conn, id)
        raise OwnerArchived(id)
    return get(conn, id)


def stored(row: Row[*tuple[Any, ...]]) -> StoredOwner:
    """An owner from its row."""
    return StoredOwner(row.id, row.name, row.created_at, row.archived_at, row.limits)
