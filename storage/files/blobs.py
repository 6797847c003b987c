"""Blobs: bytes of any length by their SHA-256, streamed in and out, and removed when no row names them.

A blob is put first, and the row that names it is committed afterwards. So a crash in between leaves a blob
without a row, which a sweep removes, and never a row without its blob. A sweep leaves alone what was put less
than GRACE_S ago, whose row may be on its way.

Who has put a blob holds it until `release`. One that nobody holds, and that no row names, goes at once with
the last hold or the last row: what is refused or deleted takes no room, however much of it comes.

Everything that touches a disk or a database is done by threads, in steps of at most PART_BYTES: neither the
event loop nor the memory holds a whole file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, select

from storage.drivers import PART_BYTES, BlobStore, Database, OpenBlob, Run, unavailable
from storage.files.records import Blob, BlobTooLarge, SweptFiles
from storage.records import UNSURE, NotFound, StorageUnavailable
from storage.tables import NAMES_BLOB, metadata

T = TypeVar("T")

log = logging.getLogger("antiphon.storage")

THREADS = 4

GRACE_S = 3600.0

SWEEP_EVERY_S = 3600.0
"""Seconds between two sweeps of the blobs, unless a row has gone that named one."""

SWEPT_AT_ONCE = 500


def blob_columns() -> tuple[Column[str], ...]:
    """The columns that name blobs, of all tables."""
    return tuple(
        column for table in metadata.sorted_tables for column in table.c if column.info == NAMES_BLOB
    )


class Blobs:
    """The blobs of one database. Any verb may raise StorageUnavailable."""

    def __init__(self, database: Database, read: Run) -> None:
        self._database = database
        self._read_rows = read
        self._store: BlobStore = database.blobs()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="antiphon-blobs")
        self._closed = False
        self._told_full = False  # to the log, since a blob was put
        self._dropping: set[asyncio.Task[int]] = set()
        self._sweep_at = 0.0  # monotonic

    async def put(self, stream: AsyncIterable[bytes], *, limit: int | None = None) -> Blob:
        """Stores what a stream yields, on the disk when this returns; the row that names it has GRACE_S to be
        committed, and `release` is to be called then, or as soon as it is known that there will be none. The
        same bytes are stored once.

        BlobTooLarge as soon as there are more than `limit` bytes; then, and whenever this raises or is
        cancelled, nothing is left of it.
        """
        incoming = await self._step(self._store.begin)
        digest, num_bytes, waiting = sha256(), 0, bytearray()
        finished = False

        def finish() -> None:
            nonlocal finished
            incoming.finish(digest.hexdigest())
            finished = True

        def write(data: bytes) -> None:
            digest.update(data)
            incoming.write(data)

        try:
            async for piece in stream:
                num_bytes += len(piece)
                if limit is not None and num_bytes > limit:
                    raise BlobTooLarge(limit)
                waiting += piece
                while len(waiting) >= PART_BYTES:
                    await self._step(partial(write, bytes(waiting[:PART_BYTES])))
                    del waiting[:PART_BYTES]
            if waiting:
                await self._step(partial(write, bytes(waiting)))
            await self._step(finish)
        except BaseException:
            if finished:  # it was cancelled in this very moment
                await self.release(digest.hexdigest())
            else:
                await self._step(incoming.abandon)
            raise
        self._told_full = False
        return Blob(digest.hexdigest(), num_bytes)

    @asynccontextmanager
    async def incoming(self, stream: AsyncIterable[bytes]) -> AsyncGenerator[Blob]:
        """`put` before the block, in which its row is committed, and `release` after it."""
        blob = await self.put(stream)
        async with self.committing(blob.digest):
            yield blob

    @asynccontextmanager
    async def committing(self, digest: str) -> AsyncGenerator[None]:
        """`release` after the block, in which the row of a blob that was put, or touched, is committed. Where
        nobody knows whether it is, the blob stays until a sweep finds it old, and named by no row."""
        try:
            yield
        except UNSURE:
            self.let_go()
            raise
        except BaseException:
            await self.release(digest)
            raise
        await self.release(digest)

    async def release(self, digest: str) -> bool:
        """The row of a blob that was put is committed, or will never be: where no row names the blob, and
        nobody else holds it, it goes. Returns whether it went."""
        try:
            await self._step(partial(self._store.release, (digest,)))
        except StorageUnavailable:
            return False  # a sweep finds it
        return await self.drop((digest,)) > 0

    async def drop(self, digests: Iterable[str]) -> int:
        """Rows that named these blobs are durably gone: removes, at once, those that no other row names and
        nobody holds. Returns how many went; the next sweep looks for the others."""
        num, these = 0, list(dict.fromkeys(digests))
        for start in range(0, len(these), SWEPT_AT_ONCE):
            page = these[start : start + SWEPT_AT_ONCE]
            try:
                marks = await self._step(partial(self._store.condemn, page))
                named = await self._read_rows(partial(_named, digests=[*marks])) if marks else set()
                num += await self._step(partial(self._store.remove_condemned, marks, named))
            except StorageUnavailable:
                break
        if num < len(these):
            self.let_go()
        return num

    def drop_soon(self, digests: Iterable[str]) -> None:
        """The same in the background, at once, for whoever cannot wait for it."""
        task = asyncio.create_task(self.drop(digests), name="contents that no row names")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def open(self, digest: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        """Yields the bytes from `start` to before `stop` (None: to the end), at most PART_BYTES at a time.

        NotFound("blob"), with the first step. Close it where it is not read to its end.
        """
        content = await self._step(partial(self._store.open, digest), _close)
        if content is None:
            raise NotFound("blob", digest)
        try:
            stop = content.num_bytes if stop is None else min(stop, content.num_bytes)
            while start < stop:
                data = await self._step(partial(content.read, start, min(PART_BYTES, stop - start)))
                if not data:
                    raise NotFound("blob", digest)  # it was removed meanwhile
                start += len(data)
                yield data
        finally:
            await self._step(content.close)

    async def read(self, digest: str) -> bytes:
        """All bytes of a blob that is known to be small. NotFound("blob")."""
        return b"".join([data async for data in self.open(digest)])

    async def touch(self, digest: str) -> bool:
        """Makes a blob count as put now, to be followed by `release`; False where there is none.

        For whoever commits a row that names a blob which another row names already: that row may go
        meanwhile, and the blob must not go with it.
        """
        return await self._step(partial(self._store.touch, digest))

    def let_go(self) -> None:
        """A row that named a blob is gone: the next sweep looks for it, and does not wait for its hour."""
        self._sweep_at = 0.0

    async def sweep(self, *, grace_s: float = GRACE_S) -> AsyncGenerator[SweptFiles]:
        """Removes blobs that no row names, and what is left of broken uploads, once an hour or after
        `let_go`; yields after each step.

        A row must be gone durably before this: were its removal lost with the machine, it would come back
        without its blob.
        """
        if time.monotonic() < self._sweep_at:
            return
        self._sweep_at = time.monotonic() + SWEEP_EVERY_S
        pages = self._store.untouched(grace_s, SWEPT_AT_ONCE)
        while page := await self._step(partial(next, pages, None)):
            named = await self._read_rows(partial(_named, digests=page))
            gone = [digest for digest in page if digest not in named]
            yield SweptFiles(
                blobs=await self._step(partial(self._store.remove, gone, grace_s)) if gone else 0
            )
        yield SweptFiles(blobs=await self._step(partial(self._store.remove_unfinished, grace_s)))

    async def close(self) -> None:
        """Removes what is being removed, ends the steps in flight, then the connections."""
        await asyncio.gather(*self._dropping, return_exceptions=True)
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._store.close)

    async def _step(self, job: Callable[[], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """What `job` returns or raises, in a thread. Where the caller is cancelled the job still ends first,
        so that no other step meets it; `undo` is given what it comes to."""
        if self._closed:
            raise StorageUnavailable("storage is closed")
        step = asyncio.get_running_loop().run_in_executor(self._threads, job)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step])
            if step.exception() is None:
                undo(step.result())
            raise
        except Exception as error:
            if isinstance(error, OSError) or self._database.trouble(error) is not None:
                told = unavailable("the content of a file could not be read or written", error)
                if told.full and not self._told_full:
                    self._told_full = True
                    log.error("there is no room: %s", told)
                raise told from error
            raise


def _named(conn: Connection, digests: Sequence[str]) -> set[str]:
    """Those of the digests that any row names."""
    named: set[str] = set()
    for column in blob_columns():
        query: Any = select(column).where(column.in_(digests)).distinct()
        named.update(conn.execute(query).scalars())
    return named


def _close(content: OpenBlob | None) -> None:
    if content is not None:
        content.close()
