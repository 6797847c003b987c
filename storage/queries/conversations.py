"""Conversations: their items by position, the lock that one run at a time holds, and their turns.

A position is given once and never again. A deleted item keeps its row as a tombstone while a run may need it.
The items of a fork are in part those of its parent (`storage.lineage`): one that is deleted through any of
them is deleted in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, Row, bindparam, func, insert, null, select, tuple_, update

from storage import pairs
from storage.kept_replies import forget_replies
from storage.lineage import IN_LINEAGE, LINEAGE, lineage_of, sharing, stretches
from storage.queries import garbage, items
from storage.records import (
    CONVERSATION_BYTES,
    ConversationArchived,
    ConversationChange,
    ConversationFull,
    ConversationLocked,
    NewFork,
    NewItem,
    NotFound,
    Order,
    Page,
    PositionedItem,
    StoredConversation,
    TooManyForks,
)
from storage.tables import conversation_items, conversations, runs
from storage.tables import items as item_rows

MAX_LEVELS = 1000
"""Conversations in a lineage: whoever reads the last one goes through all of them."""

MAX_BRANCHES = 10_000
"""Conversations that descend from one: whoever deletes an item of it looks at all of them in one transaction,
for replies that are kept."""


def live(conn: Connection, owner: str, id: str, *, change: bool) -> Row[*tuple[Any, ...]]:
    """The row of a conversation, held until the transaction's end if it is to be changed.
    NotFound("conversation")."""
    row = conn.execute(_LIVE_HELD if change else _LIVE, {"id": id, "owner": owner}).first()
    if row is None:
        raise NotFound("conversation", id)
    return row


_LIVE = select(conversations).where(
    conversations.c.id == bindparam("id"),
    conversations.c.owner == bindparam("owner"),
    conversations.c.deleted_at.is_(None),
)
_LIVE_HELD = _LIVE.with_for_update()


STORED = (
    *("id", "created_at", "metadata", "active_response_id", "head", "parent_id", "parent_item", "title"),
    *("used_at", "archived_at"),
)
"""The columns of which a `StoredConversation` is made."""


def _stored(row: Row[*tuple[Any, ...]]) -> StoredConversation:
    return StoredConversation(*(row._mapping[name] for name in STORED))


# ------------------------------------------------------------------------------------------------------------
# The lock, for runs


def lock(
    conn: Connection, owner: str, id: str, response_id: str, now: int, *, limit: int | None = None
) -> int:
    """Takes the conversation for a run and returns its head. NotFound; ConversationArchived;
    ConversationLocked with the holder;
    ConversationFull where it has `limit` items."""
    row = live(conn, owner, id, change=True)
    _require_active(row)
    _require_unlocked(conn, row)
    _require_room(conn, row, 1, limit)
    conn.execute(_TAKE, {"of": id, "run": response_id, "at": max(row.used_at, now)})
    head: int = row.head
    return head


def require_unlocked(conn: Connection, owner: str, id: str) -> None:
    """NotFound("conversation"); ConversationLocked with the holder, where there is one."""
    _require_unlocked(conn, live(conn, owner, id, change=False))


def _require_unlocked(conn: Connection, row: Row[*tuple[Any, ...]]) -> None:
    if row.active_response_id is not None:
        state = conn.execute(
            select(runs.c.state).where(runs.c.response_id == row.active_response_id)
        ).scalar()
        raise ConversationLocked(row.id, row.active_response_id, waits=state == "waiting")


def unlock(
    conn: Connection,
    id: str,
    response_id: str,
    turn: Sequence[tuple[str, str]],
    new: Sequence[NewItem] = (),
    *,
    kept: bool,
    status: str | None = None,
    now: int = 0,
) -> None:
    """Gives the lock back and appends the turn: (item id, direction) pairs, input before output.

    new: those of its items that nothing has stored yet. kept: the response is stored, so its items name it.
    status: how it ended. A conversation that was deleted meanwhile takes nothing, and then nothing is stored.
    """
    row = conn.execute(_HELD, {"id": id}).first()
    if row is None:
        return
    if turn and row.deleted_at is None:
        items.put(conn, row.owner, new)
        _append(conn, row, turn, response_id if kept else None, status, now=now)
    conn.execute(_GIVE_BACK, {"of": id, "run": response_id})
    garbage.collect_conversation(conn, id)


def _append(
    conn: Connection,
    row: Row[*tuple[Any, ...]],
    turn: Sequence[tuple[str, str]],
    response_id: str | None = None,
    status: str | None = None,
    *,
    now: int = 0,
) -> dict[str, tuple[int, int | None]]:
    """Appends items that are stored already; one that the conversation holds keeps its place. Returns the
    position of each, and when it came there."""
    places = {
        place.item_id: (place.position, place.created_at)
        for part in items.parts([item_id for item_id, _ in turn])
        for place in _places(conn, row, part)
    }
    new = {item_id: direction for item_id, direction in turn if item_id not in places}
    if not new:
        return places
    added = {item_id: (position, now or None) for position, item_id in enumerate(new, row.head)}
    conn.execute(
        _NEW_PLACES,
        [
            {
                "conversation_id": row.id,
                "position": position,
                "owner": row.owner,
                "item_id": item_id,
                "direction": new[item_id],
                "response_id": response_id,
                "response_status": status,
                "created_at": created_at,
            }
            for item_id, (position, created_at) in added.items()
        ],
    )
    num_bytes = row.num_bytes + items.num_bytes(conn, row.owner, list(new))
    grown = {"to": row.head + len(new), "size": num_bytes, "at": max(row.used_at, now)}
    conn.execute(_GROW, {"of": row.id, **grown})
    return places | added


_HELD = select(conversations).where(conversations.c.id == bindparam("id")).with_for_update()
_THIS = update(conversations).where(conversations.c.id == bindparam("of"))
_TAKE = _THIS.values(active_response_id=bindparam("run"), used_at=bindparam("at"))
_GIVE_BACK = _THIS.where(conversations.c.active_response_id == bindparam("run")).values(
    active_response_id=null()
)
_GROW = _THIS.values(head=bindparam("to"), num_bytes=bindparam("size"), used_at=bindparam("at"))
_NEW_PLACES = insert(conversation_items)


def _require_active(row: Row[*tuple[Any, ...]]) -> None:
    if row.archived_at is not None:
        raise ConversationArchived(row.id)


def _require_room(conn: Connection, row: Row[*tuple[Any, ...]], num_new: int, limit: int | None) -> None:
    """ConversationFull unless so many more items are within the limit."""
    if limit is None or row.head + num_new <= limit:  # positions are never given twice: it has no more
        return
    if conn.execute(_NUM_ITEMS, lineage_of(row.owner, row.id)).scalar_one() + num_new > limit:
        raise ConversationFull(row.id, limit)


_LISTED = conversation_items.c.deleted_at.is_(None)
_NUM_ITEMS = select(func.count()).join_from(LINEAGE, conversation_items, IN_LINEAGE).where(_LISTED)
_PLACES = select(
    *(conversation_items.c[name] for name in ("conversation_id", "position", "item_id", "created_at"))
).where(
    conversation_items.c.owner == bindparam("owner"),
    conversation_items.c.item_id.in_(bindparam("ids", expanding=True)),
    _LISTED,
)
_MET_ON_A_WALK = _PLACES.join_from(LINEAGE, conversation_items, IN_LINEAGE)
_LOOKED_UP = _PLACES.where(
    conversation_items.c.conversation_id.in_(bindparam("within", expanding=True))
).with_hint(conversation_items, "INDEXED BY conversation_items_by_item", "sqlite")

MAX_LOOKUPS = 10_000
"""Places that are looked up one by one; a walk through as many items, which may be all, takes as long."""


def _places(
    conn: Connection, row: Row[*tuple[Any, ...]], ids: Sequence[str]
) -> Sequence[Row[*tuple[Any, ...]]]:
    """Where a conversation shows items: `conversation_id`, maybe an ancestor's, `position` and `item_id`, and
    `created_at`, when it came there."""
    pieces = {piece.conversation_id: piece for piece in stretches(conn, row.owner, row.id, row.parent_id)}
    if len(pieces) * len(ids) > MAX_LOOKUPS:
        return conn.execute(_MET_ON_A_WALK, {**lineage_of(row.owner, row.id), "ids": list(ids)}).all()
    found = conn.execute(_LOOKED_UP, {"owner": row.owner, "ids": list(ids), "within": list(pieces)}).all()
    return [place for place in found if place.position in pieces[place.conversation_id]]


def _place(conn: Connection, row: Row[*tuple[Any, ...]], item_id: str) -> Row[*tuple[Any, ...]]:
    """Where a conversation shows an item. NotFound("item")."""
    places = _places(conn, row, [item_id])
    if not places:
        raise NotFound("item", item_id)
    return places[0]


# ------------------------------------------------------------------------------------------------------------
# The client's verbs


def create(
    conn: Connection,
    owner: str,
    id: str,
    created_at: int,
    metadata: bytes,
    new: Sequence[NewItem],
    title: str | None = None,
) -> StoredConversation:
    """Stores a conversation with its first items. ItemConflict."""
    conn.execute(
        insert(conversations).values(
            id=id,
            owner=owner,
            created_at=created_at,
            metadata=metadata,
            head=0,
            num_bytes=CONVERSATION_BYTES + len(metadata) + _title_bytes(title),
            used_at=created_at,
            title=title,
        )
    )
    pairs.add(conn, owner, "conversation", id, created_at, orjson.loads(metadata))
    add_items(conn, owner, id, new, now=created_at)
    return get(conn, owner, id)


def fork(conn: Connection, owner: str, id: str, new: NewFork) -> StoredConversation:
    """Stores a conversation that begins as another one does, up to an item or as a whole.

    A turn that is at work there is not part of it. NotFound("conversation" | "item").
    """
    query = select(conversations).where(
        conversations.c.id == id, conversations.c.owner == owner, conversations.c.deleted_at.is_(None)
    )
    # Held, lest it be collected before it has a fork.
    parent = conn.execute(query.with_for_update(read=True)).first()
    if parent is None:
        raise NotFound("conversation", id)
    if new.after is None:
        head, item_id = parent.head, _last_item(conn, parent)
    else:
        head, item_id = _place(conn, parent, new.after).position + 1, new.after
    metadata = parent.metadata if new.metadata is None else new.metadata
    row = {
        "id": new.id,
        "owner": owner,
        "created_at": new.created_at,
        "metadata": metadata,
        "head": head,
        "num_bytes": CONVERSATION_BYTES + len(metadata) + _title_bytes(parent.title),
        "used_at": new.created_at,
        "parent_id": id,
        "parent_head": head,
        "parent_item": item_id,
        "title": parent.title,
    }
    conn.execute(insert(conversations), row)
    pairs.add(conn, owner, "conversation", new.id, new.created_at, orjson.loads(metadata))
    return get(conn, owner, new.id)


def require_room_for_fork(conn: Connection, owner: str, id: str) -> None:
    """NotFound("conversation"); TooManyForks where it is not to be forked once more."""
    live(conn, owner, id, change=False)
    levels = conn.execute(_LEVELS, lineage_of(owner, id)).scalars().all()
    if len(levels) >= MAX_LEVELS:
        raise TooManyForks(f"Conversation '{id}' is a fork of forks, {MAX_LEVELS} levels deep.")
    branches = select(sharing(levels[-1], -1).c.id).limit(MAX_BRANCHES).subquery()
    if conn.execute(select(func.count()).select_from(branches)).scalar_one() >= MAX_BRANCHES:
        raise TooManyForks(
            f"Conversation '{levels[-1]}' has {MAX_BRANCHES} branches: itself, its forks, and theirs."
        )


_LEVELS = select(LINEAGE.c.id).order_by(LINEAGE.c.depth)


def _last_item(conn: Connection, row: Row[*tuple[Any, ...]]) -> str | None:
    pieces = stretches(conn, row.owner, row.id, row.parent_id)
    found, _ = items.page_of_places(conn, pieces, limit=1, order="desc")
    return found[0].item.id if found else None


def get(conn: Connection, owner: str, id: str) -> StoredConversation:
    """NotFound("conversation")."""
    return _stored(live(conn, owner, id, change=False))


def list_(
    conn: Connection,
    owner: str,
    *,
    limit: int,
    order: Order,
    after: str | None,
    archived: bool | None,
    metadata: Mapping[str, str],
) -> Page[StoredConversation]:
    """One page by time, of those that are archived, or are not, where that is asked for, and that have all of
    these pairs. NotFound("conversation") for an unknown `after`."""
    table = conversations
    query = select(*(table.c[name] for name in STORED))
    query = query.where(table.c.owner == owner, table.c.deleted_at.is_(None))
    if archived is not None:
        at = table.c.archived_at
        query = query.where(at.is_not(None) if archived else at.is_(None))
    by_time = (table.c.created_at, table.c.id)
    if metadata:
        by_time = (pairs.CREATED, pairs.ID)
        query = pairs.walking(conn, query, table, owner, "conversation", metadata)
    elif archived:
        query = query.with_hint(table, "INDEXED BY conversations_archived", "sqlite")
    place = tuple_(*by_time)
    if after is not None:
        last = live(conn, owner, after, change=False)
        query = query.where(
            place > tuple_(last.created_at, last.id)
            if order == "asc"
            else place < tuple_(last.created_at, last.id)
        )
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    rows = conn.execute(query.limit(limit + 1)).all()
    return Page(tuple(map(_stored, rows[:limit])), len(rows) > limit)


def change(
    conn: Connection, owner: str, id: str, wanted: ConversationChange, now: int = 0
) -> StoredConversation:
    """Replaces what is to be changed. NotFound("conversation")."""
    row = live(conn, owner, id, change=True)
    metadata = row.metadata if wanted.metadata is None else wanted.metadata
    title = row.title if wanted.title is None else wanted.title or None
    archived_at = row.archived_at
    if wanted.archived is not None:
        archived_at = (archived_at or now) if wanted.archived else None
    num_bytes = row.num_bytes + len(metadata) - len(row.metadata)
    num_bytes += _title_bytes(title) - _title_bytes(row.title)
    changed = update(conversations).where(conversations.c.id == id)
    conn.execute(
        changed.values(
            metadata=metadata,
            title=title,
            archived_at=archived_at,
            num_bytes=num_bytes,
            used_at=max(row.used_at, now),
        )
    )
    if wanted.metadata is not None:
        pairs.forget(conn, [id])
        pairs.add(conn, owner, "conversation", id, row.created_at, orjson.loads(metadata))
    return get(conn, owner, id)


def _title_bytes(title: str | None) -> int:
    return len((title or "").encode())


def delete(conn: Connection, owner: str, id: str, now: int) -> None:
    """Makes the id unknown; a run that holds the lock goes on, pinned. What nothing needs of it is to be
    collected next. NotFound("conversation")."""
    row = live(conn, owner, id, change=True)
    num_bytes = row.num_bytes - len(row.metadata) + 2 - _title_bytes(row.title)
    emptied = {"deleted_at": now, "metadata": b"{}", "title": None, "num_bytes": num_bytes}
    conn.execute(update(conversations).where(conversations.c.id == id).values(**emptied))
    pairs.forget(conn, [id])
    forget_replies(conn, [id])


def add_items(
    conn: Connection, owner: str, id: str, new: Sequence[NewItem], *, now: int = 0, limit: int | None = None
) -> tuple[PositionedItem, ...]:
    """Appends items, under a lock too: the running turn is pinned; returns them at their places.
    NotFound("conversation"), ConversationArchived, ItemConflict,
    ConversationFull where it would have more than `limit`."""
    row = live(conn, owner, id, change=True)
    if not new:
        return ()
    _require_active(row)
    _require_room(conn, row, len(new), limit)
    items.put(conn, owner, new)
    places = _append(conn, row, [(item.id, "in") for item in new], now=now)
    return tuple(
        PositionedItem(position, item, created_at)
        for item in items.as_stored(new)
        for position, created_at in [places[item.id]]
    )


def list_places(
    conn: Connection, owner: str, id: str, *, limit: int, order: Order, after: str | None
) -> Page[PositionedItem]:
    """One page of the items, at their places. NotFound("conversation"), or ("item") for an unknown
    `after`."""
    row = live(conn, owner, id, change=False)
    position = None if after is None else _place(conn, row, after).position
    pieces = stretches(conn, owner, id, row.parent_id)
    found, more = items.page_of_places(conn, pieces, limit=limit, order=order, after=position)
    return Page(tuple(found), more)


def get_item(conn: Connection, owner: str, id: str, item_id: str) -> PositionedItem:
    """One item, at its place. NotFound("conversation" | "item")."""
    place = _place(conn, live(conn, owner, id, change=False), item_id)
    query = select(*items.COLUMNS).where(item_rows.c.owner == owner, item_rows.c.id == item_id)
    return PositionedItem(place.position, items.stored_item(conn.execute(query).one()), place.created_at)


def delete_item(conn: Connection, owner: str, id: str, item_id: str, now: int) -> StoredConversation:
    """Takes an item out, of all branches that share it; runs that are pinned still see it.
    NotFound("conversation" | "item")."""
    row = live(conn, owner, id, change=True)
    place = _place(conn, row, item_id)
    deleted = conn.execute(
        update(conversation_items)
        .where(
            conversation_items.c.conversation_id == place.conversation_id,
            conversation_items.c.position == place.position,
            conversation_items.c.deleted_at.is_(None),
        )
        .values(deleted_at=now)
    )
    if deleted.rowcount == 0:  # somebody else did, through another branch
        raise NotFound("item", item_id)
    _less_shown(conn, place.conversation_id, place.position)
    garbage.collect_conversation(conn, place.conversation_id)
    return get(conn, owner, id)


def clear(conn: Connection, owner: str, id: str, now: int) -> tuple[StoredConversation, Sequence[str]]:
    """Takes all items out, of all branches that share them; runs that are pinned still see them.

    Returns it, and the conversations that are to be collected next. NotFound("conversation").
    """
    row = live(conn, owner, id, change=True)
    table = conversation_items
    emptied: list[tuple[str, int]] = []
    for piece in stretches(conn, owner, id, row.parent_id):
        shown = (
            table.c.conversation_id == piece.conversation_id,
            table.c.position >= piece.low,
            table.c.position < piece.high,
            table.c.deleted_at.is_(None),
        )
        first = conn.execute(select(func.min(table.c.position)).where(*shown)).scalar()
        if first is None:
            continue
        conn.execute(update(table).where(*shown).values(deleted_at=now))
        emptied.append((piece.conversation_id, first))
    if emptied:  # whoever shares anything of it shows the conversation in which it begins
        _less_shown(conn, *emptied[-1])
    return get(conn, owner, id), [conversation_id for conversation_id, _ in emptied]


def _less_shown(conn: Connection, id: str, position: int) -> None:
    """Something was deleted at a position of a conversation, or there and behind it: whoever keeps what was
    made of it is to know, and replies that may tell of it go."""
    less = update(conversations).where(conversations.c.id == id)
    conn.execute(less.values(epoch=conversations.c.epoch + 1))
    forget_replies(conn, select(sharing(id, position).c.id))
