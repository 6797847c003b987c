"""Storage's door: every verb that the server has, each one transaction.

Owns: the life of an open database and which verbs are writes, promises, or patient. Refuses to know: SQL (the
modules beside it) and HTTP. Every verb is scoped by `owner`, except those of whoever runs a response; another
owner's id is the NotFound of an unknown one. Writes survive power loss when they return, except the appends
of running text, which reach the disk within 50 ms. Any verb may raise StorageUnavailable; `append` waits
instead.

Reads see every write that returned before they began, and each sees one moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, text

from . import conversations, events, history, items, keys, responses, runs, waiting
from .database import FolderLock, sqlite_path, trouble
from .migrate import migrate
from .readers import Readers
from .records import (
    CommitStats,
    HistoryItem,
    NewItem,
    NewResponse,
    Order,
    Page,
    Record,
    RunAppend,
    RunClaim,
    StorageUnavailable,
    StoredConversation,
    StoredItem,
    StoredKey,
    StoredResponse,
    ToolOutput,
    WaitingInputs,
)
from .writer import Writer

T = TypeVar("T")


class Storage:
    """An open database. Made by `open_storage`; closed by `close`."""

    def __init__(self, path: Path, writer: Writer, lock: FolderLock | None, runner: str) -> None:
        self.path = path
        self._writer = writer
        self._lock = lock
        self.runner = runner
        self._readers = Readers(path)
        self._dead: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, url: str, *, runner: str, lock: bool = True) -> Storage:
        """See `storage.open_storage`."""
        path = sqlite_path(url)
        loop = asyncio.get_running_loop()
        opened: list[Storage] = []

        def fatal(error: BaseException) -> None:
            for storage in opened:
                if not storage._dead.done():
                    storage._dead.set_result(error)

        def prepare() -> tuple[FolderLock | None, Writer]:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = FolderLock(path) if lock else None
            try:
                writer = Writer(path, loop, fatal)
                try:
                    writer.first(migrate)
                except BaseException:
                    writer.discard()
                    raise
            except BaseException as error:
                if held is not None:
                    held.release()
                if trouble(error) is not None:
                    raise StorageUnavailable(f"{path} cannot be opened: {error}") from error
                raise
            return held, writer

        held, writer = await asyncio.to_thread(prepare)
        storage = cls(path, writer, held, runner)
        opened.append(storage)
        writer.start()
        return storage

    # -- life ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Commits what was submitted, checkpoints, gives the folder back. A second call does nothing."""
        await self._readers.close()
        await self._writer.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def ready(self) -> None:
        """StorageUnavailable unless reads and writes go through."""
        self._writer.check()
        await self._read(lambda conn: conn.execute(text("SELECT 1")).all())

    async def dead(self) -> BaseException:
        """Waits for the error after which nothing is acknowledged any more: a failed sync, a broken file."""
        return await asyncio.shield(self._dead)

    def commit_stats(self) -> CommitStats:
        """What the writer did since it was opened."""
        return self._writer.stats()

    async def _read(self, job: Callable[[Connection], T]) -> T:
        return await self._readers.run(job)

    async def _write(self, job: Callable[[Connection], T]) -> T:
        return await self._writer.submit(job, promise=True)

    # -- runs ------------------------------------------------------------------------------------------------

    async def start_response(self, new: NewResponse) -> RunClaim:
        """Stores a response, its input, run and first record, and takes its conversation's lock: all or none.

        NotFound("conversation" | "response") for what it refers to, ConversationLocked, ConversationMoved,
        ItemConflict.
        """
        return await self._write(partial(runs.start, new=new, runner=new.runner))

    async def append(self, batch: Sequence[RunAppend]) -> Mapping[str, Exception]:
        """Writes what many runs add, in one transaction; returns the runs that added nothing, and why.

        RunLost: the fence no longer holds. Anything else is the run's own bad row; the others are committed.
        A batch holds each run once; commits of one run must be awaited one after the other. While the
        database is locked or full this waits.
        """
        try:
            return await self._append(batch)
        except StorageUnavailable:
            raise
        except Exception as error:
            if len(batch) == 1:
                return {batch[0].response_id: error}
        alone = await asyncio.gather(*(self.append([one]) for one in batch))
        return {id: error for refused in alone for id, error in refused.items()}

    def _append(self, batch: Sequence[RunAppend]) -> asyncio.Future[dict[str, Exception]]:
        promise = any(one.promise for one in batch)
        return self._writer.submit(partial(runs.append, batch=batch), promise=promise, patient=True)

    async def claim(self, response_id: str) -> RunClaim | None:
        """Takes a run over; None if it has ended, or if this process has it already."""
        return await self._write(partial(runs.claim, response_id=response_id, runner=self.runner))

    async def claim_dead(self) -> tuple[RunClaim, ...]:
        """Takes over every running or queued run; only at the start, by the holder of the folder."""
        return await self._write(partial(runs.claim_dead, runner=self.runner))

    async def admit(self, claim: RunClaim) -> None:
        """Counts another attempt of a run found running, before an engine is given it. RunLost."""
        await self._write(
            partial(runs.admit, response_id=claim.response_id, fence=claim.fence, strikes=claim.strikes)
        )

    async def release(self) -> None:
        """Gives back the runs of this process, which ends in peace."""
        await self._write(partial(runs.release, runner=self.runner))

    async def claim_due(self, now: int) -> tuple[RunClaim, ...]:
        """Takes over every waiting run whose deadline has come."""
        return await self._write(partial(runs.claim_due, runner=self.runner, now=now))

    async def next_deadline(self) -> int | None:
        """When the first waiting run runs out of time (microseconds); None if none waits."""
        return await self._read(runs.next_deadline)

    async def add_tool_outputs(
        self, owner: str, response_id: str, outputs: Sequence[ToolOutput], now: int
    ) -> WaitingInputs:
        """Stores outputs for a waiting run, all or none; with the last pending one it is queued: claim it.

        The same output again changes nothing. NotFound, NotWaiting, UnknownCall, OutputConflict.
        """
        job = partial(
            waiting.add_tool_outputs, owner=owner, response_id=response_id, outputs=tuple(outputs), now=now
        )
        return await self._write(job)

    async def pending_calls(self, owner: str, response_id: str) -> WaitingInputs:
        """Which calls a waiting run still waits for; none for any other run. NotFound."""
        return await self._read(partial(waiting.pending_calls, owner=owner, response_id=response_id))

    async def waiting_inputs(self, response_id: str) -> tuple[StoredItem, ...]:
        """The outputs posted to a run that are not among its items yet, in the order of its calls."""
        return await self._read(partial(waiting.waiting_inputs, response_id=response_id))

    async def request_cancel(self, owner: str, response_id: str) -> None:
        """Marks a run in flight as to be cancelled; nothing for one that has ended. NotFound."""
        await self._write(partial(runs.request_cancel, owner=owner, response_id=response_id))

    # -- responses -------------------------------------------------------------------------------------------

    async def get_response(self, owner: str, id: str) -> StoredResponse:
        """One response. NotFound if it is unknown, deleted, unstored or another owner's."""
        return await self._read(partial(responses.get, owner=owner, id=id))

    async def list_responses(
        self,
        owner: str,
        *,
        limit: int,
        order: Order = "desc",
        after: str | None = None,
        status: str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
        conversation_id: str | None = None,
        model: str | None = None,
    ) -> Page[StoredResponse]:
        """One page by time. created_after, created_before: microseconds, exclusive. NotFound for `after`."""
        job = partial(
            responses.list_,
            owner=owner,
            limit=limit,
            order=order,
            after=after,
            status=status,
            created_after=created_after,
            created_before=created_before,
            conversation_id=conversation_id,
            model=model,
        )
        return await self._read(job)

    async def delete_response(self, owner: str, id: str, now: int) -> bool:
        """Deletes a response and its log; True if it was in flight: its next append is lost. NotFound.

        Its items stay while a live descendant or a conversation lists them.
        """
        return await self._write(partial(responses.delete_one, owner=owner, id=id, now=now))

    async def records(
        self, response_id: str, *, after: int, limit_bytes: int = 1 << 20
    ) -> tuple[Record, ...]:
        """The records that hold any event numbered above `after`, in order.

        It stops at the record that reaches `limit_bytes`. Empty at the log's end only.
        """
        return await self._read(
            partial(events.read, response_id=response_id, after=after, limit_bytes=limit_bytes)
        )

    async def input_items(
        self, owner: str, id: str, *, limit: int, order: Order = "desc", after: str | None = None
    ) -> Page[StoredItem]:
        """One page of a response's own input. NotFound("response"), or ("item") for an unknown `after`."""
        return await self._read(
            partial(responses.input_items, owner=owner, id=id, limit=limit, order=order, after=after)
        )

    async def response_input(self, id: str) -> tuple[StoredItem, ...]:
        """A response's own input in order, for whoever runs it."""
        return await self._read(partial(responses.own_input, id=id))

    async def get_items(self, owner: str, ids: Sequence[str]) -> dict[str, StoredItem]:
        """The items among `ids` that a live response or conversation lists."""
        return await self._read(partial(items.get_live, owner=owner, ids=tuple(ids)))

    async def history(
        self,
        owner: str,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        conversation_head: int | None = None,
        as_of: int | None = None,
    ) -> tuple[HistoryItem, ...]:
        """What a run continues from, oldest first: the turns up to a response, or a conversation's items.

        conversation_head: positions below it (None: all). as_of: the creation time of the run that is pinned
        to this (None: now); deletions since then do not count. NotFound("response" | "conversation").
        """
        if previous_response_id is not None:
            return await self._read(
                partial(history.of_response, owner=owner, id=previous_response_id, as_of=as_of)
            )
        if conversation_id is not None:
            return await self._read(
                partial(
                    history.of_conversation,
                    owner=owner,
                    id=conversation_id,
                    head=conversation_head,
                    as_of=as_of,
                )
            )
        return ()

    # -- conversations ---------------------------------------------------------------------------------------

    async def create_conversation(
        self, owner: str, id: str, created_at: int, metadata: bytes, new: Sequence[NewItem] = ()
    ) -> StoredConversation:
        """Stores a conversation with its first items. ItemConflict."""
        return await self._write(
            partial(
                conversations.create,
                owner=owner,
                id=id,
                created_at=created_at,
                metadata=metadata,
                new=tuple(new),
            )
        )

    async def get_conversation(self, owner: str, id: str) -> StoredConversation:
        """NotFound("conversation")."""
        return await self._read(partial(conversations.get, owner=owner, id=id))

    async def update_conversation(self, owner: str, id: str, metadata: bytes) -> StoredConversation:
        """Replaces the metadata. NotFound("conversation")."""
        return await self._write(
            partial(conversations.update_metadata, owner=owner, id=id, metadata=metadata)
        )

    async def delete_conversation(self, owner: str, id: str, now: int) -> None:
        """Makes the id unknown; responses that ran in it keep its items, a run at work goes on. NotFound."""
        await self._write(partial(conversations.delete, owner=owner, id=id, now=now))

    async def add_conversation_items(
        self, owner: str, id: str, new: Sequence[NewItem]
    ) -> tuple[StoredItem, ...]:
        """Appends items and returns them; one that the conversation holds already keeps its place.

        NotFound("conversation"), ItemConflict.
        """
        return await self._write(partial(conversations.add_items, owner=owner, id=id, new=tuple(new)))

    async def list_conversation_items(
        self, owner: str, id: str, *, limit: int, order: Order = "desc", after: str | None = None
    ) -> Page[StoredItem]:
        """One page of the items. NotFound("conversation"), or ("item") for an unknown `after`."""
        return await self._read(
            partial(conversations.list_items, owner=owner, id=id, limit=limit, order=order, after=after)
        )

    async def get_conversation_item(self, owner: str, id: str, item_id: str) -> StoredItem:
        """One item. NotFound("conversation" | "item")."""
        return await self._read(partial(conversations.get_item, owner=owner, id=id, item_id=item_id))

    async def delete_conversation_item(
        self, owner: str, id: str, item_id: str, now: int
    ) -> StoredConversation:
        """Takes an item out; runs in flight still see it. NotFound("conversation" | "item")."""
        return await self._write(
            partial(conversations.delete_item, owner=owner, id=id, item_id=item_id, now=now)
        )

    # -- keys ------------------------------------------------------------------------------------------------

    async def create_key(self, id: str, owner: str, name: str, hash: bytes, hint: str, now: int) -> StoredKey:
        """Stores a key's hash for the owner that it speaks for."""
        return await self._write(
            partial(keys.create, id=id, owner=owner, name=name, hash=hash, hint=hint, now=now)
        )

    async def list_keys(self) -> tuple[StoredKey, ...]:
        """All keys, revoked ones included, oldest first."""
        return await self._read(keys.list_)

    async def revoke_key(self, id: str, now: int) -> bool:
        """Ends a key; False if there is no live key of this id."""
        return await self._write(partial(keys.revoke, id=id, now=now))

    async def find_key(self, hash: bytes) -> StoredKey | None:
        """The live key with this hash."""
        return await self._read(partial(keys.find, hash=hash))
