"""Items: each is stored once for its owner, and responses and conversations refer to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, get_args

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Integer,
    Row,
    Select,
    and_,
    bindparam,
    exists,
    func,
    insert,
    or_,
    select,
)

from storage.drivers import many
from storage.lineage import Stretch, in_fork, listed_in_conversations
from storage.records import (
    ItemConflict,
    NewItem,
    NotFound,
    Order,
    Page,
    PositionedItem,
    StoredItem,
    page_length,
)
from storage.tables import conversation_items, items, response_items, responses

T = TypeVar("T")

PART = 1000

COLUMNS = (items.c.id, items.c.kind, items.c.body, items.c.call_id, items.c.name, items.c.private)


def stored_item(row: Row[*tuple[Any, ...]]) -> StoredItem:
    """An item from a row that begins with COLUMNS."""
    return StoredItem(*row[:6])


def as_stored(new: Iterable[NewItem]) -> tuple[StoredItem, ...]:
    return tuple(
        StoredItem(item.id, item.kind, item.body, item.call_id, item.name, item.private) for item in new
    )


def joined(references: FromClause) -> ColumnElement[bool]:
    """The join of a table of references (owner, item_id) with items."""
    return and_(items.c.owner == references.c.owner, items.c.id == references.c.item_id)


_THESE = (items.c.owner == bindparam("owner"), items.c.id.in_(bindparam("ids", expanding=True)))
# Held, so that they are there when the transaction lists them.
_HELD = (
    select(items.c.id, items.c.body)
    .where(*_THESE)
    .order_by(items.c.id)
    .with_for_update(read=True, key_share=True)
)


def put(conn: Connection, owner: str, new: Sequence[NewItem]) -> None:
    """Stores the items that are not there yet; the same id with the same body is the same item.

    ItemConflict for an id whose body differs.
    """
    bodies: dict[str, NewItem] = {}
    for item in new:
        if bodies.setdefault(item.id, item).body != item.body:
            raise ItemConflict(item.id)
    if not bodies:
        return
    for part in parts(sorted(bodies)):
        for id, body in conn.execute(_HELD, {"owner": owner, "ids": part}).all():
            if bodies.pop(id).body != body:
                raise ItemConflict(id)
    if bodies:
        rows = [
            (owner, item.id, item.kind, item.call_id, item.name, item.body, item.private)
            for _, item in sorted(bodies.items())
        ]
        many(conn, _INSERT, ("owner", "id", "kind", "call_id", "name", "body", "private"), rows)


_INSERT = insert(items)

ROW_BYTES = 128
"""What an item takes beside its body where a conversation lists it."""

SIZE = func.length(items.c.body) + func.coalesce(func.length(items.c.private), 0)
"""The bytes of an item, its private half included."""


def num_bytes(conn: Connection, owner: str, ids: Sequence[str]) -> int:
    """What these items take in a conversation."""
    total = 0
    for part in parts(ids):
        total += int(conn.execute(_NUM_BYTES, {"owner": owner, "ids": part}).scalar_one())
    return total


_NUM_BYTES = select(func.coalesce(func.sum(SIZE + ROW_BYTES), 0)).where(*_THESE)


def num_bytes_of(conn: Connection, response_ids: Sequence[str]) -> dict[str, int]:
    """The bytes of the items of responses that no conversation lists; responses without any are not named."""
    elsewhere = exists().where(
        conversation_items.c.owner == response_items.c.owner,
        conversation_items.c.item_id == response_items.c.item_id,
    )
    size = func.sum(SIZE)
    query = (
        select(response_items.c.response_id, size)
        .join_from(response_items, items, joined(response_items))
        .where(response_items.c.response_id.in_(response_ids), ~elsewhere)
        .group_by(response_items.c.response_id)
    )
    return {id: int(size) for id, size in conn.execute(query).all()}


def parts(values: Sequence[T]) -> Iterator[list[T]]:
    """Lists short enough for one statement's parameters on any database."""
    for begin in range(0, len(values), PART):
        yield list(values[begin : begin + PART])


def get_live(conn: Connection, owner: str, ids: Sequence[str]) -> dict[str, StoredItem]:
    """The items among `ids` that a live response or a live conversation refers to, be it as a fork."""
    found: dict[str, StoredItem] = {}
    for part in parts(ids):
        responded = conn.execute(_IN_RESPONSES, {"owner": owner, "ids": part}).all()
        found |= {row.id: stored_item(row) for row in responded}
        if elsewhere := [id for id in part if id not in found]:
            listed = listed_in_conversations(conn, owner, elsewhere)
            rows = conn.execute(_OWNED, {"owner": owner, "ids": list(listed)}).all() if listed else []
            found |= {row.id: stored_item(row) for row in rows}
    return found


_OWNED = select(*COLUMNS).where(*_THESE)


def _in_responses() -> Select[*tuple[Any, ...]]:
    """Those that a live response has, be it as a fork."""
    live = (responses.c.deleted_at.is_(None), ~responses.c.hidden)
    listing = (response_items.c.owner == items.c.owner, response_items.c.item_id == items.c.id)
    in_response = exists().where(*listing, responses.c.id == response_items.c.response_id, *live)
    return _OWNED.where(or_(in_response, exists().where(*listing, in_fork(responses), *live)))


_IN_RESPONSES = _in_responses()


def page(
    conn: Connection,
    references: FromClause,
    where: Sequence[ColumnElement[bool]],
    *,
    limit: int,
    order: Order,
    after: str | None,
) -> Page[StoredItem]:
    """One page of the items that `references` (with owner, item_id, position) lists, in order of position.

    NotFound("item") for an `after` that is not among them. An item listed twice counts, as a cursor, at its
    last place in the order asked for, so that paging always ends.
    """
    position = references.c.position
    query = select(SIZE).join_from(references, items, joined(references)).where(*where)
    if after is not None:
        places = conn.execute(select(position).where(*where, references.c.item_id == after)).scalars().all()
        if not places:
            raise NotFound("item", after)
        query = query.where(position > max(places) if order == "asc" else position < min(places))
    query = query.order_by(position.asc() if order == "asc" else position.desc())
    sizes = conn.execute(query.limit(limit + 1)).scalars().all()
    length = page_length(sizes, limit)
    rows = conn.execute(query.with_only_columns(*COLUMNS).limit(length)).all()
    return Page(tuple(map(stored_item, rows)), len(sizes) > length)


def page_of_places(
    conn: Connection,
    pieces: Sequence[Stretch],
    *,
    limit: int,
    order: Order = "asc",
    after: int | None = None,
) -> tuple[list[PositionedItem], bool]:
    """The next items of a conversation by their positions, beyond `after` where there is one, and whether
    there are more. pieces: as `stretches` has them.

    One stretch is read after the other, and only those that the page crosses: their sizes, and then, once
    these tell where the page ends, their bodies.
    """
    sizes: list[int] = []
    crossed: list[dict[str, Any]] = []
    for piece in reversed(pieces) if order == "asc" else pieces:
        low, high = piece.low, piece.high
        if after is not None:
            low, high = (max(low, after + 1), high) if order == "asc" else (low, min(high, after))
        if low < high:
            crossed.append({"conversation": piece.conversation_id, "low": low, "high": high})
            most = limit + 1 - len(sizes)
            sizes += conn.execute(_SIZES[order], {**crossed[-1], "most": most}).scalars().all()
        if len(sizes) > limit:
            break
    length = page_length(sizes, limit)
    found: list[PositionedItem] = []
    for there in crossed:
        if len(found) < length:
            rows = conn.execute(_PLACES[order], {**there, "most": length - len(found)}).all()
            found += [PositionedItem(row[-4], stored_item(row), *row[-3:]) for row in rows]
    return found, len(sizes) > length


def _places(order: Order, *columns: ColumnElement[Any]) -> Select[*tuple[Any, ...]]:
    table = conversation_items
    position = table.c.position
    return (
        select(*columns)
        .join_from(table, items, joined(table))
        .where(
            table.c.conversation_id == bindparam("conversation"),
            position >= bindparam("low"),
            position < bindparam("high"),
            table.c.deleted_at.is_(None),
        )
        .order_by(position.asc() if order == "asc" else position.desc())
        .limit(bindparam("most", type_=Integer))
    )


_PLACE = tuple(
    conversation_items.c[name] for name in ("position", "created_at", "direction", "response_status")
)
_PLACES = {order: _places(order, *COLUMNS, *_PLACE) for order in get_args(Order)}
_SIZES = {order: _places(order, SIZE) for order in get_args(Order)}
