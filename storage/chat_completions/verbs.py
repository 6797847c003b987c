"""The class `ChatCompletions`: every operation on stored chat completions, each one a transaction, scoped by
owner."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from functools import partial

from sqlalchemy import Connection

from storage.chat_completions import rows
from storage.chat_completions.records import NewChatCompletion, StoredChatCompletion
from storage.drivers import Run
from storage.records import Cursor, Kept, Order, Page

WriteKept = Callable[
    [Callable[[Connection], StoredChatCompletion], Kept[StoredChatCompletion] | None],
    Awaitable[StoredChatCompletion],
]
"""Writes, together with the reply to the request that asked for it where it has a key."""


class ChatCompletions:
    """The stored chat completions of one database. An unknown id is NotFound, and so is another owner's."""

    def __init__(self, read: Run, write: Run, write_kept: WriteKept) -> None:
        self._read, self._write = read, write
        self._write_kept = write_kept

    async def create(
        self,
        new: NewChatCompletion,
        *,
        purge: str | None = None,
        kept: Kept[StoredChatCompletion] | None = None,
    ) -> StoredChatCompletion:
        """Stores a completion. ChatCompletionKnown where its owner has one of this id. purge: as what the
        audit log notes the purges of owners; OwnerPurged where it has one of this owner that came after the
        completion was asked for. None: nobody looks."""
        return await self._write_kept(partial(rows.create, new=new, purge=purge), kept)

    async def is_known(self, owner: str, id: str) -> bool:
        """Whether an owner has a completion of this id."""
        return await self._read(partial(rows.is_known, owner=owner, id=id))

    async def get(self, owner: str, id: str) -> StoredChatCompletion:
        """NotFound("chat completion")."""
        return await self._read(partial(rows.get, owner=owner, id=id))

    async def messages(self, owner: str, id: str) -> bytes:
        """The messages that it answers, a JSON array. NotFound("chat completion")."""
        return await self._read(partial(rows.messages, owner=owner, id=id))

    async def list(
        self,
        owner: str,
        *,
        limit: int,
        order: Order = "asc",
        after: Cursor | None = None,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page[StoredChatCompletion]:
        """One page by time. model, metadata: only those of this model, and those that have all of these
        pairs. NotFound("chat completion") for an id in `after`."""
        job = partial(
            rows.list_,
            owner=owner,
            limit=limit,
            order=order,
            after=after,
            model=model,
            metadata=dict(metadata or {}),
        )
        return await self._read(job)

    async def change(self, owner: str, id: str, metadata: Mapping[str, str]) -> StoredChatCompletion:
        """Replaces the metadata. NotFound("chat completion")."""
        return await self._write(partial(rows.change, owner=owner, id=id, metadata=dict(metadata)))

    async def delete(self, owner: str, id: str) -> None:
        """NotFound("chat completion")."""
        await self._write(partial(rows.remove, owner=owner, id=id))

    # -- the ends of things ----------------------------------------------------------------------------------

    async def sweep(self, *, before: int | None, most: int | None) -> AsyncGenerator[int]:
        """Removes those that were created by `before`, and of each owner all but the `most` newest ones;
        None: no such limit. Yields how many went after each short transaction."""
        if before is not None:
            while places := await self._read(partial(rows.older, before=before)):
                yield await self._write(partial(rows.remove_all, places=places))
        if most is not None:
            for owner in await self._read(partial(rows.owners_beyond, most=most)):
                while places := await self._read(partial(rows.beyond, owner=owner, most=most)):
                    yield await self._write(partial(rows.remove_all, places=places))

    async def purge(self, owner: str, now: int) -> AsyncGenerator[int]:
        """Removes those that an owner had at `now`; yields how many went after each short transaction."""
        while places := await self._read(partial(rows.of_owner, owner=owner, before=now)):
            yield await self._write(partial(rows.remove_all, places=places))
