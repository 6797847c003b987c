"""Reading files into stores: who does it, and what has been stored of a file.

A file that is in progress is a job. A process claims it, which raises the fence of the row, and writes chunks
under that fence only: a claim that is older, or a file that was deleted or cancelled meanwhile, writes
nothing. What is stored of a file is a beginning of its chunks, up to `next_position`, so whoever claims it
after a crash goes on from there. No search finds a chunk before all of them are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    tuple_,
    update,
)

from storage.claims import claimable
from storage.drivers import earlier_clock
from storage.kept_replies import forget_replies
from storage.tables import (
    vector_chunks,
    vector_store_batches,
    vector_store_files,
    vector_store_slices,
    vector_stores,
)
from storage.vector_stores import nearest
from storage.vector_stores.chunk_ids import FILE_BITS, chunk_id, file_key, of_file
from storage.vector_stores.records import (
    POSITION_BITS,
    Due,
    FileClaim,
    FileClaimLost,
    NewChunk,
    StoredChunk,
)
from storage.vector_stores.words import add_words, remove_words

_stores, _files, _batches = vector_stores, vector_store_files, vector_store_batches
_chunks, _slices = vector_chunks, vector_store_slices

ERASED = 64
"""Chunks that one transaction erases."""

FORGOTTEN = 400
"""Files that one transaction lets go of, or stores; it takes some 10 ms."""


# ------------------------------------------------------------------------------------------------------------
# Claims


@dataclass(frozen=True, slots=True)
class Claimant:
    """A process that claims files, at the time `now`. held: the keys of the files that its tasks hold.
    shared: other processes may have files too. embedding: its model, if it has one."""

    runner: str
    shared: bool
    held: frozenset[tuple[int, int]]
    now: int
    embedding: str | None = None

    def may_claim(self) -> ColumnElement[bool]:
        """The files that no task works on, and that do not rest, of stores that are there."""
        key = (_files.c.store_number, _files.c.number)
        rested = or_(_files.c.retry_at.is_(None), _files.c.retry_at <= self.now)
        free = claimable(_files.c.runner, self.runner, key, self.held, shared=self.shared)
        return and_(rested, free, _files.c.deleted_at.is_(None), of_live_store())


def of_live_store() -> ColumnElement[bool]:
    """Whether the store of a file has not been deleted: its files are let go of later."""
    store = _stores.alias()
    there = (store.c.number == _files.c.store_number, store.c.deleted_at.is_(None))
    return select(store.c.number).where(*there).exists()


# In these words, because the index is on them.
_UNREAD = _files.c.status == literal_column("'in_progress'")

_READ = (_files.c.status == "completed", _files.c.deleted_at.is_(None))


def _to_embed(embedding: str) -> tuple[ColumnElement[bool], ...]:
    """The stores with files that lack vectors of their model, where that is this one."""
    return (_stores.c.to_embed, _stores.c.embedding == embedding, _stores.c.deleted_at.is_(None))


def embedded(embedding: ColumnElement[Any] | str) -> ColumnElement[bool]:
    """Whether all chunks of a file have vectors of a model."""
    return and_(_files.c.embedding == embedding, _files.c.embedded == _files.c.next_position)


def due(conn: Connection, claimant: Claimant) -> Due:
    """What there is to be done."""
    deleted = select(_stores.c.number).where(_stores.c.deleted_at.is_not(None))
    asked = (
        select(_files.c.number).where(_UNREAD, claimant.may_claim()).exists(),
        select(_stores.c.number).where(*_to_embed(claimant.embedding or "")).exists(),
        select(_stores.c.number).where(*expired(conn, claimant.now)).exists(),
        or_(select(_files.c.number).where(_files.c.erasing).exists(), deleted.exists()),
        select(_slices.c.batch_id).exists(),
    )
    return Due(*conn.execute(select(*asked)).one())


def expired(conn: Connection, now: int) -> tuple[ColumnElement[bool], ...]:
    """Whether a store has expired, and still has files."""
    over = _stores.c.last_active_at + _stores.c.expires_after <= earlier_clock(conn.dialect.name, now)
    # By the ids of stores goes the index on files that were not let go of: those that were may be many more.
    files = select(_files.c.number).where(_files.c.store_id == _stores.c.id, _files.c.deleted_at.is_(None))
    return (_stores.c.expires_after.is_not(None), over, _stores.c.deleted_at.is_(None), files.exists())


def claim(conn: Connection, claimant: Claimant, behind: str) -> FileClaim | None:
    """Takes the next file that is to be read. Owners take turns: `behind` is the one whose turn was last."""
    # In the order of the index, so that nothing is sorted where thousands wait.
    query = _claiming(_UNREAD, claimant.may_claim()).order_by(_files.c.owner, _files.c.created_at)
    job = _claimed(conn, claimant, query.where(_files.c.owner > behind))
    return job if job is not None or not behind else _claimed(conn, claimant, query)


def _claiming(*where: ColumnElement[bool]) -> Select[Any]:
    joined = select(_files, _stores.c.embedding.label("model"), _stores.c.dimensions).join_from(
        _files, _stores, _stores.c.number == _files.c.store_number
    )
    return joined.where(*where)


def _claimed(conn: Connection, claimant: Claimant, query: Select[Any]) -> FileClaim | None:
    row = conn.execute(query.limit(1).with_for_update(of=_files, skip_locked=True)).first()
    if row is None:
        return None
    # A file that this process already had, and knew nothing of, has not failed by that.
    attempt = row.attempt if row.runner == claimant.runner else row.attempt + 1
    taken = {"runner": claimant.runner, "fence": row.fence + 1, "attempt": attempt}
    conn.execute(update(_files).where(*_this(row.store_number, row.number)).values(**taken))
    return FileClaim(
        row.store_number,
        row.number,
        row.owner,
        row.store_id,
        row.file_id,
        row.filename,
        row.status,
        row.chunk_tokens,
        row.chunk_overlap,
        row.model,
        row.dimensions,
        row.fence + 1,
        attempt,
        row.next_position,
        row.digest,
        row.embedded if row.model is not None and row.embedding == row.model else 0,
    )


def release(conn: Connection, runner: str) -> None:
    """A process ends well: what it worked on is nobody's, and counts as never begun."""
    mine = update(_files).where(_files.c.runner == runner)
    conn.execute(
        mine.values(runner=None, attempt=case((_files.c.attempt > 0, _files.c.attempt - 1), else_=0))
    )


def others_wait(conn: Connection, claimant: Claimant, job: FileClaim) -> bool:
    """Whether files wait to be read that would be claimed rather than this one again: those of other owners,
    and all of them where this one has been read."""
    query = select(_files.c.number).where(_UNREAD, claimant.may_claim())
    if job.status == "in_progress":
        query = query.where(_files.c.owner != job.owner)
    return conn.execute(query.limit(1)).first() is not None


def put_off(conn: Connection, job: FileClaim, until: int | None, counts: bool) -> None:
    """A claim is no more; the file rests until a time, if one is given. counts: as an attempt that failed.
    FileClaimLost."""
    row = _held(conn, job)
    left = update(_files).where(*_this(job.store_number, job.number))
    attempt = max(1, row.attempt) if counts else max(0, row.attempt - 1)
    conn.execute(left.values(runner=None, retry_at=until, attempt=attempt))


def free_all(conn: Connection) -> None:
    """Takes every file from whoever worked on it; only for a process that knows that it is alone."""
    conn.execute(update(_files).where(_files.c.runner.is_not(None)).values(runner=None))


def _this(store_number: int, number: int) -> tuple[Any, ...]:
    return (_files.c.store_number == store_number, _files.c.number == number)


def _held(conn: Connection, job: FileClaim) -> Row[*tuple[Any, ...]]:
    """The row of a file that is still this claim's, held until the commit. FileClaimLost."""
    mine = (
        *_this(job.store_number, job.number),
        _files.c.store_id == job.store_id,
        _files.c.file_id == job.file_id,
        _files.c.fence == job.fence,
        _files.c.status == job.status,
        _files.c.deleted_at.is_(None),
        of_live_store(),
    )
    row = conn.execute(select(_files).where(*mine).with_for_update()).first()
    if row is None:
        raise FileClaimLost(job.file_id)
    return row


# ------------------------------------------------------------------------------------------------------------
# What a claim writes


def begin_anew(conn: Connection, job: FileClaim) -> bool:
    """Erases some of what is stored of a file that is to be read from its beginning; False when nothing is
    left. FileClaimLost."""
    _held(conn, job)
    # What is left is no beginning of any document's chunks, so that whoever comes next begins anew as well.
    anew: dict[str, Any] = {"digest": None}
    left = _erase(conn, file_key(job.store_number, job.number))
    if not left:
        anew |= {"next_position": 0, "num_bytes": 0, "embedding": None, "embedded": 0}
    conn.execute(update(_files).where(*_this(job.store_number, job.number)).values(**anew))
    return left


def add_chunks(
    conn: Connection, job: FileClaim, chunks: Sequence[NewChunk], digest: bytes, embedding: str | None
) -> None:
    """Stores the next chunks of a file; digest: of all of its chunks; embedding: the model of their vectors,
    where they have any. FileClaimLost."""
    row = _held(conn, job)
    rows: list[dict[str, Any]] = [
        {
            "id": chunk_id(job.store_number, job.number, chunk.position),
            "owner": job.owner,
            "page": chunk.page,
            "text": chunk.text,
            "tokens": chunk.tokens,
            "embedding": chunk.embedding,
            "breaks": orjson.dumps(chunk.breaks) if chunk.breaks else None,
        }
        for chunk in chunks
    ]
    conn.execute(insert(_chunks), rows)
    add_words(conn, [(each["id"], each["text"]) for each in rows])
    nearest.put(conn, [(each["id"], each["embedding"]) for each in rows if each["embedding"] is not None])
    size = sum(len(chunk.text.encode()) + len(chunk.embedding or b"") for chunk in chunks)
    grown: dict[str, Any] = {
        "next_position": chunks[-1].position + 1,
        "num_bytes": row.num_bytes + size,
        "digest": digest,
        "attempt": 0,  # what gets somewhere has not failed, whatever ends it
    }
    if embedding is not None:
        grown |= {"embedding": embedding, "embedded": chunks[-1].position + 1}
    conn.execute(update(_files).where(*_this(job.store_number, job.number)).values(**grown))


def finish(conn: Connection, job: FileClaim, error: tuple[str, str] | None) -> None:
    """Ends the reading of a file: it can be searched, or there is an error, its code and message, and what
    was stored of it goes. FileClaimLost."""
    row = _held(conn, job)
    code, message = error or (None, None)
    ended = {
        "status": "completed" if error is None else "failed",
        "error_code": code,
        "error_message": message,
        "runner": None,
        "attempt": 0,
        "retry_at": None,
        "erasing": error is not None,
    }
    conn.execute(update(_files).where(*_this(job.store_number, job.number)).values(**ended))
    if error is None:
        _note_lack(conn, job.store_number, row)


def _note_lack(conn: Connection, store_number: int, row: Row[*tuple[Any, ...]]) -> None:
    """Has a file embedded that has been read without vectors of the model that its store has now."""
    model = _stores.c.embedding
    lacks = or_(model != (row.embedding or ""), row.embedded < row.next_position)
    store = update(_stores).where(_stores.c.number == store_number, model.is_not(None), lacks)
    conn.execute(store.values(to_embed=True))


# ------------------------------------------------------------------------------------------------------------
# Vectors of another model


ADOPTED = 100
"""Stores that one transaction gives another model."""


def adopt(conn: Connection, embedding: str, dimensions: int) -> bool:
    """Gives some stores this model, whose files are then to be embedded anew; False where all have it."""
    other = or_(
        _stores.c.embedding.is_distinct_from(embedding), _stores.c.dimensions.is_distinct_from(dimensions)
    )
    query = select(_stores.c.number).where(other, _stores.c.deleted_at.is_(None)).order_by(_stores.c.number)
    numbers = conn.execute(query.limit(ADOPTED).with_for_update()).scalars().all()
    changed = update(_stores).where(_stores.c.number.in_(numbers))
    conn.execute(changed.values(embedding=embedding, dimensions=dimensions, to_embed=True))
    return bool(numbers)


def find_to_embed(conn: Connection, claimant: Claimant, behind: tuple[int, int]) -> tuple[int, int] | None:
    """The next file that lacks vectors of this process's model and that no task works on, behind the file
    with this key; None where there is none."""
    model, key = claimant.embedding or "", tuple_(_files.c.store_number, _files.c.number)
    query = (
        select(_files.c.store_number, _files.c.number)
        .join_from(_files, _stores, _stores.c.number == _files.c.store_number)
        .where(*_to_embed(model), *_READ, not_embedded(model), claimant.may_claim(), key > tuple_(*behind))
        .order_by(_files.c.store_number, _files.c.number)
    )
    row = conn.execute(query.limit(1)).first()
    return None if row is None else (row.store_number, row.number)


def not_embedded(embedding: str) -> ColumnElement[bool]:
    """Whether some chunks of a file lack vectors of a model."""
    return or_(_files.c.embedding.is_distinct_from(embedding), _files.c.embedded < _files.c.next_position)


def claim_to_embed(conn: Connection, claimant: Claimant, key: tuple[int, int]) -> FileClaim | None:
    """Takes a file that `find_to_embed` found; None where it has gone meanwhile."""
    model = claimant.embedding or ""
    where = (*_this(*key), *_to_embed(model), *_READ, not_embedded(model), claimant.may_claim())
    return _claimed(conn, claimant, _claiming(*where))


def set_vectors(conn: Connection, job: FileClaim, start: int, vectors: Sequence[bytes]) -> None:
    """Gives the chunks of a file from a position on these vectors, of the model that the claim names.
    FileClaimLost."""
    row = _held(conn, job)
    first = chunk_id(job.store_number, job.number, start)
    ids = range(first, first + len(vectors))
    length = func.coalesce(func.sum(func.length(_chunks.c.embedding)), 0)
    before = conn.execute(select(length).where(_chunks.c.id.between(ids[0], ids[-1]))).scalar_one()
    conn.execute(
        update(_chunks).where(_chunks.c.id == bindparam("of")).values(embedding=bindparam("value")),
        [{"of": id, "value": vector} for id, vector in zip(ids, vectors, strict=True)],
    )
    nearest.put(conn, list(zip(ids, vectors, strict=True)))
    grown = {
        "embedding": job.embedding,
        "embedded": start + len(vectors),
        "num_bytes": row.num_bytes + sum(map(len, vectors)) - int(before),
        "attempt": 0,
    }
    conn.execute(update(_files).where(*_this(job.store_number, job.number)).values(**grown))


def end_embedding(conn: Connection, job: FileClaim) -> None:
    """All chunks of a file have their vectors. FileClaimLost."""
    _held(conn, job)
    ended = update(_files).where(*_this(job.store_number, job.number))
    conn.execute(ended.values(runner=None, attempt=0, retry_at=None))


def end_stores(conn: Connection, embedding: str) -> None:
    """Stores of which all files have vectors of this model are looked at no more."""
    lacking = select(_files.c.number).where(
        _files.c.store_number == _stores.c.number, *_READ, not_embedded(embedding)
    )
    query = select(_stores.c.number).where(*_to_embed(embedding), ~lacking.exists())
    numbers = conn.execute(query.limit(ADOPTED).with_for_update(skip_locked=True)).scalars().all()
    # Once more, now that the rows are held: a file that ends meanwhile waits for them, or was seen.
    done = update(_stores).where(_stores.c.number.in_(numbers), ~lacking.exists())
    conn.execute(done.values(to_embed=False))


# ------------------------------------------------------------------------------------------------------------
# Erasing


def erase(conn: Connection, owner: str | None = None) -> bool:
    """Erases some chunks of a file that was let go of, or, when none are left, what else there is of it, and
    then lets go of files of stores that were deleted; False when there is nothing more to erase. owner: only
    of this one."""
    query = select(_files).where(_files.c.erasing, *([] if owner is None else [_files.c.owner == owner]))
    row = conn.execute(query.limit(1).with_for_update(skip_locked=True)).first()
    if row is None:
        return _erase_store(conn, owner)
    if _erase(conn, file_key(row.store_number, row.number)):
        return True
    this = _this(row.store_number, row.number)
    if row.deleted_at is not None:
        conn.execute(delete(_files).where(*this))
    else:
        empty = {"erasing": False, "num_bytes": 0, "next_position": 0, "runner": None, "embedded": 0}
        conn.execute(update(_files).where(*this).values(**empty))
    return True


def _erase(conn: Connection, key: int) -> bool:
    """Erases the last chunks of a file; False where it has none."""
    first, last = of_file(key)
    query = select(_chunks.c.id, _chunks.c.text).where(_chunks.c.id.between(first, last))
    gone = conn.execute(query.order_by(_chunks.c.id.desc()).limit(ERASED)).all()
    if not gone:
        return False
    remove_words(conn, [(row.id, row.text) for row in gone])
    conn.execute(delete(_chunks).where(_chunks.c.id.between(gone[-1].id, gone[0].id)))
    nearest.remove(conn, gone[-1].id, gone[0].id)
    return True


def _erase_store(conn: Connection, owner: str | None) -> bool:
    """Lets go of some files of a store that was deleted, or, when it has none, erases it; False where there
    is no such store."""
    files = select(_files.c.number).where(_files.c.store_number == _stores.c.number)
    live = files.where(_files.c.deleted_at.is_(None)).exists()
    # One with files that others are erasing now waits for them.
    query = select(_stores).where(_stores.c.deleted_at.is_not(None), or_(live, ~files.exists()))
    if owner is not None:
        query = query.where(_stores.c.owner == owner)
    row = conn.execute(query.limit(1).with_for_update(skip_locked=True)).first()
    if row is None:
        return False
    if not forget_files(conn, _files.c.store_id == row.id, row.deleted_at):
        mine = select(_batches.c.id).where(_batches.c.store_id == row.id)
        conn.execute(delete(_slices).where(_slices.c.batch_id.in_(mine)))
        conn.execute(delete(_batches).where(_batches.c.store_id == row.id))
        conn.execute(delete(_stores).where(_stores.c.number == row.number))
    return True


def forget_files(conn: Connection, where: ColumnElement[bool], now: int) -> int:
    """Makes some files unknown, whose chunks go later, and what searches have replied with; returns how many:
    fewer than FORGOTTEN when no more are left."""
    key = (_files.c.store_number, _files.c.number)
    query = select(*key, _files.c.store_id).where(where, _files.c.deleted_at.is_(None))
    # In one order, so that no two processes wait for each other: that of the index on such files.
    query = query.order_by(_files.c.store_id, _files.c.file_id)
    rows = conn.execute(query.limit(FORGOTTEN).with_for_update()).all()
    if rows:
        forget_replies(conn, list({row.store_id for row in rows}))
        these = tuple_(*key).in_([(row.store_number, row.number) for row in rows])
        conn.execute(update(_files).where(these).values(deleted_at=now, erasing=True))
    return len(rows)


def let_go(conn: Connection, owner: str, before: int, now: int) -> int:
    """Makes some stores of an owner that were made by `before` unknown, and what is in them; returns how
    many, 0 when all are."""
    mine = (_stores.c.owner == owner, _stores.c.created_at <= before, _stores.c.deleted_at.is_(None))
    some = select(_stores.c.number).where(*mine).order_by(_stores.c.number).limit(FORGOTTEN)
    numbers = conn.execute(some.with_for_update()).scalars().all()
    conn.execute(update(_stores).where(_stores.c.number.in_(numbers)).values(deleted_at=now))
    return len(numbers)


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
        .where(*_READ, of_live_store())
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
    breaks = () if row.breaks is None else tuple((at, page) for at, page in orjson.loads(row.breaks))
    return StoredChunk(
        row.id, row.file_id, row.filename, row.attributes, position, row.page, row.text, breaks
    )


_PLACES = 1 << POSITION_BITS + 1
"""More than the chunks of a file can be."""


def embedded_files(conn: Connection, store: int, embedding: str) -> str:
    """The files of a store that can be searched by vectors of a model, and how many chunks each has, as one
    text. While it is the same nothing has changed; `read_embedded` reads it. 10,000 rows would take a search
    three times as long."""
    file = cast(_files.c.number, BigInteger) * _PLACES + _files.c.next_position
    query = select(func.aggregate_strings(cast(file, Text), " ")).where(
        _files.c.store_number == store, *_READ, embedded(embedding)
    )
    return conn.execute(query).scalar() or ""


def read_embedded(store: int, told: str) -> dict[int, int]:
    """What `embedded_files` tells: the keys of files, and how many chunks each has."""
    return {file_key(store, file // _PLACES): file % _PLACES for file in map(int, told.split())}


def vectors(conn: Connection, keys: Sequence[int]) -> list[tuple[int, bytes]]:
    """The vectors of files, by their keys, which rise: ids and float32 values, in their order."""
    ranges: list[list[int]] = []
    for key in keys:
        first, last = of_file(key)
        if ranges and ranges[-1][1] == first - 1:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])
    within = or_(*(_chunks.c.id.between(first, last) for first, last in ranges))
    query = select(_chunks.c.id, _chunks.c.embedding).where(within, _chunks.c.embedding.is_not(None))
    return [(id, value) for id, value in conn.execute(query.order_by(_chunks.c.id)).all()]
