"""Branches: what a fork shares with the conversation or the response that it was forked from.

Nothing is copied. A forked conversation begins at a position of its parent and counts on from there: its
items are those of its parent below that position, then its own. A parent may be a fork itself, so the items
of a conversation are those of its *lineage*: one stretch of positions in each of its ancestors. The stretches
do not meet, so the positions of a whole lineage are in one order.

A forked response lists no items. It has the first ones of the response `fork_of` that was really run, in the
order of the turn, up to one place, and whatever led to that response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    and_,
    bindparam,
    case,
    func,
    literal,
    or_,
    select,
    tuple_,
)

from storage.tables import conversation_items, conversations, response_items

BEYOND = 1 << 62
"""A position that no item will have."""

# ------------------------------------------------------------------------------------------------------------
# Conversations


@dataclass(frozen=True, slots=True)
class Stretch:
    """The positions from `low` up to, and without, `high` of one conversation."""

    conversation_id: str
    low: int
    high: int

    def __contains__(self, position: int) -> bool:
        return self.low <= position < self.high


def _lineage() -> CTE:
    begin = func.coalesce(conversations.c.parent_head, 0)
    own = (
        select(
            conversations.c.id,
            conversations.c.parent_id,
            begin.label("low"),
            bindparam("below", type_=BigInteger).label("high"),
            literal(0).label("depth"),
        )
        .where(conversations.c.id == bindparam("of"), conversations.c.owner == bindparam("owner"))
        .cte("lineage", recursive=True)
    )
    parent = conversations.alias("parent")
    return own.union_all(
        select(
            parent.c.id,
            parent.c.parent_id,
            func.coalesce(parent.c.parent_head, 0),
            case((own.c.high < own.c.low, own.c.high), else_=own.c.low),
            own.c.depth + 1,
        ).where(parent.c.id == own.c.parent_id, parent.c.owner == bindparam("owner"))
    )


LINEAGE = _lineage()
"""The stretches of which a conversation consists, be its ancestors deleted or not: `id`, `low`, `high` and
`depth`, 0 being its own. Its parameters are those of `lineage_of`.

It and the statements made of it are made once: making them costs more than carrying them out.
"""

IN_LINEAGE = and_(
    conversation_items.c.conversation_id == LINEAGE.c.id,
    conversation_items.c.position >= LINEAGE.c.low,
    conversation_items.c.position < LINEAGE.c.high,
)
"""The join of `LINEAGE` with the places of its items."""

_STRETCHES = (
    select(LINEAGE.c.id, LINEAGE.c.low, LINEAGE.c.high)
    .where(LINEAGE.c.low < LINEAGE.c.high)
    .order_by(LINEAGE.c.depth)
)


def lineage_of(owner: str, id: str, head: int | None = None) -> dict[str, Any]:
    """The parameters of `LINEAGE` for a conversation, below position `head` if there is one."""
    return {"owner": owner, "of": id, "below": BEYOND if head is None else head}


def stretches(conn: Connection, owner: str, id: str, parent_id: str | None) -> list[Stretch]:
    """The stretches of a conversation that are not empty, its own first, which is the last in the order of
    positions."""
    if parent_id is None:
        return [Stretch(id, 0, BEYOND)]
    return [Stretch(*row) for row in conn.execute(_STRETCHES, lineage_of(owner, id)).all()]


def sharing(conversation_id: str, position: int) -> CTE:
    """The ids of a conversation and of all its forks, and theirs, that show what it has at a position."""
    child = conversations.alias("child")
    own = select(conversations.c.id).where(conversations.c.id == conversation_id)
    shown = own.cte("sharing", recursive=True)
    return shown.union_all(
        select(child.c.id).where(child.c.parent_id == shown.c.id, child.c.parent_head > position)
    )


def epochs(conn: Connection, ids: Sequence[str]) -> dict[str, int]:
    """The epochs of those conversations that are not deleted, whoever owns them: each grows whenever an item
    is deleted that the conversation shows, or that one has of which it is a fork.

    They are summed up here, so that a deletion changes one row, however many branches share what it deletes.
    """
    return {id: int(epoch) for id, epoch in conn.execute(_EPOCHS, {"ids": ids}).all()}


def _epochs() -> Select[*tuple[Any, ...]]:
    names = ("parent_id", "parent_head", "epoch")
    given = conversations.c.id.in_(bindparam("ids", expanding=True))
    above = (
        select(conversations.c.id, *(conversations.c[name] for name in names))
        .where(given, conversations.c.deleted_at.is_(None))
        .cte("above", recursive=True)
    )
    parent = conversations.alias("parent")
    # One of which nothing is shared may be gone any time, and no sum may ever become less.
    shared = (parent.c.id == above.c.parent_id, above.c.parent_head > 0)
    above = above.union_all(select(above.c.id, *(parent.c[name] for name in names)).where(*shared))
    return select(above.c.id, func.sum(above.c.epoch)).group_by(above.c.id)


_EPOCHS = _epochs()


def listed_in_conversations(conn: Connection, owner: str, ids: Sequence[str]) -> set[str]:
    """Those of some items that a conversation shows which is not deleted, be it as a fork."""
    return set(conn.execute(_LISTED, {"owner": owner, "ids": ids}).scalars())


def _listed() -> Select[*tuple[Any, ...]]:
    table, child = conversation_items, conversations.alias("child")
    holding = (
        select(
            table.c.item_id,
            table.c.position,
            conversations.c.id,
            conversations.c.deleted_at,
        )
        .join_from(table, conversations, conversations.c.id == table.c.conversation_id)
        .where(
            table.c.owner == bindparam("owner"),
            table.c.item_id.in_(bindparam("ids", expanding=True)),
            table.c.deleted_at.is_(None),
        )
        .cte("holding", recursive=True)
    )
    showing = holding.union_all(
        select(holding.c.item_id, holding.c.position, child.c.id, child.c.deleted_at).where(
            child.c.parent_id == holding.c.id,
            child.c.parent_head > holding.c.position,
            holding.c.deleted_at.is_not(None),
        )
    )
    return select(showing.c.item_id).where(showing.c.deleted_at.is_(None)).distinct()


_LISTED = _listed()


# ------------------------------------------------------------------------------------------------------------
# Responses


def in_turn(response: FromClause) -> ColumnElement[bool]:
    """The join of responses, by their columns `id`, `fork_of`, `fork_direction` and `fork_position`, with the
    places of their items."""
    table, row = response_items, response.c
    return and_(table.c.response_id == func.coalesce(row.fork_of, row.id), _before_fork(response))


def in_fork(response: FromClause) -> ColumnElement[bool]:
    """The same for forks alone, which can be found from a place."""
    return and_(response.c.fork_of == response_items.c.response_id, _before_fork(response))


def _before_fork(response: FromClause) -> ColumnElement[bool]:
    table, row = response_items, response.c
    place = tuple_(table.c.direction, table.c.position)
    return or_(row.fork_of.is_(None), place <= tuple_(row.fork_direction, row.fork_position))
