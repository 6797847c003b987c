"""API keys: their hashes, and the owner that each of them speaks for."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from storage.records import StoredKey
from storage.tables import api_keys


def create(conn: Connection, id: str, owner: str, name: str, hash: bytes, hint: str, now: int) -> StoredKey:
    """Stores a key. IntegrityError if the id or the hash is taken."""
    conn.execute(insert(api_keys).values(id=id, owner=owner, name=name, hash=hash, hint=hint, created_at=now))
    return StoredKey(id, owner, name, hint, now, None)


def list_(conn: Connection) -> tuple[StoredKey, ...]:
    """All keys, revoked ones included, oldest first."""
    query = select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
    return tuple(_stored(row) for row in conn.execute(query).all())


def revoke(conn: Connection, id: str, now: int) -> bool:
    """Ends a key; False if there is no live key of this id."""
    statement = update(api_keys).where(api_keys.c.id == id, api_keys.c.revoked_at.is_(None))
    return conn.execute(statement.values(revoked_at=now)).rowcount > 0


def find(conn: Connection, hash: bytes) -> StoredKey | None:
    """The live key with this hash."""
    row = conn.execute(
        select(api_keys).where(api_keys.c.hash == hash, api_keys.c.revoked_at.is_(None))
    ).first()
    return None if row is None else _stored(row)


def _stored(row: Row[*tuple[Any, ...]]) -> StoredKey:
    return StoredKey(row.id, row.owner, row.name, row.hint, row.created_at, row.revoked_at)
