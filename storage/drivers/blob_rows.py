"""Blobs as rows of a PostgreSQL database, by connections of their own: the writer never waits for a file.

Each statement is a transaction of its own, and repeating it does nothing: so it is tried again when the
connection breaks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from queue import Empty, LifoQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    delete,
    exists,
    func,
    literal,
    select,
    tuple_,
    update,
)
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
        put_again = {"touched_at": _NOW, "holds": blobs.c.holds + 1, "puts": blobs.c.puts + 1}
        touch = update(blobs).where(blobs.c.digest == digest).values(put_again)
        return self.run(lambda conn: conn.execute(touch).rowcount) == 1

    def release(self, digests: Sequence[str]) -> None:
        held = (blobs.c.digest.in_(digests), blobs.c.holds > 0)
        release = update(blobs).where(*held).values(holds=blobs.c.holds - 1)
        begun = False

        def once(conn: Connection) -> None:
            nonlocal begun
            if not begun:  # repeated, it might end the hold of another; a hold too many ends with the grace
                begun = True
                conn.execute(release)

        self.run(once)

    def condemn(self, digests: Sequence[str]) -> Mapping[str, object]:
        query = select(blobs.c.digest, blobs.c.puts).where(blobs.c.digest.in_(digests), blobs.c.holds == 0)
        return {digest: puts for digest, puts in self.run(lambda conn: conn.execute(query).all())}

    def remove_condemned(self, marks: Mapping[str, object], named: AbstractSet[str]) -> int:
        these = [(digest, puts) for digest, puts in marks.items() if digest not in named]
        return self._remove(tuple_(blobs.c.digest, blobs.c.puts).in_(these), blobs.c.holds == 0)

    def untouched(self, grace_s: float, limit: int) -> Iterator[list[str]]:
        old, after = select(blobs.c.digest).where(blobs.c.touched_at <= _NOW - int(grace_s)), ""

        def page(conn: Connection) -> list[str]:
            query = old.where(blobs.c.digest > after).order_by(blobs.c.digest).limit(limit)
            return list(conn.execute(query).scalars().all())

        while found := self.run(page):
            yield found
            after = found[-1]

    def remove(self, digests: Sequence[str], grace_s: float) -> int:
        return self._remove(blobs.c.digest.in_(digests), blobs.c.touched_at <= _NOW - int(grace_s))

    def _remove(self, *which: ColumnElement[bool]) -> int:
        # What is asked of a row is looked at again under its lock. Its parts are unfinished from then on.
        remove = delete(blobs).where(*which).returning(blobs.c.content)
        contents = self.run(lambda conn: conn.execute(remove).scalars().all())
        if contents:
            self.drop(*contents)
        return len(contents)

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

    def drop(self, *contents: str) -> None:
        """Removes parts that no digest stands for."""
        drop = delete(blob_parts).where(blob_parts.c.content.in_(contents))
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
            literal(digest),
            literal(self._content),
            cast_sql(literal(self._num_bytes), BigInteger),
            _NOW,
            *(cast_sql(literal(1), BigInteger) for _ in ("holds", "puts")),
        ).where(held == self._num_parts)
        columns = ["digest", "content", "num_bytes", "touched_at", "holds", "puts"]
        put = insert(blobs).from_select(columns, row)
        again = {"touched_at": put.excluded.touched_at, "holds": blobs.c.holds + 1, "puts": blobs.c.puts + 1}
        kept = put.on_conflict_do_update(index_elements=[blobs.c.digest], set_=again).returning(
            blobs.c.content
        )
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
