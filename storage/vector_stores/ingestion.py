"""Reading files into stores: who does it, and what has been stored of a file.

A file that is in progress is a job. A process claims it, which raises the fence of the row, and writes chunks
under that fence only: a claim that is older, or a file that was deleted or cancelled meanwhile, writes
nothing. What is stored of a file is a beginning of its chunks, up to `next_position`, so whoever claims it
after a crash goes on from there. No search finds a chunk before all of them are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    delete,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from storage.tables import (
    runners,
    vector_chunks,
    vector_store_batches,
    vector_store_files,
    vector_stores,
)
from storage.vector_stores import words
from storage.vector_stores.chunk_ids import FILE_BITS, POSITION_BITS, chunk_id, file_key, of_file
from storage.vector_stores.records import Due, Ingestion, IngestionLost, NewChunk, StoredChunk

_stores, _files, _batches = vector_stores, vector_store_files, vector_store_batches
_chunks = vector_chunks

ERASED = 64
"""Chunks that one transaction erases."""


# ------------------------------------------------------------------------------------------------------------
# Jobs


def _unread(runner: str, *, shared: bool) -> ColumnElement[bool]:
    """The files that nobody reads, and those of processes that have gone."""
    free: ColumnElement[bool] = _files.c.runner.is_(None)
    if shared:
        known = select(runners.c.id).where(runners.c.id == _files.c.runner).exists()
        free = or_(free, and_(_files.c.runner != runner, ~known))
    # In these words, because the index is on them.
    return and_(_files.c.status == literal_column("'in_progress'"), _files.c.deleted_at.is_(None), free)


def due(conn: Connection, runner: str, shared: bool, now: int) -> Due:
    """What there is to be done."""
    over = select(_stores.c.number).where(*expired(now), _stores.c.deleted_at.is_(None))
    live = (_files.c.store_number.in_(over), _files.c.deleted_at.is_(None))
    filled = select(_files.c.number).where(_files.c.store_number == _stores.c.number).exists()
    asked = (
        select(_files.c.number).where(_unread(runner, shared=shared)),
        select(_files.c.number).where(*live),
        select(_files.c.number).where(_files.c.erasing),
        select(_stores.c.number).where(_stores.c.deleted_at.is_not(None), ~filled),
    )
    found = [conn.execute(query.limit(1)).first() is not None for query in asked]
    return Due(found[0], found[1], found[2] or found[3])


def expired(now: int) -> tuple[ColumnElement[bool], ...]:
    """Whether a store has expired."""
    over = _stores.c.last_active_at + _stores.c.expires_after <= now
    return (_stores.c.expires_after.is_not(None), over)


def claim(conn: Connection, runner: str, shared: bool, behind: str) -> Ingestion | None:
    """Takes the next file that nobody reads. Owners take turns: `behind` is the one whose turn was last.

    shared: other processes may read files too; those of a process that has gone are taken over.
    """
    query = (
        select(_files, _stores.c.embedding, _stores.c.dimensions)
        .join_from(_files, _stores, _stores.c.number == _files.c.store_number)
        .where(_unread(runner, shared=shared))
        .order_by(
            case((_files.c.owner > behind, 0), else_=1), _files.c.owner, _files.c.created_at, _files.c.number
        )
        .limit(1)
        .with_for_update(of=_files, skip_locked=True)
    )
    row = conn.execute(query).first()
    if row is None:
        return None
    taken = {"runner": runner, "fence": row.fence + 1, "attempt": row.attempt + 1}
    conn.execute(update(_files).where(*_this(row.store_number, row.number)).values(**taken))
    return Ingestion(
        row.store_number,
        row.number,
        row.owner,
        row.store_id,
        row.file_id,
        row.filename,
        row.chunk_tokens,
        row.chunk_overlap,
        row.embedding,
        row.dimensions,
        row.fence + 1,
        row.attempt + 1,
        row.next_position,
        row.digest,
    )


def release(conn: Connection, runner: str) -> None:
    """A process ends well: what it read is nobody's, and counts as never begun."""
    mine = update(_files).where(_files.c.runner == runner, _files.c.status == "in_progress")
    conn.execute(
        mine.values(runner=None, attempt=case((_files.c.attempt > 0, _files.c.attempt - 1), else_=0))
    )


def give_back(conn: Connection, job: Ingestion) -> None:
    """A claim is no more, and counts as never made. IngestionLost."""
    row = _held(conn, job)
    left = update(_files).where(*_this(job.store_number, job.number))
    conn.execute(left.values(runner=None, attempt=max(0, row.attempt - 1)))


def free_all(conn: Connection) -> None:
    """Takes every file from whoever read it; only for a process that knows that it is alone."""
    conn.execute(update(_files).where(_files.c.runner.is_not(None)).values(runner=None))


def _this(store_number: int, number: int) -> tuple[Any, ...]:
    return (_files.c.store_number == store_number, _files.c.number == number)


def _held(conn: Connection, job: Ingestion) -> Row[*tuple[Any, ...]]:
    """The row of a file that is still this claim's, held until the commit. IngestionLost."""
    query = select(_files).where(*_this(job.store_number, job.number)).with_for_update()
    row = conn.execute(query).first()
    lost = row is None or row.fence != job.fence or row.status != "in_progress" or row.deleted_at is not None
    if row is None or lost:
        raise IngestionLost(job.file_id)
    return row


def begin_anew(conn: Connection, job: Ingestion) -> bool:
    """Erases some of what is stored of a file that is to be read from its beginning; False when nothing is
    left. IngestionLost."""
    _held(conn, job)
    if _erase(conn, file_key(job.store_number, job.number)):
        return True
    anew = update(_files).where(*_this(job.store_number, job.number))
    conn.execute(anew.values(next_position=0, num_bytes=0, digest=None))
    return False


def add_chunks(conn: Connection, job: Ingestion, chunks: Sequence[NewChunk], digest: bytes) -> None:
    """Stores the next chunks of a file; digest: of all of its chunks. IngestionLost."""
    row = _held(conn, job)
    rows: list[dict[str, Any]] = [
        {
            "id": chunk_id(job.store_number, job.number, chunk.position),
            "owner": job.owner,
            "page": chunk.page,
            "text": chunk.text,
            "tokens": chunk.tokens,
            "embedding": chunk.embedding,
        }
        for chunk in chunks
    ]
    conn.execute(insert(_chunks), rows)
    words.add(conn, [(each["id"], each["text"]) for each in rows])
    size = sum(len(chunk.text.encode()) + len(chunk.embedding or b"") for chunk in chunks)
    grown = {
        "next_position": chunks[-1].position + 1,
        "num_bytes": row.num_bytes + size,
        "digest": digest,
    }
    conn.execute(update(_files).where(*_this(job.store_number, job.number)).values(**grown))


def finish(conn: Connection, job: Ingestion, error: tuple[str, str] | None) -> None:
    """Ends the reading of a file: it can be searched, or there is an error, its code and message, and what
    was stored of it goes. IngestionLost."""
    _held(conn, job)
    code, message = error or (None, None)
    ended = {
        "status": "completed" if error is None else "failed",
        "error_code": code,
        "error_message": message,
        "runner": None,
        "erasing": error is not None,
    }
    conn.execute(update(_files).where(*_this(job.store_number, job.number)).values(**ended))


# ------------------------------------------------------------------------------------------------------------
# Erasing


def erase(conn: Connection, owner: str | None = None) -> bool:
    """Erases some chunks of a file that was let go of, or, when none are left, what else there is of it, and
    then of stores that were deleted; False when there is nothing more to erase. owner: only of this one."""
    query = select(_files).where(_files.c.erasing, *([] if owner is None else [_files.c.owner == owner]))
    row = conn.execute(query.limit(1).with_for_update(skip_locked=True)).first()
    if row is None:
        return _erase_empty_store(conn, owner)
    if _erase(conn, file_key(row.store_number, row.number)):
        return True
    this = _this(row.store_number, row.number)
    if row.deleted_at is not None:
        conn.execute(delete(_files).where(*this))
    else:
        empty = {"erasing": False, "num_bytes": 0, "next_position": 0, "runner": None}
        conn.execute(update(_files).where(*this).values(**empty))
    return True


def _erase(conn: Connection, key: int) -> bool:
    """Erases the last chunks of a file; False where it has none."""
    first, last = of_file(key)
    query = select(_chunks.c.id, _chunks.c.text).where(_chunks.c.id.between(first, last))
    gone = conn.execute(query.order_by(_chunks.c.id.desc()).limit(ERASED)).all()
    if not gone:
        return False
    words.remove(conn, [(row.id, row.text) for row in gone])
    conn.execute(delete(_chunks).where(_chunks.c.id.between(gone[-1].id, gone[0].id)))
    return True


def _erase_empty_store(conn: Connection, owner: str | None) -> bool:
    filled = select(_files.c.number).where(_files.c.store_number == _stores.c.number).exists()
    query = select(_stores.c.number, _stores.c.id).where(_stores.c.deleted_at.is_not(None), ~filled)
    if owner is not None:
        query = query.where(_stores.c.owner == owner)
    row = conn.execute(query.limit(1).with_for_update(skip_locked=True)).first()
    if row is None:
        return False
    conn.execute(delete(_batches).where(_batches.c.store_id == row.id))
    conn.execute(delete(_stores).where(_stores.c.number == row.number))
    return True


def let_go(conn: Connection, owner: str, before: int, now: int) -> None:
    """Makes all stores of an owner that were made by `before` unknown, and what is in them."""
    mine = (_stores.c.owner == owner, _stores.c.created_at <= before)
    numbers = select(_stores.c.number).where(*mine)
    live = update(_files).where(_files.c.store_number.in_(numbers), _files.c.deleted_at.is_(None))
    conn.execute(live.values(deleted_at=now, erasing=True))
    conn.execute(update(_stores).where(*mine, _stores.c.deleted_at.is_(None)).values(deleted_at=now))


# ------------------------------------------------------------------------------------------------------------
# Chunks


def get_chunks(conn: Connection, ids: Sequence[int]) -> dict[int, StoredChunk]:
    """Chunks by their ids, those that are there, of files that can be searched."""
    store = _chunks.c.id.op(">>")(literal_column(str(POSITION_BITS + FILE_BITS)))
    key = _chunks.c.id.op(">>")(literal_column(str(POSITION_BITS)))
    number = key.op("&")(literal_column(str((1 << FILE_BITS) - 1)))
    query = (
        select(_chunks, _files.c.file_id, _files.c.filename, _files.c.attributes)
        .join_from(_chunks, _files, and_(_files.c.store_number == store, _files.c.number == number))
        .where(_chunks.c.id.in_(list(ids)))
        .where(_files.c.status == "completed", _files.c.deleted_at.is_(None))
    )
    return {row.id: _stored_chunk(row) for row in conn.execute(query).all()}


def chunks_of(
    conn: Connection, store_number: int, number: int, after: int, limit: int
) -> tuple[StoredChunk, ...]:
    """The next chunks of a file behind a position."""
    first, last = of_file(file_key(store_number, number))
    query = (
        select(_chunks, _files.c.file_id, _files.c.filename, _files.c.attributes)
        .join_from(_chunks, _files, and_(*_this(store_number, number)))
        .where(_chunks.c.id.between(first + after + 1, last))
        .order_by(_chunks.c.id)
        .limit(limit)
    )
    return tuple(map(_stored_chunk, conn.execute(query).all()))


def _stored_chunk(row: Row[*tuple[Any, ...]]) -> StoredChunk:
    position = row.id & ((1 << POSITION_BITS) - 1)
    return StoredChunk(row.id, row.file_id, row.filename, row.attributes, position, row.page, row.text)


def readable_files(conn: Connection, store: int) -> dict[int, int]:
    """The files of a store that can be searched, by their keys, and how many chunks each has."""
    query = select(_files.c.number, _files.c.next_position).where(
        _files.c.store_number == store, _files.c.status == "completed", _files.c.deleted_at.is_(None)
    )
    return {file_key(store, number): count for number, count in conn.execute(query).all()}


def vectors(conn: Connection, key: int) -> list[tuple[int, bytes]]:
    """The vectors of a file: ids and float32 values, in their order."""
    first, last = of_file(key)
    query = select(_chunks.c.id, _chunks.c.embedding).where(
        _chunks.c.id.between(first, last), _chunks.c.embedding.is_not(None)
    )
    return [(id, value) for id, value in conn.execute(query.order_by(_chunks.c.id)).all()]
