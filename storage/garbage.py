"""Garbage: what is removed once nothing refers to it.

Owns: the rules by which tombstones and items outlive a deletion. Refuses to know: why something was deleted.

A deleted response stays, emptied, while a response that continues it is there; a deleted conversation while a
response that ran in it is there; a deleted conversation item while a run that began before its deletion is in
flight; an item while any of these lists it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, exists, func, select

from .tables import conversation_items, conversations, items, response_items, responses, run_inputs, runs


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
    """Removes a deleted conversation if no response ran in it, else only what `sweep_conversation` may."""
    row = conn.execute(
        select(conversations.c.owner, conversations.c.deleted_at).where(conversations.c.id == id)
    ).first()
    if row is None or row.deleted_at is None:
        return
    user = select(responses.c.id).where(responses.c.conversation_id == id).limit(1)
    if conn.execute(user).first() is not None:
        sweep_conversation(conn, id)
        return
    listed = select(conversation_items.c.item_id).where(conversation_items.c.conversation_id == id)
    item_ids = conn.execute(listed).scalars().all()
    conn.execute(delete(conversation_items).where(conversation_items.c.conversation_id == id))
    conn.execute(delete(conversations).where(conversations.c.id == id))
    collect_items(conn, row.owner, item_ids)


def sweep_conversation(conn: Connection, id: str) -> None:
    """Removes deleted items of a conversation that no run in flight can still see."""
    table = conversation_items
    dead = conn.execute(
        select(table.c.owner, table.c.position, table.c.item_id, table.c.deleted_at).where(
            table.c.conversation_id == id, table.c.deleted_at.is_not(None)
        )
    ).all()
    if not dead:
        return
    owner: str = dead[0].owner
    oldest: int | None = conn.execute(
        select(func.min(responses.c.created_at))
        .join_from(runs, responses, responses.c.id == runs.c.response_id)
        .where(runs.c.owner == owner)
    ).scalar()
    gone = [row for row in dead if oldest is None or row.deleted_at < oldest]
    if not gone:
        return
    positions = [row.position for row in gone]
    conn.execute(delete(table).where(table.c.conversation_id == id, table.c.position.in_(positions)))
    collect_items(conn, owner, [row.item_id for row in gone])


def collect_items(conn: Connection, owner: str, ids: Sequence[str]) -> None:
    """Removes those of the items that nothing lists any more."""
    in_response = exists().where(
        response_items.c.owner == items.c.owner, response_items.c.item_id == items.c.id
    )
    in_conversation = exists().where(
        conversation_items.c.owner == items.c.owner, conversation_items.c.item_id == items.c.id
    )
    if ids:
        conn.execute(
            delete(items).where(
                items.c.owner == owner, items.c.id.in_(list(ids)), ~in_response, ~in_conversation
            )
        )
