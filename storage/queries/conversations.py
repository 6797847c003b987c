"""Conversations: their items by position, the lock that one run at a time holds, and their turns.

A position is given once and never again. A deleted item keeps its row as a tombstone while a run may need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from storage.queries import garbage, items
from storage.records import (
    ConversationFull,
    ConversationLocked,
    NewItem,
    NotFound,
    Order,
    Page,
    StoredConversation,
    StoredItem,
)
from storage.tables import conversation_items, conversations
from storage.tables import items as item_rows

ROW_BYTES = 256
"""What a conversation takes beside its metadata and its items."""


def _live(conn: Connection, owner: str, id: str, *, change: bool) -> Row[*tuple[Any, ...]]:
    """The row of a conversation, held until the transaction's end if it is to be changed."""
    query = select(conversations).where(
        conversations.c.id == id, conversations.c.owner == owner, conversations.c.deleted_at.is_(None)
    )
    row = conn.execute(query.with_for_update() if change else query).first()
    if row is None:
        raise NotFound("conversation", id)
    return row


def _stored(row: Row[*tuple[Any, ...]]) -> StoredConversation:
    return StoredConversation(row.id, row.created_at, row.metadata, row.active_response_id, row.head)


# ------------------------------------------------------------------------------------------------------------
# The lock, for runs


def lock(
    conn: Connection, owner: str, id: str, response_id: str, now: int, *, limit: int | None = None
) -> int:
    """Takes the conversation for a run and returns its head. NotFound; ConversationLocked with the holder;
    ConversationFull where it has `limit` items."""
    row = _live(conn, owner, id, change=True)
    if row.active_response_id is not None:
        raise ConversationLocked(id, row.active_response_id)
    _require_room(conn, row, 1, limit)
    taken = update(conversations).where(conversations.c.id == id)
    conn.execute(taken.values(active_response_id=response_id, used_at=max(row.used_at, now)))
    head: int = row.head
    return head


def unlock(
    conn: Connection,
    id: str,
    response_id: str,
    turn: Sequence[tuple[str, str]],
    *,
    kept: bool,
    status: str | None = None,
    now: int = 0,
) -> None:
    """Gives the lock back and appends the turn: (item id, direction) pairs, input before output.

    kept: the response is stored, so its items name it. status: how it ended. A conversation that was deleted
    meanwhile takes nothing.
    """
    query = select(conversations).where(conversations.c.id == id)
    row = conn.execute(query.with_for_update()).first()
    if row is None:
        return
    if turn and row.deleted_at is None:
        _append(conn, row, turn, response_id if kept else None, status, now=now)
    conn.execute(
        update(conversations)
        .where(conversations.c.id == id, conversations.c.active_response_id == response_id)
        .values(active_response_id=None)
    )
    garbage.collect_conversation(conn, id)


def _append(
    conn: Connection,
    row: Row[*tuple[Any, ...]],
    turn: Sequence[tuple[str, str]],
    response_id: str | None = None,
    status: str | None = None,
    *,
    now: int = 0,
) -> None:
    """Appends items that are stored already; one that the conversation holds keeps its place."""
    held = select(conversation_items.c.item_id).where(
        conversation_items.c.owner == row.owner,
        conversation_items.c.conversation_id == row.id,
        conversation_items.c.deleted_at.is_(None),
    )
    present: set[str] = set()
    for part in items.parts([item_id for item_id, _ in turn]):
        present.update(conn.execute(held.where(conversation_items.c.item_id.in_(part))).scalars())
    new = {item_id: direction for item_id, direction in turn if item_id not in present}
    if not new:
        return
    conn.execute(
        insert(conversation_items),
        [
            {
                "conversation_id": row.id,
                "position": position,
                "owner": row.owner,
                "item_id": item_id,
                "direction": direction,
                "response_id": response_id,
                "response_status": status,
            }
            for position, (item_id, direction) in enumerate(new.items(), row.head)
        ],
    )
    grown = update(conversations).where(conversations.c.id == row.id)
    num_bytes = row.num_bytes + items.num_bytes(conn, row.owner, list(new))
    conn.execute(grown.values(head=row.head + len(new), num_bytes=num_bytes, used_at=max(row.used_at, now)))


def _require_room(conn: Connection, row: Row[*tuple[Any, ...]], num_new: int, limit: int | None) -> None:
    """ConversationFull unless so many more items are within the limit."""
    if limit is None or row.head + num_new <= limit:  # positions are never given twice: it has no more
        return
    live = select(func.count()).where(
        conversation_items.c.conversation_id == row.id, conversation_items.c.deleted_at.is_(None)
    )
    if conn.execute(live).scalar_one() + num_new > limit:
        raise ConversationFull(row.id, limit)


# ------------------------------------------------------------------------------------------------------------
# The client's verbs


def create(
    conn: Connection, owner: str, id: str, created_at: int, metadata: bytes, new: Sequence[NewItem]
) -> StoredConversation:
    """Stores a conversation with its first items. ItemConflict."""
    conn.execute(
        insert(conversations).values(
            id=id,
            owner=owner,
            created_at=created_at,
            metadata=metadata,
            head=0,
            num_bytes=ROW_BYTES + len(metadata),
            used_at=created_at,
        )
    )
    add_items(conn, owner, id, new)
    return get(conn, owner, id)


def get(conn: Connection, owner: str, id: str) -> StoredConversation:
    """NotFound("conversation")."""
    return _stored(_live(conn, owner, id, change=False))


def update_metadata(
    conn: Connection, owner: str, id: str, metadata: bytes, now: int = 0
) -> StoredConversation:
    """Replaces the metadata. NotFound("conversation")."""
    row = _live(conn, owner, id, change=True)
    changed = update(conversations).where(conversations.c.id == id)
    num_bytes = row.num_bytes + len(metadata) - len(row.metadata)
    conn.execute(changed.values(metadata=metadata, num_bytes=num_bytes, used_at=max(row.used_at, now)))
    return get(conn, owner, id)


def delete(conn: Connection, owner: str, id: str, now: int) -> None:
    """Makes the id unknown; a run that holds the lock goes on, pinned. NotFound("conversation")."""
    row = _live(conn, owner, id, change=True)
    emptied = {"deleted_at": now, "metadata": b"{}", "num_bytes": row.num_bytes - len(row.metadata) + 2}
    conn.execute(update(conversations).where(conversations.c.id == id).values(**emptied))
    garbage.collect_conversation(conn, id)


def add_items(
    conn: Connection, owner: str, id: str, new: Sequence[NewItem], *, now: int = 0, limit: int | None = None
) -> tuple[StoredItem, ...]:
    """Appends items, under a lock too: the running turn is pinned. NotFound("conversation"), ItemConflict,
    ConversationFull where it would have more than `limit`."""
    row = _live(conn, owner, id, change=True)
    if new:
        _require_room(conn, row, len(new), limit)
        items.put(conn, owner, new)
        _append(conn, row, [(item.id, "in") for item in new], now=now)
    return items.as_stored(new)


def list_items(
    conn: Connection, owner: str, id: str, *, limit: int, order: Order, after: str | None
) -> Page[StoredItem]:
    """One page of the items. NotFound("conversation"), or ("item") for an unknown `after`."""
    _live(conn, owner, id, change=False)
    where = (conversation_items.c.conversation_id == id, conversation_items.c.deleted_at.is_(None))
    return items.page(conn, conversation_items, where, limit=limit, order=order, after=after)


def get_item(conn: Connection, owner: str, id: str, item_id: str) -> StoredItem:
    """One item. NotFound("conversation" | "item")."""
    _live(conn, owner, id, change=False)
    query = (
        select(*items.COLUMNS)
        .join_from(conversation_items, item_rows, items.joined(conversation_items))
        .where(
            conversation_items.c.owner == owner,
            conversation_items.c.item_id == item_id,
            conversation_items.c.conversation_id == id,
            conversation_items.c.deleted_at.is_(None),
        )
    )
    row = conn.execute(query).first()
    if row is None:
        raise NotFound("item", item_id)
    return items.stored_item(row)


def delete_item(conn: Connection, owner: str, id: str, item_id: str, now: int) -> StoredConversation:
    """Takes an item out; runs that are pinned still see it. NotFound("conversation" | "item")."""
    row = _live(conn, owner, id, change=True)
    deleted = conn.execute(
        update(conversation_items)
        .where(
            conversation_items.c.owner == owner,
            conversation_items.c.item_id == item_id,
            conversation_items.c.conversation_id == id,
            conversation_items.c.deleted_at.is_(None),
        )
        .values(deleted_at=now)
    )
    if deleted.rowcount == 0:
        raise NotFound("item", item_id)
    garbage.collect_conversation(conn, id)
    return _stored(row)
