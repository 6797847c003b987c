"""Removes what nothing refers to any more: responses, conversations and items that were deleted.

A deleted response stays, emptied, while a response that continues it or was forked from it is there; a
deleted conversation while a response that ran in it or a fork of it is there. Where forks alone need it, only
what they share stays. A deleted conversation item stays while a run that began before its deletion is in
flight, and an item while any of these lists it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Text,
    bindparam,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    tuple_,
    update,
)

from storage.lineage import BEYOND
from storage.queries.items import ROW_BYTES, SIZE, joined, num_bytes_of, parts
from storage.tables import conversation_items, conversations, items, response_items, responses, runs

TOMBSTONES = 100
"""Deleted responses that one step goes through; to remove them takes some milliseconds."""
STEP_BYTES = 1 << 20
"""Bytes of conversations that one step goes through."""
LEAST_BYTES = 1 << 12
"""What an item counts at least then, and beside its items a conversation."""


def collect_responses(conn: Connection, ids: Sequence[str]) -> Sequence[str]:
    """Removes those of some deleted responses, whose logs are erased, that no response continues or was
    forked from, then their ancestors likewise, as many as one step may. What is left of those with forks
    alone is cut to what the forks share.

    Returns the ancestors that are to be erased next. They have no measure until then; those that stay get
    theirs.
    """
    rows = {row.id: row for row in _forsaken(conn, ids)}
    num_children: dict[str, int] = {id: row.num_children for id, row in rows.items()}
    gone = [id for id, num in num_children.items() if num == 0]
    above: set[str] = set()
    for id in gone:
        for parent in {rows[id].previous_response_id, rows[id].fork_of} - {None}:
            above.add(parent)
            if parent in num_children:
                num_children[parent] -= 1
                if num_children[parent] == 0:
                    gone.append(parent)
    remove_responses(conn, gone)
    deleted = select(responses.c.id).where(responses.c.deleted_at.is_not(None))
    next_ids = conn.execute(deleted.where(responses.c.id.in_(above - rows.keys()))).scalars().all()
    staying = {*ids, *above}.difference(gone, next_ids)
    changed = _cut_to_forks(conn, sorted(staying)).union(staying.intersection(ids))
    _measure(conn, conn.execute(deleted.where(responses.c.id.in_(changed))).scalars().all())
    conn.execute(update(responses).where(responses.c.id.in_(next_ids)).values(num_bytes=0))
    for conversation_id in {rows[id].conversation_id for id in gone} - {None}:
        collect_conversation(conn, conversation_id)
    return next_ids


def _measure(conn: Connection, ids: Sequence[str]) -> None:
    """Notes what deleted responses take that later ones need."""
    if ids:
        sizes = dict.fromkeys(ids, 1) | num_bytes_of(conn, ids)  # 0 would say that they are yet to be erased
        value = case(sizes, value=responses.c.id)
        conn.execute(update(responses).where(responses.c.id.in_(ids)).values(num_bytes=value))


def _cut_to_forks(conn: Connection, ids: Sequence[str]) -> set[str]:
    """Removes from deleted responses that nothing continues the items that none of their forks has; returns
    those that had such items."""
    child, fork = responses.alias("child"), responses.alias("fork")
    query = select(responses.c.id, responses.c.owner).where(
        responses.c.id.in_(ids),
        responses.c.deleted_at.is_not(None),
        ~exists().where(child.c.previous_response_id == responses.c.id),
        exists().where(fork.c.fork_of == responses.c.id),
    )
    place = tuple_(response_items.c.direction, response_items.c.position)
    changed: set[str] = set()
    for id, owner in conn.execute(query).all():
        # The last fork in the order of the index: there may be thousands.
        shared = select(fork.c.fork_direction, fork.c.fork_position).where(fork.c.fork_of == id)
        last = shared.order_by(fork.c.fork_direction.desc(), fork.c.fork_position.desc()).limit(1)
        beyond = delete(response_items).where(
            response_items.c.response_id == id, place > tuple_(*conn.execute(last).one())
        )
        cut_off = list(conn.execute(beyond.returning(response_items.c.item_id)).scalars())
        if cut_off:
            collect_items(conn, owner, cut_off)
            changed.add(id)
    return changed


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
    """Those of the responses that are deleted and have no children, and the nearest deleted ones above them.
    Forks are children, too."""
    child, parent = responses.alias("child"), responses.alias("parent")
    names = ("id", "previous_response_id", "fork_of")
    first = select(*(responses.c[name] for name in names)).where(
        responses.c.id.in_(ids),
        responses.c.deleted_at.is_not(None),
        ~exists().where(child.c.previous_response_id == responses.c.id),
        ~exists().where(child.c.fork_of == responses.c.id),
    )
    forsaken = first.cte("forsaken", recursive=True)
    above = select(*(parent.c[name] for name in names)).where(
        or_(parent.c.id == forsaken.c.previous_response_id, parent.c.id == forsaken.c.fork_of),
        parent.c.deleted_at.is_not(None),
        parent.c.num_bytes > 0,  # else its log is yet to be erased
    )
    forsaken = forsaken.union(above)
    found = conn.execute(select(forsaken.c.id).limit(TOMBSTONES)).scalars().all()
    # Another process may take away the last child but this one at this moment: the rows are held before the
    # children are counted.
    held = select(responses.c.id).where(responses.c.id.in_({*found, *ids})).order_by(responses.c.id)
    conn.execute(held.with_for_update()).all()
    going_on, forks = (
        select(func.count()).where(child.c[name] == responses.c.id).scalar_subquery()
        for name in ("previous_response_id", "fork_of")
    )
    columns = (*(responses.c[name] for name in (*names, "conversation_id")), going_on + forks)
    rows = select(*columns[:-1], columns[-1].label("num_children")).where(responses.c.id.in_(found))
    return conn.execute(rows).all()


def collect_conversation(conn: Connection, id: str) -> str | None:
    """Removes a deleted conversation if no response ran in it and nobody has forked it, then its ancestors
    likewise; else those of its deleted items that no run in flight can still see, and those that only a fork
    that is deleted itself could share. Of all that, as much as one step may.

    Returns the conversation to go on with, None when nothing is left to do. A sweep finds what nobody has
    gone on with.
    """
    left: str | None = id
    room = STEP_BYTES
    while left is not None and room > 0:
        left, room = _collect(conn, left, room)
    return left


def _collect(conn: Connection, id: str, room: int) -> tuple[str | None, int]:
    """The same for one conversation; returns it again if there is more of it than `room` bytes, else its
    parent if it needs less of that than before, and the bytes that are left."""
    row = conn.execute(_CONVERSATION, {"id": id}).first()
    if row is None:
        return None, room - LEAST_BYTES
    table = conversation_items
    needed: int | None = None
    if row.deleted_at is None or _is_used(conn, id):
        dead = _UNSEEN
    elif needed := _shared_head(conn, id):
        dead = _UNSEEN_OR_UNSHARED
    else:
        dead, needed = _ALL, 0
    places: list[tuple[int, str]] = []
    most = room // LEAST_BYTES + 1
    found = conn.execute(dead, {"id": id, "owner": row.owner, "needed": needed, "most": most}).all()
    for position, item_id, num_bytes in found:
        if room <= 0:
            break
        room -= max(num_bytes, LEAST_BYTES)
        places.append((position, item_id))
    _measure_anew(conn, row.owner, [item_id for _, item_id in places])
    for part in parts([position for position, _ in places]):
        these = (table.c.conversation_id == id, table.c.position.in_(part))
        _shrink(conn, id, these)
        conn.execute(delete(table).where(*these))
    collect_items(conn, row.owner, [item_id for _, item_id in places])
    if room <= 0:  # there may be more
        return id, room
    if needed == 0:
        conn.execute(delete(conversations).where(conversations.c.id == id))
    room -= LEAST_BYTES
    if row.parent_id is None or needed is None or needed >= row.parent_head:
        return None, room
    conn.execute(update(conversations).where(conversations.c.id == id).values(parent_head=needed))
    return str(row.parent_id), room


def unseen(owner: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether an item of a conversation, and of this owner, is deleted, and no run in flight can still see
    it."""
    oldest_run = select(func.min(runs.c.created_at)).where(runs.c.owner == owner).scalar_subquery()
    deleted_at = conversation_items.c.deleted_at
    return deleted_at.is_not(None) & (deleted_at < func.coalesce(oldest_run, BEYOND))


_CONVERSATION = (
    select(*(conversations.c[name] for name in ("owner", "deleted_at", "parent_id", "parent_head")))
    .where(conversations.c.id == bindparam("id"))
    .with_for_update()
)
_PLACES = (
    select(
        conversation_items.c.position,
        conversation_items.c.item_id,
        func.coalesce(SIZE, 0).label("size"),
    )
    .outerjoin_from(conversation_items, items, joined(conversation_items))
    .where(conversation_items.c.conversation_id == bindparam("id"))
    .limit(bindparam("most"))
)
_ALL = _PLACES.order_by(conversation_items.c.position)
_IS_UNSEEN = unseen(bindparam("owner", type_=Text))
# SQLite would walk through the whole conversation without the hint, at the end of each of its turns.
_UNSEEN = (
    _PLACES.with_hint(conversation_items, "INDEXED BY conversation_items_deleted", "sqlite")
    .where(_IS_UNSEEN)
    .order_by(conversation_items.c.deleted_at, conversation_items.c.position)
)
_UNSEEN_OR_UNSHARED = _PLACES.where(
    or_(conversation_items.c.position >= bindparam("needed"), _IS_UNSEEN)
).order_by(conversation_items.c.position)


def _shared_head(conn: Connection, id: str) -> int | None:
    """The position below which forks share the items of a conversation; None where there are no forks."""
    head = select(func.max(conversations.c.parent_head)).where(conversations.c.parent_id == id)
    return conn.execute(head).scalar()


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


def left_of_conversations(conn: Connection, after: str, limit: int) -> Sequence[str]:
    """The next deleted conversations, by their ids, of which there is more than responses and forks need."""
    child = conversations.alias("child")
    shared = select(func.coalesce(func.max(child.c.parent_head), 0)).where(
        child.c.parent_id == conversations.c.id
    )
    needed = shared.correlate(conversations).scalar_subquery()
    ran = exists().where(responses.c.conversation_id == conversations.c.id)
    beyond = exists().where(
        conversation_items.c.conversation_id == conversations.c.id, conversation_items.c.position >= needed
    )
    query = select(conversations.c.id).where(
        conversations.c.deleted_at.is_not(None),
        conversations.c.id > after,
        ~ran,
        or_(needed == 0, conversations.c.parent_head > needed, beyond),
    )
    return conn.execute(query.order_by(conversations.c.id).limit(limit)).scalars().all()


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
