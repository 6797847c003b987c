"""Keeps the asyncio tasks of this process's runs, from their start until their events are durable.

A foreground run without readers is cancelled: at once where it is not stored, otherwise after a grace period.
A run whose events storage cannot take ends as `failed`; one that another process has taken over just stops.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from engine import EngineDead
from server.errors import to_api_error
from server.runs.events import Feed, Journal, RunLog
from server.runs.execution.loop import Loop
from server.runs.execution.run import CancelReason, Run
from storage import RunClaim, RunLost, StorageUnavailable, patience_s

if TYPE_CHECKING:
    from server.runs.execution.recovery_restore import Restorer
    from storage import Storage

log = logging.getLogger("antiphon.runs")

TELLS = 4
"""How often in a grace other processes tell that a run is read there."""

LATE_S = 0.5
"""How much later than it is due that may come: they look at what they follow several times a second."""

PATIENCE_S = 60.0
"""How long a run waits for a database that is away: it was acknowledged, and is not to fail by it."""


class RunTasks:
    """Runs at work, by response id."""

    def __init__(
        self,
        loop: Loop,
        journal: Journal,
        restorer: Restorer,
        feed: Feed,
        storage: Storage,
        resume_grace_s: float,
    ) -> None:
        self._loop = loop
        self._journal = journal
        self._restorer = restorer
        self._feed = feed
        self._storage = storage
        self._grace_s = resume_grace_s
        self._runs: dict[str, Run] = {}
        self._unread_ends: dict[str, asyncio.Task[None]] = {}  # of runs that could not be restored
        self._graces: dict[str, asyncio.Task[None]] = {}
        self.on_over: Callable[[Run], None] = lambda run: None  # a run has ended or parked
        feed.on_left = self._unread

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def get(self, response_id: str) -> Run | None:
        """The run, if this process carries it on now."""
        return self._runs.get(response_id)

    def has(self, response_id: str) -> bool:
        """Whether this process carries a run on, or has yet to store its end."""
        return response_id in self._runs or response_id in self._unread_ends

    def stored(self) -> list[Run]:
        """The runs that the database knows as this process's."""
        return [run for run in self._runs.values() if run.entry.fence]

    # -- beginning and ending --------------------------------------------------------------------------------

    def spawn(self, run: Run) -> None:
        """Carry a run on, in a task of its own, and with a place in the engine's queue: one that has none was
        promised to somebody before, and is not refused any more. Where its end is written, that has to become
        durable, which may take as long as a disk is full."""
        if run.place is None and run.stepping:
            admission, plan = run.served.engine.admission, run.plan
            run.place = admission.enter(plan.owner, plan.weight, promised=True)
        run.entry.on_lost = self._lost
        self._runs[run.plan.response_id] = run
        run.task = asyncio.create_task(self._carry(run), name=run.plan.response_id)
        run.task.add_done_callback(lambda task: self._over(run, task))
        if not self._feed.num_readers(run.plan.response_id):
            self._unread(run.plan.response_id)

    async def _carry(self, run: Run) -> None:
        patience_s.set(PATIENCE_S)
        try:
            if run.stepping:
                await self._loop.advance(run)
            await self._journal.flushed(run.entry)
        except EngineDead as dead:
            # A stored stream is cut and can be resumed after a restart; nobody can resume an unstored one.
            if run.plan.store:
                run.entry.channel.stop()
            else:
                why = to_api_error(dead)
                told = str(dead) or "The engine stopped."
                self._loop.fail(run, told, retry_after=why.retry_after_s, why=why)
        except asyncio.CancelledError:
            if run.refusal is None:
                raise
        if run.refusal is not None:
            await self._end_refused(run, run.refusal)

    def _over(self, run: Run, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("run %s was left unfinished", run.plan.response_id, exc_info=error)
            run.entry.channel.stop()
        self._forget(run)

    def _forget(self, run: Run) -> None:
        response_id = run.plan.response_id
        if self._runs.get(response_id) is run:
            del self._runs[response_id]
        self._end_grace(response_id)
        self._feed.release(response_id)
        if run.place is not None:
            run.place.leave()
        if run.visit is not None:
            run.visit.leave()
        self.on_over(run)

    async def end_unread(self, claim: RunClaim, error: dict[str, Any] | None) -> None:
        """End a claimed run that cannot be restored, and have that become durable; see `Loop.end_unread`.
        Raises NotFound for a deleted one."""
        stored = await self._storage.get_response(claim.owner, claim.response_id, hidden=True)
        made = await self._restorer.made(stored)
        channel = self._feed.open(stored.id, stored.echo, stored=True, next_seq=claim.next_seq)
        entry = self._journal.resume(channel, claim.fence, claim.next_seq)
        self._loop.end_unread(stored, entry, made, error)
        ending = asyncio.create_task(self._journal.flushed(entry), name=f"end of {stored.id}")
        self._unread_ends[stored.id] = ending
        ending.add_done_callback(lambda _: self._unread_end_stored(stored.id, ending))

    def _unread_end_stored(self, response_id: str, ending: asyncio.Task[None]) -> None:
        if self._unread_ends.get(response_id) is ending:
            del self._unread_ends[response_id]
            self._feed.release(response_id)

    # -- stopping --------------------------------------------------------------------------------------------

    def cancel(self, run: Run, reason: CancelReason | None = None) -> None:
        """Have a run end `cancelled`, unless it has ended or parked by then. reason: where nobody asked for
        it."""
        if run.cancelled:
            return
        run.cancelled, run.cancel_reason = True, reason
        # Not at once: a task that is cancelled before its first step never gets to say so.
        asyncio.get_running_loop().call_soon(self._interrupt, run)

    def _interrupt(self, run: Run) -> None:
        if run.stepping and run.task is not None:
            run.task.cancel()

    async def over(self, run: Run) -> None:
        """Wait until a run has ended or parked, and that is durable. ApiError 503 while nothing can be
        stored."""
        if run.task is None:
            return
        stalled = asyncio.create_task((channel := run.entry.channel).stalled.wait())
        try:
            await asyncio.wait({run.task, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if not run.task.done():
                raise channel.stall_error()
        finally:
            stalled.cancel()

    async def settled(self, run: Run) -> None:
        """Wait until a run that ended here is over, and what it has used is counted."""
        if run.ended and not run.lost and run.task is not None:
            await asyncio.wait({run.task})

    async def drain(self, grace_s: float) -> Sequence[Run]:
        """Let runs finish for `grace_s`, then stop them where they are, which cuts their streams; those."""
        clock = asyncio.get_running_loop().time
        until = clock() + grace_s
        while (tasks := self._tasks()) and clock() < until:
            await asyncio.wait(tasks, timeout=until - clock())
        self._feed.stop()
        left = [run for run in self._runs.values() if run.task is not None]
        for task in (tasks := self._tasks()):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return left

    def _tasks(self) -> list[asyncio.Task[None]]:
        ends = self._unread_ends.values()
        return [*(run.task for run in self._runs.values() if run.task is not None), *ends]

    # -- runs that nobody reads ------------------------------------------------------------------------------

    def _unread(self, response_id: str) -> None:
        """Nobody reads: an unstored run ends at once, a stored foreground one after its grace."""
        run = self._runs.get(response_id)
        if run is None or run.plan.background:
            return
        self._end_grace(response_id)
        if not run.plan.store:
            self.cancel(run, "unread")
            return
        self._graces[response_id] = asyncio.create_task(self._grace(run), name=f"grace of {response_id}")

    async def _grace(self, run: Run) -> None:
        """Cancel a run that nobody has read, at this process or at others, for as long as the grace is."""
        response_id, channel = run.plan.response_id, run.entry.channel
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s):
                    await channel.stalled.wait()
            if channel.stalled.is_set():  # who read it was told to come back: the grace begins once they can
                await channel.mended.wait()
                continue
            if self._storage.shared:
                try:
                    watched = await self._storage.watched(response_id)
                except StorageUnavailable:
                    continue  # others may well read what this process cannot
                if watched != run.watched:
                    run.watched, run.watched_at = watched, asyncio.get_running_loop().time()
                    continue
            if not self._feed.num_readers(response_id):
                self.cancel(run, "unread")
            return

    async def is_read(self, run: Run) -> bool:
        """Whether somebody reads a run, at this process or at others, or may do so there and have yet to tell
        of it again. Raises StorageUnavailable."""
        if self._feed.num_readers(run.plan.response_id):
            return True
        if not (self._storage.shared and run.plan.store):
            return False
        since = -math.inf if run.watched_at is None else run.watched_at
        if asyncio.get_running_loop().time() - since < self._grace_s / TELLS + LATE_S:
            return True
        return await self._storage.watched(run.plan.response_id) != run.watched

    def _end_grace(self, response_id: str) -> None:
        grace = self._graces.pop(response_id, None)
        if grace is not None:
            grace.cancel()

    # -- runs that may not be written ------------------------------------------------------------------------

    def _lost(self, entry: RunLog, why: Exception) -> None:
        run = self._runs.get(entry.response_id)
        if run is None or run.entry is not entry:
            return
        run.stepping = False
        if isinstance(why, RunLost):
            run.lost = True
            self._feed.lose(run.plan.response_id)
        else:
            run.refusal = why
        if run.task is not None:
            run.task.cancel()

    async def _end_refused(self, run: Run, why: Exception) -> None:
        """The log did not take what a run wrote: the run ends `failed` from where the log stands."""
        log.error("run %s could not be stored", run.plan.response_id, exc_info=why)
        plan, channel = run.plan, run.entry.channel
        if plan.store:
            run = await self._restorer.again(plan.owner, plan.response_id, run.entry.fence, ends=True)
        else:
            run.entry = self._journal.resume(channel, run.entry.fence, channel.next_seq or 0)
        run.entry.on_lost = lambda entry, why: entry.channel.stop()
        self._loop.fail(run, "The response could not be stored.", keep=False)
        await self._journal.flushed(run.entry)
