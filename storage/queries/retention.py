"""Retention: what is let go of by itself, and in what order.

Owns: the limits' meaning, and how they are kept without holding the writer: what is to go is looked for by
the readers, and goes in transactions of a few milliseconds each. Refuses to know: when a sweep is due, and
what a limit should be.

Ended responses go oldest first, by their age, and by their number and size in bytes for each owner; one that
went is as if its owner had deleted it, so what a later response or a conversation needs of it stays, and is
not counted. Runs in flight are never touched. Logs go by the age of their end.

A sweep may be cut anywhere, and two may run at once: each step does nothing to what is gone already.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    delete,
    false,
    func,
    or_,
    select,
    update,
)

from storage.queries import events, idempotency
from storage.queries import responses as stored
from storage.records import TERMINAL_STATUSES, Limits, Swept
from storage.tables import items, records, response_items, responses, run_inputs, segments

T = TypeVar("T")

RESPONSES = 16
"""Responses that one step lets go of or measures."""
SEGMENTS = 32
"""Parts of logs, of 32 events or fewer, that one step erases."""


class Run(Protocol):
    """Runs a job in a transaction: that of a reader, or of the writer."""

    def __call__(self, job: Callable[[Connection], T], /) -> Awaitable[T]: ...


async def sweep(read: Run, write: Run, limits: Limits, now: int) -> AsyncGenerator[Swept]:
    """Lets go of what `limits` no longer cover at `now`; yields what went after each short transaction."""
    async for swept in _sweep_responses(read, write, limits, now):
        yield swept
    if limits.log_age is not None:
        async for swept in _sweep_logs(read, write, now - limits.log_age, now):
            yield swept
    if limits.request_age is not None:
        while num := await write(partial(idempotency.sweep, before=now - limits.request_age)):
            yield Swept(requests=num)


# ------------------------------------------------------------------------------------------------------------
# Responses


def _kept() -> tuple[ColumnElement[bool], ...]:
    """The responses that limits speak of; in these words, because the index `responses_by_end` is on them."""
    return responses.c.completed_at.is_not(None), responses.c.deleted_at.is_(None), ~responses.c.hidden


async def _sweep_responses(read: Run, write: Run, limits: Limits, now: int) -> AsyncGenerator[Swept]:
    if limits.max_bytes is not None:
        for owner in await read(_unmeasured_owners):
            while sizes := await read(partial(_measure, owner=owner)):
                await write(partial(_note_sizes, sizes=sizes))
                yield Swept()
    oldest = None if limits.age is None else now - limits.age
    for owner in await read(partial(_owners_beyond, limits=limits, oldest=oldest)):
        last = await read(partial(_last_to_go, owner=owner, limits=limits, oldest=oldest))
        while last is not None and (ids := await read(partial(_up_to, owner=owner, last=last))):
            async for swept in _let_go(read, write, ids, now):
                yield swept


def _owners_beyond(conn: Connection, limits: Limits, oldest: int | None) -> Sequence[str]:
    """The owners of whom something has to go."""
    beyond = _beyond(
        limits, oldest, func.count(), func.sum(responses.c.num_bytes), func.min(responses.c.completed_at)
    )
    query = select(responses.c.owner).where(*_kept()).group_by(responses.c.owner).having(beyond)
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


async def _let_go(read: Run, write: Run, ids: Sequence[str], now: int) -> AsyncGenerator[Swept]:
    """Deletes ended responses, after as much of their logs as is too much for one transaction."""
    while ids:
        part = await read(partial(segments_of, ids=ids))
        if len(part) < SEGMENTS:
            yield Swept(responses=await write(partial(_delete, ids=ids, now=now)))
            return
        yield Swept(logs=await write(partial(_erase_logs, part=part, now=now)))


def _delete(conn: Connection, ids: Sequence[str], now: int) -> int:
    left = _hold(conn, ids)
    stored.erase(conn, left, now)
    return len(left)


def _hold(conn: Connection, ids: Sequence[str]) -> Sequence[str]:
    """Those that nobody has deleted, held, in one order: two sweepers never wait in a circle."""
    query = select(responses.c.id).where(responses.c.id.in_(ids), responses.c.deleted_at.is_(None))
    return conn.execute(query.order_by(responses.c.id).with_for_update()).scalars().all()


# ------------------------------------------------------------------------------------------------------------
# Sizes


def _unmeasured_owners(conn: Connection) -> Sequence[str]:
    query = select(responses.c.owner).where(responses.c.num_bytes == 0, *_kept()).distinct()
    return conn.execute(query).scalars().all()


def _measure(conn: Connection, owner: str) -> dict[str, int]:
    """The bytes that some responses of unknown size take: request, items, log."""
    fields = (responses.c.head, responses.c.echo, responses.c.plan)
    query = select(responses.c.id, sum(map(func.length, fields[1:]), func.length(fields[0])))
    query = query.where(responses.c.owner == owner, responses.c.num_bytes == 0, *_kept())
    # The latest ones are those that no earlier sweep has seen.
    query = query.order_by(responses.c.completed_at.desc(), responses.c.id).limit(RESPONSES)
    sizes = {id: int(size) for id, size in conn.execute(query).all()}
    own_items = (
        select(response_items.c.response_id, func.sum(func.length(items.c.body)))
        .join_from(
            response_items,
            items,
            (items.c.owner == response_items.c.owner) & (items.c.id == response_items.c.item_id),
        )
        .where(response_items.c.response_id.in_(list(sizes)))
        .group_by(response_items.c.response_id)
    )
    log = (
        select(
            segments.c.response_id, func.sum(func.length(records.c.events) + func.length(records.c.token_ids))
        )
        .join_from(segments, records, records.c.segment == segments.c.id)
        .where(segments.c.response_id.in_(list(sizes)))
        .group_by(segments.c.response_id)
    )
    for part in (own_items, log):
        for id, size in conn.execute(part).all():
            sizes[id] += int(size)
    return {id: max(1, size) for id, size in sizes.items()}  # 0 would say that it is unknown


def _note_sizes(conn: Connection, sizes: dict[str, int]) -> None:
    value = case(sizes, value=responses.c.id)
    left = _hold(conn, list(sizes))
    conn.execute(update(responses).where(responses.c.id.in_(left)).values(num_bytes=value))


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
    due = or_(ended, responses.c.log_erased_at.is_not(None)).label("due")
    query = (
        select(segments.c.id, segments.c.response_id, responses.c.created_at, due)
        .join_from(segments, responses, responses.c.id == segments.c.response_id)
        .where(segments.c.id > after)
    )
    return conn.execute(query.order_by(segments.c.id).limit(SEGMENTS)).all()


def segments_of(conn: Connection, ids: Sequence[str]) -> dict[int, str]:
    """Up to SEGMENTS parts of the logs of these responses: segment -> response."""
    query = select(segments.c.id, segments.c.response_id).where(segments.c.response_id.in_(ids))
    return {id: response_id for id, response_id in conn.execute(query.limit(SEGMENTS)).all()}


def _erase_logs(conn: Connection, part: dict[int, str], now: int) -> int:
    """Erases segments of ended runs, whose logs count as pruned now; returns how many were begun with."""
    ids = list(set(part.values()))
    _hold(conn, ids)
    whole = responses.c.id.in_(ids) & responses.c.log_erased_at.is_(None)
    begun = conn.execute(update(responses).where(whole).values(log_erased_at=now, num_bytes=0)).rowcount
    events.erase_segments(conn, sorted(part))
    conn.execute(delete(run_inputs).where(run_inputs.c.response_id.in_(ids)))
    return begun
