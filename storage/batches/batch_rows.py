"""The statements on batches; each function runs inside a transaction that its caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, or_, select, tuple_, update

from storage.batches.records import (
    COMPLETED,
    FAILED,
    OPEN,
    BatchEnd,
    BatchEnded,
    BatchLine,
    BatchLost,
    NewBatch,
    StoredBatch,
    TooManyBatches,
)
from storage.files import StoredFile
from storage.records import NotFound, Order, Page
from storage.tables import batch_lines, batches, files, owners, runners

ROWS = 500
"""Lines that one step writes or removes."""

_COLUMNS = [batches.c[field.name] for field in fields(StoredBatch)]


def create(conn: Connection, new: NewBatch, most: int) -> StoredBatch:
    """Stores a batch that is to be validated. TooManyBatches where the owner has `most` already."""
    # One after the other, also where several processes create some.
    conn.execute(select(owners.c.id).where(owners.c.id == new.owner).with_for_update())
    going = select(func.count()).where(batches.c.owner == new.owner, batches.c.ended_at.is_(None))
    if conn.execute(going).scalar_one() >= most:
        raise TooManyBatches(most)
    started = {"status": "validating", "fence": 0, "num_bytes": 0, "total": 0, "completed": 0, "failed": 0}
    conn.execute(insert(batches).values(**asdict(new), **started))
    return get(conn, new.owner, new.id)


def get(conn: Connection, owner: str, id: str) -> StoredBatch:
    """NotFound("batch")."""
    row = conn.execute(select(*_COLUMNS).where(batches.c.id == id, batches.c.owner == owner)).first()
    if row is None:
        raise NotFound("batch", id)
    return _stored(conn, [row])[0]


def list_(conn: Connection, owner: str, limit: int, order: Order, after: str | None) -> Page[StoredBatch]:
    """One page, by time and then id. NotFound("batch") for an unknown `after`."""
    place = tuple_(batches.c.created_at, batches.c.id)
    query = select(*_COLUMNS).where(batches.c.owner == owner)
    if after is not None:
        last = get(conn, owner, after)
        at = tuple_(last.created_at, last.id)
        query = query.where(place > at if order == "asc" else place < at)
    by_time = (batches.c.created_at, batches.c.id)
    query = query.order_by(*(by_time if order == "asc" else (column.desc() for column in by_time)))
    rows = conn.execute(query.limit(limit + 1)).all()
    return Page(tuple(_stored(conn, rows[:limit])), len(rows) > limit)


def _stored(conn: Connection, rows: Sequence[Row[*tuple[Any, ...]]]) -> list[StoredBatch]:
    """Batches as they stand; the lines of those that have not ended are counted."""
    going = [row.id for row in rows if row.ended_at is None]
    counts: dict[str, dict[str, int]] = {}
    if going:
        query = select(batch_lines.c.batch_id, batch_lines.c.status, func.count())
        query = query.where(batch_lines.c.batch_id.in_(going))
        for id, status, num in conn.execute(
            query.group_by(batch_lines.c.batch_id, batch_lines.c.status)
        ).all():
            counts.setdefault(id, {})[status] = num
    found = []
    for row in rows:
        values = dict(row._mapping)
        if row.status not in ("validating", "failed") and row.id in counts:
            lines = counts[row.id]
            values |= {
                "total": sum(lines.values()),
                COMPLETED: lines.get(COMPLETED, 0),
                FAILED: lines.get(FAILED, 0),
            }
        found.append(StoredBatch(**values))
    return found


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


def any_of_others(conn: Connection, runner: str) -> bool:
    """Whether any batch is to be carried on that this process does not; it may be another one's."""
    query = select(batches.c.id).where(
        batches.c.ended_at.is_(None), batches.c.runner.is_distinct_from(runner)
    )
    return conn.execute(query.limit(1)).first() is not None


def claim(conn: Connection, runner: str, limit: int, *, shared: bool) -> list[StoredBatch]:
    """Takes over batches that nobody carries on, the oldest first. shared: processes that do not beat are
    dead, this one's own beat is there."""
    free: ColumnElement[bool] = batches.c.runner.is_(None)
    if shared:
        beating = select(runners.c.id)
        if conn.execute(beating.where(runners.c.id == runner)).first() is None:
            return []
        free = or_(free, batches.c.runner.not_in(beating))
    query = select(batches.c.id).where(batches.c.ended_at.is_(None), free).order_by(batches.c.created_at)
    ids = conn.execute(query.limit(limit).with_for_update(skip_locked=True)).scalars().all()
    taken = update(batches).where(batches.c.id.in_(ids)).values(runner=runner, fence=batches.c.fence + 1)
    conn.execute(taken)
    rows = conn.execute(select(*_COLUMNS).where(batches.c.id.in_(ids)).order_by(batches.c.created_at)).all()
    return _stored(conn, rows)


def free(conn: Connection, runner: str | None = None) -> None:
    """Takes batches from a process, or, None, from all."""
    held = batches.c.runner.is_not(None) if runner is None else batches.c.runner == runner
    conn.execute(update(batches).where(held).values(runner=None))


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
    if _mine(conn, batch, runner) == "validating":
        begun = update(batches).where(batches.c.id == batch.id)
        conn.execute(begun.values(status="in_progress", in_progress_at=now))


def finish_line(
    conn: Connection, batch: StoredBatch, runner: str, position: int, status: str, result: bytes, now: int
) -> None:
    """Gives an open line its result; a line that has one keeps it."""
    _mine(conn, batch, runner)
    line = update(batch_lines).where(
        batch_lines.c.batch_id == batch.id, batch_lines.c.position == position, batch_lines.c.status == OPEN
    )
    if conn.execute(line.values(status=status, result=result, ended_at=now)).rowcount:
        held = batches.c.num_bytes + len(result)
        conn.execute(update(batches).where(batches.c.id == batch.id).values(num_bytes=held))


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
    counted = _stored(conn, conn.execute(select(*_COLUMNS).where(batches.c.id == batch.id)).all())[0]
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
        "total": counted.total,
        "completed": counted.completed,
        "failed": counted.failed,
        "digest": None,
        "num_bytes": 0,
        "runner": None,
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
    conn: Connection, batch_id: str, status: str, after: tuple[int, int], limit: int
) -> list[tuple[tuple[int, int], bytes]]:
    """The next results, by the time of their end: the place of each, and its line of a file."""
    table = batch_lines.c
    place = tuple_(table.ended_at, table.position)
    query = select(table.ended_at, table.position, table.result).where(
        table.batch_id == batch_id, table.status == status, place > tuple_(*after)
    )
    rows = conn.execute(query.order_by(table.ended_at, table.position).limit(limit)).all()
    return [((row.ended_at, row.position), row.result) for row in rows]


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


def purge(conn: Connection, owner: str, before: int) -> int:
    """Removes some of an owner's lines, then batches, that were there at that time; returns how many rows
    went. Whoever carries one on loses it."""
    own = select(batches.c.id).where(batches.c.owner == owner, batches.c.created_at <= before)
    if num := _remove_lines(conn, batch_lines.c.batch_id.in_(own)):
        return num
    return conn.execute(delete(batches).where(batches.c.id.in_(own.limit(ROWS)))).rowcount


def _remove_lines(conn: Connection, where: ColumnElement[bool]) -> int:
    key = (batch_lines.c.batch_id, batch_lines.c.position)
    some = conn.execute(select(*key).where(where).limit(ROWS)).all()
    gone = delete(batch_lines).where(tuple_(*key).in_([tuple(each) for each in some]))
    return conn.execute(gone).rowcount if some else 0
