"""History: the items that a run continues from, oldest first. Reading it never writes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, literal, or_, select, true

from storage.queries import items
from storage.records import HistoryItem, NotFound
from storage.tables import conversation_items, conversations, response_items, responses
from storage.tables import items as item_rows


def of_response(
    conn: Connection, owner: str, id: str, as_of: int | None, *, hidden: bool = False
) -> tuple[HistoryItem, ...]:
    """The turns that led to a response, itself included: input then output of each.

    A turn that ran in a conversation stands on what the conversation held when it began, not on earlier
    responses. Deleted ancestors count, since this descendant lives; the response itself must not be deleted
    (before `as_of`), nor hidden, except for whoever runs it. NotFound("response").
    """
    step = (
        select(
            responses.c.id,
            responses.c.status,
            responses.c.previous_response_id,
            responses.c.conversation_id,
            responses.c.conversation_head,
            literal(0).label("depth"),
        )
        .where(
            responses.c.id == id,
            responses.c.owner == owner,
            responses.c.store,
            true() if hidden else ~responses.c.hidden,
            _undeleted(responses.c.deleted_at, as_of),
        )
        .cte("chain", recursive=True)
    )
    parent = responses.alias("parent")
    chain = step.union_all(
        select(
            parent.c.id,
            parent.c.status,
            parent.c.previous_response_id,
            parent.c.conversation_id,
            parent.c.conversation_head,
            step.c.depth + 1,
        ).where(
            parent.c.id == step.c.previous_response_id,
            parent.c.owner == owner,
            step.c.conversation_id.is_(None),
        )
    )
    oldest = conn.execute(
        select(chain.c.conversation_id, chain.c.conversation_head).order_by(chain.c.depth.desc()).limit(1)
    ).first()
    if oldest is None:
        raise NotFound("response", id)
    base: tuple[HistoryItem, ...] = ()
    if oldest.conversation_id is not None:
        base = _of_positions(conn, owner, oldest.conversation_id, oldest.conversation_head, as_of)
    query = (
        select(*items.COLUMNS, chain.c.id.label("response_id"), chain.c.status, response_items.c.direction)
        .select_from(chain)
        .join(response_items, response_items.c.response_id == chain.c.id)
        .join(item_rows, items.joined(response_items))
        .order_by(chain.c.depth.desc(), response_items.c.direction, response_items.c.position)
    )
    return base + tuple(_item(row) for row in conn.execute(query).all())


def of_conversation(
    conn: Connection, owner: str, id: str, head: int | None, as_of: int | None
) -> tuple[HistoryItem, ...]:
    """The items of a conversation below position `head` (None: all). NotFound("conversation")."""
    live = select(conversations.c.id).where(
        conversations.c.id == id,
        conversations.c.owner == owner,
        _undeleted(conversations.c.deleted_at, as_of),
    )
    if conn.execute(live).first() is None:
        raise NotFound("conversation", id)
    return _of_positions(conn, owner, id, head, as_of)


def _of_positions(
    conn: Connection, owner: str, id: str, head: int | None, as_of: int | None
) -> tuple[HistoryItem, ...]:
    table = conversation_items
    query = (
        select(
            *items.COLUMNS, table.c.response_id, table.c.response_status.label("status"), table.c.direction
        )
        .select_from(table)
        .join(item_rows, items.joined(table))
        .where(table.c.conversation_id == id, table.c.owner == owner, _undeleted(table.c.deleted_at, as_of))
        .order_by(table.c.position)
    )
    if head is not None:
        query = query.where(table.c.position < head)
    return tuple(_item(row, in_conversation=True) for row in conn.execute(query).all())


def _undeleted(deleted_at: ColumnElement[int | None], as_of: int | None) -> ColumnElement[bool]:
    """Whether a row was there at `as_of` (None: now); a deletion in that very microsecond came later."""
    return deleted_at.is_(None) if as_of is None else or_(deleted_at.is_(None), deleted_at >= as_of)


def _item(row: Row[*tuple[Any, ...]], *, in_conversation: bool = False) -> HistoryItem:
    return HistoryItem(items.stored_item(row), row.response_id, row.status, row.direction, in_conversation)
