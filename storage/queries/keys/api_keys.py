"""API keys: their hashes, what each may do, and the owner that it speaks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, func, insert, or_, select, update

from storage.queries.keys import owners
from storage.records import (
    FoundKey,
    KeyEnded,
    LimitsChange,
    NewKey,
    NotFound,
    Order,
    Page,
    StoredKey,
    StoredOwner,
)
from storage.tables import api_keys
from storage.tables import owners as owner_rows


def create(conn: Connection, new: NewKey, owner_name: str | None = None) -> StoredKey:
    """Stores a key, and its owner if it is the first one, under `owner_name` or else under its id.

    OwnerArchived; IntegrityError if the id or the hash is taken.
    """
    owners.ensure(conn, new.owner, owner_name or new.owner, new.created_at)
    return _insert(conn, new)


def list_(conn: Connection) -> tuple[StoredKey, ...]:
    """All keys, revoked ones included, oldest first."""
    query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
    return tuple(_stored(row) for row in conn.execute(query).all())


def count(conn: Connection) -> int:
    """How many keys are not revoked; by columns that every schema of ours has."""
    query = select(func.count()).select_from(api_keys).where(api_keys.c.revoked_at.is_(None))
    return conn.execute(query).scalar_one()


def any_(conn: Connection, besides: Collection[str], at: int | None) -> bool:
    """Whether there is a key that is not revoked, besides those of these ids. at: nor has expired by then."""
    query = select(api_keys.c.id).where(api_keys.c.revoked_at.is_(None)).limit(1)
    if at is not None:
        query = query.where(or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > at))
    if besides:
        query = query.where(api_keys.c.id.not_in(besides))
    return conn.execute(query).first() is not None


def page(
    conn: Connection,
    owner: str | None,
    scope: str | None,
    limit: int,
    order: Order,
    after: str | None,
) -> Page[StoredKey]:
    """One page of the keys that are not revoked, by time. owner, scope: only those of this owner, and those
    that have this scope. NotFound("key") for `after`."""
    created, id = api_keys.c.created_at, api_keys.c.id
    query: Select[*tuple[Any, ...]] = select(api_keys).where(api_keys.c.revoked_at.is_(None))
    if owner is not None:
        query = query.where(api_keys.c.owner == owner)
    if scope is not None:
        query = query.where(("," + api_keys.c.scopes + ",").contains(f",{scope},", autoescape=True))
    if after is not None:
        last = get(conn, after)
        if order == "asc":
            behind = or_(created > last.created_at, and_(created == last.created_at, id > last.id))
        else:
            behind = or_(created < last.created_at, and_(created == last.created_at, id < last.id))
        query = query.where(behind)
    by_time = (created, id) if order == "asc" else (created.desc(), id.desc())
    rows = conn.execute(query.order_by(*by_time).limit(limit + 1)).all()
    return Page(tuple(_stored(row) for row in rows[:limit]), len(rows) > limit)


def get(conn: Connection, id: str, *, hold: bool = False) -> StoredKey:
    """One key, whether or not it is live. hold: nobody else changes it until the commit. NotFound("key")."""
    query = select(api_keys).where(api_keys.c.id == id)
    row = conn.execute(query.with_for_update() if hold else query).first()
    if row is None:
        raise NotFound("key", id)
    return _stored(row)


def hash_of(conn: Connection, owner: str, id: str) -> bytes | None:
    """The hash of an owner's key; None for an unknown one."""
    query = select(api_keys.c.hash).where(api_keys.c.id == id, api_keys.c.owner == owner)
    found: bytes | None = conn.execute(query).scalar()
    return found


def find(conn: Connection, hash: bytes) -> FoundKey | None:
    """The key with this hash; it may be revoked or have expired."""
    columns = (
        owner_rows.c.name.label("owner_name"),
        owner_rows.c.created_at.label("owner_created_at"),
        owner_rows.c.archived_at,
        owner_rows.c.limits.label("owner_limits"),
    )
    row = conn.execute(
        select(api_keys, *columns)
        .join(owner_rows, owner_rows.c.id == api_keys.c.owner)
        .where(api_keys.c.hash == hash)
    ).first()
    if row is None:
        return None
    owner = StoredOwner(row.owner, row.owner_name, row.owner_created_at, row.archived_at, row.owner_limits)
    return FoundKey(_stored(row), owner)


def revoke(conn: Connection, id: str, now: int) -> StoredKey:
    """Ends a key. NotFound("key") if there is none of this id that is not revoked."""
    statement = update(api_keys).where(api_keys.c.id == id, api_keys.c.revoked_at.is_(None))
    if not conn.execute(statement.values(revoked_at=now)).rowcount:
        raise NotFound("key", id)
    return get(conn, id)


def change(
    conn: Connection, id: str, now: int, values: Mapping[str, Any], limits: LimitsChange | None
) -> StoredKey:
    """Replaces columns of a live key, `scopes` as a tuple, and changes its limits. NotFound("key"),
    KeyEnded."""
    before = get(conn, id, hold=True)
    if not before.live(now):
        raise KeyEnded(id)
    written = {name: ",".join(value) if name == "scopes" else value for name, value in values.items()}
    if limits is not None:
        written["limits"] = limits(before.limits)
    if written:
        conn.execute(update(api_keys).where(api_keys.c.id == id).values(**written))
    return get(conn, id)


def rotate(conn: Connection, id: str, successor: NewKey, until: int) -> StoredKey:
    """Stores the successor of a live key, which itself is accepted until `until` at most.

    The successor takes over its owner, scopes and limits; its id, name, hash, hint, times are its own.
    NotFound("key"), KeyEnded, OwnerArchived.
    """
    now = successor.created_at
    old = get(conn, id, hold=True)
    if not old.live(now):
        raise KeyEnded(id)
    owners.ensure(conn, old.owner, old.owner, now)
    end = until if old.expires_at is None else min(until, old.expires_at)
    conn.execute(update(api_keys).where(api_keys.c.id == id).values(expires_at=end))
    taken_over = NewKey(
        **{**asdict(successor), "owner": old.owner, "scopes": old.scopes, "limits": old.limits}
    )
    return _insert(conn, taken_over, replaces=id)


def family(conn: Connection, id: str) -> tuple[str, ...]:
    """A key with those that it has replaced, one after another, and those that have replaced them."""
    replaced: str | None = id
    found: set[str] = set()
    while replaced is not None and replaced not in found:
        found.add(replaced)
        replaced = conn.execute(select(api_keys.c.replaces).where(api_keys.c.id == replaced)).scalar()
    newest = found
    while newest:
        successors = select(api_keys.c.id).where(api_keys.c.replaces.in_(sorted(newest)))
        newest = set(conn.execute(successors).scalars()) - found
        found |= newest
    return tuple(sorted(found))


def touch(conn: Connection, used: Mapping[str, int]) -> None:
    """Notes when keys were last used: id -> time; a later time that is there stays."""
    for id, at in used.items():
        earlier = or_(api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < at)
        conn.execute(update(api_keys).where(api_keys.c.id == id, earlier).values(last_used_at=at))


def _insert(conn: Connection, new: NewKey, replaces: str | None = None) -> StoredKey:
    conn.execute(
        insert(api_keys).values(**{**asdict(new), "scopes": ",".join(new.scopes)}, replaces=replaces)
    )
    return get(conn, new.id)


_FIELDS = tuple(field.name for field in fields(StoredKey))


def _stored(row: Row[*tuple[Any, ...]]) -> StoredKey:
    values = {name: row._mapping[name] for name in _FIELDS}
    return StoredKey(**{**values, "scopes": tuple(row.scopes.split(","))})
