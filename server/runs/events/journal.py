"""Numbers the events of all runs, commits them to storage, and shows them to readers only after the commit.

Nothing else writes events. One task commits for all runs: whatever gathers while a commit is in flight goes
into the next one, without a timer. A run with `store=false` has no log, so its events go straight to its
channel, in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from server.clock import now_us
from server.runs.events.channel import Channel
from storage import (
    ECHO_MARK,
    ClosedItem,
    ContainerChange,
    Finish,
    NewResponse,
    Park,
    Record,
    RunAppend,
    RunLost,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon.journal")

Draft = dict[str, Any]

MAX_UNCOMMITTED = 256
"""Writes a run may be ahead of the log before it has to wait for it."""

LAST_COMMIT_S = 1.0
"""How long a process that ends waits for its last commit. What is not in it is made again: nobody saw it."""

STALL_S = 4.0
"""How long whoever waits for what a run has written waits for a database that takes nothing."""

RETRY_S = 0.1
"""Pause before a commit is tried again while the database cannot be written."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a record: their place in their generation, and what they do not determine."""

    token_ids: tuple[int, ...] = ()
    generation: int = 0
    first_token: int = 0
    logprobs: bytes | None = None
    facts: bytes | None = None


NO_TOKENS = Tokens()


@dataclass(slots=True, eq=False)
class RunLog:
    """One run as the journal sees it: its place in the log and what is not yet committed.

    fence: 0 where the database knows nothing of the run. on_lost: given this place and the reason, once, when
    nothing more is written: another owner has the run, it was deleted, or the log did not take what it wrote.
    It must not hold the run, which holds this: a cycle keeps all events of an ended run in memory until the
    garbage collector looks at the oldest objects.
    """

    response_id: str
    stored: bool
    fence: int
    next_seq: int
    channel: Channel
    pending: RunAppend | None = None
    pending_since: float = 0.0  # perf_counter seconds of the oldest pending write
    num_uncommitted: int = 0
    lost: bool = False
    on_lost: Callable[[RunLog, Exception], None] = lambda entry, why: None
    committed: asyncio.Event = field(default_factory=asyncio.Event)

    def lose(self, why: Exception) -> None:
        """Stop writing; whoever carries the run on is told."""
        if self.lost:
            return
        self.lost = True
        self.pending, self.num_uncommitted = None, 0
        self.committed.set()
        self.on_lost(self, why)


class Journal:
    """Writes the events of all runs of this process."""

    def __init__(self, storage: Storage, committed: Callable[[float], None]) -> None:
        """`committed` is told how long, in seconds, each run's oldest write of a commit had waited for it."""
        self._storage = storage
        self._committed = committed
        self._dirty: dict[str, RunLog] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the commit task, which the journal owns until `close`."""
        self._task = asyncio.create_task(self._commits(), name="journal")

    async def close(self) -> None:
        """Commit what is pending, if that can be done in LAST_COMMIT_S, then stop; whoever writes later has
        lost its run to the next process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_COMMIT_S):
                await self._idle.wait()
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- entries ---------------------------------------------------------------------------------------------

    async def begin(self, new: NewResponse, drafts: Sequence[Draft], channel: Channel) -> RunLog:
        """Start a run: its row, its input and its first events in one transaction, shown once they are
        durable.

        Raises what the start transaction raises (ConversationLocked, NotFound, StorageUnavailable, ...).
        """
        record = _record(drafts, 0)
        fence = 0
        if new.store or new.conversation_id is not None:
            claim = await self._storage.start_response(replace(new, record=record if new.store else None))
            fence = claim.fence
        channel.publish(record)
        return RunLog(new.id, new.store, fence, record.num_events, channel)

    def resume(self, channel: Channel, fence: int, next_seq: int) -> RunLog:
        """Go on writing a run behind the last event that its log holds."""
        return RunLog(channel.response_id, channel.stored, fence, next_seq, channel)

    async def has_room(self, entry: RunLog) -> None:
        """Wait until the run is fewer than MAX_UNCOMMITTED writes ahead of the log."""
        while entry.num_uncommitted >= MAX_UNCOMMITTED:
            await self._next_commit(entry)

    async def flushed(self, entry: RunLog) -> None:
        """Wait until everything written for the run is committed and shown (or the run is lost)."""
        while entry.num_uncommitted:
            await self._next_commit(entry)

    async def _next_commit(self, entry: RunLog) -> None:
        """Wait for it. Whoever waits for the run hears of a database that takes nothing meanwhile."""
        entry.committed.clear()
        while not entry.committed.is_set():
            try:
                async with asyncio.timeout(STALL_S):
                    await entry.committed.wait()
            except TimeoutError:
                try:
                    self._storage.require_writable()
                except StorageUnavailable as why:
                    if not entry.committed.is_set():  # it may be by now, in the same turn of the loop
                        entry.channel.stall(why)

    # -- writing ---------------------------------------------------------------------------------------------

    def write(
        self, entry: RunLog, drafts: Sequence[Draft], *, tokens: Tokens = NO_TOKENS, closed:
        Sequence[ClosedItem] = (), head: bytes | None = None, status: str | None = None, finish: Finish | None
        = None, park: Park | None = None, effects: tuple[ContainerChange, ...] = (),
    ) -> None:  # fmt: skip
        """Number the drafts and hand them to the next commit, whole; they are shown after it.

        `drafts` is empty only with `park`, or with a `head` alone. effects: see `apply`. Does nothing once
        the run is lost.
        """
        if self._closed and entry.fence:
            entry.lose(RunLost(entry.response_id))
        if entry.lost:
            return
        records = (_record(drafts, entry.next_seq, tokens),) if drafts else ()
        entry.next_seq += len(drafts)
        if not entry.stored and (finish is None or entry.fence == 0):
            for record in records:
                entry.channel.publish(record)
            return
        new = RunAppend(
            entry.response_id, entry.fence, records, tuple(closed), head, status, finish, park, effects
        )
        if entry.pending is None:
            entry.pending_since = time.perf_counter()
            entry.pending = new
        else:
            entry.pending = _joined(entry.pending, new)
        entry.num_uncommitted += 1
        self._dirty[entry.response_id] = entry
        self._idle.clear()
        self._wake.set()

    async def apply(self, effects: Sequence[ContainerChange]) -> None:
        """Commit what tools have changed of a run that has no log, whose outcomes are in no transaction."""
        for effect in effects:
            await self._storage.containers.change(effect)

    async def _commits(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._commit_dirty()
            if not self._dirty:
                self._idle.set()

    async def _commit_dirty(self) -> None:
        """Commit and show what is pending; nothing of it is held until the next time, which may be far."""
        batch: list[tuple[RunLog, RunAppend, int]] = []
        since = []
        for entry in self._dirty.values():
            if entry.pending is not None:
                batch.append((entry, entry.pending, entry.num_uncommitted))
                since.append(entry.pending_since)
                entry.pending = None
        self._dirty = {}
        if batch:
            self._show(batch, await self._commit(batch))
        done = time.perf_counter()
        for start in since:
            self._committed(done - start)

    async def _commit(self, batch: Sequence[tuple[RunLog, RunAppend, int]]) -> Mapping[str, Exception]:
        """Commit a batch, as soon as the database can be written; returns the runs that were refused."""
        # The records of an unstored run exist nowhere but in its channel; only its end touches the database.
        appends = [
            append if entry.stored else replace(append, records=(), closed=()) for entry, append, _ in batch
        ]
        while True:
            try:
                return await self._storage.append(appends)
            except StorageUnavailable as error:
                log.warning("commit delayed: %s", error)
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                log.exception("commit failed for good")
                return dict.fromkeys((append.response_id for append in appends), error)

    def _show(self, batch: Sequence[tuple[RunLog, RunAppend, int]], refused: Mapping[str, Exception]) -> None:
        """Publish what is durable; runs that were refused learn why."""
        for entry, append, num_writes in batch:
            if append.response_id in refused:
                entry.lose(refused[append.response_id])
            if entry.lost:
                continue
            entry.channel.mend()
            for record in append.records:
                entry.channel.publish(record)
            entry.num_uncommitted -= num_writes
            entry.committed.set()


def _joined(before: RunAppend, new: RunAppend) -> RunAppend:
    """What a run adds in one transaction in place of two."""
    return RunAppend(
        new.response_id,
        new.fence,
        records=before.records + new.records,
        closed=before.closed + new.closed,
        head=new.head or before.head,
        status=new.status or before.status,
        finish=new.finish or before.finish,
        park=new.park or before.park,
        effects=before.effects + new.effects,
    )


def stamp(draft: Draft, sequence_number: int) -> bytes:
    """The one place where events get their numbers: a draft's JSON, with ECHO_MARK where the echo belongs."""
    numbered = {"type": draft["type"], "sequence_number": sequence_number, **draft}
    if "response" not in draft:
        # A slice, for it takes the room that it needs: [measured] what orjson 3.13 returns takes 4 kB for as
        # long as it is kept, and a run's channel keeps thousands of events of 200 bytes.
        return orjson.dumps(numbered, option=orjson.OPT_APPEND_NEWLINE)[:-1]
    head = numbered.pop("response")
    return orjson.dumps(numbered)[:-1] + b',"response":' + orjson.dumps(head)[:-1] + b"," + ECHO_MARK + b"}}"


def stamped(drafts: Sequence[Draft], first_seq: int) -> bytes:
    """Consecutive drafts as a record holds them."""
    return b"\n".join(stamp(draft, first_seq + offset) for offset, draft in enumerate(drafts))


def _record(drafts: Sequence[Draft], first_seq: int, tokens: Tokens = NO_TOKENS) -> Record:
    return Record(
        first_seq=first_seq,
        num_events=len(drafts),
        events=stamped(drafts, first_seq),
        generation=tokens.generation,
        first_token=tokens.first_token,
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        facts=tokens.facts,
        created_at=now_us(),
    )
