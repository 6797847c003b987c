"""The writing thread: one connection through which all writes of this process go, committed in groups.

It also decides what callers are told when the database is locked, full, unreachable or broken.

A job is a callable `(Connection) -> T`, free of side effects outside the database: it may run twice. All jobs
that wait are committed together; those that gathered meanwhile form the next commit, so there is no timer.
Results go back by one `call_soon_threadsafe` per commit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection

from storage.drivers.interface import CommitUnknown, Database, ErrorKind, Work, Writing, unavailable
from storage.patience import patience_s
from storage.records import COMMIT_SECONDS, CommitStats, StorageUnavailable

T = TypeVar("T")

log = logging.getLogger("antiphon.storage")

PATIENCE_S = 4.0  # how long a write waits for a database that others hold before its caller is told
RETRY_S = 0.1  # pause after a refused commit, and between attempts to connect
BATCH_LIMIT = 512  # jobs in one transaction
DENIED_S = 60.0  # between two lines of the log on single writes that are denied
LOOK_S = 1.0  # between two looks at what only an operator can mend
CONTENDED_LIMIT = 2  # jobs that may wait for a row in vain before the queue is looked at again


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[Connection], Any]
    durable: bool
    retry_until_available: bool
    future: asyncio.Future[Any]
    since: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    job: _Job
    value: Any
    error: BaseException | None


class Writer:
    """Everything that this process writes to a database; see the module.

    fatal: called once, on the loop, with the error after which nothing is acknowledged any more. committed:
    called after each commit that others may want to know of, in the writer's thread.
    """

    def __init__(
        self,
        database: Database,
        writing: Writing,
        loop: asyncio.AbstractEventLoop,
        fatal: Callable[[BaseException], None],
        committed: Callable[[], None],
    ) -> None:
        self._database = database
        self._writing = writing
        self._loop = loop
        self._fatal = fatal
        self._committed = committed
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._pending: deque[_Job] = deque()
        self._unsure: list[_Outcome] | None = None  # of a commit of which nobody knows whether it took place
        self._closing: float | None = None  # monotonic time by which the queue must be empty
        self._dead: BaseException | None = None
        self._blocked_since: float | None = None
        self._obstacle: StorageUnavailable | None = None  # what only an operator can mend, while it lasts
        self._obstacle_since = self._looked_at = 0.0
        self._denied_at: float | None = None  # when the log was last told of a single write that was denied
        self._num_commits = self._num_jobs = 0
        self._durations = [0] * (len(COMMIT_SECONDS) + 1)
        self._duration = 0.0
        self._thread = threading.Thread(target=self._run, name="antiphon-writer", daemon=True)

    def start(self) -> None:
        """Starts the thread, to which the connection belongs from now on."""
        self._thread.start()

    def submit(
        self, call: Work[T], *, durable: bool, retry_until_available: bool = False
    ) -> asyncio.Future[T]:
        """Runs `call` in the next transaction; the future is done after the commit.

        durable: it must survive power loss. retry_until_available: it waits for as long as the database is
        locked, full or away, instead of StorageUnavailable after PATIENCE_S, or after `patience_s` where the
        database is away. What `call` raises is raised,
        and nothing of it is committed. Leaving the future behind does not undo the write.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        if self._dead is not None or self._closing is not None:
            future.set_exception(self._unavailable())
        else:
            job = _Job(call, durable, retry_until_available, future, time.monotonic(), patience_s.get())
            self._queue.put(job)
        return future

    def check(self) -> None:
        """StorageUnavailable if writes do not go through at present."""
        blocked = self._blocked_since
        if self._dead is not None or self._closing is not None:
            raise self._unavailable()
        self.require_room()
        if blocked is not None and time.monotonic() - blocked > 1.0:
            raise StorageUnavailable("the database has been locked, full or away for over a second")

    def require_room(self) -> None:
        """StorageUnavailable where only an operator can mend what stands in the way of writes. Small ones may
        go through all the same, so this is for whoever begins what will need more of them."""
        obstacle = self._obstacle
        if obstacle is not None:
            raise StorageUnavailable(
                str(obstacle), full=obstacle.full, moved=obstacle.moved, read_only=obstacle.read_only
            )

    def shed(self) -> None:
        """Has what was deleted leave the write-ahead log too, soon."""
        self._writing.shed()

    def stats(self) -> CommitStats:
        """Counters since the start."""
        return CommitStats(
            commits=self._num_commits,
            synced=self._writing.num_synced,
            jobs=self._num_jobs,
            checkpoints=self._writing.num_checkpoints,
            seconds=tuple(self._durations),
            seconds_sum=self._duration,
            wal_bytes=self._writing.wal_bytes,
        )

    async def close(self) -> None:
        """Commits what was submitted and closes. Waits at most PATIENCE_S for a database that is away, and
        not for an operator."""
        if self._closing is None:
            self._closing = time.monotonic() + (PATIENCE_S if self._obstacle is None else 0.0)
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # --------------------------------------------------------------------------------------------------------
    # The thread

    def _run(self) -> None:
        # The one broad `except` of storage: whatever stops this thread becomes the writer's state and every
        # caller's error; a thread that dies in silence would leave them waiting for ever.
        try:
            while self._closing is None or self._pending or self._unsure or not self._queue.empty():
                self._gather()
                if time.monotonic() - self._looked_at >= LOOK_S:
                    self._look()
                if self._pending or self._unsure:
                    self._commit()
                else:
                    self._writing.rest()
            self._writing.close()
        except BaseException as error:
            self._die(error)
        finally:
            self._writing.drop()

    def _gather(self) -> None:
        """Moves what waits into `_pending`; sleeps until there is a job or something else to do."""
        with suppress(Empty):
            if not self._pending and not self._unsure:
                rest_s = self._writing.rest_s()
                due_s = LOOK_S if rest_s is None else min(rest_s, LOOK_S)
                self._take(self._queue.get(timeout=0.0 if self._closing else due_s))
            while len(self._pending) < BATCH_LIMIT:
                self._take(self._queue.get_nowait())

    def _take(self, job: _Job | None) -> None:
        if job is not None:
            self._pending.append(job)

    def _commit(self) -> None:
        error = self._try(self._make_sure)
        batch = tuple(self._pending)
        if error is None and batch:
            error = self._try(partial(self._commit_batch, batch))
            if error is not None and len(batch) > 1 and not self._unsure:
                error = self._commit_alone(batch, error)
        if error is not None and (self._pending or self._unsure):
            self._wait_after(error)
        self._writing.after_commit(idle=self._queue.empty())

    def _commit_alone(self, batch: tuple[_Job, ...], error: Exception) -> Exception | None:
        """Each job by itself: what needs much room, or a row that is held, must not stop what does not."""
        num_contended = 0
        for job in batch:
            if self._database.trouble(error) not in (ErrorKind.REFUSED, ErrorKind.CONTENDED):
                break
            met = self._try(partial(self._commit_batch, (job,)))
            if met is not None and self._database.trouble(met) is ErrorKind.CONTENDED:
                self._pending.remove(job)
                self._pending.append(job)  # the others first, next time
                num_contended += 1
            error = met or error
            if num_contended == CONTENDED_LIMIT:
                break
        return error

    def _try(self, attempt: Callable[[], object]) -> Exception | None:
        """What `attempt` raises, if it is a trouble that may pass."""
        try:
            attempt()
        except Exception as error:
            if self._database.trouble(error) in (None, ErrorKind.FATAL):
                raise
            return error
        return None

    def _commit_batch(self, batch: tuple[_Job, ...]) -> None:
        """One commit and the news of it. Raises only the database's trouble; then nothing is done."""
        started = time.monotonic()
        try:
            outcomes = self._outcomes(batch)
        except CommitUnknown as unknown:
            self._unsure = unknown.value
            self._leave_queue(batch)
            raise
        took = time.monotonic() - started
        self._durations[bisect_left(COMMIT_SECONDS, took)] += 1
        self._duration += took
        self._leave_queue(batch)
        self._settle(outcomes)

    def _make_sure(self) -> None:
        """If the connection broke during a commit: did it take place? If not, its jobs wait again."""
        if self._unsure is None:
            return
        took_place = self._writing.took_place()
        outcomes, self._unsure = self._unsure, None
        if took_place:
            self._settle(outcomes)
        else:
            self._pending.extendleft(outcome.job for outcome in reversed(outcomes))

    def _leave_queue(self, batch: tuple[_Job, ...]) -> None:
        for job in batch:
            self._pending.remove(job)

    def _settle(self, outcomes: list[_Outcome]) -> None:
        self._blocked_since = None
        if self._obstacle is not None:
            self._look(written=True)
        self._num_commits += 1
        self._num_jobs += len(outcomes)
        self._deliver(outcomes)
        # A beat or a sweep, which nobody promised and nobody waits for, is no news to others.
        if any(outcome.job.durable or outcome.job.retry_until_available for outcome in outcomes):
            self._committed()

    def _outcomes(self, batch: tuple[_Job, ...]) -> list[_Outcome]:
        """What came of the jobs, by a transaction that is committed.

        Who was overtaken by another process sees by whom at the second attempt, and says so.
        """
        try:
            return self._attempt(batch, isolate=False)
        except Exception as error:
            if self._database.trouble(error) is not None:
                raise
            if len(batch) == 1 and not self._database.is_unique_violation(error):
                return [_Outcome(batch[0], None, self._database.meaning(error))]
        return self._attempt(batch, isolate=True)

    def _attempt(self, batch: tuple[_Job, ...], *, isolate: bool) -> list[_Outcome]:
        """One transaction. The first job that raises undoes all; with `isolate`, each stands alone.

        Savepoints cost 20-50 us a job, and jobs seldom raise: so they are for the second attempt.
        """

        def work(connection: Connection) -> list[_Outcome]:
            outcomes = []
            for job in batch:
                if isolate:
                    self._writing.say("SAVEPOINT job")
                try:
                    outcomes.append(_Outcome(job, job.call(connection), None))
                except Exception as error:
                    if not isolate or self._database.trouble(error) is not None:
                        raise
                    self._writing.say("ROLLBACK TO job")
                    outcomes.append(_Outcome(job, None, self._database.meaning(error)))
                if isolate:
                    self._writing.say("RELEASE job")
            return outcomes

        return self._writing.transact(work, durable=any(job.durable for job in batch))

    def _wait_after(self, error: Exception) -> None:
        """The database does not take it now: tell the impatient when their time is up, keep the others."""
        self._writing.sync()  # what was committed before is not to wait for this to pass
        kind = self._database.trouble(error)
        now = time.monotonic()
        if self._blocked_since is None:
            self._blocked_since = now
        out_of_time = self._closing is not None and now > self._closing
        kept: deque[_Job] = deque()
        given_up = []
        for job in self._pending:
            # A lost connection is mended by a new one, so patience begins where the loss was seen: a process
            # that was itself stopped for seconds finds its session ended, and has not tried yet.
            lost = kind is ErrorKind.LOST
            waited_s = now - (max(job.since, self._blocked_since) if lost else job.since)
            tired = kind is ErrorKind.REFUSED or waited_s > (job.patience_s if lost else PATIENCE_S)
            if out_of_time or (tired and not job.retry_until_available):
                given_up.append(job)
            else:
                kept.append(job)
        self._pending = kept
        if self._unsure is not None and out_of_time:
            given_up += [outcome.job for outcome in self._unsure]
            self._unsure = None
        # What one write alone has no room for is no obstacle to others.
        if kept or self._unsure or kind is not ErrorKind.REFUSED or self._try(self._writing.look) is not None:
            self._note(error)
        elif self._database.cause(error) is not None and (
            self._denied_at is None or now - self._denied_at >= DENIED_S
        ):
            self._denied_at = now
            log.error("one write is refused, others go through: %s", self._told(error))
        self._deliver([_Outcome(job, None, self._told(error)) for job in given_up])
        if not kept and not self._unsure:
            self._blocked_since = None
        elif kind is ErrorKind.LOST:
            time.sleep(RETRY_S)
        elif kind is ErrorKind.REFUSED:
            with suppress(Empty):  # a pause that new work ends
                self._take(self._queue.get(timeout=RETRY_S))

    def _look(self, *, written: bool = False) -> None:
        """Notice what only an operator can mend, and that it is mended. written: something was just now."""
        self._looked_at = time.monotonic()
        mended = written

        def look() -> None:
            nonlocal mended
            mended = self._writing.look() or written

        if (error := self._try(look)) is not None:
            self._note(error)
        elif mended and self._obstacle is not None and not self._pending:
            waited_s = time.monotonic() - self._obstacle_since
            self._obstacle = None
            log.warning("the database can be written again, after %.0f s", waited_s)

    def _note(self, error: Exception) -> None:
        """Where only an operator can mend this: remember it, and tell the log once."""
        if self._database.trouble(error) is ErrorKind.REFUSED:
            told, before = self._told(error), self._obstacle
            if before is None:
                self._obstacle_since = time.monotonic()
            if before is None or (before.full, before.moved) != (told.full, told.moved):
                log.error(_NO_ROOM if told.full else "%s", told)
            self._obstacle = told

    def _told(self, error: Exception) -> StorageUnavailable:
        return unavailable(_WHAT, error, self._database.cause(error))

    def _deliver(self, outcomes: list[_Outcome]) -> None:
        if outcomes:
            self._call_loop(_complete, outcomes)

    def _die(self, error: BaseException) -> None:
        self._dead = error
        self._call_loop(self._bury)

    def _bury(self) -> None:
        # On the loop, as `submit` is: nothing can slip into the queue behind this.
        with suppress(Empty):
            while True:
                self._take(self._queue.get_nowait())
        _complete([_Outcome(job, None, self._unavailable()) for job in self._pending])
        self._pending.clear()
        if self._dead is not None:
            self._fatal(self._dead)

    def _call_loop(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _unavailable(self) -> StorageUnavailable:
        if self._dead is None:
            return StorageUnavailable("storage is closed")
        unavailable = StorageUnavailable(f"storage stopped: {self._dead}")
        unavailable.__cause__ = self._dead
        return unavailable


_WHAT = "the database could not be written"
_NO_ROOM = "there is no room: %s. What is new is refused until there is, and what was begun waits"


def _complete(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.job.future.done():
            continue  # nobody waits any more
        if outcome.error is not None:
            outcome.job.future.set_exception(outcome.error)
        else:
            outcome.job.future.set_result(outcome.value)
