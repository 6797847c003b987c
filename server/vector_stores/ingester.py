"""Reads files into stores: takes a file that nobody reads, cuts it into chunks, embeds them, and stores them.

Each file is a job in the database, claimed and fenced (`storage.vector_stores.ingestion`). Chunks are stored
a few at a time, so that the writing thread is free for streams in between, and what is stored is never read
again: after a crash the next process finds the first chunk that is missing. It may go on there because the
same document gives the same chunks; where a newer parser gives others, it begins anew.

A process that starts with another embedding model makes it the model of all stores. Their files keep what
they have until there is nothing to be read; then their chunks are given vectors of the new model, file by
file, and by the same claims. Until a file has all of them, its words alone are searched.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from engine import EngineError
from server.clock import now_us
from server.errors import ApiError, to_api_error
from server.progress import Progress
from server.vector_stores.embedding import Embedder, Payer
from server.vector_stores.vectors import as_bytes
from storage import MAX_CHUNKS, FileClaim, FileClaimLost, NewChunk, NotFound, StorageUnavailable
from tools import Chunk, ReadersBusy, UnreadableDocument

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon.vector_stores")

WORKERS = 2
"""Files that a process reads at once: a long one does not hold up all short ones."""

TURN_S = 10.0
"""How long a file is worked on before it gives way to those of other owners; one that took longer to be read,
for as long again: so reading files several times takes no longer than storing what they have."""

BATCH = 48
"""Chunks that one transaction stores; it takes some 15 ms."""

MOST_APART = 256
"""Transactions whose words may lie apart while a model generates or files are read; a search for eight words
takes some 40 ms then. Otherwise they are merged at once."""

RESTS = 10
"""While a model generates, a task rests this many times as long as it has worked; at other times just as
long. Streams then lose some 4 % of their tokens."""

MOST_CHUNKS_A_S = 220
"""That a process stores while a model generates: on a quick machine the same share of the work would be more
chunks, which cost the streams more than 5 % of their tokens."""

MOST_REST_S = 1.0
"""What a model can make of a rest: where a transaction was slow, for a lock or a disk, more helps nobody."""

MAX_ATTEMPTS = 3
"""Times that the work on a file may fail, or end the process, without having got anywhere."""

LOOK_S = 5.0
"""How often a process looks for files that other processes left, and for stores that have expired."""

RETRY_S = 1.0
"""Until the database is asked again that could not be reached; what fails again and again waits longer."""

MOST_RETRY_S = 60.0

BACKOFF_S = (5.0, 30.0)
"""How long a file rests whose work has failed once, and twice, by a fault of the server."""

EMBEDDING_RESTS_S = 3600.0
"""How long a file rests that was read, and cannot be embedded anew."""

Read = Callable[[FileClaim], Awaitable[Sequence[Chunk]]]
"""Reads the file of a job into chunks. Raises UnreadableDocument, and NotFound where the file is gone."""

Room = Callable[[str, int], Awaitable[None]]
"""Counts bytes of an owner that are about to be stored; ApiError 429 where there is no room for them."""

PayerOf = Callable[[str], Awaitable[Payer]]
"""Who pays for the vectors of an owner's files."""


async def nobody_limited(owner: str) -> Payer:
    """An owner without limits."""
    return Payer(owner)


class Flow:
    """What all tasks of a process store together."""

    def __init__(self) -> None:
        self._full_until = 0.0

    def wait_s(self, num_chunks: int) -> float:
        """For how long nothing more is to be stored, once these have been, while a model generates."""
        now = time.monotonic()
        self._full_until = max(self._full_until, now) + num_chunks / MOST_CHUNKS_A_S
        return self._full_until - now


class Pace:
    """The rests of one task, in which the writing thread and the processor are left to others. generates:
    whether a model generates now."""

    def __init__(self, generates: Callable[[], bool], flow: Flow | None = None) -> None:
        self._generates = generates
        self._flow = flow or Flow()
        self._began = time.monotonic()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is done within is not rested after: it gives way to others by itself."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._began += time.monotonic() - began

    async def rest(self, num_chunks: int = 0) -> None:
        """Rest after what was done since the last rest, storing so many chunks among it."""
        rest_s = took = time.monotonic() - self._began
        if self._generates():
            rest_s = max(took, min(RESTS * took, MOST_REST_S), self._flow.wait_s(num_chunks))
        await asyncio.sleep(rest_s)
        self._began = time.monotonic()


class _GivesWay(Exception):
    """What a claim is for goes on later: the files of other owners have their turn."""


class Turn:
    """How long a task works on a file while others wait."""

    def __init__(self, storage: Storage, job: FileClaim) -> None:
        self._stores, self._job = storage.vector_stores, job
        self._began = time.monotonic()
        self._ends = self._began + TURN_S

    def has_read(self) -> None:
        """What was done since its beginning is to be done anew in the next turn."""
        now = time.monotonic()
        self._ends = now + max(TURN_S, now - self._began)

    async def end(self) -> None:
        """Raises _GivesWay when it is over and others wait. To be called once some of the work is stored."""
        if time.monotonic() >= self._ends and await self._stores.others_wait(self._job, now_us()):
            raise _GivesWay


class Ingester:
    """Reads the files of one server. Several on one database share the work."""

    def __init__(
        self,
        storage: Storage,
        read: Read,
        room: Room,
        embedder: Embedder | None = None,
        payer_of: PayerOf = nobody_limited,
        generates: Callable[[], bool] = lambda: False,
    ) -> None:
        self._storage = storage
        self._generates = generates
        self._flow = Flow()
        self._tell_after = 0.0  # that the database is away
        self._stores = storage.vector_stores
        self._read = read
        self._room = room
        self._embedder = embedder
        self._model = None if embedder is None else embedder.identity
        self._payer_of = payer_of
        self._adopted = embedder is None  # all stores have the model of this process
        self._asked_database = False  # whether it can search vectors by itself
        self._behind = ""  # the owner whose turn was last
        self._num_apart = 1  # transactions whose words have not been merged; of earlier processes, who knows
        self._woken: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin with what an earlier process left."""
        if not self._storage.shared:
            await self._stores.free_all()
        for name, step in (*(("ingester", self._next) for _ in range(WORKERS)), ("erasing", self._tidy)):
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
        wait_s = RETRY_S
        while True:
            woken.clear()
            try:
                more = await step()
                wait_s = RETRY_S
                if more:
                    continue
            except StorageUnavailable as error:
                if time.monotonic() > self._tell_after:
                    self._tell_after = time.monotonic() + MOST_RETRY_S
                    log.warning("files cannot be read into vector stores now: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:  # a task that dies would be missed only when files are never read again
                log.exception("reading files into vector stores failed")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MOST_RETRY_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await woken.wait()

    async def _tidy(self) -> bool:
        """Do some of what is nobody's work: give stores the model of this process, put files of batches into
        them, erase what nobody sees any more; False when there is nothing of it to be done."""
        if not self._adopted:
            assert self._embedder is not None
            if not self._asked_database:
                await self._stores.make_nearest()
                self._asked_database = True
            self._adopted = not await self._stores.adopt(self._embedder.identity, self._embedder.dimensions)
            self.wake()
            return True
        if await self._stores.take_over():
            return True
        due = await self._stores.due(now_us())
        if not (due.to_add or due.to_expire or due.to_erase):
            return await self._merge(busy=due.to_read or self._generates())
        pace = Pace(self._generates)
        if due.to_add and await self._stores.add_some(now_us()):
            self.wake()
        elif due.to_expire:
            await self._stores.expire(now_us())
        else:
            await self._stores.erase()
            self._num_apart += 1
        await pace.rest()
        return True

    async def _merge(self, *, busy: bool) -> bool:
        """Merge some of the index of words; False where there is nothing to be merged, or it can wait."""
        if self._num_apart < (MOST_APART if busy else 1):
            return False
        pace = Pace(self._generates)
        if not await self._stores.merge_words():
            self._num_apart = 0
        await pace.rest()
        return True

    # -- one file --------------------------------------------------------------------------------------------

    async def _next(self) -> bool:
        """Read the next file, or embed the next one anew; False where there is none."""
        pace = Pace(self._generates, self._flow)
        # A look costs the writing thread nothing.
        due, job = await self._stores.due(now_us(), self._model), None
        if due.to_read:
            job = await self._stores.claim(now_us(), self._behind)
            self._behind = self._behind if job is None else job.owner
        if job is None and due.to_embed and self._model is not None:
            job = await self._stores.claim_to_embed(now_us(), self._model)
        if job is None:
            return False
        try:
            await self._work_on(job, pace)
        except FileClaimLost:
            log.info("file %s of %s was taken away while it was read", job.file_id, job.store_id)
        finally:
            # What could not be written of its end is found again, as a file of this process.
            self._stores.let_go(job)
        await pace.rest()
        return True

    async def _work_on(self, job: FileClaim, pace: Pace) -> None:
        """Do what a claim is for, or have the file rest. Raises FileClaimLost and StorageUnavailable."""
        try:
            reads = job.status == "in_progress"
            what = f"{'reading' if reads else 'embedding anew'} file {job.file_id} of {job.store_id}"
            with Progress(what, say=log.info):
                await (self._take_in if reads else self._embed_anew)(job, pace)
        except FileClaimLost:
            raise
        except _GivesWay:
            await self._stores.put_off(job, None, counts=False)
        except StorageUnavailable:
            await self._stores.put_off(job, None, counts=False)
            raise
        except Exception as error:  # one file must not keep others from being read
            if (wait_s := _wait_s(error)) is not None:  # the model is busy, or the owner's limits are reached
                await self._stores.put_off(job, _in(wait_s), counts=False)
                return
            log.exception("file %s could not be read into %s", job.file_id, job.store_id)
            if job.attempt < MAX_ATTEMPTS:
                await self._stores.put_off(job, _in(BACKOFF_S[max(job.attempt, 1) - 1]), counts=True)
            elif job.status == "in_progress":
                await self._stores.finish(job, ("server_error", _GIVEN_UP))
            else:
                await self._stores.put_off(job, _in(EMBEDDING_RESTS_S), counts=False)

    async def _take_in(self, job: FileClaim, pace: Pace) -> None:
        """Read a file to its end, whatever that is, unless it is no fault of the file."""
        try:
            error = await self._ingested(job, pace)
        except UnreadableDocument as why:
            if isinstance(why, ReadersBusy) or (why.code == "server_error" and job.attempt < MAX_ATTEMPTS):
                raise  # another attempt may succeed
            code = "invalid_file" if why.code == "too_large" else why.code
            error = (code, why.message)
        except ApiError as why:
            if _wait_s(why) is not None:
                raise
            error = ("server_error", why.message)  # there is no room, or the model cannot read a chunk
        except NotFound:
            error = ("invalid_file", "The file was deleted before it was read.")
        await self._stores.finish(job, error)

    async def _embed_anew(self, job: FileClaim, pace: Pace) -> None:
        """Give all chunks of a file that was read vectors of the model that this process has."""
        assert self._embedder is not None and job.dimensions is not None
        payer = Payer(job.owner, counted=False)
        start, turn = job.embedded, Turn(self._storage, job)
        while chunks := await self._stores.texts(job, start - 1, BATCH):
            vectors = await _embedded(self._embedder, [chunk.text for chunk in chunks], payer, pace)
            await self._stores.set_vectors(job, start, [as_bytes(vector) for vector in vectors])
            start += len(chunks)
            await pace.rest(len(chunks))
            await turn.end()
        await self._stores.end_embedding(job)

    async def _ingested(self, job: FileClaim, pace: Pace) -> tuple[str, str] | None:
        """Store the chunks of a file; what is wrong with it, as code and message. None: nothing."""
        if job.attempt > MAX_ATTEMPTS:
            log.error("file %s was begun %d times without an end", job.file_id, MAX_ATTEMPTS)
            return "server_error", _CUT_OFF
        embedder, turn = self._embedder_of(job), Turn(self._storage, job)
        with pace.apart():  # a process of a lower priority does most of it
            chunks = await self._read(job)
        if not chunks:
            return "unsupported_file", "The file has no text."
        if len(chunks) > MAX_CHUNKS:
            message = f"The file has {len(chunks)} chunks of this size; at most {MAX_CHUNKS} are taken."
            return "invalid_file", message
        digest = await asyncio.to_thread(digest_of, chunks, None if embedder is None else embedder.identity)
        first = job.next_position
        if first and job.digest != digest:
            while await self._stores.begin_anew(job):
                await pace.rest()
            first = 0
        turn.has_read()
        vector_bytes = 0 if embedder is None else 4 * embedder.dimensions
        await self._room(job.owner, sum(len(chunk.text.encode()) + vector_bytes for chunk in chunks[first:]))
        for start in range(first, len(chunks), BATCH):
            batch = chunks[start : start + BATCH]
            await self._store(job, start, batch, digest, embedder, pace)
            await pace.rest(len(batch))
            if start + BATCH < len(chunks):
                await turn.end()
        return None

    def _embedder_of(self, job: FileClaim) -> Embedder | None:
        """What embeds the chunks of a store. None where nothing is to, or another process's model: then the
        words alone are stored, and a process with that model embeds the file later."""
        mine = self._embedder
        same = mine is not None and (mine.identity, mine.dimensions) == (job.embedding, job.dimensions)
        return mine if same else None

    async def _store(
        self,
        job: FileClaim,
        start: int,
        chunks: Sequence[Chunk],
        digest: bytes,
        embedder: Embedder | None,
        pace: Pace,
    ) -> None:
        vectors: Sequence[Sequence[float] | None] = [None] * len(chunks)
        if embedder is not None:
            payer = await self._payer_of(job.owner)
            vectors = await _embedded(embedder, [chunk.text for chunk in chunks], payer, pace)
        new = [
            NewChunk(
                position,
                chunk.page,
                chunk.text,
                chunk.num_tokens,
                None if vector is None else as_bytes(vector),
                chunk.breaks,
            )
            for position, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True), start)
        ]
        await self._stores.add_chunks(job, new, digest, None if embedder is None else embedder.identity)
        self._num_apart += 1


async def _embedded(
    embedder: Embedder, texts: Sequence[str], payer: Payer, pace: Pace
) -> Sequence[Sequence[float]]:
    """Vectors of chunks. A model's queue and its priority let others go first. The work of a table is mostly
    Python's own, which no priority keeps from others, so it is rested after."""
    with nullcontext() if embedder.is_table else pace.apart():
        return await embedder.embed(texts, "document", payer=payer)


_CUT_OFF = (
    f"The server ended {MAX_ATTEMPTS} times while it read this file, so it does not begin again by itself: "
    "add the file to the store once more."
)
_GIVEN_UP = f"Reading this file has failed {MAX_ATTEMPTS} times. The server's log says more."


def _wait_s(error: Exception) -> float | None:
    """After how long the same work may succeed, where it is only that others were in the way."""
    if isinstance(error, ReadersBusy):
        return RETRY_S
    if isinstance(error, (ApiError, EngineError)):
        told = to_api_error(error).headers.get("retry-after")
        return None if told is None else max(RETRY_S, float(told))
    return None


def _in(wait_s: float) -> int:
    return now_us() + int(wait_s * 1e6)


def digest_of(chunks: Sequence[Chunk], embedding: str | None) -> bytes:
    """What tells the chunks of a file from others, and from those with vectors of another model."""
    digest = hashlib.blake2b(f"{embedding}/{len(chunks)}".encode(), digest_size=16)
    for chunk in chunks:
        text, pages = chunk.text.encode(), f"{chunk.page}{chunk.breaks}".encode()
        digest.update(len(text).to_bytes(8, "big") + text + len(pages).to_bytes(8, "big") + pages)
    return digest.digest()
