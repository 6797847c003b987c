"""The writer: one thread, one connection, every write and every checkpoint.

Owns: the order of writes, group commit, when a commit reaches the disk, checkpoints, and what callers are
told when the database is locked, full or broken. Refuses to know: tables and what a job does.

A job is a callable `(Connection) -> T`, free of side effects outside the database: it may run twice. All jobs
that wait are committed together; those that gathered meanwhile form the next commit, so there is no timer.
Results go back by one `call_soon_threadsafe` per commit.

Durability: a batch with a promise in it commits at synchronous=FULL. Others commit at NORMAL (they survive
the death of the process, not of the machine) and the WAL is synced within `SYNC_DELAY_S` of the first of
them.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection

from .database import Trouble, trouble, write_connection
from .records import CommitStats, StorageUnavailable
from .wal import Wal

T = TypeVar("T")

SYNC_DELAY_S = 0.030  # idle moments sync earlier than they must
SYNC_LIMIT_S = 0.045  # under load: the next commit is FULL, so the promise of 50 ms holds
BUSY_MS = 200  # how long SQLite itself waits for a lock before the queue is looked at again
PATIENCE_S = 4.0  # how long a write waits for a lock or for room before its caller is told
RETRY_S = 0.1  # pause after a refused commit
BATCH_LIMIT = 512  # jobs in one transaction
IDLE_CHECKPOINT_S = 0.1  # an empty queue for this long is a good moment
WAL_OPPORTUNE = 4 << 20  # bytes from which an empty queue is reason enough
WAL_LIMIT = 16 << 20  # bytes at which a checkpoint does not wait for an empty queue
CHECKPOINT_STEP = 4 << 20  # bytes between attempts while a reader holds the WAL back


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[Connection], Any]
    promise: bool
    patient: bool
    future: asyncio.Future[Any]
    since: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    job: _Job
    value: Any
    error: BaseException | None


class Writer:
    """The single writing connection of a database file; see the module.

    fatal: called once, on the loop, with the error after which nothing is acknowledged any more.
    """

    def __init__(
        self, path: Path, loop: asyncio.AbstractEventLoop, fatal: Callable[[BaseException], None]
    ) -> None:
        self._loop = loop
        self._fatal = fatal
        self._raw, self._connection = write_connection(path)
        self._wal = Wal(path)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._pending: deque[_Job] = deque()
        self._closing: float | None = None  # monotonic time by which the queue must be empty
        self._dead: BaseException | None = None
        self._blocked_since: float | None = None
        self._dirty_since: float | None = None  # the oldest commit that no sync has covered
        self._full = True  # the connection's present synchronous setting
        self._uncheckpointed = True
        self._next_checkpoint_at = 0  # bytes of WAL
        self._num_commits = self._num_synced = self._num_jobs = self._num_checkpoints = 0
        self._durations: deque[float] = deque(maxlen=2048)
        self._thread = threading.Thread(target=self._run, name="antiphon-writer", daemon=True)

    def first(self, call: Callable[[Connection], None]) -> None:
        """Runs a job at once, in the caller's thread; only before `start`."""
        self._raw.execute("BEGIN IMMEDIATE")
        try:
            call(self._connection)
            self._raw.execute("COMMIT")
        except BaseException:
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")
            raise

    def start(self) -> None:
        """Starts the thread, to which the connection belongs from now on."""
        self._raw.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        self._thread.start()

    def submit(
        self, call: Callable[[Connection], T], *, promise: bool, patient: bool = False
    ) -> asyncio.Future[T]:
        """Runs `call` in the next transaction; the future is done after the commit.

        promise: it must survive power loss. patient: it waits for as long as the database is locked or full,
        instead of StorageUnavailable after PATIENCE_S. What `call` raises is raised, and nothing of it is
        committed. Leaving the future behind does not undo the write.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        if self._dead is not None or self._closing is not None:
            future.set_exception(self._unavailable())
        else:
            self._queue.put(_Job(call, promise, patient, future, time.monotonic()))
        return future

    def check(self) -> None:
        """StorageUnavailable if writes do not go through at present."""
        blocked = self._blocked_since
        if self._dead is not None or self._closing is not None:
            raise self._unavailable()
        if blocked is not None and time.monotonic() - blocked > 1.0:
            raise StorageUnavailable("the database has been locked or full for over a second")

    def stats(self) -> CommitStats:
        """Counters since the start, and the durations of the latest commits."""
        return CommitStats(
            commits=self._num_commits,
            synced=self._num_synced,
            jobs=self._num_jobs,
            checkpoints=self._num_checkpoints,
            seconds=tuple(self._durations),
            wal_bytes=self._wal.num_bytes,
        )

    async def close(self) -> None:
        """Commits what was submitted, checkpoints, closes. Waits at most PATIENCE_S for a locked database."""
        if self._closing is None:
            self._closing = time.monotonic() + PATIENCE_S
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def discard(self) -> None:
        """Closes a writer that was never started."""
        self._connection.close()
        self._raw.close()
        self._wal.close()

    # --------------------------------------------------------------------------------------------------------
    # The thread

    def _run(self) -> None:
        # The one broad `except` of storage: whatever stops this thread becomes the writer's state and every
        # caller's error; a thread that dies in silence would leave them waiting for ever.
        try:
            while self._closing is None or self._pending or not self._queue.empty():
                self._gather()
                if self._pending:
                    self._commit()
                else:
                    self._rest()
            self._sync()
            self._checkpoint("TRUNCATE")
        except BaseException as error:
            self._die(error)
        finally:
            self._wal.close()
            self._connection.close()
            self._raw.close()

    def _gather(self) -> None:
        """Moves what waits into `_pending`; sleeps until there is a job or something else to do."""
        with suppress(Empty):
            if not self._pending:
                self._take(self._queue.get(timeout=self._rest_s()))
            while len(self._pending) < BATCH_LIMIT:
                self._take(self._queue.get_nowait())

    def _take(self, job: _Job | None) -> None:
        if job is not None:
            self._pending.append(job)

    def _rest_s(self) -> float | None:
        if self._closing is not None:
            return 0.0
        if self._dirty_since is not None:
            return max(0.0, self._dirty_since + SYNC_DELAY_S - time.monotonic())
        return IDLE_CHECKPOINT_S if self._uncheckpointed else None

    def _rest(self) -> None:
        """The queue is empty: sync if that is due, else checkpoint."""
        if not self._sync() and self._uncheckpointed:
            self._checkpoint("PASSIVE")

    def _sync(self) -> bool:
        """Puts on the disk what is not yet there; False if nothing was missing."""
        if self._dirty_since is None:
            return False
        self._wal.sync()
        self._dirty_since = None
        self._num_synced += 1
        return True

    def _commit(self) -> None:
        batch = tuple(self._pending)
        late = self._dirty_since is not None and time.monotonic() - self._dirty_since > SYNC_LIMIT_S
        self._set_full(late or any(job.promise for job in batch))
        error = self._try_commit(batch)
        if error is not None and len(batch) > 1 and trouble(error) is Trouble.REFUSED:
            for job in batch:  # what needs much room must not stop what needs little
                error = self._try_commit((job,)) or error
                if trouble(error) is Trouble.BLOCKED:
                    break
        if error is not None and self._pending:
            self._wait_after(error)
        self._look_at_wal()

    def _try_commit(self, batch: tuple[_Job, ...]) -> Exception | None:
        """Commits the jobs and tells their callers; returns the trouble if there is one that may pass."""
        try:
            self._commit_batch(batch)
        except Exception as error:
            if trouble(error) not in (Trouble.BLOCKED, Trouble.REFUSED):
                raise
            return error
        return None

    def _commit_batch(self, batch: tuple[_Job, ...]) -> None:
        """One commit and the news of it. Raises only the database's trouble; then nothing is done."""
        started = time.monotonic()
        try:
            outcomes = self._attempt(batch, isolate=False)
        except Exception as error:
            if trouble(error) is not None:
                raise
            outcomes = (
                [_Outcome(batch[0], None, error)] if len(batch) == 1 else self._attempt(batch, isolate=True)
            )
        ended = time.monotonic()
        for job in batch:
            self._pending.remove(job)
        self._blocked_since = None
        self._uncheckpointed = True
        if self._full:
            self._dirty_since = None
            self._num_synced += 1
        elif self._dirty_since is None:
            self._dirty_since = ended
        self._num_commits += 1
        self._num_jobs += len(batch)
        self._durations.append(ended - started)
        self._deliver(outcomes)

    def _attempt(self, batch: tuple[_Job, ...], *, isolate: bool) -> list[_Outcome]:
        """One transaction. The first job that raises undoes all; with `isolate`, each stands alone.

        Savepoints cost 20-50 us a job, and jobs seldom raise: so they are for the second attempt.
        """
        outcomes = []
        self._raw.execute("BEGIN IMMEDIATE")
        try:
            for job in batch:
                if isolate:
                    self._raw.execute("SAVEPOINT job")
                try:
                    outcomes.append(_Outcome(job, job.call(self._connection), None))
                except Exception as error:
                    if not isolate or trouble(error) is not None:
                        raise
                    self._raw.execute("ROLLBACK TO job")
                    outcomes.append(_Outcome(job, None, error))
                if isolate:
                    self._raw.execute("RELEASE job")
            self._raw.execute("COMMIT")
        except BaseException:
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")
            raise
        return outcomes

    def _set_full(self, full: bool) -> None:
        if full != self._full:
            self._raw.execute(f"PRAGMA synchronous={'FULL' if full else 'NORMAL'}")
            self._full = full

    def _wait_after(self, error: Exception) -> None:
        """The database is locked or full: tell the impatient when their time is up, keep the others."""
        self._sync()  # what was committed before is not to wait for this to pass
        refused = trouble(error) is Trouble.REFUSED
        now = time.monotonic()
        if self._blocked_since is None:
            self._blocked_since = now
        kept: deque[_Job] = deque()
        given_up = []
        out_of_time = self._closing is not None and now > self._closing
        for job in self._pending:
            if out_of_time or (not job.patient and (refused or now - job.since > PATIENCE_S)):
                refusal = StorageUnavailable(f"the database could not be written: {error}")
                refusal.__cause__ = error
                given_up.append(_Outcome(job, None, refusal))
            else:
                kept.append(job)
        self._pending = kept
        self._deliver(given_up)
        if not kept:
            self._blocked_since = None
        elif refused:
            with suppress(Empty):  # a pause that new work ends
                self._take(self._queue.get(timeout=RETRY_S))

    def _look_at_wal(self) -> None:
        idle = self._queue.empty()
        size = self._wal.measure()
        if size + CHECKPOINT_STEP < self._next_checkpoint_at:  # the WAL was begun anew
            self._next_checkpoint_at = 0
        if size >= (WAL_OPPORTUNE if idle else WAL_LIMIT) and size >= self._next_checkpoint_at:
            self._checkpoint("PASSIVE")

    def _checkpoint(self, mode: str) -> None:
        """Moves the WAL into the database file as far as readers allow; SQLite syncs both."""
        try:
            self._raw.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        except sqlite3.Error as error:
            if trouble(error) is Trouble.FATAL:
                raise
            # Locked or no room: the WAL keeps everything; another attempt follows the next commit.
            self._uncheckpointed = False
            return
        self._num_checkpoints += 1
        self._uncheckpointed = False
        self._dirty_since = None
        self._next_checkpoint_at = self._wal.measure() + CHECKPOINT_STEP

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


def _complete(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.job.future.done():
            continue  # nobody waits any more
        if outcome.error is not None:
            outcome.job.future.set_exception(outcome.error)
        else:
            outcome.job.future.set_result(outcome.value)
