"""The class `Storage`: every operation of the server on its database, each one a transaction.

Every operation is limited to the rows of one `owner`, except the operations of the process that runs a
response. The id of another owner's row raises the same NotFound as an unknown id. What was written survives a
loss of power when the call returns, except the appends of running text, which reach the disk within 50 ms.
Any operation may raise StorageUnavailable; `append` waits instead.

A read sees every write that had returned before the read began, and all of its rows are of the same moment.
Only the places of queued responses are a ranking of the last second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, select, text

from storage.batches import Batches
from storage.chat_completions import ChatCompletions
from storage.containers import Containers
from storage.drivers import Database, Readers, Writer, Writing, database, look, shared_clock, unavailable
from storage.files import Blobs, Files
from storage.importing import Imports
from storage.inspection import database_id, lacking_blobs
from storage.lineage import epochs
from storage.migrate import migrated, revision
from storage.places import Places
from storage.prompts import Prompts
from storage.queries import (
    conversations,
    events,
    fleet,
    history,
    idempotency,
    items,
    live_runs,
    queue,
    responses,
    retention,
    runs,
    tenants,
    waiting,
    webhooks,
)
from storage.queries.keys import api_keys, audit, owners, quotas, sealing_keys, usage
from storage.records import (
    MAX_PERSONS,
    Appended,
    AuditEntry,
    AuditFilter,
    AuditState,
    CommitStats,
    ConversationChange,
    ConversationHistory,
    Delivery,
    Dimension,
    DueDeliveries,
    ExportedResponse,
    FleetView,
    FoundKey,
    HistoryItem,
    Kept,
    KeyedRequest,
    KnownRequest,
    Limits,
    LimitsChange,
    LiveRun,
    NewFork,
    NewItem,
    NewKey,
    NewResponse,
    NewResponseFork,
    OfModels,
    Order,
    Page,
    PositionedItem,
    Purged,
    Record,
    RequestKnown,
    RunAppend,
    RunClaim,
    RunGlance,
    SealingKey,
    Spending,
    Spent,
    StorageUnavailable,
    StoredAudit,
    StoredConversation,
    StoredItem,
    StoredKey,
    StoredOwner,
    StoredResponse,
    StoredWebhook,
    Swept,
    ToolOutput,
    Usage,
    UsageFilter,
    UsageSum,
    WaitingInputs,
)
from storage.vector_stores import VectorStores, remove_from_stores

T = TypeVar("T")

LOOKED_FOR = 100
"""Contents of files, of each table that names any, that are looked for when a server starts."""


class Storage:
    """An open database. Made by `open_storage`; closed by `close`.

    blobs, files, containers: the operations on contents, and on the files, uploads and containers that name
    them. batches: those on batches of requests. chat_completions: those on stored chat completions. prompts:
    those on prompt templates. imports: those that put back what an export holds.
    """

    def __init__(
        self,
        url: str,
        database: Database,
        writing: Writing,
        runner: str,
        *,
        synced: bool,
        max_persons: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.url = url
        self.runner = runner
        self._synced = synced
        self._shard = usage.shard_of(runner)
        self._counting = usage.Counting(self._shard, usage.Persons(max_persons))
        self._database = database
        self._hints = database.hints()
        self._dead: asyncio.Future[BaseException] = loop.create_future()
        self._readers = Readers(database)
        self._places = Places(self._read)
        self._writer = Writer(database, writing, loop, self._dead.set_result, self._hints.tell)
        self._writer.start()
        self.blobs = Blobs(database, self._read)
        self.files = Files(self._read, self._write, self.blobs, leave=(remove_from_stores,))
        self.imports = Imports(self._read, self._write)
        self.containers = Containers(
            self._read, self._write, self.blobs, partial(usage.add, counting=self._counting)
        )
        # set whenever something has ended with a notice: deliveries may be due
        self.announced = asyncio.Event()
        self.batches = Batches(
            self._read,
            self._write,
            self.blobs,
            runner,
            shared=database.shared,
            announce=webhooks.announce,
            announced=self.announced.set,
        )
        self.chat_completions = ChatCompletions(self._read, self._write, self._kept)
        self.prompts = Prompts(self._read, self._write, self._kept)
        self.vector_stores = VectorStores(
            self._read, self._write, self._write_late, runner, shared=database.shared
        )

    @classmethod
    async def open(
        cls, url: str, *, runner: str, lock: bool = True, synced: bool = False, max_persons: int = MAX_PERSONS
    ) -> Storage:
        """See `storage.open_storage`."""

        def prepare() -> tuple[Database, Writing]:
            opened = database(url)
            try:
                if not opened.shared and opened.exists():
                    # First of all: the lock, the modes and the log of a file are another program's, too.
                    look(opened, partial(revision, opened))
                if lock:
                    opened.hold()
                return opened, migrated(opened, runner)
            except BaseException as error:
                opened.release()
                if isinstance(error, OSError) or opened.trouble(error) is not None:
                    told = f"{opened.shown} cannot be opened"
                    raise unavailable(told, error, opened.cause(error)) from error
                raise

        opened, writing = await asyncio.to_thread(prepare)
        return cls(url, opened, writing, runner, synced=synced, max_persons=max_persons)

    # -- life ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Commits what was submitted, checkpoints, gives the folder back. A second call does nothing."""
        await self.blobs.close()
        await self._readers.close()
        await self._writer.close()
        await self._hints.close()
        self._database.release()

    async def ready(self) -> None:
        """StorageUnavailable unless reads and writes go through."""
        self.require_writable()
        await self._read(lambda conn: conn.execute(text("SELECT 1")).all())

    def require_writable(self) -> None:
        """StorageUnavailable where it is known that writes do not go through at present."""
        self._writer.check()

    async def dead(self) -> BaseException:
        """Waits for the error after which nothing is acknowledged any more: a failed sync, a broken file."""
        return await asyncio.shield(self._dead)

    @property
    def shared(self) -> bool:
        """Whether other processes may write to this database too."""
        return self._database.shared

    async def hinted(self, seen: int, timeout_s: float) -> int:
        """The number of hints so far, as soon as it differs from `seen`, or after `timeout_s` seconds.

        A hint says that another process has committed something, nothing more; some get lost. Begin with
        seen=0, and hand in next time what came back: then no hint falls between two waits.
        """
        return await self._hints.heard(seen, timeout_s)

    async def database_id(self) -> str | None:
        """What tells this database from every other: 32 hex digits; None where its row was removed."""
        return await self._read(database_id)

    async def lacking_blobs(self) -> str | None:
        """The folder of the contents of files, where it lacks one of some that rows name."""
        return await self._read(lambda conn: lacking_blobs(self._database, conn, LOOKED_FOR))

    def commit_stats(self) -> CommitStats:
        """What the writer did since it was opened."""
        return self._writer.stats()

    async def _read(self, job: Callable[[Connection], T]) -> T:
        return await self._readers.run(job)

    async def _write(self, job: Callable[[Connection], T]) -> T:
        return await self._writer.submit(job, durable=True)

    async def _write_late(self, job: Callable[[Connection], T]) -> T:
        """For writes that a loss of power may undo, because they will be repeated."""
        return await self._writer.submit(job, durable=False)

    async def _audited(self, job: Callable[[Connection], T], entry: AuditEntry) -> T:
        """A change and its entry in the audit log: both are written, or neither."""

        def both(conn: Connection) -> T:
            result = job(conn)
            audit.append(conn, entry)
            return result

        return await self._write(both)

    # -- runs ------------------------------------------------------------------------------------------------

    async def start_response(self, new: NewResponse) -> RunClaim:
        """Stores a response, its input, run and first record, and takes its conversation's lock: all or none.

        A start may find room on a disk where the end does not: so there is none while the disk is full.
        RequestKnown where a request with the same key came first. NotFound("conversation" | "response") for
        what it refers to, ConversationLocked, ConversationMoved, ItemConflict, ResponseKnown.
        """

        def start(conn: Connection) -> RunClaim:
            if new.request is not None:
                idempotency.start(conn, new.request, new.id, self.runner)
            claim = runs.start(conn, new, new.runner, self._shard)
            for entry in new.audit:
                audit.append(conn, entry)
            return claim

        self._writer.require_room()
        return await self._write(start)

    async def response_is_known(self, id: str) -> bool:
        """Whether there is a response of this id, whoever's."""
        return await self._read(partial(runs.is_known, id=id))

    async def append(self, batch: Sequence[RunAppend]) -> Mapping[str, Exception]:
        """Writes what many runs add, in one transaction; returns the runs that added nothing, and why.

        RunLost: the fence no longer holds. Anything else is the run's own bad row; the others are committed.
        A batch holds each run once; commits of one run must be awaited one after the other. While the
        database is locked or full this waits.
        """
        try:
            appended = await self._append(batch)
            if appended.gone:
                self.blobs.drop_soon(appended.gone)  # streams do not wait for it
            if any(one.notice is not None for one in batch):
                self.announced.set()
            return appended.refused
        except StorageUnavailable:
            raise
        except Exception as error:
            if len(batch) == 1:
                return {batch[0].response_id: error}
        alone = await asyncio.gather(*(self.append([one]) for one in batch))
        return {id: error for refused in alone for id, error in refused.items()}

    def _append(self, batch: Sequence[RunAppend]) -> asyncio.Future[Appended]:
        durable = self._synced or any(one.durable for one in batch)
        return self._writer.submit(
            partial(runs.append, batch=batch, counting=self._counting),
            durable=durable,
            retry_until_available=True,
        )

    async def claim(self, response_id: str, models: OfModels | None = None) -> RunClaim | None:
        """Takes over a run that nobody owns and that can go on or is to be cancelled; None if it has ended,
        has an owner, waits for its client, or is not of these models."""
        claim = await self._write(
            partial(runs.claim, response_id=response_id, runner=self.runner, models=models)
        )
        self._places.left([] if claim is None else [claim])
        return claim

    async def admit(self, claim: RunClaim) -> None:
        """Counts another attempt of a run found running, before an engine is given it. RunLost."""
        await self._write(
            partial(runs.admit, response_id=claim.response_id, fence=claim.fence, strikes=claim.strikes)
        )

    async def release(self, *, blameless: bool = True) -> None:
        """Gives back the runs of this process, which ends, and forgets its beat.

        blameless: no run can have brought it to its end.
        """
        await self._write(partial(fleet.release, runner=self.runner, blameless=blameless))

    async def give_back(self, response_ids: Sequence[str], *, blameless: bool) -> None:
        """Gives back runs of this process that it does not carry on. blameless: none of them can be why."""
        ids = tuple(response_ids)
        await self._write(partial(fleet.give_back, runner=self.runner, ids=ids, blameless=blameless))

    async def claim_due(self, now: int) -> tuple[RunClaim, ...]:
        """Takes over waiting runs whose deadline has come, and those that are to be cancelled: some of them,
        the earliest first. now: by this process's clock, as in `Park`."""
        return await self._write(partial(runs.claim_due, runner=self.runner, now=now))

    async def cap_deadlines(self, now: int, longest: int) -> None:
        """Has no waiting run wait for longer than `longest` microseconds from now on, as none does whose
        deadline was set by a clock that was right. now: as in `claim_due`."""
        await self._write(partial(runs.cap_deadlines, now=now, longest=longest))

    async def add_tool_outputs(
        self, owner: str, response_id: str, outputs: Sequence[ToolOutput], now: int
    ) -> WaitingInputs:
        """Stores outputs for a waiting run, all or none; with the last pending one it is queued: claim it.

        The same output again changes nothing. NotFound, NotWaiting, UnknownCall, OutputConflict.
        """
        job = partial(
            waiting.add_tool_outputs,
            owner=owner,
            response_id=response_id,
            outputs=tuple(outputs),
            now=now,
            shard=self._shard,
        )
        return await self._write(job)

    async def pending_calls(self, owner: str, response_id: str) -> WaitingInputs:
        """Which calls a waiting run still waits for; none for any other run. NotFound."""
        return await self._read(partial(waiting.pending_calls, owner=owner, response_id=response_id))

    async def waiting_inputs(self, response_id: str) -> tuple[StoredItem, ...]:
        """The outputs posted to a run that are not among its items yet, in the order of its calls."""
        return await self._read(partial(waiting.waiting_inputs, response_id=response_id))

    # -- other processes -------------------------------------------------------------------------------------

    async def beat(self, serves: str = "") -> bool:
        """Says that this process lives. False if its beat was not there: others may have taken its runs.

        serves: a digest of the models that it serves.
        """
        return await self._write_late(partial(fleet.beat, runner=self.runner, serves=serves))

    async def list_processes(self, now: int) -> FleetView:
        """Who beats, and whether there is anything to take up."""
        return await self._read(partial(fleet.list_processes, now=now))

    async def live_runs(self, limit: int) -> tuple[LiveRun, ...]:
        """The stored runs of all owners that have not ended, the oldest first; for operators."""
        return await self._read(partial(live_runs.live_runs, limit=limit))

    async def run_owner(self, response_id: str) -> str:
        """Whose run in flight this is. NotFound("run"), RunEnded."""
        return await self._read(partial(live_runs.run_owner, response_id=response_id))

    async def response_owner(self, response_id: str) -> str:
        """Whose stored response this is, in flight or ended. NotFound("response")."""
        return await self._read(partial(live_runs.response_owner, response_id=response_id))

    async def cancel_run(self, response_id: str, *, entry: AuditEntry) -> None:
        """Marks a run in flight of any owner as to be cancelled. NotFound("run")."""
        await self._audited(partial(runs.cancel_of_any_owner, response_id=response_id), entry)

    async def num_live_runs(self) -> dict[str, int]:
        """How many runs of all owners have not ended, by their state: `queued`, `running`, `waiting`."""
        return await self._read(live_runs.num_live_runs)

    async def release_runs(self, runner: str, beat: int | None) -> int:
        """Takes the runs from a process that is dead, unless its beat is another by now; returns how many.

        Nobody owns them then: they are the first of the queue. Unstored ones end. A process that only stood
        still, perhaps in the midst of a transaction that holds their rows, loses its connection.
        """
        # By a connection that reads: the writer may wait for a row that the dead process holds.
        await self._read(partial(self._database.end_writer, runner=runner))
        return await self._write(partial(fleet.release_runs, runner=runner, beat=beat))

    async def free_all(self) -> None:
        """Takes the runs from all processes, as `release_runs` does from one. Called once, at the start, by
        the process that holds the data folder."""
        await self._write(fleet.free_all)

    async def take(self, limit: int, models: OfModels | None = None) -> tuple[RunClaim, ...]:
        """Takes over the next runs of the queue, at most `limit`. models: only runs of these."""
        claims = await self._write(partial(fleet.take, runner=self.runner, limit=limit, models=models))
        self._places.left(claims)
        return claims

    async def free_models(self) -> tuple[str, ...]:
        """The models of the runs that nobody owns."""
        return tuple(await self._read(queue.free_models))

    async def forget_shares(self) -> int:
        """Drops what the queue has served its owners where nothing is queued, and puts the rest together;
        returns how many rows went, 0 when there are no more."""
        return await self._write_late(partial(queue.forget, shard=self._shard))

    async def run_status(self, response_ids: Sequence[str]) -> dict[str, RunGlance]:
        """The state of those of these runs that have not ended, and of every run that this process owns."""
        return await self._read(
            partial(fleet.run_status, runner=self.runner, response_ids=tuple(response_ids))
        )

    async def mark_watched(self, response_ids: Sequence[str]) -> tuple[str, ...]:
        """Tells the owners of these runs that they are read here; returns those that could be told now."""
        return await self._write_late(partial(fleet.mark_watched, response_ids=tuple(response_ids)))

    async def watched(self, response_id: str) -> int:
        """How often the owner of a run was told that it is read elsewhere."""
        return await self._read(partial(fleet.watched, response_id=response_id))

    async def request_cancel(self, owner: str, response_id: str) -> None:
        """Marks a run in flight as to be cancelled; nothing for one that has ended. NotFound."""
        await self._write(partial(runs.request_cancel, owner=owner, response_id=response_id))

    # -- responses -------------------------------------------------------------------------------------------

    async def get_response(self, owner: str, id: str, *, hidden: bool = False) -> StoredResponse:
        """One response. NotFound if it is unknown, deleted, unstored or another owner's.

        hidden: True finds one that is kept for repeats alone, too.
        """
        read = await self._read(partial(responses.get, owner=owner, id=id, hidden=hidden))
        [placed] = await self._places.placed(owner, [read])
        return placed

    async def gone_responses(self, ids: Sequence[str]) -> frozenset[str]:
        """Those of some hundred ids whose responses are deleted or unknown, whoever owns them."""
        return await self._read(partial(responses.gone, ids=ids))

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
        metadata: Mapping[str, str] | None = None,
    ) -> Page[StoredResponse]:
        """One page by time. status: or `waiting`: in progress, and waiting for outputs of tools.
        created_after, created_before: microseconds, exclusive. metadata: only those that have all of these
        pairs. NotFound for `after`."""
        job = partial(
            responses.list_,
            owner=owner,
            limit=limit,
            order=order,
            after=after,
            status=status,
            created_within=(created_after, created_before),
            conversation_id=conversation_id,
            model=model,
            metadata=dict(metadata or {}),
        )
        page = await self._read(job)
        return replace(page, data=await self._places.placed(owner, page.data))

    async def delete_response(
        self, owner: str, id: str, now: int, *, spending: Spending | None = None
    ) -> bool:
        """Deletes a response and its log; True if it was in flight: its next append is lost. NotFound.

        Its items stay while a live descendant or a conversation lists them. spending: what one in flight has
        used is counted by this.

        The response is deleted by one transaction, and what was of it erased by others, between which the
        rest of the process writes. A sweep goes on with what is left where that is cut.
        """
        job = partial(responses.delete_one, owner=owner, id=id, now=now, settle=self._settle(spending))
        ran = await self._write(job)
        with suppress(StorageUnavailable):
            async for _ in retention.erase(self._read, self._write_late, [id]):
                pass
        return ran

    def _settle(self, spending: Spending | None) -> responses.Settle | None:
        return None if spending is None else partial(usage.settle, spending=spending, counting=self._counting)

    async def fork_response(
        self, owner: str, id: str, new: NewResponseFork, request: KeyedRequest | None = None
    ) -> None:
        """Stores a response that has ended and has the first items of response `id`, none of them copied.

        request: it is recorded in the same transaction; RequestKnown where it was carried out already.
        NotFound("response" | "item").
        """

        def fork(conn: Connection) -> None:
            if request is not None:
                idempotency.start(conn, request, new.id, self.runner)
            responses.fork(conn, owner, id, new)

        await self._write(fork)

    async def records(
        self, response_id: str, *, after: int, limit_bytes: int = 1 << 20
    ) -> tuple[Record, ...]:
        """The records that hold any event numbered above `after`, in order.

        It stops at the record that reaches `limit_bytes`. Empty at the log's end only.
        """
        return await self._read(
            partial(events.read, response_id=response_id, after=after, limit_bytes=limit_bytes)
        )

    async def token_counts(self, response_id: str) -> Sequence[tuple[int, bytes | None]]:
        """How many tokens each record of a response's log holds, and its facts, in order."""
        return await self._read(partial(events.counts, response_id=response_id))

    async def log_end(self, response_id: str) -> int:
        """The number after the last event of a response's log. EventsExpired."""
        return await self._read(partial(events.end, response_id=response_id))

    async def input_items(
        self, owner: str, id: str, *, limit: int, order: Order = "desc", after: str | None = None
    ) -> Page[StoredItem]:
        """One page of a response's own input. NotFound("response"), or ("item") for an unknown `after`."""
        return await self._read(
            partial(responses.input_items, owner=owner, id=id, limit=limit, order=order, after=after)
        )

    async def all_input_items(
        self, owner: str, id: str, *, limit: int, order: Order = "desc", after: str | None = None
    ) -> Page[StoredItem]:
        """The same of all that a response was made from: its own input, and what led to it."""
        return await self._read(
            partial(history.input_page, owner=owner, id=id, limit=limit, order=order, after=after)
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
        hidden: bool = False,
    ) -> tuple[HistoryItem, ...]:
        """What a run continues from, oldest first: the turns up to a response, or a conversation's items.

        conversation_head: positions below it (None: all). as_of: the creation time of the run that is pinned
        to this (None: now); deletions since then do not count. hidden: the response may be one that is kept
        for repeats alone. NotFound("response" | "conversation").
        """
        if previous_response_id is not None:
            job = partial(
                history.of_response, owner=owner, id=previous_response_id, as_of=as_of, hidden=hidden
            )
            return await self._read(job)
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

    async def conversation_history(
        self, owner: str, id: str, *, first: int = 0, as_of: int
    ) -> ConversationHistory:
        """What a conversation holds from position `first` on, as it was at `as_of` (microseconds).
        NotFound("conversation")."""
        return await self._read(
            partial(history.of_conversation_from, owner=owner, id=id, first=first, as_of=as_of)
        )

    async def shrunk_conversations(self, known: Mapping[str, tuple[int, int]]) -> frozenset[str]:
        """Those of the conversations that are deleted, or hold fewer items in front of a position than they
        did; known: that position and the number of items, by conversation, whoever owns it."""
        return await self._read(partial(history.shrunk, known=known)) if known else frozenset()

    # -- conversations ---------------------------------------------------------------------------------------

    async def create_conversation(
        self,
        owner: str,
        id: str,
        created_at: int,
        metadata: bytes,
        new: Sequence[NewItem] = (),
        *,
        title: str | None = None,
        kept: Kept[StoredConversation] | None = None,
    ) -> StoredConversation:
        """Stores a conversation with its first items. ItemConflict.

        kept: the request that asked for it, recorded with it; RequestKnown where another process has taken
        the request over.
        """
        job = partial(
            conversations.create,
            owner=owner,
            id=id,
            created_at=created_at,
            metadata=metadata,
            new=tuple(new),
            title=title,
        )
        return await self._kept(job, kept)

    async def _kept(self, job: Callable[[Connection], T], kept: Kept[T] | None) -> T:
        """A change and the reply to the request that asked for it: both are written, or neither."""
        if kept is None:
            return await self._write(job)

        def both(conn: Connection) -> T:
            result = job(conn)
            body = kept.reply(result)
            done = partial(idempotency.complete, conn, kept.request, self.runner, about=kept.about)
            if not done(200, kept.headers(), body):
                raise RequestKnown
            return result

        return await self._write(both)

    async def get_conversation(self, owner: str, id: str) -> StoredConversation:
        """NotFound("conversation")."""
        return await self._read(partial(conversations.get, owner=owner, id=id))

    async def require_unlocked(self, owner: str, id: str) -> None:
        """NotFound("conversation"); ConversationLocked while a run is at work on it."""
        await self._read(partial(conversations.require_unlocked, owner=owner, id=id))

    async def fork_conversation(
        self,
        owner: str,
        id: str,
        new: NewFork,
        *,
        kept: Kept[StoredConversation] | None = None,
    ) -> StoredConversation:
        """Stores a conversation that begins as conversation `id` does, none of its items copied.

        NotFound("conversation" | "item"), TooManyForks. kept: see `create_conversation`.
        """
        # By a reader, lest the writer count for long; forks of the same moment may go a little beyond.
        await self._read(partial(conversations.require_room_for_fork, owner=owner, id=id))
        return await self._kept(partial(conversations.fork, owner=owner, id=id, new=new), kept)

    async def conversation_epochs(self, ids: Collection[str]) -> dict[str, int]:
        """The epochs of those of some hundred conversations that are there, whoever owns them."""
        return await self._read(partial(epochs, ids=tuple(ids)))

    async def list_conversations(
        self,
        owner: str,
        *,
        limit: int,
        order: Order = "desc",
        after: str | None = None,
        archived: bool | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page[StoredConversation]:
        """One page by time. archived: only those that are, or are not. metadata: as for responses.
        NotFound("conversation") for `after`."""
        job = partial(
            conversations.list_,
            owner=owner,
            limit=limit,
            order=order,
            after=after,
            archived=archived,
            metadata=dict(metadata or {}),
        )
        return await self._read(job)

    async def update_conversation(
        self, owner: str, id: str, change: ConversationChange, now: int = 0
    ) -> StoredConversation:
        """Replaces what is to be changed. now: when, for its retention. NotFound("conversation")."""
        return await self._write(partial(conversations.change, owner=owner, id=id, wanted=change, now=now))

    async def delete_conversation(self, owner: str, id: str, now: int) -> str | None:
        """Makes the id unknown; responses that ran in it keep its items, a run at work goes on. One that
        waits for tool outputs is marked as to be cancelled: returns its id. NotFound.

        Like a response it is deleted by one transaction, and what was of it erased by others.
        """
        waits = await self._write(partial(runs.delete_conversation, owner=owner, id=id, now=now))
        await self._collect([id])
        return waits

    async def add_conversation_items(
        self,
        owner: str,
        id: str,
        new: Sequence[NewItem],
        now: int = 0,
        *,
        limit: int | None = None,
        kept: Kept[tuple[PositionedItem, ...]] | None = None,
    ) -> tuple[PositionedItem, ...]:
        """Appends items and returns them at their places; one that the conversation holds already keeps its
        own.

        now: when, for its retention. NotFound("conversation"), ItemConflict, ConversationFull where it would
        have more than `limit` items. kept: see `create_conversation`.
        """
        job = partial(conversations.add_items, owner=owner, id=id, new=tuple(new), now=now, limit=limit)
        return await self._kept(job, kept)

    async def list_conversation_places(
        self, owner: str, id: str, *, limit: int, order: Order = "desc", after: str | None = None
    ) -> Page[PositionedItem]:
        """One page of the items, with their places, and when they came there. NotFound("conversation"), or
        ("item") for an unknown `after`."""
        return await self._read(
            partial(conversations.list_places, owner=owner, id=id, limit=limit, order=order, after=after)
        )

    async def get_conversation_item(self, owner: str, id: str, item_id: str) -> PositionedItem:
        """One item, at its place. NotFound("conversation" | "item")."""
        return await self._read(partial(conversations.get_item, owner=owner, id=id, item_id=item_id))

    async def delete_conversation_item(
        self, owner: str, id: str, item_id: str, now: int
    ) -> StoredConversation:
        """Takes an item out; runs in flight still see it. NotFound("conversation" | "item")."""
        return await self._write(
            partial(conversations.delete_item, owner=owner, id=id, item_id=item_id, now=now)
        )

    async def clear_conversation(self, owner: str, id: str, now: int) -> StoredConversation:
        """Takes all items out; runs in flight still see them. NotFound("conversation").

        One transaction hides them, and others erase them.
        """
        stored, emptied = await self._write(partial(conversations.clear, owner=owner, id=id, now=now))
        await self._collect(emptied)
        return stored

    async def _collect(self, conversation_ids: Sequence[str]) -> None:
        with suppress(StorageUnavailable):  # a sweep goes on with what is left
            async for _ in retention.collect(self._write_late, conversation_ids):
                pass

    # -- requests with an Idempotency-Key --------------------------------------------------------------------

    async def find_request(self, request: KeyedRequest) -> KnownRequest | None:
        """What is known of a request with this owner, route and key; nothing is written."""
        return await self._read(partial(idempotency.find, request=request))

    async def begin_request(self, request: KeyedRequest) -> KnownRequest | None:
        """Records that this process begins to work on a request; otherwise what is known of it.

        It may take the place of a process that died at it, and of itself.
        """
        return await self._write(partial(idempotency.begin, request=request, runner=self.runner))

    async def complete_request(
        self,
        request: KeyedRequest,
        status: int,
        headers: bytes,
        body: bytes | None,
        about: str | None = None,
    ) -> None:
        """Keeps the reply to a request that this process has begun. body: None for one that is not kept.
        about: the id of what it tells of, with which it goes."""
        job = partial(
            idempotency.complete,
            request=request,
            runner=self.runner,
            status=status,
            headers=headers,
            body=body,
            about=about,
        )
        await self._write(job)

    async def drop_reply(self, request: KeyedRequest) -> None:
        """Keeps the reply to a request no longer; its repeats are told so."""
        await self._write(partial(idempotency.drop_reply, request=request))

    async def release_request(self, request: KeyedRequest) -> None:
        """Makes the key free again of a request that this process has begun and that has no result."""
        await self._write(partial(idempotency.release, request=request, runner=self.runner))

    # -- retention -------------------------------------------------------------------------------------------

    def sweep(self, limits: Limits, now: int, owner: str | None = None) -> AsyncGenerator[Swept]:
        """Lets go of what `limits` no longer cover, in short transactions: one for each value that it yields.

        Whoever iterates sets the pace, and may stop anywhere. owner: of this one's responses alone.
        """
        return retention.sweep(self._read, self._write_late, limits, now, owner)

    async def shared_now(self, now: int) -> int:
        """The time by the one clock of all that write to the database, in microseconds since the epoch: its
        own where several may, and elsewhere `now`."""
        return await self._read(
            lambda conn: conn.execute(select(shared_clock(conn.dialect.name, now))).scalar_one()
        )

    async def is_over(self, expires_at: int | None, now: int) -> bool:
        """Whether that time has come by the clock of this process, which says `now`, and by the shared one: a
        clock that is ahead must not take anything of what others find."""
        return expires_at is not None and expires_at <= now and expires_at <= await self.shared_now(now)

    async def newest(self, before: int) -> int | None:
        """When anything was last used or stored before a time; None where nothing was."""
        return await self._read(partial(retention.newest, before=before))

    async def usage(self, owner: str) -> Usage:
        """What an owner stores, in bytes; a response counts once a sweep by bytes has measured it."""
        return await self._read(partial(retention.usage, owner=owner))

    async def num_bytes(self) -> int:
        """What all owners store together, in bytes, counted the same way."""
        return await self._read(retention.num_bytes)

    async def num_bytes_by_owner(self) -> Mapping[str, int]:
        """What each owner stores, in bytes, the largest first, counted the same way."""
        return await self._read(retention.num_bytes_by_owner)

    # -- usage -----------------------------------------------------------------------------------------------

    async def add_usage(self, spent: Sequence[Spent]) -> None:
        """Counts what was used by requests of which nothing is stored; a run's end counts its own."""
        await self._write(partial(usage.add, spent=tuple(spent), counting=self._counting))

    async def usage_sums(
        self, wanted: UsageFilter, by: tuple[Dimension, ...], width: int, limit: int | None = None
    ) -> tuple[UsageSum, ...]:
        """What was used, by buckets of `width` microseconds since the epoch, whole minutes, oldest first: all
        sums, or the first `limit` ones."""
        return await self._read(partial(usage.sums, wanted=wanted, by=by, width=width, limit=limit))

    async def fold_usage(self, before: int) -> int:
        """Puts together in hours what was counted by minutes in hours that ended by `before`, some of it at a
        time; returns how many rows went, 0 when there are no more."""
        return await self._write_late(partial(usage.fold, before=before))

    async def forget_person_usage(self, before: int) -> int:
        """Removes some of what persons used in hours that began before this time; returns how many rows went,
        0 when there are no more. The sums of their owners stay."""
        return await self._write_late(partial(usage.forget, before=before))

    # -- rate limits -----------------------------------------------------------------------------------------

    async def move_quotas(self, ids: Sequence[str], move: quotas.Move[T], now: int) -> T:
        """Changes how much of some rate limits is used up; see `quotas.Move`. Nobody else changes them
        meanwhile. May be lost with the machine. now: nanoseconds by this process's clock, which count only
        where it has the database alone."""
        return await self._write_late(partial(quotas.move, ids=tuple(ids), move=move, now=now))

    async def sweep_quotas(self, now: int) -> int:
        """Forgets rate limits of which nothing is used; returns how many."""
        return await self._write_late(partial(quotas.sweep, now=now))

    # -- tenants ---------------------------------------------------------------------------------------------

    async def purge(
        self,
        owner: str,
        now: int,
        *,
        entry: AuditEntry | None,
        with_keys: bool = False,
        spending: Spending | None = None,
    ) -> AsyncGenerator[Purged]:
        """Removes everything that an owner had at `now`, whoever refers to it, in short transactions: one for
        each value that it yields.

        Runs in flight are cut: their next append is lost. with_keys: its keys are revoked first. entry: of
        the audit log, committed before anything goes; None for what goes on with a purge that is noted there.
        spending: what runs in flight have used is counted by this. The sums of usage stay.
        A purge that was stopped anywhere is simply begun again.
        """
        note = None if entry is None else partial(audit.append, entry=entry)
        rows = tenants.purge(
            self._read,
            self._write,
            owner,
            now,
            note,
            with_keys=with_keys,
            settle=self._settle(spending),
        )
        batches, files = self.batches.purge(owner, now), self.files.purge(owner, now)
        async with aclosing(rows), aclosing(batches), aclosing(files):
            async for num in batches:  # first: one at work makes responses
                yield Purged(batches=num)
            async for gone in rows:
                yield gone
            async for num in files:
                yield Purged(files=num)
        async with aclosing(self.prompts.purge(owner, now)) as removed:
            async for num in removed:
                yield Purged(prompts=num)
        async with aclosing(self.containers.purge(owner, now)) as removed:
            async for num in removed:
                yield Purged(containers=num)
        async with aclosing(self.chat_completions.purge(owner, now)) as removed:
            async for num in removed:
                yield Purged(chat_completions=num)
        whole = True
        while await self.vector_stores.merge_words(whole=whole):  # what was erased is still in older parts
            whole = False
            yield Purged()
        self._writer.shed()

    async def purgeable(self, owner: str, now: int) -> Purged:
        """What `purge` would remove that begins at `now`, with_keys."""
        return await self._read(partial(tenants.purgeable, owner=owner, now=now))

    async def owner_known(self, owner: str) -> bool:
        """Whether a key, live or revoked, or anything that is kept belongs to the owner."""
        return await self._read(partial(tenants.known, owner=owner))

    async def export_responses(
        self, owner: str, *, after: tuple[int, str] | None, limit: int, carried: Collection[str] = ()
    ) -> tuple[ExportedResponse, ...]:
        """The next responses by time, behind (created_at, id), each with its own input.

        One that has ended comes with the deleted ones that its history needs, and their conversation, but for
        those whose ids are in `carried`, and each of them once.
        """
        return await self._read(
            partial(tenants.responses_behind, owner=owner, after=after, limit=limit, carried=carried)
        )

    async def export_conversations(
        self, owner: str, *, after: tuple[int, str] | None, limit: int
    ) -> tuple[StoredConversation, ...]:
        """The next conversations by time, behind (created_at, id)."""
        return await self._read(partial(tenants.conversations_behind, owner=owner, after=after, limit=limit))

    async def export_conversation_items(
        self, owner: str, id: str, *, after: int, limit: int
    ) -> tuple[PositionedItem, ...]:
        """The next items of a conversation, above position `after`; none when it is gone."""
        return await self._read(
            partial(tenants.conversation_items_behind, owner=owner, id=id, after=after, limit=limit)
        )

    # -- keys ------------------------------------------------------------------------------------------------

    async def create_key(self, new: NewKey, *, entry: AuditEntry, owner_name: str | None = None) -> StoredKey:
        """Stores a key's hash, and its owner if this is the owner's first key, under `owner_name` or its id.

        entry: of the audit log, here as in every other change. OwnerArchived.
        """
        return await self._audited(partial(api_keys.create, new=new, owner_name=owner_name), entry)

    async def list_keys(self) -> tuple[StoredKey, ...]:
        """All keys, revoked ones included, oldest first."""
        return await self._read(api_keys.list_)

    async def any_key(self, besides: Collection[str] = (), *, at: int | None = None) -> bool:
        """Whether there is a key that is not revoked, besides those of these ids. at: only those count that
        have not expired by then; by default all."""
        return await self._read(partial(api_keys.any_, besides=besides, at=at))

    async def page_of_keys(
        self,
        *,
        limit: int,
        order: Order = "asc",
        after: str | None = None,
        owner: str | None = None,
        scope: str | None = None,
    ) -> Page[StoredKey]:
        """One page of the keys that are not revoked, by time. owner, scope: only those of this owner, and
        those that have this very scope. NotFound("key") for `after`."""
        return await self._read(
            partial(api_keys.page, owner=owner, scope=scope, limit=limit, order=order, after=after)
        )

    async def get_key(self, id: str) -> StoredKey:
        """One key, whether or not it is live. NotFound("key")."""
        return await self._read(partial(api_keys.get, id=id))

    async def revoke_key(self, id: str, now: int, *, entry: AuditEntry) -> StoredKey:
        """Ends a key. NotFound("key") if there is none of this id that is not revoked."""
        return await self._audited(partial(api_keys.revoke, id=id, now=now), entry)

    async def change_key(
        self,
        id: str,
        now: int,
        changes: Mapping[str, object],
        *,
        entry: AuditEntry,
        limits: LimitsChange | None = None,
    ) -> StoredKey:
        """Replaces some of a live key's `name`, `scopes` (a tuple) and `expires_at`, and changes its limits.

        NotFound("key"), KeyEnded.
        """
        job = partial(api_keys.change, id=id, now=now, values=changes, limits=limits)
        return await self._audited(job, entry)

    async def rotate_key(self, id: str, successor: NewKey, until: int, *, entry: AuditEntry) -> StoredKey:
        """Stores the successor of a live key and lets that one be accepted until `until` at most.

        The successor takes over owner, scopes and limits. NotFound("key"), KeyEnded.
        """
        return await self._audited(partial(api_keys.rotate, id=id, successor=successor, until=until), entry)

    async def key_family(self, id: str) -> tuple[str, ...]:
        """The id of a key, and of those before and after it by rotation."""
        return await self._read(partial(api_keys.family, id=id))

    async def find_key(self, hash: bytes) -> FoundKey | None:
        """The key with this hash and its owner, unless it is revoked; it may have expired."""
        return await self._read(partial(api_keys.find, hash=hash))

    async def key_hash(self, owner: str, id: str) -> bytes | None:
        """The hash of an owner's key; None for an unknown one."""
        return await self._read(partial(api_keys.hash_of, owner=owner, id=id))

    async def touch_keys(self, used: Mapping[str, int]) -> None:
        """Notes when keys were last used: id -> microseconds. May be lost with the machine."""
        await self._write_late(partial(api_keys.touch, used=dict(used)))

    # -- owners ----------------------------------------------------------------------------------------------

    async def create_owner(self, id: str, name: str, now: int, *, entry: AuditEntry) -> StoredOwner:
        """Stores an owner that has no key yet; one of this id that is there stays as it is."""
        return await self._audited(partial(owners.ensure, id=id, name=name, now=now), entry)

    async def ensure_owners(self, ids: Sequence[str], now: int) -> None:
        """Stores those of these owners that are not there yet, each under its id as its name."""
        await self._write(partial(owners.ensure_all, ids=tuple(ids), now=now))

    async def get_owner(self, id: str) -> StoredOwner:
        """One owner. NotFound("owner")."""
        return await self._read(partial(owners.get, id=id))

    async def list_owners(
        self, *, limit: int, after: str | None = None, archived: bool = False
    ) -> Page[StoredOwner]:
        """One page, oldest first. archived: with those that are. NotFound("owner") for `after`."""
        return await self._read(partial(owners.list_, limit=limit, after=after, archived=archived))

    async def rename_owner(self, id: str, name: str, *, entry: AuditEntry) -> StoredOwner:
        """Gives an owner another name. NotFound("owner"), OwnerArchived."""
        return await self._audited(partial(owners.rename, id=id, name=name), entry)

    async def limit_owner(self, id: str, change: LimitsChange, *, entry: AuditEntry) -> StoredOwner:
        """Changes the limits of an owner, a JSON object. NotFound("owner"), OwnerArchived."""
        return await self._audited(partial(owners.limit, id=id, change=change), entry)

    async def archive_owner(self, id: str, now: int, *, entry: AuditEntry) -> StoredOwner:
        """Revokes the keys of an owner, which gets none any more; its data stays. NotFound, OwnerArchived."""
        return await self._audited(partial(owners.archive, id=id, now=now), entry)

    # -- the audit log ---------------------------------------------------------------------------------------

    async def add_audit(self, entry: AuditEntry) -> None:
        """Adds an entry for what changes nothing, such as an export."""
        await self._write(partial(audit.append, entry=entry))

    async def list_audit(
        self, wanted: AuditFilter, *, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[StoredAudit]:
        """One page, newest first: behind the entry `after`, or the nearest ahead of the entry `before`.

        NotFound("audit log") for an id that is no entry's.
        """
        return await self._read(partial(audit.list_, wanted=wanted, limit=limit, after=after, before=before))

    async def examine_audit(self) -> AuditState:
        """Whether the audit log is whole: follows its chain of hashes from the beginning to the end."""
        return await self._read(audit.examine)

    async def audit_hash(self, number: int) -> bytes | None:
        """The hash of one entry of the audit log; None where there is none of this number."""
        return await self._read(partial(audit.hash_at, number=number))

    # -- keys that seal --------------------------------------------------------------------------------------

    async def sealing_keys(self) -> tuple[SealingKey, ...]:
        """All keys that seal, oldest first."""
        return await self._read(sealing_keys.list_)

    async def add_sealing_key(self, key: SealingKey, entry: AuditEntry | None = None) -> bool:
        """Stores a key, to seal from now on; False where there is one of its number already, and nothing
        changes. entry: of the audit log, where a person asked for the key."""

        def add(conn: Connection) -> bool:
            added = sealing_keys.add(conn, key)
            if added and entry is not None:
                audit.append(conn, entry)
            return added

        return await self._write(add)

    # -- webhooks --------------------------------------------------------------------------------------------

    async def add_webhook(self, webhook: StoredWebhook, *, entry: AuditEntry) -> None:
        """Stores an endpoint that is told of its owner's ends from now on. entry: of the audit log."""
        await self._audited(partial(webhooks.add, webhook=webhook), entry)

    async def list_webhooks(self) -> tuple[StoredWebhook, ...]:
        """The webhooks of all owners, oldest first."""
        return await self._read(webhooks.list_)

    async def get_webhook(self, id: str) -> StoredWebhook:
        """One webhook. NotFound("webhook")."""
        return await self._read(partial(webhooks.get, id=id))

    async def remove_webhook(self, id: str, *, entry: AuditEntry) -> None:
        """Forgets a webhook and what it was still to be told. NotFound("webhook")."""
        await self._audited(partial(webhooks.remove, id=id), entry)

    async def disable_webhook(self, id: str, now: int, *, entry: AuditEntry) -> int | None:
        """Tells a webhook nothing until it is enabled; what it was still to be told is kept. Returns how much
        that is; None, and there is no entry, where it was disabled or removed already."""

        def disable(conn: Connection) -> int | None:
            if (pending := webhooks.disable(conn, id, now)) is not None:
                audit.append(conn, entry)
            return pending

        return await self._write(disable)

    async def enable_webhook(self, id: str, now: int, *, entry: AuditEntry) -> int:
        """Tells a webhook again of what comes, and at once of what it was still to be told; returns how much
        that is. NotFound("webhook")."""
        pending = await self._audited(partial(webhooks.enable, id=id, now=now), entry)
        self.announced.set()
        return pending

    async def due_deliveries(self, now: int) -> DueDeliveries:
        """Which webhooks have deliveries that are due, when the next one is, and how many there are."""
        return await self._read(partial(webhooks.due, now=now))

    async def hasten_deliveries(self, now: int, longest: int) -> None:
        """Makes due now what is due in more than `longest` microseconds, likewise."""
        await self._write(partial(webhooks.hasten, now=now, longest=longest))

    async def claim_deliveries(
        self, webhook_id: str, now: int, *, until: int, limit: int
    ) -> tuple[Delivery, ...]:
        """Begins attempts: up to `limit` due deliveries that nobody else tries before `until`."""
        return await self._write(
            partial(webhooks.claim, webhook_id=webhook_id, now=now, until=until, limit=limit)
        )

    async def settle_delivery(self, delivery: Delivery, due_at: int | None) -> None:
        """Ends an attempt: the next one is due then, or never (None)."""
        await self._write(partial(webhooks.settle, delivery=delivery, due_at=due_at))

    async def put_off_delivery(self, delivery: Delivery, due_at: int, now: int, *, before: int) -> int:
        """Ends an attempt that has failed; the next one is due then. Gives up what is due for its webhook and
        was to be told before `before`, a thousand at most; returns how many."""
        put_off = partial(webhooks.put_off, delivery=delivery, due_at=due_at, now=now, before=before)
        return await self._write(put_off)
