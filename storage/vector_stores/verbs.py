"""What can be done with vector stores, each one transaction: `Storage.vector_stores`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from storage.drivers import Run
from storage.records import Cursor, Order, Page
from storage.vector_stores import ingestion, nearest, stores
from storage.vector_stores.records import (
    Due,
    FileClaim,
    NewChunk,
    NewStoreFile,
    NewVectorStore,
    SearchedStore,
    StoredChunk,
    StoredFileBatch,
    StoredStoreFile,
    StoredVectorStore,
    WordHits,
)
from storage.vector_stores.words import merge_words, search_words

MAX_KNOWN = 256
"""Stores of which it is kept which files have vectors."""


class VectorStores:
    """The vector stores of a database. Like `Storage`, of which it is a part: everything is of one `owner`,
    and the id of another owner's store is an unknown one. Any operation may raise StorageUnavailable."""

    def __init__(self, read: Run, write: Run, write_late: Run, runner: str, *, shared: bool) -> None:
        self._read = read
        self._write = write
        self._write_late = write_late
        self._runner = runner
        self._shared = shared
        self._held: dict[tuple[int, int], int] = {}  # files that tasks work on; the fence of each claim
        self._claiming = asyncio.Lock()
        self._behind = (-1, -1)  # the file that was embedded last
        self._taken_over: int | None = None  # the last chunk whose vector the database can search by itself
        self._nearest = False
        # by store and model: what was told last of the files that have vectors, and what that says
        self._embedded: OrderedDict[tuple[int, str], tuple[str, Mapping[int, int]]] = OrderedDict()

    # -- stores ----------------------------------------------------------------------------------------------

    async def create(self, new: NewVectorStore, files: Sequence[NewStoreFile] = ()) -> StoredVectorStore:
        """Stores a store, with the files that are to be read into it."""
        return await self._write(partial(stores.create, new=new, files=tuple(files)))

    async def get(self, owner: str, id: str) -> StoredVectorStore:
        """One store. NotFound("vector store")."""
        return await self._read(partial(stores.get, owner=owner, id=id))

    async def list(
        self,
        owner: str,
        *,
        limit: int,
        order: Order = "desc",
        after: Cursor | None = None,
        before: str | None = None,
    ) -> Page[StoredVectorStore]:
        """One page by time. NotFound for `after` and `before`."""
        return await self._read(
            partial(stores.list_, owner=owner, limit=limit, order=order, after=after, before=before)
        )

    async def change(self, owner: str, id: str, now: int, values: Mapping[str, Any]) -> StoredVectorStore:
        """Replaces some of `name`, `metadata` and `expires_after`. NotFound."""
        return await self._write(partial(stores.change, owner=owner, id=id, now=now, values=values))

    async def delete(self, owner: str, id: str, now: int) -> None:
        """Makes a store unknown; `erase` removes what is in it. NotFound."""
        await self._write(partial(stores.delete, owner=owner, id=id, now=now))

    # -- files and batches -----------------------------------------------------------------------------------

    async def add_files(
        self, owner: str, store_id: str, files: Sequence[NewStoreFile], now: int
    ) -> tuple[StoredStoreFile, ...]:
        """Puts files into a store, to be read. NotFound("vector store"), VectorStoreFull."""
        job = partial(
            stores.add_files, owner=owner, store_id=store_id, files=tuple(files), batch_id=None, now=now
        )
        return await self._write(job)

    async def get_file(self, owner: str, store_id: str, file_id: str) -> StoredStoreFile:
        """One file of a store. NotFound("vector store" | "vector store file")."""
        return await self._read(partial(stores.get_file, owner=owner, store_id=store_id, file_id=file_id))

    async def list_files(
        self,
        owner: str,
        store_id: str,
        *,
        limit: int,
        order: Order = "desc",
        after: Cursor | None = None,
        before: str | None = None,
        status: str | None = None,
        batch_id: str | None = None,
    ) -> Page[StoredStoreFile]:
        """One page of a store's files, or of one batch's, by time. NotFound."""
        job = partial(
            stores.list_files,
            owner=owner,
            store_id=store_id,
            limit=limit,
            order=order,
            after=after,
            before=before,
            status=status,
            batch_id=batch_id,
        )
        return await self._read(job)

    async def set_attributes(
        self, owner: str, store_id: str, file_id: str, attributes: bytes | None
    ) -> StoredStoreFile:
        """Replaces the attributes of a file, a JSON object. NotFound."""
        job = partial(
            stores.set_attributes, owner=owner, store_id=store_id, file_id=file_id, attributes=attributes
        )
        return await self._write(job)

    async def remove_file(self, owner: str, store_id: str, file_id: str, now: int) -> None:
        """Takes a file out of a store, also while it is read. NotFound."""
        await self._write(
            partial(stores.remove_file, owner=owner, store_id=store_id, file_id=file_id, now=now)
        )

    async def create_batch(
        self, owner: str, store_id: str, batch_id: str, files: Sequence[NewStoreFile], now: int
    ) -> StoredFileBatch:
        """Puts files into a store together, in short transactions; once this has begun, `add_some` goes on
        with it in any process. NotFound("vector store"), VectorStoreFull."""
        job = partial(
            stores.create_batch,
            owner=owner,
            store_id=store_id,
            batch_id=batch_id,
            files=tuple(files),
            now=now,
        )
        await self._write(job)
        while await self.add_some(now, batch_id):
            pass
        return await self.get_batch(owner, store_id, batch_id)

    async def add_some(self, now: int, batch_id: str | None = None) -> bool:
        """Puts some files of a batch into its store, or of any that was left; False where there is none."""
        return await self._write(partial(stores.add_some, batch_id=batch_id, now=now))

    async def get_batch(self, owner: str, store_id: str, batch_id: str) -> StoredFileBatch:
        """One batch. NotFound("vector store" | "file batch")."""
        return await self._read(partial(stores.get_batch, owner=owner, store_id=store_id, batch_id=batch_id))

    async def cancel_batch(self, owner: str, store_id: str, batch_id: str, now: int) -> StoredFileBatch:
        """Cancels those files of a batch that are not read yet. NotFound."""
        return await self._write(
            partial(stores.cancel_batch, owner=owner, store_id=store_id, batch_id=batch_id, now=now)
        )

    # -- searches --------------------------------------------------------------------------------------------

    async def searched(
        self,
        owner: str,
        ids: Sequence[str],
        now: int,
        *,
        shows: Callable[[bytes | None], bool] | None = None,
    ) -> tuple[SearchedStore, ...]:
        """Stores that are about to be searched. shows: which of their files are found, by their attributes,
        which are a JSON object or None; called in a thread. NotFound("vector store")."""
        job = partial(stores.searched, owner=owner, ids=tuple(ids), now=now, shows=shows)
        return await self._read(job)

    async def search(
        self, numbers: Sequence[int], query: str, files: Collection[int], *, only: bool, most: int
    ) -> WordHits:
        """The chunks of stores that share most words with a query.

        files: keys of files: those whose chunks are looked at where `only`, and else those whose are not.
        """
        job = partial(search_words, stores=tuple(numbers), query=query, files=files, only=only, most=most)
        return await self._read(job)

    async def chunks(self, ids: Sequence[int]) -> dict[int, StoredChunk]:
        """Chunks by their ids; those are missing that can no longer be searched."""
        return await self._read(partial(ingestion.get_chunks, ids=tuple(ids)))

    async def file_chunks(
        self, owner: str, store_id: str, file_id: str, *, after: int = -1, limit: int
    ) -> tuple[StoredChunk, ...]:
        """The next chunks of a file behind a position. NotFound."""
        job = partial(
            stores.file_chunks, owner=owner, store_id=store_id, file_id=file_id, after=after, limit=limit
        )
        return await self._read(job)

    async def embedded_files(self, number: int, embedding: str) -> Mapping[int, int]:
        """The files of a store that can be searched by vectors of a model, by their keys, and how many chunks
        each has. It is the same object as long as it is the same."""
        told = await self._read(partial(ingestion.embedded_files, store=number, embedding=embedding))
        known = self._embedded.get((number, embedding))
        if known is None or known[0] != told:
            known = told, ingestion.read_embedded(number, told)
            self._embedded[number, embedding] = known
        self._embedded.move_to_end((number, embedding))
        if len(self._embedded) > MAX_KNOWN:
            self._embedded.popitem(last=False)
        return known[1]

    async def vectors(self, keys: Sequence[int]) -> Sequence[tuple[int, bytes]]:
        """The vectors of files, by their keys, which rise: the ids of their chunks and float32 values."""
        return await self._read(partial(ingestion.vectors, keys=tuple(keys)))

    async def make_nearest(self) -> bool:
        """Has the database search vectors by itself, where it can; see `storage.vector_stores.nearest`."""
        made = self._shared and await self._write(nearest.make)
        self._taken_over = -1 if made else None
        return made

    async def take_over(self) -> bool:
        """Takes over some vectors that were there before the database could search them; False when there
        are no more."""
        if self._taken_over is not None:
            job = partial(nearest.take_over, after=self._taken_over)
            self._taken_over = await self._write_late(job)
        return self._taken_over is not None

    async def finds_nearest(self) -> bool:
        """Whether the database searches vectors by itself, and has all of them."""
        if self._shared and not self._nearest:
            self._nearest = await self._read(nearest.is_complete)
        return self._nearest

    async def nearest(
        self,
        model: str,
        numbers: Sequence[int],
        query: bytes,
        files: Collection[int],
        *,
        only: bool,
        most: int,
    ) -> Sequence[tuple[int, float]]:
        """The chunks of stores that are nearest to a query: ids and cosines, the highest first; only where
        the database `finds_nearest`.

        model: of the vectors. query: float32 values. files: keys of files: those whose chunks are looked at
        where `only`, and else those whose are not.
        """
        job = partial(
            nearest.search,
            model=model,
            stores=tuple(numbers),
            query=query,
            files=files,
            only=only,
            most=most,
        )
        return await self._read(job)

    async def touch(self, numbers: Sequence[int], now: int) -> None:
        """Notes that stores are used. May be lost with the machine."""
        await self._write_late(partial(stores.touch, numbers=tuple(numbers), now=now))

    async def kept_bytes(
        self, owners: Sequence[str], before: int, width: int
    ) -> Sequence[tuple[str, int, int]]:
        """The bytes of chunks that are there, by owner and by the time when their files came, in buckets of
        `width` microseconds: (owner, start of the bucket, bytes), of files that came before a time. No
        owners: all of them."""
        job = partial(stores.kept_bytes, owners=tuple(owners), before=before, width=width)
        return await self._read(job)

    # -- reading files ---------------------------------------------------------------------------------------

    def _claimant(self, now: int, embedding: str | None = None) -> ingestion.Claimant:
        return ingestion.Claimant(self._runner, self._shared, frozenset(self._held), now, embedding)

    async def due(self, now: int, embedding: str | None = None) -> Due:
        """What there is to be done: files to be read or embedded, expired stores, what is to be erased.
        embedding: the model of this process."""
        return await self._read(partial(ingestion.due, claimant=self._claimant(now, embedding)))

    async def claim(self, now: int, behind: str = "") -> FileClaim | None:
        """Takes the next file that is to be read and that no task works on; owners take turns, and `behind`
        had the last one. It is held until `let_go`."""
        async with self._claiming:  # one must know of the other
            return self._hold(
                await self._write(partial(ingestion.claim, claimant=self._claimant(now), behind=behind))
            )

    def _hold(self, job: FileClaim | None) -> FileClaim | None:
        if job is not None:
            self._held[job.key] = job.fence
        return job

    async def others_wait(self, job: FileClaim, now: int) -> bool:
        """Whether files wait to be read that would be claimed rather than this one again: those of other
        owners, and all of them where this one has been read."""
        return await self._read(partial(ingestion.others_wait, claimant=self._claimant(now), job=job))

    def let_go(self, job: FileClaim) -> None:
        """No task of this process works on a file any more: whatever the database knows of that, it may be
        claimed again where its work has not ended."""
        if self._held.get(job.key) == job.fence:
            del self._held[job.key]

    async def begin_anew(self, job: FileClaim) -> bool:
        """Erases some of what is stored of a file that is to be read from its beginning; False when nothing
        is left. FileClaimLost."""
        return await self._write_late(partial(ingestion.begin_anew, job=job))

    async def add_chunks(
        self, job: FileClaim, chunks: Sequence[NewChunk], digest: bytes, embedding: str | None = None
    ) -> None:
        """Stores the next chunks of a file; digest: of all of its chunks; embedding: the model of their
        vectors. May be lost with the machine, and is then read again. FileClaimLost."""
        write = partial(
            ingestion.add_chunks, job=job, chunks=tuple(chunks), digest=digest, embedding=embedding
        )
        await self._write_late(write)

    async def merge_words(self, *, whole: bool = False) -> bool:
        """Merges some of the index of words, so that searches stay fast; False when there is nothing to be
        merged. whole: begins to merge all of it, so that nothing stays of what was erased; later calls go
        on with that."""
        return await self._write_late(partial(merge_words, whole=whole))

    async def finish(self, job: FileClaim, error: tuple[str, str] | None = None) -> None:
        """Ends the reading of a file: it can be searched, or there is an error, its code and message.
        FileClaimLost."""
        await self._write(partial(ingestion.finish, job=job, error=error))

    async def put_off(self, job: FileClaim, until: int | None, *, counts: bool) -> None:
        """Gives a claim up; the file rests until a time, if one is given. counts: as an attempt that failed.
        FileClaimLost."""
        await self._write(partial(ingestion.put_off, job=job, until=until, counts=counts))

    async def release(self) -> None:
        """Gives back what this process works on, because it ends."""
        self._held.clear()
        await self._write(partial(ingestion.release, runner=self._runner))

    async def free_all(self) -> None:
        """Takes every file from whoever worked on it. Called once, at the start, by the process that holds
        the data folder."""
        self._held.clear()
        await self._write(ingestion.free_all)

    # -- vectors of another model ----------------------------------------------------------------------------

    async def adopt(self, embedding: str, dimensions: int) -> bool:
        """Gives some stores this model, whose files are then to be embedded anew; False where all have it."""
        return await self._write(partial(ingestion.adopt, embedding=embedding, dimensions=dimensions))

    async def claim_to_embed(self, now: int, embedding: str) -> FileClaim | None:
        """Takes the next file whose chunks lack vectors of the model of its store, where that is this one."""
        async with self._claiming:
            claimant = self._claimant(now, embedding)
            for behind in dict.fromkeys((self._behind, (-1, -1))):
                key = await self._read(partial(ingestion.find_to_embed, claimant=claimant, behind=behind))
                if key is not None:
                    self._behind = key
                    claim = partial(ingestion.claim_to_embed, claimant=claimant, key=key)
                    return self._hold(await self._write(claim))
            await self._write_late(partial(ingestion.end_stores, embedding=embedding))
        return None

    async def texts(self, job: FileClaim, after: int, limit: int) -> tuple[StoredChunk, ...]:
        """The next chunks of a claimed file behind a position."""
        read = partial(
            ingestion.chunks_of, store_number=job.store_number, number=job.number, after=after, limit=limit
        )
        return await self._read(read)

    async def set_vectors(self, job: FileClaim, start: int, vectors: Sequence[bytes]) -> None:
        """Gives the chunks of a file from a position on these vectors, of the model that the claim names. May
        be lost with the machine, and is then done again. FileClaimLost."""
        write = partial(ingestion.set_vectors, job=job, start=start, vectors=tuple(vectors))
        await self._write_late(write)

    async def end_embedding(self, job: FileClaim) -> None:
        """All chunks of a file have their vectors. FileClaimLost."""
        await self._write(partial(ingestion.end_embedding, job=job))

    # -- what goes -------------------------------------------------------------------------------------------

    async def expire(self, now: int) -> int:
        """Lets go of some files of expired stores; returns how many, 0 when all are gone."""
        return await self._write_late(partial(stores.expire, now=now))

    async def erase(self) -> bool:
        """Erases some of what nobody sees any more; False when there is nothing more to erase."""
        return await self._write_late(ingestion.erase)
