"""The class `Files`: every operation on files and uploads, each one a transaction, scoped by owner.

Contents are the blobs (`Blobs`): put the content first, then create the file that names it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from storage.drivers import Run
from storage.files import file_rows, upload_rows
from storage.files.blobs import GRACE_S, Blobs
from storage.files.records import StoredFile, StoredPart, StoredUpload, SweptFiles
from storage.records import Cursor, Order, Page

T = TypeVar("T")

Leave = Callable[[Connection, Sequence[str]], bool]
"""Takes files that are to go, by their ids, out of some of what else has them; whether more of that is left,
which is for the next transaction."""


class Files:
    """The files of one database. An unknown id is NotFound; so are another owner's and one that has expired.

    leave: what is to be done before files go, deleted, expired or purged.
    """

    def __init__(self, read: Run, write: Run, blobs: Blobs, leave: Sequence[Leave] = ()) -> None:
        self._read, self._write = read, write
        self._blobs = blobs
        self._leave = tuple(leave)

    async def create(self, file: StoredFile) -> None:
        """Stores a file, whose blob has been put."""
        await self._write(partial(file_rows.create, file=file))

    async def get(self, owner: str, id: str, now: int) -> StoredFile:
        """NotFound("file")."""
        return await self._read(partial(file_rows.get, owner=owner, id=id, now=now))

    async def get_many(self, owner: str, ids: Sequence[str], now: int) -> dict[str, StoredFile]:
        """Those of these files that are there, by id."""
        return await self._read(partial(file_rows.get_many, owner=owner, ids=tuple(ids), now=now))

    async def list(
        self,
        owner: str,
        *,
        now: int,
        limit: int,
        order: Order = "desc",
        after: Cursor | None = None,
        purpose: str | None = None,
    ) -> Page[StoredFile]:
        """One page by time. NotFound("file") for an id in `after`."""
        job = partial(
            file_rows.list_, owner=owner, now=now, limit=limit, order=order, after=after, purpose=purpose
        )
        return await self._read(job)

    async def delete(self, owner: str, id: str, now: int) -> None:
        """Makes the id unknown, and removes the content where nothing else needs it. NotFound("file")."""

        def remove(conn: Connection) -> str:
            return file_rows.remove(conn, owner, id, now)

        await self.get(owner, id, now)
        await self._blobs.drop((await self._remove((id,), remove),))

    # -- uploads ---------------------------------------------------------------------------------------------

    async def create_upload(self, upload: StoredUpload) -> None:
        """Stores an upload without parts."""
        await self._write(partial(upload_rows.create, upload=upload))

    async def get_upload(self, owner: str, id: str) -> StoredUpload:
        """NotFound("upload")."""
        return await self._read(partial(upload_rows.get, owner=owner, id=id))

    async def parts(self, owner: str, upload_id: str) -> dict[str, StoredPart]:
        """The parts of a pending upload by id; none of any other."""
        parts = await self._read(partial(upload_rows.parts, owner=owner, id=upload_id))
        return {part.id: part for part in parts}

    async def add_part(self, part: StoredPart) -> None:
        """Stores a part, whose blob has been put. NotFound("upload"), UploadEnded."""
        await self._write(partial(upload_rows.add_part, part=part))

    async def complete_upload(self, id: str, file: StoredFile) -> StoredUpload:
        """Stores the file that an upload becomes, whose blob has been put, and removes the parts.

        NotFound("upload"), UploadEnded.
        """
        completed, digests = await self._write(partial(upload_rows.complete, id=id, file=file))
        await self._blobs.drop(digests)
        return completed

    async def cancel_upload(self, owner: str, id: str, now: int) -> StoredUpload:
        """Ends an upload and removes its parts. NotFound("upload"), UploadEnded."""
        cancelled, digests = await self._write(partial(upload_rows.cancel, owner=owner, id=id, now=now))
        await self._blobs.drop(digests)
        return cancelled

    # -- the ends of things ----------------------------------------------------------------------------------

    async def sweep(self, now: int, *, grace_s: float = GRACE_S) -> AsyncGenerator[SweptFiles]:
        """Removes files and uploads that have expired, and then blobs that no row names; yields what went
        after each short step. grace_s: see `Blobs.sweep`."""
        while ids := await self._read(partial(file_rows.expired, now=now)):
            yield SweptFiles(files=await self._remove_files(ids))
        while ids := await self._read(partial(upload_rows.expired, now=now)):
            yield SweptFiles(uploads=await self._remove_uploads(ids))
        async for swept in self._blobs.sweep(grace_s=grace_s):
            yield swept

    async def purge(self, owner: str, now: int) -> AsyncGenerator[int]:
        """Removes the files and uploads that an owner had at `now`; yields how many files went after each
        short transaction."""
        while ids := await self._read(partial(file_rows.of_owner, owner=owner, before=now)):
            yield await self._remove_files(ids)
        while ids := await self._read(partial(upload_rows.of_owner, owner=owner, before=now)):
            await self._remove_uploads(ids)
            yield 0

    async def _remove_files(self, ids: Sequence[str]) -> int:
        digests = await self._remove(ids, partial(file_rows.remove_all, ids=ids))
        await self._blobs.drop(digests)
        return len(digests)

    async def _remove_uploads(self, ids: Sequence[str]) -> int:
        num, digests = await self._write(partial(upload_rows.remove_all, ids=ids))
        await self._blobs.drop(digests)
        return num

    async def _remove(self, ids: Sequence[str], remove: Callable[[Connection], T]) -> T:
        """Takes files out of whatever has them, in short transactions, the last of which removes them."""

        def step(conn: Connection) -> tuple[T] | None:
            left = [leave(conn, ids) for leave in self._leave]
            return None if any(left) else (remove(conn),)

        while (removed := await self._write(step)) is None:
            pass
        return removed[0]
