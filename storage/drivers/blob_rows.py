"""Blobs as rows of a PostgreSQL database, by connections of their own: the writer never waits for a file.

Each statement is a transaction of its own, and repeating it does nothing: so it is tried again when the
connection breaks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from queue import Empty, LifoQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import BigInteger, delete, exists, func, literal, select, update
from sqlalchemy import cast as cast_sql
from sqlalchemy.dialects.postgresql import insert

from storage.drivers.interface import PART_BYTES, Work
from storage.tables import blob_parts, blobs

T = TypeVar("T")

_NOW = cast_sql(func.floor(func.extract("epoch", func.now())), BigInteger)


class Repeating(Protocol):
    """A connection that repeats what it was told when it broke."""

    def run(self, work: Work[T]) -> T: ...

    def close(self) -> None: ...


class BlobRows:
    """See `interface.BlobStore`. Its verbs raise the database's errors.

    connect: makes a connection, of which there are as many as threads that call at once.
    """

    def __init__(self, connect: Callable[[], Repeating]) -> None:
        self._connect = connect
        self._idle: LifoQueue[Repeating] = LifoQueue()

    def run(self, work: Work[T]) -> T:
        """`work` on a connection that nobody else uses meanwhile."""
        try:
            connection = self._idle.get_nowait()
        except Empty:
            connection = self._connect()
        try:
            return connection.run(work)
        finally:
            self._idle.put(connection)

    def begin(self) -> IncomingRows:
        return IncomingRows(self)

    def open(self, digest: str) -> BlobOfRows | None:
        query = select(blobs.c.content, blobs.c.num_bytes).where(blobs.c.digest == digest)
        row = self.run(lambda conn: conn.execute(query).first())
        return None if row is None else BlobOfRows(self, row.content, row.num_bytes)

    def touch(self, digest: str) -> bool:
        touch = update(blobs).where(blobs.c.digest == digest).values(touched_at=_NOW)
        return self.run(lambda conn: conn.execute(touch).rowcount) == 1

    def untouched(self, grace_s: float, after: str, limit: int) -> list[str]:
        old = select(blobs.c.digest).where(blobs.c.digest > after, blobs.c.touched_at <= _NOW - int(grace_s))
        query = old.order_by(blobs.c.digest).limit(limit)
        return list(self.run(lambda conn: conn.execute(query).scalars().all()))

    def remove(self, digest: str, grace_s: float) -> bool:
        # The age is looked at again under the row's lock. The parts are unfinished ones from then on.
        old = (blobs.c.digest == digest, blobs.c.touched_at <= _NOW - int(grace_s))
        remove = delete(blobs).where(*old).returning(blobs.c.content)
        content = self.run(lambda conn: conn.execute(remove).scalar())
        if content is not None:
            self.drop(content)
        return content is not None

    def remove_unfinished(self, grace_s: float) -> int:
        parts = blob_parts
        stale = (
            select(parts.c.content)
            .where(~exists().where(blobs.c.content == parts.c.content))
            .group_by(parts.c.content)
            .having(func.max(parts.c.written_at) <= _NOW - int(grace_s))
        )
        contents = self.run(lambda conn: conn.execute(stale).scalars().all())
        for content in contents:
            self.drop(content)
        return len(contents)

    def drop(self, content: str) -> None:
        """Removes parts that no digest stands for."""
        drop = delete(blob_parts).where(blob_parts.c.content == content)
        self.run(lambda conn: conn.execute(drop))

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get_nowait().close()


class IncomingRows:
    """See `interface.IncomingBlob`."""

    def __init__(self, rows: BlobRows) -> None:
        self._rows = rows
        self._content = secrets.token_hex(16)
        self._num_parts = self._num_bytes = 0
        self._finishing = False

    def write(self, data: bytes) -> None:
        values = {
            "content": self._content,
            "number": self._num_parts,
            "data": data,
            "written_at": _NOW,
        }
        part = insert(blob_parts).values(values).on_conflict_do_nothing()
        self._rows.run(lambda conn: conn.execute(part))
        self._num_parts += 1
        self._num_bytes += len(data)

    def finish(self, digest: str) -> None:
        self._finishing = True
        held = select(func.count()).where(blob_parts.c.content == self._content).scalar_subquery()
        # Parts that stood still for longer than the grace may be gone: without them there is no blob.
        row: Any = select(
            literal(digest), literal(self._content), cast_sql(literal(self._num_bytes), BigInteger), _NOW
        ).where(held == self._num_parts)
        put = insert(blobs).from_select(["digest", "content", "num_bytes", "touched_at"], row)
        kept = put.on_conflict_do_update(
            index_elements=[blobs.c.digest], set_={"touched_at": put.excluded.touched_at}
        ).returning(blobs.c.content)
        content = self._rows.run(lambda conn: conn.execute(kept).scalar())
        if content is None:
            raise TimeoutError("its parts were removed, because none came for too long")
        if content != self._content:
            self._rows.drop(self._content)  # the same bytes are there already

    def abandon(self) -> None:
        if not self._finishing:  # else a row may name them; parts that no row names go after a while
            self._rows.drop(self._content)


class BlobOfRows:
    """See `interface.OpenBlob`."""

    def __init__(self, rows: BlobRows, content: str, num_bytes: int) -> None:
        self._rows, self._content = rows, content
        self.num_bytes = num_bytes

    def read(self, start: int, length: int) -> bytes:
        number, skipped = divmod(start, PART_BYTES)
        piece = func.substr(blob_parts.c.data, skipped + 1, min(length, PART_BYTES - skipped))
        query = select(piece).where(blob_parts.c.content == self._content, blob_parts.c.number == number)
        data: bytes | None = self._rows.run(lambda conn: conn.execute(query).scalar())
        return data or b""

    def close(self) -> None:
        """Nothing is held between two reads."""
