"""The statements on uploads and parts; each function runs inside a transaction that its caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from storage.drivers import earlier_clock
from storage.files import file_rows
from storage.files.records import StoredFile, StoredPart, StoredUpload, UploadEnded
from storage.records import NotFound
from storage.tables import upload_parts, uploads

ROWS = 20
"""Uploads that one step of a sweep removes with all their parts."""

Ended = tuple[StoredUpload, Sequence[str]]
"""An upload that has ended, and the digests of the parts that it had."""


def create(conn: Connection, upload: StoredUpload) -> None:
    """Stores an upload without parts."""
    conn.execute(insert(uploads).values(asdict(upload)))


def get(conn: Connection, owner: str, id: str) -> StoredUpload:
    """NotFound("upload")."""
    row = conn.execute(select(uploads).where(uploads.c.id == id, uploads.c.owner == owner)).first()
    if row is None:
        raise NotFound("upload", id)
    return _stored(row)


def parts(conn: Connection, owner: str, id: str) -> tuple[StoredPart, ...]:
    """The parts of an upload, in no particular order."""
    query = select(upload_parts).where(upload_parts.c.upload_id == id, upload_parts.c.owner == owner)
    return tuple(StoredPart(**row._mapping) for row in conn.execute(query).all())


def add_part(conn: Connection, part: StoredPart) -> None:
    """Stores a part, whose blob has been put. NotFound("upload"), UploadEnded."""
    _hold(conn, part.owner, part.upload_id, part.created_at)
    conn.execute(insert(upload_parts).values(asdict(part)))


def complete(conn: Connection, id: str, file: StoredFile) -> Ended:
    """Stores the file that an upload has become, and removes the parts. NotFound("upload"), UploadEnded."""
    _hold(conn, file.owner, id, file.created_at)
    file_rows.create(conn, file)
    return _end(conn, file.owner, id, "completed", file.id)


def cancel(conn: Connection, owner: str, id: str, now: int) -> Ended:
    """Ends an upload and removes its parts. NotFound("upload"), UploadEnded."""
    _hold(conn, owner, id, now)
    return _end(conn, owner, id, "cancelled", None)


def expired(conn: Connection, now: int) -> Sequence[str]:
    """The next uploads whose time is over, whatever became of them."""
    return conn.execute(select(uploads.c.id).where(uploads.c.expires_at <= now).limit(ROWS)).scalars().all()


def of_owner(conn: Connection, owner: str, before: int) -> Sequence[str]:
    """The next uploads that an owner had at that time."""
    query = select(uploads.c.id).where(uploads.c.owner == owner, uploads.c.created_at <= before)
    return conn.execute(query.limit(ROWS)).scalars().all()


def remove_all(conn: Connection, ids: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Removes uploads with their parts; returns how many were there, and the digests of the parts."""
    conn.execute(select(uploads.c.id).where(uploads.c.id.in_(ids)).order_by(uploads.c.id).with_for_update())
    digests = _remove_parts(conn, ids)
    return conn.execute(delete(uploads).where(uploads.c.id.in_(ids))).rowcount, digests


def _remove_parts(conn: Connection, ids: Sequence[str]) -> Sequence[str]:
    gone = delete(upload_parts).where(upload_parts.c.upload_id.in_(ids)).returning(upload_parts.c.digest)
    return conn.execute(gone).scalars().all()


def _hold(conn: Connection, owner: str, id: str, now: int) -> None:
    """Nobody else changes the upload until the commit. NotFound("upload"), UploadEnded."""
    these = (uploads.c.id == id, uploads.c.owner == owner)
    over = (uploads.c.expires_at <= earlier_clock(conn.dialect.name, now)).label("over")
    row = conn.execute(select(uploads.c.status, over).where(*these).with_for_update()).first()
    if row is None:
        raise NotFound("upload", id)
    if row.status != "pending" or row.over:
        raise UploadEnded(id, row.status if row.status != "pending" else "expired")


def _end(conn: Connection, owner: str, id: str, status: str, file_id: str | None) -> Ended:
    digests = _remove_parts(conn, (id,))
    conn.execute(update(uploads).where(uploads.c.id == id).values(status=status, file_id=file_id))
    return get(conn, owner, id), digests


def _stored(row: Row[*tuple[Any, ...]]) -> StoredUpload:
    return StoredUpload(**row._mapping)
