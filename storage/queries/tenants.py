"""Everything of one owner: pages of it for an export, and its removal (purge).

The cursor of an export outlives the row that it names. What is deleted and still stored is exported beside a
response that needs it, read in the same transaction.

Purge also deletes items that other items still reference. Everything that was there when it began is hidden
first and then removed, newest first, so that what is left never refers to what is gone. A purge that was
killed half-way is simply begun again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    delete,
    func,
    literal,
    or_,
    select,
    tuple_,
    update,
)

from storage import pairs
from storage.drivers import Run
from storage.lineage import Stretch, in_turn, stretches
from storage.queries import conversations as talk
from storage.queries import events, garbage, items
from storage.queries import responses as stored
from storage.queries.retention import RESPONSES, SEGMENTS, segments_of
from storage.records import (
    TERMINAL_STATUSES,
    DeletedConversation,
    DeletedResponse,
    ExportedResponse,
    NotFound,
    PositionedItem,
    Purged,
    StoredConversation,
    StoredItem,
    StoredResponse,
)
from storage.tables import (
    api_keys,
    batches,
    chat_completions,
    containers,
    conversation_items,
    conversations,
    deliveries,
    files,
    idempotency,
    metadata,
    person_usage,
    prompts,
    queue_shares,
    response_items,
    responses,
    runs,
    vector_stores,
    webhooks,
)
from storage.tables import items as item_rows
from storage.vector_stores import erase, let_go

ROWS = 100
"""Small rows that one step of a purge removes."""

Cursor = tuple[int, str]
"""(created_at, id) of the last row of the page before."""


def _behind(
    query: Select[*tuple[Any, ...]], table: Table, after: Cursor | None, limit: int
) -> Select[*tuple[Any, ...]]:
    created, id = table.c.created_at, table.c.id
    if after is not None:
        query = query.where(or_(created > after[0], and_(created == after[0], id > after[1])))
    return query.order_by(created, id).limit(limit)


def known(conn: Connection, owner: str) -> bool:
    """Whether any row names the owner."""
    return any(conn.execute(select(column).where(column == owner).limit(1)).first() for column in naming())


def naming() -> list[Column[str]]:
    """The columns that name an owner, in the order in which to look through them: the audit log, which has no
    index by owner, comes last."""
    named = [
        table for table in metadata.sorted_tables if "owner" in table.c and table.name not in _WITH_OTHERS
    ]
    return [table.c.owner for table in sorted(named, key=lambda table: table.name == "audit")]


_WITH_OTHERS = {"vector_chunks", "vector_store_slices", "deliveries"}
"""Tables without an index by owner. Their rows are there as long as rows of the file, the batch or the
webhook that they belong to, which name the owner, too."""


# ------------------------------------------------------------------------------------------------------------
# Export


def responses_behind(
    conn: Connection, owner: str, after: Cursor | None, limit: int, carried: Collection[str] = ()
) -> tuple[ExportedResponse, ...]:
    """The next responses that the owner sees, by time, each with its own input, and what is deleted that
    those of them need which have ended. carried: what an earlier page had of that, by ids."""
    query = _behind(select(responses.c.id).where(*stored.visible(owner)), responses, after, limit)
    found: list[ExportedResponse] = []
    here: set[str] = set()
    for id in conn.execute(query).scalars().all():
        one = stored.get(conn, owner, id)
        deleted: Sequence[DeletedResponse] = ()
        conversation = None
        if one.status in TERMINAL_STATUSES:
            deleted, conversation = _deleted_before(conn, one, lambda id: id in here or id in carried)
            here.update(each.id for each in deleted)
            if conversation is not None:
                here.add(conversation.conversation.id)
        found.append(ExportedResponse(one, stored.own_input(conn, id), tuple(deleted), conversation))
    return tuple(found)


_KEPT = (
    *("id", "created_at", "completed_at", "status", "model", "background"),
    *("previous_response_id", "conversation_id", "conversation_head", "deleted_at"),
)
"""What is left of a deleted response, beside its items."""


def _deleted_before(
    conn: Connection, one: StoredResponse, is_carried: Callable[[str], bool]
) -> tuple[Sequence[DeletedResponse], DeletedConversation | None]:
    """The deleted responses that one stands on, the nearest first, up to one that is seen, or is carried
    already, and the deleted conversation that this history begins with, unless it is carried."""
    rows: list[Row[*tuple[Any, ...]]] = []
    root = one.conversation_id
    if root is None and one.previous_response_id is not None:
        for row in conn.execute(_chain(one.owner, one.previous_response_id)).all():
            if is_carried(row.id):  # and so is all before it
                root = None
                break
            rows.append(row)
            root = row.conversation_id
    said, answered = _turns(conn, [row.id for row in rows])
    deleted = [
        DeletedResponse(
            **{name: getattr(row, name) for name in _KEPT},
            input=tuple(said[row.id]),
            output=tuple(answered[row.id]),
        )
        for row in rows
    ]
    if root is None or is_carried(root):
        return deleted, None
    return deleted, _deleted_conversation(conn, one.owner, root)


def _chain(owner: str, id: str) -> Select[*tuple[Any, ...]]:
    """A response and those that it continues, the nearest first, as long as they are deleted. One that ran in
    a conversation stands on nothing else."""
    above = responses.alias("above")
    first = select(*(responses.c[name] for name in _KEPT), literal(0).label("depth")).where(
        responses.c.id == id, responses.c.owner == owner, responses.c.deleted_at.is_not(None)
    )
    deleted = first.cte("deleted", recursive=True)
    chain = deleted.union_all(
        select(*(above.c[name] for name in _KEPT), deleted.c.depth + 1).where(
            above.c.id == deleted.c.previous_response_id,
            above.c.owner == owner,
            above.c.deleted_at.is_not(None),
            deleted.c.conversation_id.is_(None),
        )
    )
    return select(chain).order_by(chain.c.depth)


_Items = defaultdict[str, list[StoredItem]]


def _turns(conn: Connection, ids: Sequence[str]) -> tuple[_Items, _Items]:
    """The input and the output of responses, those of forks included, by their ids."""
    said, answered = _Items(list), _Items(list)
    for part in items.parts(ids):
        query = (
            select(*items.COLUMNS, responses.c.id.label("response_id"), response_items.c.direction)
            .join_from(responses, response_items, in_turn(responses))
            .join(item_rows, items.joined(response_items))
            .where(responses.c.id.in_(part))
            .order_by(responses.c.id, response_items.c.direction, response_items.c.position)
        )
        for row in conn.execute(query).all():
            (said if row.direction == "in" else answered)[row.response_id].append(items.stored_item(row))
    return said, answered


def _deleted_conversation(conn: Connection, owner: str, id: str) -> DeletedConversation | None:
    """What responses that are seen need of a deleted conversation; None where that is nothing."""
    columns = [conversations.c[name] for name in talk.STORED]
    row = conn.execute(
        select(*columns, conversations.c.deleted_at).where(
            conversations.c.id == id, conversations.c.owner == owner, conversations.c.deleted_at.is_not(None)
        )
    ).first()
    head = conn.execute(_needed_head(owner, id)).scalar() if row is not None else None
    if row is None or not head:
        return None
    pieces = [
        Stretch(piece.conversation_id, piece.low, min(piece.high, head))
        for piece in stretches(conn, owner, id, row.parent_id)
    ]
    found: list[PositionedItem] = []
    more = True
    while more:
        after = found[-1].position if found else None
        page, more = items.page_of_places(conn, pieces, limit=head, after=after)
        found += page
    return DeletedConversation(StoredConversation(*row[:-1]), row.deleted_at, tuple(found)) if found else None


def _needed_head(owner: str, id: str) -> Select[int]:
    """The highest position of a conversation that the history of an ended response reaches which the owner
    sees: one that ran in it, or that continues such a one by deleted ones alone."""
    below = responses.alias("below")
    names = ("id", "status", "store", "hidden", "deleted_at")
    ran = select(*(responses.c[name] for name in names), responses.c.conversation_head.label("head")).where(
        responses.c.conversation_id == id, responses.c.owner == owner
    )
    above = ran.cte("standing", recursive=True)
    standing = above.union_all(
        select(*(below.c[name] for name in names), above.c.head).where(
            below.c.previous_response_id == above.c.id,
            below.c.owner == owner,
            below.c.conversation_id.is_(None),
            above.c.deleted_at.is_not(None),
        )
    )
    seen = (standing.c.deleted_at.is_(None), standing.c.store, ~standing.c.hidden)
    return select(func.max(standing.c.head)).where(*seen, standing.c.status.in_(TERMINAL_STATUSES))


def conversations_behind(
    conn: Connection, owner: str, after: Cursor | None, limit: int
) -> tuple[StoredConversation, ...]:
    """The owner's next conversations, by time."""
    columns = [conversations.c[name] for name in talk.STORED]
    query = select(*columns).where(conversations.c.owner == owner, conversations.c.deleted_at.is_(None))
    rows = conn.execute(_behind(query, conversations, after, limit)).all()
    return tuple(StoredConversation(*row) for row in rows)


def conversation_items_behind(
    conn: Connection, owner: str, id: str, after: int, limit: int
) -> tuple[PositionedItem, ...]:
    """The next items of a conversation above position `after`, those before its fork included; none if it is
    gone."""
    try:
        row = talk.live(conn, owner, id, change=False)
    except NotFound:
        return ()
    pieces = stretches(conn, owner, id, row.parent_id)
    found, _ = items.page_of_places(conn, pieces, limit=limit, after=after)
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------
# Purge


def purgeable(conn: Connection, owner: str, now: int) -> Purged:
    """What a purge would remove that begins at `now`, with the owner's keys."""

    def num(table: Table, *where: ColumnElement[bool]) -> int:
        return conn.execute(select(func.count()).where(table.c.owner == owner, *where)).scalar_one()

    def had(table: Table) -> int:
        return num(table, table.c.created_at <= now)

    in_flight = (
        select(runs.c.response_id)
        .join_from(runs, responses, runs.c.response_id == responses.c.id)
        .where(runs.c.owner == owner, responses.c.created_at <= now)
    )
    return Purged(
        responses=had(responses),
        conversations=had(conversations),
        webhooks=num(webhooks),
        keys=num(api_keys, api_keys.c.revoked_at.is_(None)),
        runs=tuple(conn.execute(in_flight).scalars()),
        files=had(files),
        containers=had(containers),
        chat_completions=had(chat_completions),
        batches=had(batches),
        vector_stores=num(
            vector_stores, vector_stores.c.created_at <= now, vector_stores.c.deleted_at.is_(None)
        ),
        prompts=had(prompts),
    )


async def purge(
    read: Run,
    write: Run,
    owner: str,
    now: int,
    note: Callable[[Connection], None] | None,
    *,
    with_keys: bool,
    settle: stored.Settle | None = None,
) -> AsyncGenerator[Purged]:
    """Removes what an owner had at `now`; yields what went after each short transaction.

    Runs in flight are cut: their next append is lost. note: writes down, first of all, that this is done.
    with_keys: its keys are revoked in that same transaction. settle: counts what runs that are cut have used.
    """

    def begin(conn: Connection) -> int:
        if note is not None:
            note(conn)
        return _revoke_keys(conn, owner, now) if with_keys else 0

    keys = await write(begin)
    if with_keys:
        yield Purged(keys=keys)
    while (found := await read(partial(_next_responses, owner=owner, before=now))).ids:
        ids = found.ids
        if found.live:
            yield Purged(runs=tuple(await write(partial(stored.hide, ids=ids, now=now, settle=settle))))
            continue
        while len(part := await read(partial(segments_of, ids=ids))) >= SEGMENTS:
            await write(partial(events.erase_segments, ids=list(part)))
            yield Purged()
        yield Purged(responses=await write(partial(_remove_responses, ids=ids)))
    while ids := await read(partial(_newest, table=conversations, owner=owner, before=now)):
        while await write(partial(_empty_conversations, ids=ids, now=now)):
            yield Purged()
        yield Purged(conversations=await write(partial(_remove_conversations, ids=ids)))
    while num := await write(partial(let_go, owner=owner, before=now, now=now)):
        yield Purged(vector_stores=num)
    while await write(partial(erase, owner=owner)):
        yield Purged()
    rest: Sequence[tuple[Table, ColumnElement[bool]]] = (
        (deliveries, deliveries.c.owner == owner),
        (webhooks, webhooks.c.owner == owner),
        (queue_shares, queue_shares.c.owner == owner),
        (person_usage, person_usage.c.owner == owner),  # the owner's own sums stay, and name nobody
        (idempotency, and_(idempotency.c.owner == owner, idempotency.c.created_at <= now)),
    )
    for table, where in rest:
        while num := await write(partial(_remove_some, table=table, where=where)):
            yield Purged(webhooks=num if table is webhooks else 0)
    while ids := await read(partial(_unlisted_items, owner=owner)):
        await write(partial(garbage.collect_items, owner=owner, ids=ids))
        yield Purged()


def _revoke_keys(conn: Connection, owner: str, now: int) -> int:
    # Not deleted: without any key in the database, a server on loopback would ask for none.
    live = update(api_keys).where(api_keys.c.owner == owner, api_keys.c.revoked_at.is_(None))
    return conn.execute(live.values(revoked_at=now)).rowcount


class _Next(NamedTuple):
    """Responses that a purge takes next. live: they are to be hidden; the others, to be removed."""

    ids: Sequence[str]
    live: bool


_STATUSES = ("queued", "in_progress", *TERMINAL_STATUSES)


def _next_responses(conn: Connection, owner: str, before: int) -> _Next:
    """Those that are live, runs in flight first; where there are none, the newest. Both of one moment: where
    a start commits while others are removed, it is hidden, too, before it is removed."""
    for status in _STATUSES:  # by an index that has none of the hidden ones, which nothing walks over so
        live = _newest(
            conn, responses, owner, before, responses.c.status == status, responses.c.deleted_at.is_(None)
        )
        if live:
            return _Next(live, live=True)
    return _Next(_newest(conn, responses, owner, before), live=False)


def _newest(
    conn: Connection, table: Table, owner: str, before: int, *where: ColumnElement[bool]
) -> Sequence[str]:
    query = (
        select(table.c.id)
        .where(table.c.owner == owner, table.c.created_at <= before, *where)
        .order_by(table.c.created_at.desc(), table.c.id.desc())
        .limit(RESPONSES)
    )
    return conn.execute(query).scalars().all()


def _remove_responses(conn: Connection, ids: Sequence[str]) -> int:
    """Removes hidden responses with what is left of their logs, whoever refers to them."""
    events.erase(conn, ids)
    garbage.remove_responses(conn, ids)
    return len(ids)


def _empty_conversations(conn: Connection, ids: Sequence[str], now: int) -> int:
    """Hides conversations, and takes some of their items out; returns how many."""
    conn.execute(update(conversations).where(conversations.c.id.in_(ids)).values(deleted_at=now))
    pairs.forget(conn, ids)
    table = conversation_items
    columns = (table.c.conversation_id, table.c.position, table.c.owner, table.c.item_id)
    rows = conn.execute(select(*columns).where(table.c.conversation_id.in_(ids)).limit(ROWS)).all()
    places = [(row.conversation_id, row.position) for row in rows]
    conn.execute(delete(table).where(tuple_(table.c.conversation_id, table.c.position).in_(places)))
    for owner in {row.owner for row in rows}:
        garbage.collect_items(conn, owner, [row.item_id for row in rows])
    return len(rows)


def _remove_conversations(conn: Connection, ids: Sequence[str]) -> int:
    return conn.execute(delete(conversations).where(conversations.c.id.in_(ids))).rowcount


def _unlisted_items(conn: Connection, owner: str) -> Sequence[str]:
    query = select(item_rows.c.id).where(item_rows.c.owner == owner, garbage.unlisted())
    return conn.execute(query.limit(ROWS)).scalars().all()


def _remove_some(conn: Connection, table: Table, where: ColumnElement[bool]) -> int:
    key = tuple(table.primary_key.columns)
    some = select(*key).where(where).limit(ROWS)
    return conn.execute(delete(table).where(tuple_(*key).in_(some))).rowcount
