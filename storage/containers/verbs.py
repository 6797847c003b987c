"""The class `Containers`: every operation on containers, each one a transaction, scoped by owner."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial

from sqlalchemy import ColumnElement, Connection

from storage.containers import rows
from storage.drivers import Run
from storage.files import Blobs
from storage.records import (
    ContainerChange,
    ContainerFile,
    ContainerRoom,
    Cursor,
    NotFound,
    Order,
    Page,
    Spent,
    StoredContainer,
)

Count = Callable[[Connection, Sequence[Spent]], None]
"""Counts what was used, within a transaction."""


class Containers:
    """The containers of one database. An unknown id is NotFound; so are another owner's and one that has
    expired. Contents of files are blobs: put the content first. What a client brings may raise ContainerFull
    and PathTaken, and is then refused as a whole."""

    def __init__(self, read: Run, write: Run, blobs: Blobs, count: Count) -> None:
        self._read, self._write = read, write
        self._blobs = blobs
        self._count = count

    async def create(
        self,
        container: StoredContainer,
        files: Sequence[ContainerFile] = (),
        *,
        room: ContainerRoom,
        spent: Spent | None = None,
    ) -> bool:
        """Stores a container with its first files, in the place of one that has expired; False where it is
        there already. spent: what it counts as, in the same transaction."""

        def make(conn: Connection) -> Sequence[str] | None:
            replaced = rows.create(conn, container, files, room)
            if replaced is not None and spent is not None:
                self._count(conn, (spent,))
            return replaced

        replaced = await self._write(make)
        await self._blobs.drop(replaced or ())
        return replaced is not None

    async def get(self, owner: str, id: str, now: int) -> StoredContainer:
        """NotFound("container")."""
        return await self._read(partial(rows.get, owner=owner, id=id, now=now))

    async def whole(
        self, owner: str, id: str, now: int
    ) -> tuple[StoredContainer, tuple[ContainerFile, ...], bytes | None]:
        """A container, its files and its session, all of one moment. NotFound("container")."""

        def read(conn: Connection) -> tuple[StoredContainer, tuple[ContainerFile, ...], bytes | None]:
            found = rows.get(conn, owner, id, now)
            return found, rows.files_of(conn, owner, id), rows.state_of(conn, owner, id)

        return await self._read(read)

    async def list(
        self,
        owner: str,
        *,
        now: int,
        limit: int,
        order: Order = "desc",
        after: Cursor | None = None,
        name: str | None = None,
    ) -> Page[StoredContainer]:
        """One page by time. NotFound("container") for an id in `after`."""
        job = partial(rows.list_, owner=owner, now=now, limit=limit, order=order, after=after, name=name)
        return await self._read(job)

    async def delete(self, owner: str, id: str, now: int) -> None:
        """Removes a container with its files. NotFound("container")."""

        def remove(conn: Connection) -> Sequence[str]:
            rows.get(conn, owner, id, now, hold=True)
            return rows.remove(conn, (id,))

        await self._blobs.drop(await self._write(remove))

    async def use(self, ids: Sequence[str], now: int) -> None:
        """Puts off when these containers expire, those that have not, of any owner."""
        await self._write(partial(rows.use, ids=tuple(ids), now=now))

    async def alive(self, ids: Sequence[str], now: int) -> set[str]:
        """Those of these containers, of any owner, that are there."""
        return await self._read(partial(rows.alive, ids=tuple(ids), now=now))

    async def add_file(self, file: ContainerFile, room: ContainerRoom) -> None:
        """Stores a file, in the place of one of the same path. NotFound("container")."""
        owner, id, now = file.owner, file.container_id, file.created_at
        add = partial(rows.add_files, owner=owner, id=id, files=(file,), now=now, room=room)
        await self._blobs.drop(await self._write(add))

    async def give(
        self, owner: str, id: str, files: Mapping[str, ContainerFile], now: int, room: ContainerRoom
    ) -> None:
        """Stores copies of uploaded files, by their ids; those that it was given before are left out,
        whatever has become of them. NotFound("container")."""
        give = partial(rows.give, owner=owner, id=id, files=files, now=now, room=room)
        await self._blobs.drop(await self._write(give))

    async def files(self, owner: str, container_id: str, now: int) -> tuple[ContainerFile, ...]:
        """All files of a container, oldest first. NotFound("container")."""

        def read(conn: Connection) -> tuple[ContainerFile, ...]:
            rows.get(conn, owner, container_id, now)
            return rows.files_of(conn, owner, container_id)

        return await self._read(read)

    async def file(self, owner: str, container_id: str, id: str, now: int) -> ContainerFile:
        """NotFound("container") or NotFound("file")."""
        found = await self.files(owner, container_id, now)
        if (file := next((file for file in found if file.id == id), None)) is None:
            raise NotFound("file", id)
        return file

    async def remove_file(self, owner: str, container_id: str, id: str, now: int) -> None:
        """NotFound("container") or NotFound("file")."""
        job = partial(rows.remove_file, owner=owner, container_id=container_id, id=id, now=now)
        await self._blobs.drop((await self._write(job),))

    async def change(self, change: ContainerChange) -> None:
        """What a finished cell changes, where its outcome has no transaction of its own."""
        await self._blobs.drop(await self._write(partial(rows.apply, changes=(change,))))

    def sweep(self, now: int) -> AsyncGenerator[int]:
        """Removes containers that have expired; yields how many went after each short transaction."""
        return self._remove(rows.expired(now))

    def purge(self, owner: str, now: int) -> AsyncGenerator[int]:
        """Removes those that an owner had at `now`, likewise."""
        return self._remove(rows.of_owner(owner, now))

    async def _remove(self, which: ColumnElement[bool]) -> AsyncGenerator[int]:
        while ids := await self._read(partial(rows.next_, which=which)):
            num, digests = await self._write(partial(rows.remove_those, ids=ids, which=which))
            await self._blobs.drop(digests)
            yield num
