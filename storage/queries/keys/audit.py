"""The audit log: entries that are only ever added, each chained to the one before it by its hash.

An entry is added in the transaction of the change that it tells of. A row that was changed or removed later
breaks the chain from there on, and `audit_head` shows it where the last rows are gone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, insert, or_, select, update

from storage.drivers import insert_unless_taken
from storage.records import AuditEntry, AuditFilter, AuditState, NotFound, Page, StoredAudit
from storage.tables import audit, audit_head

ROWS_AT_ONCE = 1000
"""That one read of an examination takes."""

START = bytes(32)
"""What stands for the hash before the first entry."""


def append(conn: Connection, entry: AuditEntry) -> None:
    """Adds an entry at the end."""
    # Changed first and read then: so no other process is between the two, on any database.
    step = update(audit_head).values(number=audit_head.c.number + 1)
    if not conn.execute(step).rowcount:
        insert_unless_taken(conn, audit_head, {"one": 1, "number": 0, "hash": START})
        conn.execute(step)
    number, before = conn.execute(select(audit_head.c.number, audit_head.c.hash)).one()
    hash = chained(before, number, entry)
    conn.execute(update(audit_head).values(hash=hash))
    conn.execute(
        insert(audit).values(
            number=number,
            id=entry.id,
            at=entry.at,
            actor=entry.actor,
            action=entry.action,
            target=entry.target,
            owner=entry.owner,
            details=entry.details,
            request_id=entry.request_id,
            ip=entry.ip,
            hash=hash,
        )
    )


def chained(before: bytes, number: int, entry: AuditEntry) -> bytes:
    """The hash of an entry: SHA-256 of the hash before it and of all its fields as a JSON array."""
    fields = [field.decode() if isinstance(field, bytes) else field for field in astuple(entry)]
    return hashlib.sha256(before + json.dumps([number, *fields]).encode()).digest()


def list_(
    conn: Connection, wanted: AuditFilter, limit: int, after: str | None, before: str | None
) -> Page[StoredAudit]:
    """One page, newest first: behind the entry `after`, or, the nearest ones, ahead of the entry `before`.

    NotFound("audit log") for an id that is no entry's.
    """
    where: list[ColumnElement[bool]] = []
    if wanted.since is not None:
        where.append(audit.c.at >= wanted.since)
    if wanted.before is not None:
        where.append(audit.c.at < wanted.before)
    for column, values in (
        (audit.c.action, wanted.actions),
        (audit.c.actor, wanted.actors),
        (audit.c.owner, wanted.owners),
    ):
        if values:
            where.append(column.in_(values))
    if wanted.targets:
        # The official API names the rate limit of one model, which is found by the owner that it limits, too.
        limits_owner = and_(audit.c.action == "rate_limit.updated", audit.c.owner.in_(wanted.targets))
        where.append(or_(audit.c.target.in_(wanted.targets), limits_owner))
    if after is not None:
        where.append(audit.c.number < _number(conn, after))
    if before is not None:
        where.append(audit.c.number > _number(conn, before))
    ahead = before is not None and after is None
    by_number = audit.c.number if ahead else audit.c.number.desc()
    rows = conn.execute(select(audit).where(*where).order_by(by_number).limit(limit + 1)).all()
    found = [_stored(row) for row in rows[:limit]]
    return Page(tuple(reversed(found) if ahead else found), len(rows) > limit)


def _number(conn: Connection, id: str) -> int:
    number = conn.execute(select(audit.c.number).where(audit.c.id == id)).scalar()
    if number is None:
        raise NotFound("audit log", id)
    return int(number)


def examine(conn: Connection) -> AuditState:
    """Follows the chain from its beginning to its end."""
    found = conn.execute(select(audit_head.c.number, audit_head.c.hash)).first()
    last, head = (0, START) if found is None else (found.number, found.hash)
    number, hash = 0, START
    while True:
        query = select(audit).where(audit.c.number > number).order_by(audit.c.number).limit(ROWS_AT_ONCE)
        rows = [_stored(row) for row in conn.execute(query).all()]
        for row in rows:
            expected = chained(hash, number + 1, row.entry)
            if row.number != number + 1 or row.hash != expected:
                return AuditState(last, head, number + 1)
            number, hash = row.number, row.hash
        if not rows:
            break
    if (number, hash) == (last, head):
        return AuditState(last, head, None)
    return AuditState(last, head, last if number == last else min(number, last) + 1)


def hash_at(conn: Connection, number: int) -> bytes | None:
    """The hash of one entry; None where there is none of this number."""
    found: bytes | None = conn.execute(select(audit.c.hash).where(audit.c.number == number)).scalar()
    return found


def _stored(row: Row[*tuple[Any, ...]]) -> StoredAudit:
    entry = AuditEntry(
        id=row.id,
        at=row.at,
        actor=row.actor,
        action=row.action,
        target=row.target,
        owner=row.owner,
        details=row.details,
        request_id=row.request_id,
        ip=row.ip,
    )
    return StoredAudit(row.number, entry, row.hash)
