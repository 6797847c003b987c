"""Reads files into stores: takes a file that nobody reads, cuts it into chunks, embeds them, and stores them.

Each file is a job in the database, claimed and fenced (`storage.vector_stores.ingestion`). Chunks are stored
a few at a time, so that the writing thread is free for streams in between, and what is stored is never read
again: after a crash the next process finds the first chunk that is missing. It may go on there because the
same document gives the same chunks; where a newer parser gives others, it begins anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from server.clock import now_us
from server.errors import ApiError
from server.vector_stores.embedding import Embedder
from server.vector_stores.vectors import as_bytes
from storage import MAX_CHUNKS, Ingestion, IngestionLost, NewChunk, NotFound, StorageUnavailable
from tools import Chunk, UnreadableDocument

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon.vector_stores")

WORKERS = 2
"""Files that a process reads at once: a long one does not hold up all short ones."""

BATCH = 16
"""Chunks that one transaction stores; it takes some 5 ms."""

MAX_ATTEMPTS = 3
"""Times that a file may end the process that reads it."""

LOOK_S = 5.0
"""How often a process looks for files that other processes left, and for stores that have expired."""

RETRY_S = 1.0
"""Until the database is asked again that could not be reached."""

Read = Callable[[Ingestion], Awaitable[Sequence[Chunk]]]
"""Reads the file of a job into chunks. Raises UnreadableDocument, and NotFound where the file is gone."""

Room = Callable[[str, int], Awaitable[None]]
"""Counts bytes of an owner that are about to be stored; ApiError 429 where there is no room for them."""


class Ingesting:
    """Reads the files of one server. Several on one database share the work."""

    def __init__(self, storage: Storage, read: Read, room: Room, embedder: Embedder | None = None) -> None:
        self._storage = storage
        self._stores = storage.vector_stores
        self._read = read
        self._room = room
        self._embedder = embedder
        self._behind = ""  # the owner whose turn was last
        self._woken: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin with what an earlier process left."""
        if not self._storage.shared:
            await self._stores.free_all()
        for name, step in (*(("ingesting", self._next) for _ in range(WORKERS)), ("erasing", self._tidy)):
            woken = asyncio.Event()
            self._woken.append(woken)
            self._tasks.append(asyncio.create_task(self._forever(step, woken), name=name))

    async def close(self) -> None:
        """Stop where it stands; the next process goes on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            with suppress(StorageUnavailable):
                await self._stores.release()

    def wake(self) -> None:
        """There is a file to be read, or something to be erased."""
        for woken in self._woken:
            woken.set()

    async def _forever(self, step: Callable[[], Awaitable[bool]], woken: asyncio.Event) -> None:
        while True:
            woken.clear()
            try:
                if await step():
                    continue
            except StorageUnavailable as error:
                log.warning("files cannot be read into vector stores now: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a task that dies would be missed only when files are never read again
                log.exception("reading files into vector stores failed")
                await asyncio.sleep(RETRY_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await woken.wait()

    async def _tidy(self) -> bool:
        """Erase some of what nobody sees any more; False when there is nothing to erase."""
        due = await self._stores.due(now_us())
        if due.to_expire:
            await self._stores.expire(now_us())
        elif not due.to_erase:
            return False
        began = time.monotonic()
        await self._stores.erase()
        await asyncio.sleep(time.monotonic() - began)
        return True

    # -- one file --------------------------------------------------------------------------------------------

    async def _next(self) -> bool:
        """Read the next file; False where there is none."""
        # A look costs the writing thread nothing.
        if not (await self._stores.due(now_us())).to_read:
            return False
        job = await self._stores.claim(self._behind)
        if job is None:
            return False
        self._behind = job.owner
        try:
            await self._take_in(job)
        except IngestionLost:
            log.info("file %s of %s was taken away while it was read", job.file_id, job.store_id)
        except StorageUnavailable:
            await self._give_back(job)
            raise
        return True

    async def _give_back(self, job: Ingestion) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await self._stores.give_back(job)
                return
            except IngestionLost:
                return
            except StorageUnavailable:
                continue

    async def _take_in(self, job: Ingestion) -> None:
        """Read a file to its end, whatever that is."""
        try:
            error = await self._ingested(job)
        except UnreadableDocument as why:
            code = "invalid_file" if why.code == "too_large" else why.code
            error = (code, why.message)
        except ApiError as why:  # there is no room
            error = ("server_error", why.message)
        except NotFound:
            error = ("invalid_file", "The file was deleted before it was read.")
        except (IngestionLost, StorageUnavailable):
            raise
        except Exception:  # one file must not keep others from being read
            log.exception("file %s could not be read into %s", job.file_id, job.store_id)
            error = ("server_error", "The file could not be read, by no fault of its own.")
        await self._stores.finish(job, error)

    async def _ingested(self, job: Ingestion) -> tuple[str, str] | None:
        """Store the chunks of a file; what is wrong with it, as code and message. None: nothing."""
        if job.attempt > MAX_ATTEMPTS:
            return "server_error", f"Reading this file has ended the server {MAX_ATTEMPTS} times."
        embedder = self._embedder_of(job)
        if isinstance(embedder, str):
            return "server_error", embedder
        chunks = await self._read(job)
        if not chunks:
            return "unsupported_file", "The file has no text."
        if len(chunks) > MAX_CHUNKS:
            message = f"The file has {len(chunks)} chunks of this size; at most {MAX_CHUNKS} are taken."
            return "invalid_file", message
        digest = await asyncio.to_thread(digest_of, chunks, job)
        first = job.next_position
        if first and job.digest != digest:
            while await self._stores.begin_anew(job):
                await asyncio.sleep(0)
            first = 0
        await self._room(job.owner, sum(len(chunk.text.encode()) for chunk in chunks[first:]))
        for start in range(first, len(chunks), BATCH):
            began = time.monotonic()
            await self._store(job, start, chunks[start : start + BATCH], digest, embedder)
            await asyncio.sleep(time.monotonic() - began)  # others write, too
        return None

    def _embedder_of(self, job: Ingestion) -> Embedder | str | None:
        """What embeds the chunks of a store, None where nothing is to; a message where that is not here."""
        if job.embedding is None:
            return None
        mine = self._embedder
        if mine is None or (mine.identity, mine.dimensions) != (job.embedding, job.dimensions):
            return f"The store was made with the embedding model {job.embedding}, which is not served here."
        return mine

    async def _store(
        self, job: Ingestion, start: int, chunks: Sequence[Chunk], digest: bytes, embedder: Embedder | None
    ) -> None:
        vectors: Sequence[Sequence[float] | None] = [None] * len(chunks)
        if embedder is not None:
            vectors = await embedder.embed([chunk.text for chunk in chunks], "document", owner=job.owner)
        new = [
            NewChunk(
                position,
                chunk.page,
                chunk.text,
                chunk.num_tokens,
                None if vector is None else as_bytes(vector),
            )
            for position, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True), start)
        ]
        await self._stores.add_chunks(job, new, digest)


def digest_of(chunks: Sequence[Chunk], job: Ingestion) -> bytes:
    """What tells the chunks of a file from others, and from those of another model."""
    digest = hashlib.blake2b(f"{job.embedding}/{job.dimensions}/{len(chunks)}".encode(), digest_size=16)
    for chunk in chunks:
        text = chunk.text.encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return digest.digest()
