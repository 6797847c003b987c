"""History: the items that a run continues from, oldest first. Reading it never writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    bindparam,
    func,
    literal,
    or_,
    select,
    true,
)

from storage.lineage import BEYOND, IN_LINEAGE, LINEAGE, epochs, in_turn, lineage_of
from storage.queries import items
from storage.records import (
    ConversationHistory,
    HistoryItem,
    NotFound,
    Order,
    Page,
    StoredItem,
    page_length,
)
from storage.tables import conversation_items, conversations, response_items, responses
from storage.tables import items as item_rows

_Rows = Sequence[Row[*tuple[Any, ...]]]


def of_response(
    conn: Connection, owner: str, id: str, as_of: int | None, *, hidden: bool = False
) -> tuple[HistoryItem, ...]:
    """The turns that led to a response, itself included: input then output of each. See `_led_to`."""
    base, turns = _led_to(conn, owner, id, as_of, hidden=hidden)
    return tuple(_item(row, in_conversation=True) for row in base) + tuple(map(_item, turns))


def input_page(
    conn: Connection, owner: str, id: str, *, limit: int, order: Order, after: str | None
) -> Page[StoredItem]:
    """One page of all that a response was made from: its own input, and what led to it. NotFound("response"),
    or ("item") for an unknown `after`.

    A cursor is an id, so an item that stands there twice is listed once. Bodies are read of the page alone.
    """
    base, turns = _led_to(conn, owner, id, None, sizes=True)
    sizes = {
        row.id: row.size for row in (*base, *turns) if not (row.response_id == id and row.direction == "out")
    }
    ids = list(sizes) if order == "asc" else list(reversed(sizes))
    if after is not None:
        if after not in sizes:
            raise NotFound("item", after)
        ids = ids[ids.index(after) + 1 :]
    shown = ids[: page_length([sizes[one] for one in ids], limit)]
    query = select(*items.COLUMNS).where(item_rows.c.owner == owner, item_rows.c.id.in_(shown))
    found = {row.id: items.stored_item(row) for row in conn.execute(query).all()}
    return Page(tuple(found[one] for one in shown), len(ids) > len(shown))


def _led_to(
    conn: Connection, owner: str, id: str, as_of: int | None, *, hidden: bool = False, sizes: bool = False
) -> tuple[_Rows, _Rows]:
    """What a response stands on of a conversation, and the turns that led to it, its own included. sizes: of
    the items, in the place of their bodies.

    A turn that ran in a conversation stands on what the conversation held when it began, not on earlier
    responses. A fork is the turn that it was forked from, cut short. Deleted ancestors count, since this
    descendant lives; the response itself must not be deleted (before `as_of`), nor hidden, except for whoever
    runs it. NotFound("response").
    """
    oldest, turns = _CHAINS[hidden, sizes]
    named = {"id": id, "owner": owner, "as_of": _time(as_of)}
    first = conn.execute(oldest, named).first()
    if first is None:
        raise NotFound("response", id)
    base: _Rows = ()
    if first.conversation_id is not None:
        of = (owner, first.conversation_id, first.conversation_head, as_of)
        base = _positioned(conn, _SIZES if sizes else _POSITIONS, *of)
    return base, conn.execute(turns, named).all()


def of_conversation(
    conn: Connection, owner: str, id: str, head: int | None, as_of: int | None
) -> tuple[HistoryItem, ...]:
    """The items of a conversation below position `head` (None: all). NotFound("conversation")."""
    if conn.execute(_LIVE, {"id": id, "owner": owner, "as_of": _time(as_of)}).first() is None:
        raise NotFound("conversation", id)
    return _of_positions(conn, owner, id, head, as_of)


def of_conversation_from(
    conn: Connection, owner: str, id: str, first: int, as_of: int
) -> ConversationHistory:
    """What a conversation holds from position `first` on. NotFound("conversation")."""
    head: int | None = conn.execute(_HEAD, {"id": id, "owner": owner}).scalar()
    epoch = epochs(conn, [id]).get(id)
    if head is None or epoch is None:
        raise NotFound("conversation", id)
    num_before = _number(conn, owner, id, first, as_of) if first else 0
    new = _of_positions(conn, owner, id, head, as_of, first=first) if head > first else ()
    # What is read is as it was then, and so is its epoch: else nobody would know that some of it is gone.
    num_deleted = conn.execute(_NUM_DELETED, {**lineage_of(owner, id, head), "as_of": as_of}).scalar_one()
    return ConversationHistory(head, epoch - num_deleted, num_before, new)


def shrunk(conn: Connection, known: Mapping[str, tuple[int, int]]) -> frozenset[str]:
    """Those of the conversations that are deleted, or no longer hold as many items in front of a position;
    known: that position and their number, by conversation, whoever owns it."""
    lost = set()
    for id, (head, num_items) in known.items():
        live = select(conversations.c.owner).where(
            conversations.c.id == id, conversations.c.deleted_at.is_(None)
        )
        owner = conn.execute(live).scalar()
        if owner is None or _number(conn, owner, id, head, BEYOND) != num_items:
            lost.add(id)
    return frozenset(lost)


def _number(conn: Connection, owner: str, id: str, head: int, as_of: int) -> int:
    """How many items a conversation held at `as_of` below position `head`."""
    return conn.execute(_NUMBER, {**lineage_of(owner, id, head), "as_of": as_of}).scalar_one()


def _of_positions(
    conn: Connection, owner: str, id: str, head: int | None, as_of: int | None, *, first: int = 0
) -> tuple[HistoryItem, ...]:
    rows = _positioned(conn, _POSITIONS, owner, id, head, as_of, first)
    return tuple(_item(row, in_conversation=True) for row in rows)


def _positioned(
    conn: Connection,
    places: Select[*tuple[Any, ...]],
    owner: str,
    id: str,
    head: int | None,
    as_of: int | None,
    first: int = 0,
) -> _Rows:
    as_it_was = {**lineage_of(owner, id, head), "as_of": _time(as_of), "first": first}
    # They come in one piece a stretch; sorting ten thousand bodies would cost a database more.
    return sorted(conn.execute(places, as_it_was).all(), key=attrgetter("position"))


def _time(as_of: int | None) -> int:
    """Microseconds. None, for what is read as it is now: as it will be before a deletion that is still to
    come."""
    return BEYOND if as_of is None else as_of


def _item(row: Row[*tuple[Any, ...]], *, in_conversation: bool = False) -> HistoryItem:
    return HistoryItem(items.stored_item(row), row.response_id, row.status, row.direction, in_conversation)


def _undeleted(deleted_at: ColumnElement[int | None]) -> ColumnElement[bool]:
    """Whether a row was there at `as_of`; a deletion in that very microsecond came later."""
    return or_(deleted_at.is_(None), deleted_at >= bindparam("as_of"))


_OWN = (conversations.c.id == bindparam("id"), conversations.c.owner == bindparam("owner"))
_HEAD = select(conversations.c.head).where(*_OWN, conversations.c.deleted_at.is_(None))
_LIVE = select(conversations.c.id).where(*_OWN, _undeleted(conversations.c.deleted_at))
_THERE = _undeleted(conversation_items.c.deleted_at)
_SIZED = (item_rows.c.id, items.SIZE.label("size"))


def _places(*columns: ColumnElement[Any]) -> Select[*tuple[Any, ...]]:
    return (
        select(
            *columns,
            conversation_items.c.response_id,
            conversation_items.c.response_status.label("status"),
            conversation_items.c.direction,
            conversation_items.c.position,
        )
        .select_from(LINEAGE)
        .join(conversation_items, IN_LINEAGE)
        .join(item_rows, items.joined(conversation_items))
        .where(conversation_items.c.position >= bindparam("first"), _THERE)
    )


_POSITIONS, _SIZES = _places(*items.COLUMNS), _places(*_SIZED)
_COUNTED = select(func.count()).select_from(LINEAGE).join(conversation_items, IN_LINEAGE)
_NUMBER = _COUNTED.where(_THERE)
_NUM_DELETED = _COUNTED.where(conversation_items.c.deleted_at >= bindparam("as_of"))


_CHAINED = ("id", "status", "previous_response_id", "conversation_id", "conversation_head")
_FORKED = ("fork_of", "fork_direction", "fork_position")


def _of(response: FromClause) -> list[ColumnElement[Any]]:
    """What a chain has of each response."""
    return [response.c[name] for name in (*_CHAINED, *_FORKED)]


def _chain(hidden: bool, sizes: bool) -> tuple[Select[*tuple[Any, ...]], Select[*tuple[Any, ...]]]:
    """Of the turns that led to a response: what the oldest one stands on, and the items of all. They are made
    once: to make them takes 2 ms."""
    step = (
        select(*_of(responses), literal(0).label("depth"))
        .where(
            responses.c.id == bindparam("id"),
            responses.c.owner == bindparam("owner"),
            responses.c.store,
            true() if hidden else ~responses.c.hidden,
            _undeleted(responses.c.deleted_at),
        )
        .cte("chain", recursive=True)
    )
    parent = responses.alias("parent")
    chain = step.union_all(
        select(*_of(parent), step.c.depth + 1).where(
            parent.c.id == step.c.previous_response_id,
            parent.c.owner == bindparam("owner"),
            step.c.conversation_id.is_(None),
        )
    )
    oldest = (
        select(chain.c.conversation_id, chain.c.conversation_head).order_by(chain.c.depth.desc()).limit(1)
    )
    columns = _SIZED if sizes else items.COLUMNS
    turns = (
        select(*columns, chain.c.id.label("response_id"), chain.c.status, response_items.c.direction)
        .select_from(chain)
        .join(response_items, in_turn(chain))
        .join(item_rows, items.joined(response_items))
        .order_by(chain.c.depth.desc(), response_items.c.direction, response_items.c.position)
    )
    return oldest, turns


_CHAINS = {(hidden, sizes): _chain(hidden, sizes) for hidden in (False, True) for sizes in (False, True)}
