"""Removes what nothing refers to any more: responses, conversations and items that were deleted.

A deleted response stays, emptied, while a response that continues it is there; a deleted conversation while a
response that ran in it is there; a deleted conversation item while a run that began before its deletion is in
flight; an item while any of these lists it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, exists, func, select, update

from storage.queries.items import ROW_BYTES, SIZE, joined, parts
from storage.tables import conversation_items, conversations, items, response_items, responses, runs


def collect_responses(conn: Connection, ids: Sequence[str]) -> None:
    """Removes those of the deleted responses that no response continues, then their ancestors likewise."""
    rows = {row.id: row for part in parts(ids) for row in _forsaken(conn, part)}
    num_children: dict[str, int] = {id: row.num_children for id, row in rows.items()}
    gone = [id for id, num in num_children.items() if num == 0]
    for id in gone:
        parent = rows[id].previous_response_id
        if parent in num_children:
            num_children[parent] -= 1
            if num_children[parent] == 0:
                gone.append(parent)
    for part in parts(gone):
        remove_responses(conn, part)
    for conversation_id in {rows[id].conversation_id for id in gone} - {None}:
        collect_conversation(conn, conversation_id)


def remove_responses(conn: Connection, ids: Sequence[str]) -> None:
    """Removes responses, whoever needs them, and those of their items that nothing else lists."""
    item_ids: dict[str, list[str]] = defaultdict(list)
    listed = select(response_items.c.owner, response_items.c.item_id)
    for owner, item_id in conn.execute(listed.where(response_items.c.response_id.in_(ids))).all():
        item_ids[owner].append(item_id)
    conn.execute(delete(response_items).where(response_items.c.response_id.in_(ids)))
    conn.execute(delete(responses).where(responses.c.id.in_(ids)))
    for owner, listed_ids in item_ids.items():
        collect_items(conn, owner, listed_ids)


def _forsaken(conn: Connection, ids: Sequence[str]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Those of the responses that are deleted and have no children, and the deleted ones above them."""
    child, parent = responses.alias("child"), responses.alias("parent")
    columns = (responses.c.id, responses.c.previous_response_id, responses.c.conversation_id)
    has_children = exists().where(child.c.previous_response_id == responses.c.id)
    first = select(*columns).where(
        responses.c.id.in_(ids), responses.c.deleted_at.is_not(None), ~has_children
    )
    forsaken = first.cte("forsaken", recursive=True)
    above = select(*(parent.c[column.name] for column in columns)).where(
        parent.c.id == forsaken.c.previous_response_id, parent.c.deleted_at.is_not(None)
    )
    forsaken = forsaken.union(above)
    # Another process may take away the last child but this one at this moment: the rows are held before the
    # children are counted.
    held = select(responses.c.id).where(responses.c.id.in_(select(forsaken.c.id))).order_by(responses.c.id)
    conn.execute(held.with_for_update()).all()
    num_children = select(func.count()).where(child.c.previous_response_id == forsaken.c.id).scalar_subquery()
    return conn.execute(select(forsaken, num_children.label("num_children"))).all()


def collect_conversation(conn: Connection, id: str) -> None:
    """Removes a deleted conversation if no response ran in it; else those of its deleted items that no run in
    flight can still see.
    """
    held = select(conversations.c.owner, conversations.c.deleted_at).where(conversations.c.id == id)
    row = conn.execute(held.with_for_update()).first()
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
    dead_places = conn.execute(dead).all()
    _measure_anew(conn, row.owner, [item_id for _, item_id in dead_places])
    for part in parts([position for position, _ in dead_places]):
        these = (table.c.conversation_id == id, table.c.position.in_(part))
        _shrink(conn, id, these)
        conn.execute(delete(table).where(*these))
    collect_items(conn, row.owner, [item_id for _, item_id in dead_places])


def _shrink(conn: Connection, id: str, places: Sequence[ColumnElement[bool]]) -> None:
    """A conversation no longer takes what the items in these places do."""
    size = select(func.coalesce(func.sum(SIZE + ROW_BYTES), 0))
    size = size.join_from(conversation_items, items, joined(conversation_items)).where(*places)
    smaller = update(conversations).where(conversations.c.id == id)
    conn.execute(smaller.values(num_bytes=conversations.c.num_bytes - size.scalar_subquery()))


def _measure_anew(conn: Connection, owner: str, ids: Sequence[str]) -> None:
    """Forget the measured sizes of responses that list some items, which a conversation lists no more: the
    next sweep measures them again."""
    for part in parts(ids):
        listing = select(response_items.c.response_id).where(
            response_items.c.owner == owner, response_items.c.item_id.in_(part)
        )
        # Not those that somebody is at work on: whoever holds them may be waiting for this conversation.
        free = select(responses.c.id).where(responses.c.id.in_(listing), responses.c.num_bytes > 0)
        held = conn.execute(free.order_by(responses.c.id).with_for_update(skip_locked=True)).scalars().all()
        conn.execute(update(responses).where(responses.c.id.in_(held)).values(num_bytes=0))


def _is_used(conn: Connection, conversation_id: str) -> bool:
    ran = select(responses.c.id).where(responses.c.conversation_id == conversation_id).limit(1)
    return conn.execute(ran).first() is not None


def collect_items(conn: Connection, owner: str, ids: Sequence[str]) -> None:
    """Removes those of the items that nothing lists any more."""
    for part in parts(ids):
        # A writer that adds a reference locks the item first (`items.put`): behind our lock it is seen.
        these = (items.c.owner == owner, items.c.id.in_(part))
        conn.execute(select(items.c.id).where(*these).order_by(items.c.id).with_for_update()).all()
        conn.execute(delete(items).where(*these, unlisted()))


def unlisted() -> ColumnElement[bool]:
    """Whether no response and no conversation lists an item."""
    in_response = exists().where(
        response_items.c.owner == items.c.owner, response_items.c.item_id == items.c.id
    )
    in_conversation = exists().where(
        conversation_items.c.owner == items.c.owner, conversation_items.c.item_id == items.c.id
    )
    return ~in_response & ~in_conversation
