"""Stores, the files in them and the batches that these came in, as their owners see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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

from storage.kept_replies import forget_replies
from storage.records import Cursor, NotFound, Order, Page
from storage.tables import files as uploaded
from storage.tables import vector_store_batches, vector_store_files, vector_stores
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
    forget_files(conn, and_(_files.c.store_number == row.number), now)


def touch(conn: Connection, numbers: Sequence[int], now: int) -> None:
    """Notes that stores are used."""
    old = (_stores.c.number.in_(list(numbers)), _stores.c.last_active_at < now)
    conn.execute(update(_stores).where(*old).values(last_active_at=now))


def expire(conn: Connection, now: int) -> int:
    """Lets go of the files of stores that have expired; returns how many files that were. The stores stay,
    and say that they have expired."""
    over = select(_stores.c.number).where(*ingestion.expired(now))
    return forget_files(conn, _files.c.store_number.in_(over), now)


def forget_files(conn: Connection, where: ColumnElement[bool], now: int) -> int:
    """Makes files unknown, whose chunks go later, and what searches have replied with; returns how many."""
    live = (where, _files.c.deleted_at.is_(None))
    forget_replies(conn, select(_files.c.store_id).where(*live))
    return conn.execute(update(_files).where(*live).values(deleted_at=now, erasing=True)).rowcount


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
        select(_stores.c.number, func.sum(_batches.c.total - _batches.c.added))
        .join_from(_batches, _stores, _stores.c.id == _batches.c.store_id)
        .where(_batches.c.files.is_not(None), _stores.c.number.in_(list(numbers)))
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
            values: dict[str, Any] = {} if new.attributes is None else {"attributes": new.attributes}
            if batch_id is not None:
                values["batch_id"] = batch_id
            if values:
                conn.execute(update(_files).where(*_this(row)).values(**values))
        else:
            forget_files(conn, and_(*_this(row)), now)
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
            "attributes": new.attributes,
            "chunk_tokens": new.chunk_tokens,
            "chunk_overlap": new.chunk_overlap,
        }
        for number, new in enumerate(fresh, store.next_file)
    ]
    if rows:
        conn.execute(insert(_files), rows)
    used = update(_stores).where(_stores.c.number == store.number)
    conn.execute(used.values(next_file=store.next_file + len(rows), last_active_at=now))
    now_there = _live_ones(conn, store_id, ids)
    return tuple(_stored(now_there[id]) for id in ids)


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
    conn.execute(update(_files).where(*_this(row)).values(attributes=attributes))
    return get_file(conn, owner, store_id, file_id)


def remove_file(conn: Connection, owner: str, store_id: str, file_id: str, now: int) -> None:
    """Takes a file out of a store; whoever reads it stops. NotFound."""
    row = _file(conn, owner, store_id, file_id, change=True)
    forget_files(conn, and_(*_this(row)), now)


def remove_from_stores(conn: Connection, file_ids: Sequence[str]) -> None:
    """Takes files that go out of all stores that they are in. When that was matters to nobody."""
    held = select(_files.c.store_number, _files.c.number, _files.c.store_id).where(
        _files.c.file_id.in_(list(file_ids)), _files.c.deleted_at.is_(None)
    )
    # In one order, so that no two processes wait for each other.
    rows = conn.execute(held.order_by(_files.c.store_number, _files.c.number).with_for_update()).all()
    for row in rows:
        conn.execute(update(_files).where(*_this(row)).values(deleted_at=0, erasing=True))
    forget_replies(conn, [row.store_id for row in rows])


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


def create_batch(
    conn: Connection, owner: str, store_id: str, batch_id: str, files: Sequence[NewStoreFile], now: int
) -> None:
    """Notes files that are to be put into a store together; `add_some` does it. NotFound("vector store"),
    VectorStoreFull."""
    store = row_of(conn, owner, store_id)
    if store.next_file + len(files) > MAX_FILES:
        raise VectorStoreFull(store_id, MAX_FILES)
    conn.execute(
        insert(_batches).values(
            id=batch_id,
            owner=owner,
            store_id=store_id,
            created_at=now,
            files=orjson.dumps([_told(file) for file in files]),
            total=len(files),
        )
    )


def _told(file: NewStoreFile) -> dict[str, Any]:
    told = None if file.attributes is None else file.attributes.decode()
    return asdict(file) | {"attributes": told}


def add_some(conn: Connection, batch_id: str | None, now: int) -> str | None:
    """Puts the next files of a batch, or, without its id, of any, into its store: its id, or None where
    nothing was left to be done. Whoever does it, each file comes once."""
    query = select(_batches).where(_batches.c.files.is_not(None))
    if batch_id is not None:
        query = query.where(_batches.c.id == batch_id)
    row = conn.execute(query.limit(1).with_for_update(skip_locked=batch_id is None)).first()
    if row is None:
        return None
    this, told = update(_batches).where(_batches.c.id == row.id), orjson.loads(row.files)
    files = [
        NewStoreFile(**file | {"attributes": file["attributes"] and file["attributes"].encode()})
        for file in told[row.added : row.added + SLICE]
    ]
    try:
        add_files(conn, row.owner, row.store_id, files, row.id, now)
    except (NotFound, VectorStoreFull):  # the store is gone, or others took its last numbers
        conn.execute(this.values(files=None, total=row.added))
        return str(row.id)
    added = row.added + len(files)
    conn.execute(this.values(added=added, **({"files": None} if added >= row.total else {})))
    return str(row.id)


def get_batch(conn: Connection, owner: str, store_id: str, batch_id: str) -> StoredFileBatch:
    """One batch. NotFound("vector store" | "file batch")."""
    row = _batch(conn, owner, store_id, batch_id)
    counts = _counts(conn, _files.c.batch_id, [batch_id]).get(batch_id, FileCounts())
    left = row.total - row.added
    if row.files is None:
        counts = replace(counts, cancelled=counts.cancelled + left)
    else:
        counts = replace(counts, in_progress=counts.in_progress + left)
    return StoredFileBatch(row.id, row.store_id, row.created_at, row.cancelled_at, counts)


def cancel_batch(conn: Connection, owner: str, store_id: str, batch_id: str, now: int) -> StoredFileBatch:
    """Cancels those files of a batch that are not read yet; nothing for one that is. NotFound."""
    _batch(conn, owner, store_id, batch_id)
    this = update(_batches).where(_batches.c.id == batch_id)
    left = conn.execute(this.where(_batches.c.files.is_not(None)).values(files=None)).rowcount
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
    query = select(_files.c.owner, start, func.sum(_files.c.num_bytes)).where(
        _files.c.created_at < before, _files.c.deleted_at.is_(None)
    )
    if owners:
        query = query.where(_files.c.owner.in_(list(owners)))
    rows = conn.execute(query.group_by(_files.c.owner, start)).all()
    return [(owner, int(start), int(size)) for owner, start, size in rows]


# ------------------------------------------------------------------------------------------------------------
# What a search looks at


def searched(
    conn: Connection, owner: str, ids: Sequence[str], now: int, *, attributes: bool
) -> tuple[SearchedStore, ...]:
    """Stores that are about to be searched, each once, in this order. attributes: those of all their files
    are wanted, because they decide what is found. A file that has expired by `now` is not found any more,
    though it stays in its stores until the next sweep. NotFound("vector store")."""
    found = []
    for id in dict.fromkeys(ids):
        row = row_of(conn, owner, id)
        mine, done = _files.c.store_number == row.number, _files.c.status == "completed"
        readable = and_(done, _files.c.deleted_at.is_(None))
        # By the indexes on expiry and on the files of a store: few files have expired and are still there.
        over = and_(
            _files.c.store_id == row.id,
            _files.c.file_id.in_(select(uploaded.c.id).where(uploaded.c.expires_at <= now)),
            _files.c.deleted_at.is_(None),
        )
        hidden = frozenset(
            key
            for unseen in (and_(mine, ~readable), over)
            for key in _keys(conn, select(_files.c.number).where(unseen), row.number)
        )
        shown: dict[int, bytes | None] = {}
        if attributes:
            query = select(_files.c.number, _files.c.attributes).where(mine, readable)
            told = ((file_key(row.number, number), told) for number, told in conn.execute(query).all())
            shown = {key: attributes_of for key, attributes_of in told if key not in hidden}
        expires_at = None if row.expires_after is None else row.last_active_at + row.expires_after
        found.append(
            SearchedStore(row.number, row.id, expires_at, row.embedding, row.dimensions, hidden, shown)
        )
    return tuple(found)


def _keys(conn: Connection, query: Select[int], store: int) -> list[int]:
    return [file_key(store, number) for number in conn.execute(query).scalars().all()]
