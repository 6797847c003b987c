"""Replies that are kept for the repeats of requests go with what they tell of.

Whoever deletes something calls this in the transaction that deletes it. The request stays known, so that a
repeat does nothing anew: it is told that there is no reply any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Select, update

from storage.tables import idempotency


def forget_replies(conn: Connection, ids: Sequence[str] | Select[str], owner: str | None = None) -> None:
    """Empties the kept replies that tell of the objects with these ids. owner: whose, where ids are unique
    within an owner only."""
    about = idempotency.c.about.in_(ids)
    told = update(idempotency).where(about if owner is None else about & (idempotency.c.owner == owner))
    conn.execute(told.values(headers=None, body=None, num_bytes=0))
