"""Garbage: what is removed once nothing refers to it.

Owns: the rules by which tombstones and items outlive a deletion. Refuses to know: why something was deleted.

A deleted response stays, emptied, while a response that continues it is there; a deleted conversation while a
response that ran in it is there; a deleted conversation item while a run that began before its deletion is in
flight; an item while any of these lists it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from sqlalchemy import Connection, delete, exists, func, select

from .tables import conversation_items, conversations, items, response_items, responses, run_inputs, runs

T = TypeVar("T")

PART = 1000


def collect_response(conn: Connection, id: str) -> None:
    """Removes a deleted response if no response continues it, then its deleted ancestors likewise."""
    next_id: str | None = id
    while next_id is not None:
        row = conn.execute(
            select(
                responses.c.owner,
                responses.c.previous_response_id,
                responses.c.conversation_id,
                responses.c.deleted_at,
            ).where(responses.c.id == next_id)
        ).first()
        if row is None or row.deleted_at is None:
            return
        child = select(responses.c.id).where(responses.c.previous_response_id == next_id).limit(1)
        if conn.execute(child).first() is not None:
            return
        listed = select(response_items.c.item_id).where(response_items.c.response_id == next_id)
        item_ids = conn.execute(listed).scalars().all()
        conn.execute(delete(response_items).where(response_items.c.response_id == next_id))
        conn.execute(delete(run_inputs).where(run_inputs.c.response_id == next_id))
        conn.execute(delete(responses).where(responses.c.id == next_id))
        collect_items(conn, row.owner, item_ids)
        if row.conversation_id is not None:
            collect_conversation(conn, row.conversation_id)
        next_id = row.previous_response_id


def collect_conversation(conn: Connection, id: str) -> None:
    """Removes a deleted conversation if no response ran in it; else those of its deleted items that no run in
    flight can still see.
    """
    row = conn.execute(
        select(conversations.c.owner, conversations.c.deleted_at).where(conversations.c.id == id)
    ).first()
    if row is None:
        return
    table = conversation_items
    dead = select(table.c.position, table.c.item_id).where(table.c.conversation_id == id)
    if row.deleted_at is None or _is_used(conn, id):
        oldest: int | None = conn.execute(
            select(func.min(responses.c.created_at))
            .join_from(runs, responses, responses.c.id == runs.c.response_id)
            .where(runs.c.owner == row.owner)
        ).scalar()
        dead = dead.where(table.c.deleted_at.is_not(None) if oldest is None else table.c.deleted_at < oldest)
    else:
        conn.execute(delete(conversations).where(conversations.c.id == id))
    found = conn.execute(dead).all()
    for part in _parts([position for position, _ in found]):
        conn.execute(delete(table).where(table.c.conversation_id == id, table.c.position.in_(part)))
    collect_items(conn, row.owner, [item_id for _, item_id in found])


def _is_used(conn: Connection, conversation_id: str) -> bool:
    ran = select(responses.c.id).where(responses.c.conversation_id == conversation_id).limit(1)
    return conn.execute(ran).first() is not None


def collect_items(conn: Connection, owner: str, ids: Sequence[str]) -> None:
    """Removes those of the items that nothing lists any more."""
    in_response = exists().where(
        response_items.c.owner == items.c.owner, response_items.c.item_id == items.c.id
    )
    in_conversation = exists().where(
        conversation_items.c.owner == items.c.owner, conversation_items.c.item_id == items.c.id
    )
    for part in _parts(ids):
        conn.execute(
            delete(items).where(items.c.owner == owner, items.c.id.in_(part), ~in_response, ~in_conversation)
        )


def _parts(values: Sequence[T]) -> Iterator[list[T]]:
    """Lists short enough for one statement's parameters on any database."""
    for begin in range(0, len(values), PART):
        yield list(values[begin : begin + PART])
