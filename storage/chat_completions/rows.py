"""The statements on stored chat completions; each function runs inside a transaction that its caller holds.

The metadata of a completion stands in its row, as JSON, to be shown, and pair by pair in rows of its own, to
be asked for: SQL never looks into JSON here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, Row, delete, exists, func, insert, select, tuple_, update

from storage.chat_completions.records import (
    ChatCompletionKnown,
    NewChatCompletion,
    OwnerPurged,
    StoredChatCompletion,
)
from storage.drivers import insert_unless_taken
from storage.kept_replies import forget_replies
from storage.records import Cursor, NotFound, Order, Page, page_length
from storage.tables import audit
from storage.tables import chat_completion_metadata as pairs
from storage.tables import chat_completions as table

ROWS = 16
"""Completions that one step removes; each may have megabytes of messages."""

_STORED = (table.c.id, table.c.created_at, table.c.model, table.c.metadata, table.c.body)
_SIZE = func.length(table.c.metadata) + func.length(table.c.body)

Place = tuple[str, str]
"""(owner, id)."""


def create(conn: Connection, new: NewChatCompletion, purge: str | None = None) -> StoredChatCompletion:
    """Stores a completion. ChatCompletionKnown where its owner has one of this id; OwnerPurged, see
    `ChatCompletions.create`."""
    if purge is not None:
        noted = (audit.c.target == new.owner, audit.c.action == purge, audit.c.at >= new.created_at)
        if conn.execute(select(audit.c.number).where(*noted).limit(1)).first() is not None:
            raise OwnerPurged
    metadata = orjson.dumps(dict(new.metadata))
    values = {
        "owner": new.owner,
        "id": new.id,
        "created_at": new.created_at,
        "model": new.model,
        "metadata": metadata,
        "body": new.body,
        "messages": new.messages,
        "num_bytes": len(metadata) + len(new.body) + len(new.messages),
    }
    if not insert_unless_taken(conn, table, values):
        raise ChatCompletionKnown(new.id)
    _add_pairs(conn, new.owner, new.id, new.metadata)
    return StoredChatCompletion(new.id, new.created_at, new.model, metadata, new.body)


def is_known(conn: Connection, owner: str, id: str) -> bool:
    """Whether an owner has a completion of this id."""
    return conn.execute(select(table.c.id).where(*_at(owner, id))).first() is not None


def get(conn: Connection, owner: str, id: str) -> StoredChatCompletion:
    """NotFound("chat completion")."""
    row = conn.execute(select(*_STORED).where(*_at(owner, id))).first()
    if row is None:
        raise NotFound("chat completion", id)
    return _stored(row)


def messages(conn: Connection, owner: str, id: str) -> bytes:
    """The messages that it answers, a JSON array. NotFound("chat completion")."""
    found: bytes | None = conn.execute(select(table.c.messages).where(*_at(owner, id))).scalar()
    if found is None:
        raise NotFound("chat completion", id)
    return found


def list_(
    conn: Connection,
    owner: str,
    *,
    limit: int,
    order: Order,
    after: Cursor | None,
    model: str | None,
    metadata: Mapping[str, str],
) -> Page[StoredChatCompletion]:
    """One page, by time and then id. model, metadata: only those of this model, and those that have all of
    these pairs. NotFound("chat completion") for an unknown `after`."""
    query = select(_SIZE).where(table.c.owner == owner)
    if model is not None:
        query = query.where(table.c.model == model)
    for key, value in metadata.items():
        query = query.where(
            exists().where(
                pairs.c.owner == table.c.owner,
                pairs.c.completion_id == table.c.id,
                pairs.c.key == key.encode(),
                pairs.c.value == value.encode(),
            )
        )
    if after is not None:
        if isinstance(after, str):
            last = get(conn, owner, after)
            after = (last.created_at, last.id)
        place, at = tuple_(table.c.created_at, table.c.id), tuple_(*after)
        query = query.where(place > at if order == "asc" else place < at)
    by_time = (table.c.created_at, table.c.id)
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    sizes = conn.execute(query.limit(limit + 1)).scalars().all()
    length = page_length(sizes, limit)
    rows = conn.execute(query.with_only_columns(*_STORED).limit(length)).all()
    return Page(tuple(map(_stored, rows)), len(sizes) > length)


def change(conn: Connection, owner: str, id: str, metadata: Mapping[str, str]) -> StoredChatCompletion:
    """Replaces the metadata. NotFound("chat completion")."""
    row = conn.execute(select(table.c.metadata).where(*_at(owner, id)).with_for_update()).first()
    if row is None:
        raise NotFound("chat completion", id)
    written = orjson.dumps(dict(metadata))
    grown = len(written) - len(row.metadata)
    changed = update(table).where(*_at(owner, id))
    conn.execute(changed.values(metadata=written, num_bytes=table.c.num_bytes + grown))
    conn.execute(delete(pairs).where(pairs.c.owner == owner, pairs.c.completion_id == id))
    _add_pairs(conn, owner, id, metadata)
    return get(conn, owner, id)


def remove(conn: Connection, owner: str, id: str) -> None:
    """NotFound("chat completion")."""
    if not remove_all(conn, [(owner, id)]):
        raise NotFound("chat completion", id)


def remove_all(conn: Connection, places: Sequence[Place]) -> int:
    """Removes those of these completions that are there; returns how many."""
    conn.execute(delete(pairs).where(tuple_(pairs.c.owner, pairs.c.completion_id).in_(places)))
    for owner in {owner for owner, _ in places}:
        forget_replies(conn, [id for whose, id in places if whose == owner], owner)
    return conn.execute(delete(table).where(tuple_(table.c.owner, table.c.id).in_(places))).rowcount


def older(conn: Connection, before: int) -> Sequence[Place]:
    """The next completions that were created by that time."""
    query = select(table.c.owner, table.c.id).where(table.c.created_at <= before)
    return _places(conn.execute(query.order_by(table.c.created_at).limit(ROWS)).all())


def owners_beyond(conn: Connection, most: int) -> Sequence[str]:
    """The owners who have more than so many."""
    query = select(table.c.owner).group_by(table.c.owner).having(func.count() > most)
    return conn.execute(query).scalars().all()


def beyond(conn: Connection, owner: str, most: int) -> Sequence[Place]:
    """Some of an owner's completions that are older than the `most` newest ones."""
    query = select(table.c.owner, table.c.id).where(table.c.owner == owner)
    query = query.order_by(table.c.created_at.desc(), table.c.id.desc())
    return _places(conn.execute(query.offset(most).limit(ROWS)).all())


def of_owner(conn: Connection, owner: str, before: int) -> Sequence[Place]:
    """The next completions that an owner had at that time."""
    query = select(table.c.owner, table.c.id).where(table.c.owner == owner, table.c.created_at <= before)
    return _places(conn.execute(query.limit(ROWS)).all())


def _add_pairs(conn: Connection, owner: str, id: str, metadata: Mapping[str, str]) -> None:
    if metadata:
        place = {"owner": owner, "completion_id": id}
        rows = [{**place, "key": key.encode(), "value": value.encode()} for key, value in metadata.items()]
        conn.execute(insert(pairs), rows)


def _at(owner: str, id: str) -> tuple[Any, ...]:
    return table.c.owner == owner, table.c.id == id


def _places(rows: Sequence[Row[*tuple[Any, ...]]]) -> Sequence[Place]:
    return [(row.owner, row.id) for row in rows]


def _stored(row: Row[*tuple[Any, ...]]) -> StoredChatCompletion:
    return StoredChatCompletion(**row._mapping)
