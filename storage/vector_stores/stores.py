"""Stores, the files in them and the batches that these came in, as their owners see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    case,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy import delete as erasing

from storage.drivers import earlier_clock
from storage.kept_replies import forget_replies
from storage.records import Cursor, NotFound, Order, Page
from storage.tables import files as uploaded
from storage.tables import (
    vector_store_batches,
    vector_store_files,
    vector_store_slices,
    vector_stores,
)
from storage.vector_stores import ingestion
from storage.vector_stores.chunk_ids import MAX_FILES, file_key
from storage.vector_stores.records import (
    FileCounts,
    NewStoreFile,
    NewVectorStore,
    SearchedStore,
    StoredChunk,
    StoredFileBatch,
    StoredStoreFile,
    StoredVectorStore,
    VectorStoreFull,
)

Columns = tuple[Any, ...]
_stores, _files, _batches = vector_stores, vector_store_files, vector_store_batches
_slices = vector_store_slices


# ------------------------------------------------------------------------------------------------------------
# Stores


def create(conn: Connection, new: NewVectorStore, files: Sequence[NewStoreFile]) -> StoredVectorStore:
    """Stores a store, with its first files."""
    conn.execute(
        insert(_stores).values(
            id=new.id,
            owner=new.owner,
            created_at=new.created_at,
            name=new.name,
            description=new.description,
            metadata=new.metadata,
            expires_after=new.expires_after,
            last_active_at=new.created_at if new.last_active_at is None else new.last_active_at,
            next_file=0,
            embedding=new.embedding,
            dimensions=new.dimensions,
        )
    )
    if files:
        add_files(conn, new.owner, new.id, files, None, new.created_at)
    return get(conn, new.owner, new.id)


def get(conn: Connection, owner: str, id: str) -> StoredVectorStore:
    """One store. NotFound("vector store")."""
    return _with_counts(conn, [row_of(conn, owner, id)])[0]


def row_of(conn: Connection, owner: str, id: str, *, change: bool = False) -> Row[*Columns]:
    """The row of a store, held until the transaction's end if it is to be changed. NotFound."""
    query = select(_stores).where(
        _stores.c.id == id, _stores.c.owner == owner, _stores.c.deleted_at.is_(None)
    )
    row = conn.execute(query.with_for_update() if change else query).first()
    if row is None:
        raise NotFound("vector store", id)
    return row


def list_(
    conn: Connection, owner: str, limit: int, order: Order, after: Cursor | None, before: str | None
) -> Page[StoredVectorStore]:
    """One page by time. NotFound for `after` and `before`."""
    live = (_stores.c.owner == owner, _stores.c.deleted_at.is_(None))
    rows, more = _page(conn, _stores, live, _stores.c.id, "vector store", limit, order, after, before)
    return Page(tuple(_with_counts(conn, rows)), more)


def change(conn: Connection, owner: str, id: str, now: int, values: Mapping[str, Any]) -> StoredVectorStore:
    """Replaces some of a store's name, metadata and expires_after; it counts as used. NotFound."""
    row = row_of(conn, owner, id, change=True)
    conn.execute(update(_stores).where(_stores.c.number == row.number).values(**values, last_active_at=now))
    return get(conn, owner, id)


def delete(conn: Connection, owner: str, id: str, now: int) -> None:
    """Makes a store and what is in it unknown at once; it goes in small steps later. NotFound."""
    row = row_of(conn, owner, id, change=True)
    conn.execute(update(_stores).where(_stores.c.number == row.number).values(deleted_at=now))
    forget_replies(conn, [id])


def touch(conn: Connection, numbers: Sequence[int], now: int) -> None:
    """Notes that stores are used."""
    old = (_stores.c.number.in_(list(numbers)), _stores.c.last_active_at < now)
    conn.execute(update(_stores).where(*old).values(last_active_at=now))


def expire(conn: Connection, now: int) -> int:
    """Lets go of some files of a store that has expired; returns how many, 0 where no such store has any. It
    stays, and says that it has expired."""
    store = conn.execute(select(_stores.c.id).where(*ingestion.expired(conn, now)).limit(1)).scalar()
    return 0 if store is None else ingestion.forget_files(conn, _files.c.store_id == store, now)


def _with_counts(conn: Connection, rows: Sequence[Row[*Columns]]) -> list[StoredVectorStore]:
    numbers = [row.number for row in rows]
    counts = _counts(conn, _files.c.store_number, numbers)
    for number, left in _to_be_added(conn, numbers).items():
        there = counts.get(number, FileCounts())
        counts[number] = replace(there, in_progress=there.in_progress + left)
    done = and_(_files.c.status == "completed", ingestion.embedded(_stores.c.embedding))
    sizes = (
        select(
            _files.c.store_number,
            func.coalesce(func.sum(_files.c.num_bytes), 0),
            func.coalesce(func.sum(case((done, 1), else_=0)), 0),
        )
        .join_from(_files, _stores, _stores.c.number == _files.c.store_number)
        .where(_files.c.store_number.in_(numbers), _files.c.deleted_at.is_(None))
        .group_by(_files.c.store_number)
    )
    taken = {
        number: (int(size), int(with_vectors)) for number, size, with_vectors in conn.execute(sizes).all()
    }
    return [
        StoredVectorStore(
            row.number,
            row.id,
            row.owner,
            row.created_at,
            row.name,
            row.description,
            row.metadata,
            row.expires_after,
            row.last_active_at,
            row.embedding,
            row.dimensions,
            *taken.get(row.number, (0, 0)),
            counts.get(row.number, FileCounts()),
        )
        for row in rows
    ]


def _to_be_added(conn: Connection, numbers: Sequence[int]) -> dict[int, int]:
    """How many files of batches are still to be put into each of some stores."""
    query = (
        select(_stores.c.number, func.sum(_slices.c.num_files))
        .join_from(_slices, _batches, _batches.c.id == _slices.c.batch_id)
        .join(_stores, _stores.c.id == _batches.c.store_id)
        .where(_stores.c.number.in_(list(numbers)))
        .group_by(_stores.c.number)
    )
    return {number: int(left) for number, left in conn.execute(query).all()}


def _counts(conn: Connection, by: ColumnElement[Any], keys: Sequence[Any]) -> dict[Any, FileCounts]:
    query = (
        select(by, _files.c.status, func.count())
        .where(by.in_(list(keys)), _files.c.deleted_at.is_(None))
        .group_by(by, _files.c.status)
    )
    found: dict[Any, dict[str, int]] = {}
    for key, status, count in conn.execute(query).all():
        found.setdefault(key, {})[status] = count
    return {key: FileCounts(**counted) for key, counted in found.items()}


def _page(
    conn: Connection,
    table: Table,
    live: Sequence[ColumnElement[bool]],
    id: ColumnElement[str],
    kind: str,
    limit: int,
    order: Order,
    after: Cursor | None,
    before: Cursor | None,
    filters: Sequence[ColumnElement[bool]] = (),
) -> tuple[Sequence[Row[*Columns]], bool]:
    """Rows by time and id, behind `after`, or the nearest ahead of `before`, and whether there are more."""
    created = table.c.created_at
    query = select(table).where(*live, *filters)
    for cursor, name in ((after, "after"), (before, "before")):
        if cursor is None:
            continue
        if isinstance(cursor, str):
            at = conn.execute(select(created).where(*live, id == cursor)).scalar()
            if at is None:
                raise NotFound(kind, cursor)
            cursor = (at, cursor)
        place, at_cursor = tuple_(created, id), tuple_(*cursor)
        behind = (order == "asc") == (name == "after")
        query = query.where(place > at_cursor if behind else place < at_cursor)
    # A page that only ends somewhere is read from its end.
    turned = before is not None and after is None
    rising = (order == "asc") != turned
    query = query.order_by(*((created, id) if rising else (created.desc(), id.desc())))
    rows = conn.execute(query.limit(limit + 1)).all()
    page = rows[:limit]
    return page[::-1] if turned else page, len(rows) > limit


# ------------------------------------------------------------------------------------------------------------
# Files


def add_files(
    conn: Connection,
    owner: str,
    store_id: str,
    files: Sequence[NewStoreFile],
    batch_id: str | None,
    now: int,
) -> tuple[StoredStoreFile, ...]:
    """Puts files into a store, to be read. One that is there already, and is or will be cut like this, is not
    read again. NotFound("vector store"), VectorStoreFull."""
    store = row_of(conn, owner, store_id, change=True)
    ids = [new.file_id for new in files]
    present, fresh = _live_ones(conn, store_id, ids), []
    for new in files:
        if (row := present.get(new.file_id)) is None:
            fresh.append(new)
        elif _serves(row, new):
            values = {} if new.attributes is None else _attributes(new.attributes)
            if batch_id is not None:
                values["batch_id"] = batch_id
            if values:
                conn.execute(update(_files).where(*_this(row)).values(**values))
        else:
            ingestion.forget_files(conn, and_(*_this(row)), now)
            fresh.append(new)
    if store.next_file + len(fresh) > MAX_FILES:
        raise VectorStoreFull(store_id, MAX_FILES)
    rows = [
        {
            "store_number": store.number,
            "number": number,
            "owner": owner,
            "store_id": store_id,
            "file_id": new.file_id,
            "filename": new.filename,
            "batch_id": batch_id,
            "created_at": now,
            "status": "in_progress",
            "chunk_tokens": new.chunk_tokens,
            "chunk_overlap": new.chunk_overlap,
            **_attributes(new.attributes),
        }
        for number, new in enumerate(fresh, store.next_file)
    ]
    if rows:
        conn.execute(insert(_files), rows)
        this = update(_stores).where(_stores.c.number == store.number)
        conn.execute(this.values(next_file=store.next_file + len(rows)))
    touch(conn, [store.number], now)
    now_there = _live_ones(conn, store_id, ids)
    return tuple(_stored(now_there[id]) for id in ids)


def _attributes(told: bytes | None) -> dict[str, Any]:
    """The columns that say what the attributes of a file are."""
    return {"attributes": told, "attribute_bytes": len(told or b"")}


def _live_ones(conn: Connection, store_id: str, ids: Sequence[str]) -> dict[str, Row[*Columns]]:
    query = select(_files).where(
        _files.c.store_id == store_id, _files.c.file_id.in_(ids), _files.c.deleted_at.is_(None)
    )
    return {row.file_id: row for row in conn.execute(query).all()}


def _serves(present: Row[*Columns], new: NewStoreFile) -> bool:
    cut = (present.chunk_tokens, present.chunk_overlap) == (new.chunk_tokens, new.chunk_overlap)
    return cut and present.status in ("in_progress", "completed")


def _this(row: Row[*Columns]) -> tuple[ColumnElement[bool], ...]:
    return (_files.c.store_number == row.store_number, _files.c.number == row.number)


def _live(conn: Connection, store_id: str, file_id: str, *, change: bool = False) -> Row[*Columns] | None:
    query = select(_files).where(
        _files.c.store_id == store_id, _files.c.file_id == file_id, _files.c.deleted_at.is_(None)
    )
    return conn.execute(query.with_for_update() if change else query).first()


def _file(
    conn: Connection, owner: str, store_id: str, file_id: str, *, change: bool = False
) -> Row[*Columns]:
    row_of(conn, owner, store_id)
    row = _live(conn, store_id, file_id, change=change)
    if row is None:
        raise NotFound("vector store file", file_id)
    return row


def get_file(conn: Connection, owner: str, store_id: str, file_id: str) -> StoredStoreFile:
    """One file of a store. NotFound("vector store" | "vector store file")."""
    return _stored(_file(conn, owner, store_id, file_id))


def _stored(row: Row[*Columns]) -> StoredStoreFile:
    return StoredStoreFile(
        row.store_id,
        row.file_id,
        row.filename,
        row.batch_id,
        row.created_at,
        row.status,
        None if row.error_code is None else (row.error_code, row.error_message),
        row.attributes,
        row.chunk_tokens,
        row.chunk_overlap,
        row.num_bytes,
    )


def list_files(
    conn: Connection,
    owner: str,
    store_id: str,
    limit: int,
    order: Order,
    after: Cursor | None,
    before: str | None,
    status: str | None,
    batch_id: str | None,
) -> Page[StoredStoreFile]:
    """One page of a store's files by time; of one batch where that is named. NotFound."""
    store = row_of(conn, owner, store_id)
    live = [_files.c.store_number == store.number, _files.c.deleted_at.is_(None)]
    if batch_id is not None:
        _batch(conn, owner, store_id, batch_id)
        live.append(_files.c.batch_id == batch_id)
    filters = [] if status is None else [_files.c.status == status]
    rows, more = _page(
        conn, _files, live, _files.c.file_id, "vector store file", limit, order, after, before, filters
    )
    return Page(tuple(map(_stored, rows)), more)


def set_attributes(
    conn: Connection, owner: str, store_id: str, file_id: str, attributes: bytes | None
) -> StoredStoreFile:
    """Replaces the attributes of a file. NotFound."""
    row = _file(conn, owner, store_id, file_id, change=True)
    conn.execute(update(_files).where(*_this(row)).values(**_attributes(attributes)))
    return get_file(conn, owner, store_id, file_id)


def remove_file(conn: Connection, owner: str, store_id: str, file_id: str, now: int) -> None:
    """Takes a file out of a store; whoever reads it stops. NotFound."""
    row = _file(conn, owner, store_id, file_id, change=True)
    ingestion.forget_files(conn, and_(*_this(row)), now)


def remove_from_stores(conn: Connection, file_ids: Sequence[str]) -> bool:
    """Takes files that go out of some of the stores that they are in; whether they may be in others still.
    When that was matters to nobody."""
    gone = ingestion.forget_files(conn, _files.c.file_id.in_(list(file_ids)), 0)
    return gone == ingestion.FORGOTTEN


def file_chunks(
    conn: Connection, owner: str, store_id: str, file_id: str, after: int, limit: int
) -> tuple[StoredChunk, ...]:
    """The next chunks of a file behind a position. NotFound."""
    row = _file(conn, owner, store_id, file_id)
    return ingestion.chunks_of(conn, row.store_number, row.number, after, limit)


# ------------------------------------------------------------------------------------------------------------
# Batches


SLICE = 100
"""Files of a batch that one transaction puts into a store: it takes some 5 ms, and others write, too."""

SLICE_BYTES = 1 << 20
"""Of attributes that it puts there, with those of one file more."""


def create_batch(
    conn: Connection, owner: str, store_id: str, batch_id: str, files: Sequence[NewStoreFile], now: int
) -> None:
    """Notes files that are to be put into a store together; `add_some` does it. NotFound("vector store"),
    VectorStoreFull."""
    store = row_of(conn, owner, store_id)
    if store.next_file + len(files) > MAX_FILES:
        raise VectorStoreFull(store_id, MAX_FILES)
    conn.execute(
        insert(_batches).values(id=batch_id, owner=owner, store_id=store_id, created_at=now, total=len(files))
    )
    slices = [
        {
            "batch_id": batch_id,
            "number": number,
            "owner": owner,
            "num_files": len(some),
            "num_bytes": len(told := _told(some)),
            "files": told,
        }
        for number, some in enumerate(_cut(files))
    ]
    if slices:
        conn.execute(insert(_slices), slices)


def _cut(files: Sequence[NewStoreFile]) -> Iterator[Sequence[NewStoreFile]]:
    """Files in slices."""
    some: list[NewStoreFile] = []
    size = 0
    for file in files:
        some.append(file)
        size += len(file.attributes or b"")
        if len(some) == SLICE or size >= SLICE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _told(files: Sequence[NewStoreFile]) -> bytes:
    """Files as a slice keeps them: what is the same of neighbours once."""
    alike = groupby(files, lambda file: (file.chunk_tokens, file.chunk_overlap, file.attributes))
    return orjson.dumps(
        [
            (tokens, overlap, None if told is None else told.decode(), [(f.file_id, f.filename) for f in of])
            for (tokens, overlap, told), of in alike
        ]
    )


def _read_told(told: bytes) -> list[NewStoreFile]:
    return [
        NewStoreFile(file_id, filename, tokens, overlap, shared)
        for tokens, overlap, attributes, files in orjson.loads(told)
        for shared in [None if attributes is None else attributes.encode()]
        for file_id, filename in files
    ]


def add_some(conn: Connection, batch_id: str | None, now: int) -> bool:
    """Puts the next files of a batch, or, without its id, of any, into its store; False where nothing was
    left to be done. Whoever does it, each file comes once."""
    query = select(_slices).order_by(_slices.c.batch_id, _slices.c.number)
    if batch_id is not None:
        query = query.where(_slices.c.batch_id == batch_id)
    row = conn.execute(query.limit(1).with_for_update(skip_locked=True)).first()
    if row is None:
        return False
    this = (_slices.c.batch_id == row.batch_id, _slices.c.number == row.number)
    conn.execute(erasing(_slices).where(*this))
    batch = conn.execute(select(_batches).where(_batches.c.id == row.batch_id)).one()
    try:
        add_files(conn, batch.owner, batch.store_id, _read_told(row.files), batch.id, now)
        counted = {"added": _batches.c.added + row.num_files}
    except (NotFound, VectorStoreFull):  # the store is gone, or others took its last numbers
        counted = {"total": _batches.c.total - row.num_files}
    conn.execute(update(_batches).where(_batches.c.id == batch.id).values(**counted))
    return True


def get_batch(conn: Connection, owner: str, store_id: str, batch_id: str) -> StoredFileBatch:
    """One batch. NotFound("vector store" | "file batch")."""
    row = _batch(conn, owner, store_id, batch_id)
    counts = _counts(conn, _files.c.batch_id, [batch_id]).get(batch_id, FileCounts())
    waiting = select(func.coalesce(func.sum(_slices.c.num_files), 0)).where(_slices.c.batch_id == batch_id)
    to_come = int(conn.execute(waiting).scalar_one())
    counts = replace(
        counts,
        in_progress=counts.in_progress + to_come,
        cancelled=counts.cancelled + row.total - row.added - to_come,
    )
    return StoredFileBatch(row.id, row.store_id, row.created_at, row.cancelled_at, counts)


def cancel_batch(conn: Connection, owner: str, store_id: str, batch_id: str, now: int) -> StoredFileBatch:
    """Cancels those files of a batch that are not read yet; nothing for one that is. NotFound."""
    _batch(conn, owner, store_id, batch_id)
    this = update(_batches).where(_batches.c.id == batch_id)
    left = conn.execute(erasing(_slices).where(_slices.c.batch_id == batch_id)).rowcount
    open_ = (_files.c.batch_id == batch_id, _files.c.status == "in_progress", _files.c.deleted_at.is_(None))
    cancelled = update(_files).where(*open_).values(status="cancelled", erasing=True)
    if conn.execute(cancelled).rowcount or left:
        conn.execute(this.values(cancelled_at=now))
    return get_batch(conn, owner, store_id, batch_id)


def _batch(conn: Connection, owner: str, store_id: str, batch_id: str) -> Row[*Columns]:
    row_of(conn, owner, store_id)
    query = select(_batches).where(_batches.c.id == batch_id, _batches.c.store_id == store_id)
    row = conn.execute(query).first()
    if row is None:
        raise NotFound("file batch", batch_id)
    return row


# ------------------------------------------------------------------------------------------------------------
# What owners keep


def kept_bytes(
    conn: Connection, owners: Sequence[str], before: int, width: int
) -> list[tuple[str, int, int]]:
    """The bytes of chunks that are there, by owner and by the time when their files came, in buckets of
    `width` microseconds: (owner, start of the bucket, bytes), of files that came before a time. No owners:
    all of them."""
    start = _files.c.created_at - _files.c.created_at % width
    gone = select(_stores.c.number).where(_stores.c.deleted_at.is_not(None))
    query = select(_files.c.owner, start, func.sum(_files.c.num_bytes)).where(
        _files.c.created_at < before, _files.c.deleted_at.is_(None), _files.c.store_number.not_in(gone)
    )
    if owners:
        query = query.where(_files.c.owner.in_(list(owners)))
    rows = conn.execute(query.group_by(_files.c.owner, start)).all()
    return [(owner, int(start), int(size)) for owner, start, size in rows]


# ------------------------------------------------------------------------------------------------------------
# What a search looks at


FILTERED = 100
"""Files whose attributes are in memory at once, of those that a search looks at."""


def searched(
    conn: Connection,
    owner: str,
    ids: Sequence[str],
    now: int,
    *,
    shows: Callable[[bytes | None], bool] | None,
) -> tuple[SearchedStore, ...]:
    """Stores that are about to be searched, each once, in this order. shows: which files are found, by their
    attributes; called for one after another. A file that has expired by `now` is not found any more, though
    it stays in its stores until the next sweep. NotFound("vector store")."""
    found, clock = [], earlier_clock(conn.dialect.name, now)
    for id in dict.fromkeys(ids):
        row = row_of(conn, owner, id)
        mine, done = _files.c.store_number == row.number, _files.c.status == "completed"
        readable = and_(done, _files.c.deleted_at.is_(None))
        # By the indexes on expiry and on the files of a store: few files have expired and are still there.
        over = and_(
            _files.c.store_id == row.id,
            _files.c.file_id.in_(select(uploaded.c.id).where(uploaded.c.expires_at <= clock)),
            _files.c.deleted_at.is_(None),
        )
        hidden = frozenset(
            key
            for unseen in (and_(mine, ~readable), over)
            for key in _keys(conn, select(_files.c.number).where(unseen), row.number)
        )
        shown: frozenset[int] = frozenset()
        if shows is not None:
            shown = frozenset(_shown(conn, row.number, readable, shows)) - hidden
        expires_at = None if row.expires_after is None else row.last_active_at + row.expires_after
        found.append(
            SearchedStore(row.number, row.id, expires_at, row.embedding, row.dimensions, hidden, shown)
        )
    return tuple(found)


def _shown(
    conn: Connection, store: int, readable: ColumnElement[bool], shows: Callable[[bytes | None], bool]
) -> Iterator[int]:
    """The keys of files by what their attributes are, of which there may be more than memory holds."""
    query = select(_files.c.number, _files.c.attributes).order_by(_files.c.number).limit(FILTERED)
    last = -1
    while rows := conn.execute(
        query.where(_files.c.store_number == store, _files.c.number > last, readable)
    ).all():
        yield from (file_key(store, row.number) for row in rows if shows(row.attributes))
        last = rows[-1].number


def _keys(conn: Connection, query: Select[int], store: int) -> list[int]:
    return [file_key(store, number) for number in conn.execute(query).scalars().all()]
