"""The keys that encrypt the reasoning which clients keep for the server.

The primary key of the table makes one of two keys that are made at once the next one.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from storage.drivers import insert_unless_taken
from storage.records import SealingKey
from storage.tables import sealing_keys


def list_(conn: Connection) -> tuple[SealingKey, ...]:
    """All keys, oldest first."""
    rows = conn.execute(select(sealing_keys).order_by(sealing_keys.c.number)).all()
    return tuple(SealingKey(row.number, row.secret, row.created_at) for row in rows)


def add(conn: Connection, key: SealingKey) -> bool:
    """Stores a key; False where its number is taken, and nothing changes."""
    values = {"number": key.number, "secret": key.secret, "created_at": key.created_at}
    return insert_unless_taken(conn, sealing_keys, values)
