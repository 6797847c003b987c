"""The class `Prompts`: every operation on prompt templates, each one a transaction, scoped by owner."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from storage.drivers import Run
from storage.prompts import rows
from storage.prompts.records import PromptChange, StoredPrompt, StoredPromptVersion
from storage.records import Cursor, Kept, Order, Page

T = TypeVar("T")


class Keep(Protocol):
    """Carries out a change together with the record of the request that asked for it."""

    async def __call__(self, job: Callable[[Connection], T], kept: Kept[T] | None) -> T:
        """What the change gives."""


class Prompts:
    """The prompts of one database. Another owner's id is NotFound("prompt"), as an unknown one is. kept: see
    `Storage.create_conversation`."""

    def __init__(self, read: Run, write: Run, keep: Keep) -> None:
        self._read, self._write, self._keep = read, write, keep

    async def create(
        self, prompt: StoredPrompt, body: bytes, *, kept: Kept[StoredPrompt] | None = None
    ) -> StoredPrompt:
        """Stores a prompt with its first version."""
        return await self._keep(partial(rows.create, prompt=prompt, body=body), kept)

    async def get(self, owner: str, id: str) -> StoredPrompt:
        """NotFound("prompt")."""
        return await self._read(partial(rows.get, owner=owner, id=id))

    async def list(
        self, owner: str, *, limit: int, order: Order = "desc", after: Cursor | None = None
    ) -> Page[StoredPrompt]:
        """One page by time. NotFound("prompt") for an id in `after`."""
        return await self._read(partial(rows.list_, owner=owner, limit=limit, order=order, after=after))

    async def change(
        self,
        owner: str,
        id: str,
        change: PromptChange,
        now: int,
        *,
        kept: Kept[StoredPrompt] | None = None,
    ) -> StoredPrompt:
        """Changes a prompt, or adds a version. NotFound("prompt" | "prompt version")."""
        return await self._keep(partial(rows.change, owner=owner, id=id, wanted=change, now=now), kept)

    async def version(
        self, owner: str, id: str, number: int | None = None
    ) -> tuple[StoredPrompt, StoredPromptVersion]:
        """A prompt and one version of it, the default where none is named, both of one moment.
        NotFound("prompt" | "prompt version")."""

        def read(conn: Connection) -> tuple[StoredPrompt, StoredPromptVersion]:
            prompt = rows.get(conn, owner, id)
            wanted = prompt.default_version if number is None else number
            return prompt, rows.version(conn, owner, id, wanted)

        return await self._read(read)

    async def versions(
        self, owner: str, id: str, *, limit: int, order: Order = "desc", after: int | None = None
    ) -> Page[StoredPromptVersion]:
        """One page by number. NotFound("prompt")."""
        job = partial(rows.versions, owner=owner, id=id, limit=limit, order=order, after=after)
        return await self._read(job)

    async def delete_version(self, owner: str, id: str, number: int) -> None:
        """NotFound("prompt" | "prompt version"), DefaultVersion."""
        await self._write(partial(rows.remove_version, owner=owner, id=id, number=number))

    async def delete(self, owner: str, id: str) -> None:
        """Removes a prompt with all of its versions; what was made with it stays. NotFound("prompt")."""
        await self._write(partial(rows.remove, owner=owner, id=id))

    async def purge(self, owner: str, now: int) -> AsyncGenerator[int]:
        """Removes the prompts that an owner had at `now`; yields how many went after each short
        transaction."""
        while ids := await self._read(partial(rows.of_owner, owner=owner, before=now)):
            yield await self._write(partial(rows.remove_all, ids=ids))
