"""Retention: removes what is older, or more, than the limits allow.

Readers look for what is to go, and it goes in transactions of a few milliseconds each, so that the writer is
never held up.

Ended responses go oldest first, by their age, and by their number and size in bytes for each owner; one that
went is as if its owner had deleted it, so what a later response or a conversation needs of it stays. That,
conversations, files and what is kept for repeats of requests count among an owner's bytes, and leave so much
less for responses. Runs in flight are never touched. Logs go by the age of their end, idle conversations by
their last use.

Whoever deletes responses or conversations hides them in one transaction, and erases them in others. What a
crash has left of that is taken up here.

Items that were deleted from conversations go here, too, where a run could still see them then, and no other
has ended in the same conversation since.

A sweep may be cut anywhere, and two may run at once: each step does nothing to what is gone already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    delete,
    false,
    func,
    literal,
    literal_column,
    or_,
    select,
    update,
)

from storage.drivers import Run
from storage.queries import conversations as talk
from storage.queries import events, garbage, idempotency, items
from storage.queries import responses as stored
from storage.records import TERMINAL_STATUSES, Limits, Swept, Usage
from storage.tables import (
    HELD_BYTES,
    chat_completions,
    conversation_items,
    conversations,
    metadata,
    records,
    responses,
    run_inputs,
    segments,
)
from storage.tables import usage as usage_rows

RESPONSES = 16
"""Responses that one step lets go of or measures."""
SEGMENTS = 32
"""Parts of logs, of 32 events or fewer, that one step erases."""


async def sweep(
    read: Run, write: Run, limits: Limits, now: int, owner: str | None = None
) -> AsyncGenerator[Swept]:
    """Lets go of what `limits` no longer cover at `now`; yields what went after each short transaction.

    owner: only this one's responses are looked at, by what limits them.
    """
    async for swept in _sweep_responses(read, write, limits, now, owner):
        yield swept
    if owner is None:
        async for swept in _sweep_rest(read, write, limits, now):
            yield swept
    while ids := await read(partial(_to_be_erased, owner=owner)):
        async for _ in erase(read, write, ids):
            yield Swept()


async def _sweep_rest(read: Run, write: Run, limits: Limits, now: int) -> AsyncGenerator[Swept]:
    if limits.conversation_age is not None:
        before = now - limits.conversation_age
        while ids := await read(partial(_idle_conversations, before=before)):
            for id in ids:
                gone = await write(partial(_delete_conversation, id=id, before=before, now=now))
                yield Swept(conversations=gone)
    left_of_deletions: Sequence[Callable[..., Sequence[str]]] = (
        _with_deleted_items,
        partial(garbage.left_of_conversations, limit=RESPONSES),
    )
    for left in left_of_deletions:
        after = ""
        while ids := await read(partial(left, after=after)):
            after = ids[-1]
            async for _ in collect(write, ids):
                yield Swept()
    if limits.log_age is not None:
        async for swept in _sweep_logs(read, write, now - limits.log_age, now):
            yield swept
    if limits.request_age is not None:
        while num := await write(partial(idempotency.sweep, before=now - limits.request_age)):
            yield Swept(requests=num)


# ------------------------------------------------------------------------------------------------------------
# Responses


def _ended() -> tuple[ColumnElement[bool], ...]:
    """The responses that are measured; in these words, because the index `responses_by_end` is on them."""
    return responses.c.completed_at.is_not(None), responses.c.deleted_at.is_(None)


def _unmeasured() -> tuple[ColumnElement[bool], ...]:
    """Those of them whose size is unknown; in these words, because `responses_unmeasured` is on them."""
    return *_ended(), responses.c.num_bytes == literal_column("0")


def _kept() -> tuple[ColumnElement[bool], ...]:
    """Those of them that limits speak of."""
    return *_ended(), ~responses.c.hidden


async def _sweep_responses(
    read: Run, write: Run, limits: Limits, now: int, only: str | None
) -> AsyncGenerator[Swept]:
    if limits.measured or limits.max_bytes is not None:
        for owner in await read(partial(_unmeasured_owners, only=only)):
            while sizes := await read(partial(_measure, owner=owner)):
                await write(partial(_note_sizes, sizes=sizes))
                yield Swept()
    oldest = None if limits.age is None else now - limits.age
    for owner in await read(partial(_owners_beyond, limits=limits, oldest=oldest, only=only)):
        limits_left = await read(partial(_left_of, owner=owner, limits=limits))
        last = await read(partial(_last_to_go, owner=owner, limits=limits_left, oldest=oldest))
        while last is not None and (ids := await read(partial(_up_to, owner=owner, last=last))):
            yield Swept(responses=await write(partial(_hide, ids=ids, now=now)))


def newest(conn: Connection, before: int | None) -> int | None:
    """When something was last used or stored before a time, or ever; None where nothing was. Whatever is
    generated counts as usage, and each of these columns has an index of its own."""
    columns = (usage_rows.c.start, conversations.c.used_at, chat_completions.c.created_at)
    times = []
    for column in columns:
        query = select(column).order_by(column.desc()).limit(1)
        if column.table is conversations:  # in these words, because the index is on them
            query = query.where(conversations.c.deleted_at.is_(None))
        if before is not None:
            query = query.where(column < before)
        times.append(conn.execute(query).scalar())
    return max((time for time in times if time), default=None)


def usage(conn: Connection, owner: str) -> Usage:
    """What an owner stores; a response that no sweep has measured yet counts nothing."""
    held = conn.execute(select(_held(literal(owner)))).scalar_one()
    ended = select(func.coalesce(func.sum(responses.c.num_bytes), 0))
    total = conn.execute(ended.where(responses.c.owner == owner, *_kept())).scalar_one()
    return Usage(int(held + total), int(held))


def num_bytes(conn: Connection) -> int:
    """What all owners store; responses without a measure count nothing."""
    ended = select(func.coalesce(func.sum(responses.c.num_bytes), 0)).where(*_ended())
    gone = select(func.coalesce(func.sum(responses.c.num_bytes), 0)).where(
        responses.c.deleted_at.is_not(None)
    )
    held = (select(func.coalesce(func.sum(column), 0)) for column in _held_columns())
    return sum(int(conn.execute(query).scalar_one()) for query in (ended, gone, *held))


def num_bytes_by_owner(conn: Connection) -> Mapping[str, int]:
    """What each owner stores, the largest first, counted the same way."""
    ended = select(responses.c.owner, responses.c.num_bytes).where(*_ended())
    gone = select(responses.c.owner, responses.c.num_bytes).where(responses.c.deleted_at.is_not(None))
    held = (select(column.table.c.owner, column) for column in _held_columns())
    total: Counter[str] = Counter()
    for rows in (ended, gone, *held):
        owner, size = rows.subquery().c
        sums = select(owner, func.coalesce(func.sum(size), 0)).group_by(owner)
        for name, num in conn.execute(sums):
            total[name] += int(num)
    return dict(total.most_common())


def _held(owner: ColumnElement[str]) -> ColumnElement[int]:
    """Bytes of an owner that no sweep by bytes lets go of."""
    total: ColumnElement[int] = literal(0)
    one = responses.alias("held")
    hidden = (one.c.completed_at.is_not(None), one.c.deleted_at.is_(None), one.c.hidden)
    for where in ((one.c.deleted_at.is_not(None),), hidden):
        held = select(func.coalesce(func.sum(one.c.num_bytes), 0)).where(one.c.owner == owner, *where)
        total = total + held.scalar_subquery()
    for column in _held_columns():
        table = column.table.alias()
        held = select(func.coalesce(func.sum(table.c[column.name]), 0)).where(table.c.owner == owner)
        total = total + held.scalar_subquery()
    return total


def _held_columns() -> tuple[Column[int], ...]:
    """How many bytes each row of a table keeps until its owner deletes it."""
    return tuple(
        column for table in metadata.sorted_tables for column in table.c if column.info == HELD_BYTES
    )


def _left_of(conn: Connection, owner: str, limits: Limits) -> Limits:
    """The limits of an owner's responses: their bytes are what is left beside what is held."""
    if limits.max_bytes is None:
        return limits
    return replace(limits, max_bytes=max(0, limits.max_bytes - usage(conn, owner).held))


def _owners_beyond(conn: Connection, limits: Limits, oldest: int | None, only: str | None) -> Sequence[str]:
    """The owners of whom something has to go."""
    size = func.sum(responses.c.num_bytes) + _held(responses.c.owner)
    beyond = _beyond(limits, oldest, func.count(), size, func.min(responses.c.completed_at))
    query = select(responses.c.owner).where(*_kept()).group_by(responses.c.owner).having(beyond)
    if only is not None:
        query = query.where(responses.c.owner == only)
    return conn.execute(query).scalars().all()


def _last_to_go(conn: Connection, owner: str, limits: Limits, oldest: int | None) -> tuple[int, str] | None:
    """The youngest response that has to go, as (completed_at, id).

    It is looked for once, and in one statement: sweepers that each counted down would let go of too many.
    """
    ended, id = responses.c.completed_at, responses.c.id
    newest_first = (ended.desc(), id.desc())
    place = func.row_number().over(order_by=newest_first).label("place")
    size = func.sum(responses.c.num_bytes).over(order_by=newest_first).label("size")
    ranked = select(ended, id, place, size).where(responses.c.owner == owner, *_kept()).subquery()
    beyond = _beyond(limits, oldest, ranked.c.place, ranked.c.size, ranked.c.completed_at)
    query = select(ranked.c.completed_at, ranked.c.id).where(beyond).order_by(ranked.c.place).limit(1)
    row = conn.execute(query).first()
    return None if row is None else (row.completed_at, row.id)


def _beyond(
    limits: Limits,
    oldest: int | None,
    count: ColumnElement[int],
    size: ColumnElement[int],
    completed_at: ColumnElement[int],
) -> ColumnElement[bool]:
    """Whether so many responses, of this size in all, are too much, or one that ended then is too old."""
    reasons: list[ColumnElement[bool]] = [false()]
    if oldest is not None:
        reasons.append(completed_at <= oldest)
    if limits.max_responses is not None:
        reasons.append(count > limits.max_responses)
    if limits.max_bytes is not None:
        reasons.append(size > limits.max_bytes)
    return or_(*reasons)


def _up_to(conn: Connection, owner: str, last: tuple[int, str]) -> Sequence[str]:
    ended, id = responses.c.completed_at, responses.c.id
    query = select(id).where(responses.c.owner == owner, *_kept())
    query = query.where(or_(ended < last[0], and_(ended == last[0], id <= last[1])))
    return conn.execute(query.order_by(ended, id).limit(RESPONSES)).scalars().all()


def _hide(conn: Connection, ids: Sequence[str], now: int) -> int:
    left = _hold(conn, ids)
    stored.hide(conn, left, now)
    return len(left)


def _hold(conn: Connection, ids: Sequence[str]) -> Sequence[str]:
    """Those that nobody has deleted, held, in one order: two sweepers never wait in a circle."""
    query = select(responses.c.id).where(responses.c.id.in_(ids), responses.c.deleted_at.is_(None))
    return conn.execute(query.order_by(responses.c.id).with_for_update()).scalars().all()


async def erase(read: Run, write: Run, ids: Sequence[str]) -> AsyncGenerator[None]:
    """Erases what is left of deleted responses: their logs, then those of them, and of the deleted ones
    before them, that nothing needs any more. Yields after each short transaction.

    It may be cut anywhere, and two may be at it at once.
    """
    while ids:
        part = await read(partial(segments_of, ids=ids))
        ids = await write(partial(_erase, ids=ids, part=list(part)))
        yield


def _erase(conn: Connection, ids: Sequence[str], part: Sequence[int]) -> Sequence[str]:
    """Erases parts of logs, and collects once these are the last ones; returns what is to be erased next."""
    events.erase_segments(conn, part)
    return ids if len(part) == SEGMENTS else garbage.collect_responses(conn, ids)


def _to_be_erased(conn: Connection, owner: str | None) -> Sequence[str]:
    query = select(responses.c.id).where(responses.c.deleted_at.is_not(None), responses.c.num_bytes == 0)
    if owner is not None:
        query = query.where(responses.c.owner == owner)
    return conn.execute(query.limit(RESPONSES)).scalars().all()


def segments_of(conn: Connection, ids: Sequence[str]) -> dict[int, str]:
    """Up to SEGMENTS parts of the logs of these responses, the last ones first, so that a reader finds a log
    that ends early, and none with a gap: segment -> response."""
    query = select(segments.c.id, segments.c.response_id).where(segments.c.response_id.in_(ids))
    query = query.order_by(segments.c.response_id.desc(), segments.c.first_seq.desc())
    return {id: response_id for id, response_id in conn.execute(query.limit(SEGMENTS)).all()}


# ------------------------------------------------------------------------------------------------------------
# Sizes


def _unmeasured_owners(conn: Connection, only: str | None) -> Sequence[str]:
    query = select(responses.c.owner).where(*_unmeasured()).distinct()
    if only is not None:
        query = query.where(responses.c.owner == only)
    return conn.execute(query).scalars().all()


def _measure(conn: Connection, owner: str) -> dict[str, int]:
    """The bytes that some responses of unknown size take: request, items, log."""
    fields = (responses.c.head, responses.c.echo, responses.c.plan)
    query = select(responses.c.id, sum(map(func.length, fields[1:]), func.length(fields[0])))
    query = query.where(responses.c.owner == owner, *_unmeasured())
    query = query.order_by(responses.c.completed_at, responses.c.id).limit(RESPONSES)  # as the index has them
    sizes = {id: int(size) for id, size in conn.execute(query).all()}
    log = (
        select(
            segments.c.response_id, func.sum(func.length(records.c.events) + func.length(records.c.token_ids))
        )
        .join_from(segments, records, records.c.segment == segments.c.id)
        .where(segments.c.response_id.in_(list(sizes)))
        .group_by(segments.c.response_id)
    )
    logs = {id: int(size) for id, size in conn.execute(log).all()}
    for part in (items.num_bytes_of(conn, list(sizes)), logs):
        for id, size in part.items():
            sizes[id] += size
    return {id: max(1, size) for id, size in sizes.items()}  # 0 would say that it is unknown


def _note_sizes(conn: Connection, sizes: dict[str, int]) -> None:
    value = case(sizes, value=responses.c.id)
    left = _hold(conn, list(sizes))
    conn.execute(update(responses).where(responses.c.id.in_(left)).values(num_bytes=value))


# ------------------------------------------------------------------------------------------------------------
# Conversations


def _idle_conversations(conn: Connection, before: int) -> Sequence[str]:
    table = conversations
    idle = (table.c.used_at <= before, table.c.deleted_at.is_(None), table.c.active_response_id.is_(None))
    return (
        conn.execute(select(table.c.id).where(*idle).order_by(table.c.used_at).limit(RESPONSES))
        .scalars()
        .all()
    )


def _delete_conversation(conn: Connection, id: str, before: int, now: int) -> int:
    """Deletes a conversation, unless it has been used meanwhile; returns how many that were."""
    table = conversations
    idle = (table.c.used_at <= before, table.c.deleted_at.is_(None), table.c.active_response_id.is_(None))
    row = conn.execute(select(table.c.owner).where(table.c.id == id, *idle).with_for_update()).first()
    if row is None:
        return 0
    talk.delete(conn, row.owner, id, now)
    return 1


async def collect(write: Run, ids: Sequence[str]) -> AsyncGenerator[None]:
    """Removes what nothing needs any more of conversations that were deleted or cleared, and of their
    ancestors. Yields after each short transaction; it may be cut anywhere, and two may be at it at once."""
    for id in ids:
        left: str | None = id
        while left is not None:
            left = await write(partial(garbage.collect_conversation, id=left))
            yield


def _with_deleted_items(conn: Connection, after: str) -> Sequence[str]:
    """The next conversations that have deleted items which no run in flight can see."""
    table = conversation_items
    query = select(table.c.conversation_id).where(garbage.unseen(table.c.owner))
    query = query.where(table.c.conversation_id > after).distinct().order_by(table.c.conversation_id)
    return conn.execute(query.limit(RESPONSES)).scalars().all()


# ------------------------------------------------------------------------------------------------------------
# Logs


async def _sweep_logs(read: Run, write: Run, before: int, now: int) -> AsyncGenerator[Swept]:
    """Erases the logs of runs that ended before this time.

    Segments are numbered in the order of time, so the walk begins at the oldest and ends at the first whose
    run is younger than `before`; whatever a cut sweep left of a log is met again.
    """
    after = 0
    while True:
        page = await read(partial(_oldest_segments, after=after, before=before))
        due = {row.id: row.response_id for row in page if row.due}
        if due:
            yield Swept(logs=await write(partial(_erase_logs, part=due, now=now)))
        if len(page) < SEGMENTS or any(row.created_at > before for row in page):
            return
        after = page[-1].id


def _oldest_segments(conn: Connection, after: int, before: int) -> Sequence[Row[*tuple[Any, ...]]]:
    ended = responses.c.status.in_(TERMINAL_STATUSES) & (responses.c.completed_at <= before)
    due = or_(ended, responses.c.log_erased_at.is_not(None)) & responses.c.deleted_at.is_(None)
    query = (
        select(segments.c.id, segments.c.response_id, responses.c.created_at, due.label("due"))
        .join_from(segments, responses, responses.c.id == segments.c.response_id)
        .where(segments.c.id > after)
    )
    return conn.execute(query.order_by(segments.c.id).limit(SEGMENTS)).all()


def _erase_logs(conn: Connection, part: dict[int, str], now: int) -> int:
    """Erases segments of ended runs, whose logs count as pruned now; returns how many were begun with."""
    ids = list(set(part.values()))
    _hold(conn, ids)
    whole = responses.c.id.in_(ids) & responses.c.log_erased_at.is_(None)
    begun = conn.execute(update(responses).where(whole).values(log_erased_at=now, num_bytes=0)).rowcount
    events.erase_segments(conn, sorted(part))
    conn.execute(delete(run_inputs).where(run_inputs.c.response_id.in_(ids)))
    return begun
