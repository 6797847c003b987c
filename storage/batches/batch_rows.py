"""The statements on batches; each function runs inside a transaction that its caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from storage.batches.records import (
    COMPLETED,
    MAX_BATCH_ATTEMPTS,
    OPEN,
    RESTS_S,
    BatchCounts,
    BatchEnd,
    BatchEnded,
    BatchLine,
    BatchLost,
    NewBatch,
    OwnerShare,
    StoredBatch,
    TooManyBatches,
)
from storage.claims import claimable
from storage.files import StoredFile
from storage.records import Cursor, NotFound, Order, Page
from storage.tables import batch_lines, batches, files, owners, runners

ROWS = 500
"""Lines that one step writes or removes."""

RESULT_BYTES = 8 << 20
"""Results that are read at once; a single one may be larger."""

_COLUMNS = [batches.c[field.name] for field in fields(StoredBatch)]

_INDEXED = (batches, "INDEXED BY batches_open", "sqlite")
"""For `Select.with_hint`, where SQLite would look through an owner's batches that have ended as well."""


def create(conn: Connection, new: NewBatch, most: int) -> StoredBatch:
    """Stores a batch that is to be validated. TooManyBatches where the owner has `most` already."""
    # One after the other, also where several processes create some.
    conn.execute(select(owners.c.id).where(owners.c.id == new.owner).with_for_update())
    going = select(func.count()).where(batches.c.owner == new.owner, batches.c.ended_at.is_(None))
    if conn.execute(going.with_hint(*_INDEXED)).scalar_one() >= most:
        raise TooManyBatches(most)
    started = {
        "status": "validating",
        "fence": 0,
        "num_bytes": 0,
        "total": 0,
        "completed": 0,
        "failed": 0,
        "attempts": 0,
    }
    conn.execute(insert(batches).values(**asdict(new), **started))
    return get(conn, new.owner, new.id)


def get(conn: Connection, owner: str, id: str) -> StoredBatch:
    """NotFound("batch")."""
    row = conn.execute(select(*_COLUMNS).where(batches.c.id == id, batches.c.owner == owner)).first()
    if row is None:
        raise NotFound("batch", id)
    return _stored(row)


def list_(conn: Connection, owner: str, limit: int, order: Order, after: Cursor | None) -> Page[StoredBatch]:
    """One page, by time and then id. NotFound("batch") for an unknown `after`."""
    place = tuple_(batches.c.created_at, batches.c.id)
    query = select(*_COLUMNS).where(batches.c.owner == owner)
    if after is not None:
        if isinstance(after, str):
            last = get(conn, owner, after)
            after = (last.created_at, last.id)
        at = tuple_(*after)
        query = query.where(place > at if order == "asc" else place < at)
    by_time = (batches.c.created_at, batches.c.id)
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    rows = conn.execute(query.limit(limit + 1)).all()
    return Page(tuple(_stored(row) for row in rows[:limit]), len(rows) > limit)


def _stored(row: Row[*tuple[Any, ...]]) -> StoredBatch:
    return StoredBatch(**row._mapping)


def cancel(conn: Connection, owner: str, id: str, now: int) -> StoredBatch:
    """Asks whoever carries a batch on to end it. NotFound("batch"), BatchEnded."""
    held = select(batches.c.status).where(batches.c.id == id, batches.c.owner == owner).with_for_update()
    status = conn.execute(held).scalar()
    if status in ("validating", "in_progress"):
        conn.execute(update(batches).where(batches.c.id == id).values(status="cancelling", cancelling_at=now))
    elif status not in (None, "cancelling", "finalizing"):
        raise BatchEnded(id, status)
    return get(conn, owner, id)


# -- whose work it is ----------------------------------------------------------------------------------------


def any_of_others(conn: Connection, runner: str, held: Sequence[str]) -> bool:
    """Whether any batch is to be carried on that this process does not; it may be another one's."""
    query = select(batches.c.id).where(
        batches.c.ended_at.is_(None),
        or_(batches.c.runner.is_distinct_from(runner), batches.c.id.not_in(held)),
    )
    return conn.execute(query.limit(1)).first() is not None


def _free(runner: str, held: Sequence[str], *, shared: bool) -> ColumnElement[bool]:
    """Whether nobody carries a batch on. held: what this process has in hand."""
    return claimable(batches.c.runner, runner, (batches.c.id,), [(id,) for id in held], shared=shared)


def _waiting(free: ColumnElement[bool], now: int) -> ColumnElement[bool]:
    """Whether a batch can be claimed: nobody carries it on, and it does not rest."""
    return and_(free, or_(batches.c.retry_at.is_(None), batches.c.retry_at <= now))


def shares(
    conn: Connection, runner: str, held: Sequence[str], now: int, *, shared: bool
) -> tuple[OwnerShare, ...]:
    """What each owner has going."""
    free = _free(runner, held, shared=shared)
    query = select(
        batches.c.owner,
        func.sum(case((free, 0), else_=1)),
        func.sum(case((_waiting(free, now), 1), else_=0)),
    )
    rows = conn.execute(query.where(batches.c.ended_at.is_(None)).group_by(batches.c.owner)).all()
    return tuple(OwnerShare(owner, int(carried), int(waiting)) for owner, carried, waiting in rows)


def claim(
    conn: Connection, runner: str, limit: int, held: Sequence[str], now: int, *, shared: bool
) -> list[StoredBatch]:
    """Takes over batches that nobody carries on. Owners take turns: first comes the one of whose batches the
    fewest are carried on, and of several the one whose turn was longest ago.

    shared: processes that do not beat are dead, this one's own beat is there.
    """
    if shared and conn.execute(select(runners.c.id).where(runners.c.id == runner)).first() is None:
        return []
    found: list[StoredBatch] = []
    while len(found) < limit:
        free = _free(runner, [*held, *(batch.id for batch in found)], shared=shared)
        turn = (
            select(
                batches.c.owner,
                func.sum(case((free, 0), else_=1)).label("carried"),
                func.max(batches.c.claimed_at).label("claimed_at"),
            )
            .where(batches.c.ended_at.is_(None))
            .group_by(batches.c.owner)
            .subquery()
        )
        query = (
            select(batches.c.id, batches.c.attempts, batches.c.expires_at)
            .with_hint(*_INDEXED)
            .join_from(batches, turn, turn.c.owner == batches.c.owner)
            .where(batches.c.ended_at.is_(None), _waiting(free, now))
            .order_by(
                turn.c.carried,
                turn.c.claimed_at.nulls_first(),
                batches.c.claimed_at.nulls_first(),
                batches.c.created_at,
                batches.c.id,
            )
        )
        row = conn.execute(query.limit(1).with_for_update(of=batches, skip_locked=True)).first()
        if row is None:
            break
        taken = {
            "runner": runner,
            "fence": batches.c.fence + 1,
            "attempts": row.attempts + 1,
            "claimed_at": now,
            "retry_at": _rested(row.attempts + 1, now, row.expires_at),
        }
        conn.execute(update(batches).where(batches.c.id == row.id).values(taken))
        found.append(_stored(conn.execute(select(*_COLUMNS).where(batches.c.id == row.id)).one()))
    return found


def _rested(attempts: int, now: int, expires_at: int) -> int:
    """When a batch is tried again whose latest claims, so many of them, came to nothing; at its end, too."""
    at = now + RESTS_S[min(attempts, len(RESTS_S)) - 1] * 1_000_000
    return min(at, expires_at) if expires_at > now else at


_NEVER_MADE = {
    "runner": None,
    "retry_at": None,
    "attempts": case((batches.c.attempts > 0, batches.c.attempts - 1), else_=0),
}
"""What takes a batch from its process as if it had never claimed it."""


def free_all(conn: Connection) -> None:
    """Takes batches from all processes, whose claims may have come to nothing."""
    conn.execute(update(batches).where(batches.c.runner.is_not(None)).values(runner=None))


def release(conn: Connection, runner: str) -> None:
    """A process ends well: what it carried on is nobody's."""
    conn.execute(update(batches).where(batches.c.runner == runner).values(_NEVER_MADE))


def give_back(conn: Connection, batch: StoredBatch, runner: str) -> None:
    """Leaves a batch to whoever claims it next. BatchLost."""
    _mine(conn, batch, runner)
    conn.execute(update(batches).where(batches.c.id == batch.id).values(_NEVER_MADE))


def set_back(conn: Connection, batch: StoredBatch, runner: str, now: int) -> bool:
    """Lets a batch rest whose carrying failed. False, and nothing is changed, where that was so too often, or
    its time is up. BatchLost."""
    _mine(conn, batch, runner)
    query = select(batches.c.attempts, batches.c.expires_at).where(batches.c.id == batch.id)
    attempts, expires_at = conn.execute(query).one()
    if attempts >= MAX_BATCH_ATTEMPTS or now >= expires_at:
        return False
    rests = {"runner": None, "retry_at": _rested(max(1, attempts), now, expires_at)}
    conn.execute(update(batches).where(batches.c.id == batch.id).values(rests))
    return True


def counts(conn: Connection) -> BatchCounts:
    """Of the batches of all owners."""
    lines = func.sum(batches.c.total - batches.c.completed - batches.c.failed)
    query = select(batches.c.status, func.count(), lines).where(batches.c.ended_at.is_(None))
    rows = conn.execute(query.group_by(batches.c.status)).all()
    return BatchCounts({status: num for status, num, _ in rows}, sum(int(waiting) for _, _, waiting in rows))


def _mine(conn: Connection, batch: StoredBatch, runner: str) -> str:
    """The status of a batch that this process carries on. BatchLost."""
    query = select(batches.c.status).where(
        batches.c.id == batch.id,
        batches.c.runner == runner,
        batches.c.fence == batch.fence,
        batches.c.ended_at.is_(None),
    )
    status: str | None = conn.execute(query.with_for_update()).scalar()
    if status is None:
        raise BatchLost(batch.id)
    return status


# -- carrying it on; all of these raise BatchLost ------------------------------------------------------------


def clear(conn: Connection, batch: StoredBatch, runner: str) -> int:
    """Removes some lines of a batch whose validation was cut short; returns how many."""
    _mine(conn, batch, runner)
    return _remove_lines(conn, batch_lines.c.batch_id == batch.id)


def add_lines(conn: Connection, batch: StoredBatch, runner: str, lines: Sequence[BatchLine]) -> None:
    """Stores lines, all of them open."""
    _mine(conn, batch, runner)
    conn.execute(
        insert(batch_lines), [{**asdict(line), "batch_id": batch.id, "status": OPEN} for line in lines]
    )


def begin(conn: Connection, batch: StoredBatch, runner: str, now: int) -> None:
    """All lines are stored: they may be carried out, unless the batch was cancelled meanwhile."""
    status = _mine(conn, batch, runner)
    num = select(func.count()).where(batch_lines.c.batch_id == batch.id).scalar_subquery()
    begun = update(batches).where(batches.c.id == batch.id)
    conn.execute(begun.values(total=num, attempts=0, retry_at=None))
    if status == "validating":
        conn.execute(begun.values(status="in_progress", in_progress_at=now))


def finish_line(
    conn: Connection,
    batch: StoredBatch,
    runner: str,
    position: int,
    status: str,
    result: bytes,
    now: int,
    used: bytes | None,
) -> bool:
    """Gives an open line its result; a line that has one keeps it, and is False."""
    _mine(conn, batch, runner)
    line = update(batch_lines).where(
        batch_lines.c.batch_id == batch.id, batch_lines.c.position == position, batch_lines.c.status == OPEN
    )
    if not conn.execute(line.values(status=status, result=result, used=used, ended_at=now)).rowcount:
        return False
    counted = batches.c.completed if status == COMPLETED else batches.c.failed
    got_on: dict[Any, Any] = {
        counted: counted + 1,
        batches.c.num_bytes: batches.c.num_bytes + len(result),
        batches.c.attempts: 0,
        batches.c.retry_at: None,
    }
    conn.execute(update(batches).where(batches.c.id == batch.id).values(got_on))
    return True


def finalize(conn: Connection, batch: StoredBatch, runner: str, now: int) -> None:
    """No line is carried out any more."""
    if _mine(conn, batch, runner) == "in_progress":
        done = update(batches).where(batches.c.id == batch.id)
        conn.execute(done.values(status="finalizing", finalizing_at=now))


def end(
    conn: Connection,
    batch: StoredBatch,
    runner: str,
    ended: BatchEnd,
    output: StoredFile | None,
    errors: StoredFile | None,
) -> None:
    """Ends a batch, with its files, whose blobs have been put. Its lines go by `tidy`."""
    _mine(conn, batch, runner)
    for file in (output, errors):
        if file is not None:
            conn.execute(insert(files).values(asdict(file)))
    values = {
        "status": ended.status,
        "ended_at": ended.at,
        "errors": ended.errors,
        "usage": ended.usage,
        "model": ended.model,
        "output_file_id": None if output is None else output.id,
        "error_file_id": None if errors is None else errors.id,
        "digest": None,
        "num_bytes": 0,
        "runner": None,
        "retry_at": None,
    }
    conn.execute(update(batches).where(batches.c.id == batch.id).values(values))


# -- lines ---------------------------------------------------------------------------------------------------


def open_lines(conn: Connection, batch_id: str, after: int, limit: int) -> list[BatchLine]:
    """The next lines without a result, behind a position."""
    table = batch_lines.c
    query = select(table.position, table.custom_id, table.start, table.stop).where(
        table.batch_id == batch_id, table.status == OPEN, table.position > after
    )
    return [BatchLine(*row) for row in conn.execute(query.order_by(table.position).limit(limit)).all()]


def results(
    conn: Connection, batch_id: str, status: str, after: tuple[int, int]
) -> list[tuple[tuple[int, int], bytes, bytes | None]]:
    """The next results, by the time of their end: the place of each, its line of a file, and what it used.
    So many as have RESULT_BYTES, and at least one if there is one."""
    table = batch_lines.c
    place = tuple_(table.ended_at, table.position)
    behind = (table.batch_id == batch_id, table.status == status, place > tuple_(*after))
    by_end = (table.ended_at, table.position)
    sizes = select(*by_end, func.length(table.result)).where(*behind).order_by(*by_end).limit(ROWS)
    last, num_bytes = None, 0
    for ended_at, position, size in conn.execute(sizes).all():
        num_bytes += size
        if last is not None and num_bytes > RESULT_BYTES:
            break
        last = (ended_at, position)
    if last is None:
        return []
    query = select(*by_end, table.result, table.used).where(*behind, place <= tuple_(*last))
    rows = conn.execute(query.order_by(*by_end)).all()
    return [((row.ended_at, row.position), row.result, row.used) for row in rows]


def untidy(conn: Connection, before: int) -> bool:
    """Whether `tidy` has anything to remove."""
    lines = select(batch_lines.c.batch_id).where(batch_lines.c.batch_id == batches.c.id).exists()
    query = select(batches.c.id).where(
        batches.c.ended_at.is_not(None), or_(batches.c.ended_at <= before, lines)
    )
    return conn.execute(query.limit(1)).first() is not None


def tidy(conn: Connection, before: int) -> int:
    """Removes some lines of batches that have ended, or else some batches that had ended at that time;
    returns how many rows went."""
    ended = select(batches.c.id).where(batches.c.ended_at.is_not(None))
    if num := _remove_lines(conn, batch_lines.c.batch_id.in_(ended)):
        return num
    old = select(batches.c.id).where(batches.c.ended_at <= before).limit(ROWS)
    return conn.execute(delete(batches).where(batches.c.id.in_(old))).rowcount


def purge(conn: Connection, owner: str, before: int) -> tuple[int, int]:
    """Removes some of an owner's lines, then batches, that were there at that time; returns how many of each
    went. Whoever carries one on loses it."""
    own = select(batches.c.id).where(batches.c.owner == owner, batches.c.created_at <= before)
    if num := _remove_lines(conn, batch_lines.c.batch_id.in_(own)):
        return num, 0
    return 0, conn.execute(delete(batches).where(batches.c.id.in_(own.limit(ROWS)))).rowcount


def _remove_lines(conn: Connection, where: ColumnElement[bool]) -> int:
    key = (batch_lines.c.batch_id, batch_lines.c.position)
    some = conn.execute(select(*key).where(where).limit(ROWS)).all()
    gone = delete(batch_lines).where(tuple_(*key).in_([tuple(each) for each in some]))
    return conn.execute(gone).rowcount if some else 0
