"""The statements on files; each function runs inside a transaction that its caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, or_, select, tuple_

from storage.drivers import earlier_clock
from storage.files.records import StoredFile
from storage.records import Cursor, NotFound, Order, Page
from storage.tables import files

ROWS = 100
"""Files that one step of a sweep removes."""


def create(conn: Connection, file: StoredFile) -> None:
    """Stores a file, whose blob has been put."""
    conn.execute(insert(files).values(asdict(file)))


def get(conn: Connection, owner: str, id: str, now: int) -> StoredFile:
    """NotFound("file")."""
    row = conn.execute(select(files).where(files.c.id == id, *_alive(conn, owner, now))).first()
    if row is None:
        raise NotFound("file", id)
    return _stored(row)


def get_many(conn: Connection, owner: str, ids: Sequence[str], now: int) -> dict[str, StoredFile]:
    """Those of the files that are there."""
    rows = conn.execute(select(files).where(files.c.id.in_(ids), *_alive(conn, owner, now))).all()
    return {row.id: _stored(row) for row in rows}


def list_(
    conn: Connection,
    owner: str,
    *,
    now: int,
    limit: int,
    order: Order,
    after: Cursor | None,
    purpose: str | None,
) -> Page[StoredFile]:
    """One page, by time and then id. NotFound("file") for an unknown `after`."""
    query = select(files).where(*_alive(conn, owner, now))
    place = tuple_(files.c.created_at, files.c.id)
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    if after is not None:
        if isinstance(after, str):
            last = get(conn, owner, after, now)
            after = (last.created_at, last.id)
        at = tuple_(*after)
        query = query.where(place > at if order == "asc" else place < at)
    by_time = (files.c.created_at, files.c.id)
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    rows = conn.execute(query.limit(limit + 1)).all()
    return Page(tuple(map(_stored, rows[:limit])), len(rows) > limit)


def remove(conn: Connection, owner: str, id: str, now: int) -> str:
    """Returns the digest of the content. NotFound("file")."""
    gone = delete(files).where(files.c.id == id, *_alive(conn, owner, now)).returning(files.c.digest)
    digest: str | None = conn.execute(gone).scalar()
    if digest is None:
        raise NotFound("file", id)
    return digest


def expired(conn: Connection, now: int) -> Sequence[str]:
    """The next files that have expired."""
    return conn.execute(select(files.c.id).where(files.c.expires_at <= now).limit(ROWS)).scalars().all()


def of_owner(conn: Connection, owner: str, before: int) -> Sequence[str]:
    """The next files that an owner had at that time."""
    query = select(files.c.id).where(files.c.owner == owner, files.c.created_at <= before)
    return conn.execute(query.limit(ROWS)).scalars().all()


def remove_all(conn: Connection, ids: Sequence[str]) -> Sequence[str]:
    """Removes files, whoever uses them; returns the digests of those that were there."""
    return conn.execute(delete(files).where(files.c.id.in_(ids)).returning(files.c.digest)).scalars().all()


def _alive(conn: Connection, owner: str, now: int) -> tuple[ColumnElement[bool], ...]:
    lasts = files.c.expires_at > earlier_clock(conn.dialect.name, now)
    return files.c.owner == owner, or_(files.c.expires_at.is_(None), lasts)


def _stored(row: Row[*tuple[Any, ...]]) -> StoredFile:
    return StoredFile(**row._mapping)
