"""Takes up runs that nobody carries on: queued ones, those of processes that have ended, and those whose
clients have answered, or have not in time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from engine import EngineUnavailable
from server.clock import now_us
from server.items import asks_approval, is_output, key_of, load_item
from server.runs.events import RETRY_S
from server.runs.execution import MAX_STRIKES, Loop, NewerPlan, Restorer, Run, RunTasks
from server.runs.planning import pending_calls
from storage import NotFound, OfModels, RunClaim, RunLost, StorageUnavailable

if TYPE_CHECKING:
    from server.items import Item
    from server.model_registry import Models
    from storage import Storage, StoredItem

log = logging.getLogger("antiphon.runs")

TAKE_UP_AT_ONCE = 8
LOOKED_AT_ONCE = 2
"""Runs whose records are read side by side."""

AGAIN_S = 1.0
"""After this the queue is looked at again where the model of a run was away."""

LOST_S = 30.0
"""How often runs are looked for that are this process's and that nothing here carries on: of a start that was
given up while it was written, say."""

UNREAD_S = 30.0
"""For how long a process leaves a run to others that it could not restore."""

UNSERVED_S = 600.0
"""For how long no process of a database serves the model of a run, or is of the version that it needs, before
the run is ended."""

MOST_ASIDE = 1000
"""Runs that a process leaves to others at once: their ids are parts of a statement."""


UNREADABLE: dict[str, Any] = {
    "code": "server_error",
    "message": "This server cannot read what it has stored of this response, so it cannot go on.",
}


class Takeover:
    """Claims runs of the database for this process. want: has the queue looked at. elsewhere: the models that
    other processes of the database serve."""

    def __init__(
        self,
        storage: Storage,
        models: Models,
        restorer: Restorer,
        loop: Loop,
        tasks: RunTasks,
        *,
        want: Callable[[], None],
        elsewhere: Callable[[], Collection[str]],
    ) -> None:
        self._storage = storage
        self._models = models
        self._restorer = restorer
        self._loop = loop
        self._tasks = tasks
        self._want = want
        self._elsewhere = elsewhere
        # Held from the claim of a run until it is among the tasks, so whoever looks for it in between has to
        # wait.
        self._claiming = asyncio.Lock()
        self._unserved: dict[str, float] = {}  # models of runs that no process serves, and since when
        self._aside: dict[str, float] = {}  # runs that could not be restored here, and until when others may
        self._looking = asyncio.Semaphore(LOOKED_AT_ONCE)  # at runs whole, and nothing comes of it
        self._due: Sequence[str] = ()  # runs that were out of time at the last look
        self._without = set[str]()  # runs of this process that nothing here carried on, at the last look
        self._stopped = False

    def stop(self) -> None:
        """No run is claimed any more, whatever becomes runnable."""
        self._stopped = True

    async def find(self, response_id: str) -> Run | None:
        """A run that is at work here, once no run is about to be."""
        async with self._claiming:
            return self._tasks.get(response_id)

    async def claim(self, response_id: str) -> None:
        """Take up a run that nobody carries on, if it is one."""
        async with self._claiming:
            models = self._of_models()
            claim = None if self._stopped else await self._storage.claim(response_id, models)
            if claim is not None:
                await self._take_up([claim])
            elif models is not None:  # its model may have to be loaded
                self._want()

    async def _take_up(self, claims: Sequence[RunClaim]) -> None:
        """Set claimed runs to work, or have them end where that is what is left."""
        at_once = asyncio.Semaphore(TAKE_UP_AT_ONCE)

        async def one(claim: RunClaim) -> None:
            async with at_once:
                await self._restore(claim)

        await asyncio.gather(*map(one, claims))

    async def _restore(self, claim: RunClaim) -> None:
        """Have a claimed run at work again, or its end written; nothing where `_read` has none."""
        if (found := await self._read(claim)) is None:
            return
        run, inputs = found
        # What its limits have counted already: all that it had used when it parked the last time.
        answers = [index for index, item in enumerate(run.assembler.output) if is_output(item)]
        if claim.state == "waiting" or inputs:
            run.counted = run.progress.num_limited
        elif run.plan.waits and answers:
            run.counted = run.progress.limited_before(answers[-1])
        if claim.cancel_requested:
            self._loop.cancel(run)
        elif (why := _cannot_go_on(claim, run)) is not None:
            log.warning("run %s failed: %s", run.plan.response_id, why)
            self._loop.fail(run, why)
        elif run.gone is not None:
            log.warning("run %s failed: %s", run.plan.response_id, run.gone.message)
            self._loop.fail(run, run.gone.message, code="invalid_prompt", why=run.gone)
        else:
            if run.queued:
                self._loop.started(run)
            elif run.claim is not None:
                self._loop.resumed(run)
            self._loop.received(run, [load_item(item.body, item.private) for item in inputs])
        self._tasks.spawn(run)

    async def require_room(self, owner: str, response_id: str, outputs: Sequence[Item], reserve: int) -> None:
        """Raises PromptTooLong where a waiting run could not go on with these outputs of its calls and
        `reserve` tokens more, NotFound for one that is gone. Nothing is said of a run that this process
        cannot carry on at present."""
        async with self._looking:
            try:
                run = await self._restorer.look(owner, response_id)
                if run.gone is None and run.served.info.fingerprint == run.plan.fingerprint:
                    await self._loop.require_room(run, outputs, reserve)
            except (NewerPlan, EngineUnavailable):
                return

    async def _read(self, claim: RunClaim) -> tuple[Run, Sequence[StoredItem]] | None:
        """A claimed run, and the outputs that were posted to it.

        None for one that was deleted meanwhile, or that cannot be read: it is left to others for a while, or
        has ended.
        """
        ends = claim.cancel_requested or claim.state == "waiting"  # then no engine is asked for anything
        while True:
            try:
                run = await self._restorer.run(claim, ends=ends)
                inputs = await self._storage.waiting_inputs(claim.response_id)
                self._aside.pop(claim.response_id, None)
                return run, inputs
            except StorageUnavailable as error:
                log.warning("run %s waits: %s", claim.response_id, error)
                await asyncio.sleep(RETRY_S)
            except EngineUnavailable as error:  # others, whose models are there, are not to wait for it
                log.warning("run %s is given back, and waits: %s", claim.response_id, error)
                with suppress(StorageUnavailable):  # `find_lost` does it later
                    await self._storage.give_back([claim.response_id], blameless=True)
                asyncio.get_running_loop().call_later(AGAIN_S, self._want)
                return None
            except NotFound:
                return None
            except NewerPlan as what:
                if self._storage.shared and not self._is_left_behind(claim.response_id):
                    log.warning("run %s is left to a newer version: %s", claim.response_id, what)
                    await self._set_aside(claim, UNSERVED_S)
                    return None
                ends = True
            except Exception:  # it must not keep the others, or the server, down
                log.exception("run %s cannot be taken up", claim.response_id)
                await self._not_restored(claim, ends=ends)
                return None

    async def _not_restored(self, claim: RunClaim, *, ends: bool) -> None:
        """Count an attempt at a run, and leave it to others for a while. After the last one it ends, and so
        it does where that is all that was to be done."""
        try:
            if ends or claim.strikes >= MAX_STRIKES:
                await self._tasks.end_unread(claim, None if claim.cancel_requested else UNREADABLE)
                return
            await self._storage.admit(claim)
        except (NotFound, RunLost):
            return
        except Exception:
            log.exception("run %s can be neither taken up nor ended", claim.response_id)
        await self._set_aside(claim, UNREAD_S)

    def _is_left_behind(self, response_id: str) -> bool:
        """Whether a run was set aside, and nobody has taken it up in that time."""
        return self._aside.get(response_id, math.inf) <= asyncio.get_running_loop().time()

    async def _set_aside(self, claim: RunClaim, seconds: float) -> None:
        """Give a run back, and leave it to others for so long from the first time on."""
        clock = asyncio.get_running_loop().time()
        until = self._aside.get(claim.response_id, clock)
        self._aside[claim.response_id] = until if until > clock else clock + seconds
        with suppress(StorageUnavailable):  # `find_lost` does it later
            await self._storage.give_back([claim.response_id], blameless=False)

    def _left_out(self) -> tuple[str, ...]:
        """What others may take up for now. Of what others did, nothing is remembered for long."""
        clock = asyncio.get_running_loop().time()
        self._aside = {id: until for id, until in self._aside.items() if until > clock - UNREAD_S}
        return tuple(id for id, until in self._aside.items() if until > clock)[-MOST_ASIDE:]

    async def take(self, limit: int) -> int:
        """Take up the next runs of the queue; returns how many they were. Models that runs wait for are
        loaded meanwhile."""
        async with self._claiming:
            claims = await self._storage.take(limit, await self._goes_on_with())
            await self._take_up(claims)
        return len(claims)

    async def _goes_on_with(self) -> OfModels | None:
        """The same as `_of_models`, once what runs wait for has been looked at: their models are loaded."""
        now, later = self._models.claimable
        if not self._storage.shared and not later:
            return self._of_models()
        free = await self._storage.free_models()
        for name in later:
            if name in free:
                self._models.want(name)
        unserved = set(free) - {*now, *later} - set(self._elsewhere())
        clock = asyncio.get_running_loop().time()
        self._unserved = {name: self._unserved.get(name, clock) for name in unserved}
        return self._of_models()

    def _of_models(self) -> OfModels | None:
        """The runs that this process can go on with now, by their models; None: whatever there is.

        Alone on its database it also ends those of models that it does not serve at all. Where others are,
        these are theirs, until for `UNSERVED_S` nobody has served them.
        """
        now, later = self._models.claimable
        but = self._left_out()
        if not self._storage.shared:
            return OfModels(tuple(later), others=True, but=but) if later or but else None
        clock = asyncio.get_running_loop().time()
        left = [name for name, since in self._unserved.items() if clock - since >= UNSERVED_S]
        return OfModels((*now, *left), but=but)

    async def watch(self) -> None:
        """Give back what is lost, for as long as the process lives."""
        while True:
            await asyncio.sleep(LOST_S)
            try:
                await self.find_lost()
            except StorageUnavailable:
                continue
            except Exception:  # the next look tries again
                log.exception("runs that nothing carries on could not be looked for")

    async def find_lost(self) -> None:
        """Give back the runs that the database says are this process's and that had nothing here that carries
        them on, now and at the look before: whoever looks at the queue next goes on with them."""
        async with self._claiming:
            mine = [
                id
                for id, glance in (await self._storage.run_status([])).items()
                if glance.runner == self._storage.runner
            ]
            without = {id for id in mine if not self._tasks.has(id)}
            lost = without & self._without
            self._without = without - lost
            if lost:
                log.warning("runs that nothing carried on are given back: %s", ", ".join(sorted(lost)))
                await self._storage.give_back(sorted(lost), blameless=False)
                self._want()

    async def end_due(self) -> None:
        """End some waiting runs whose deadline has passed, or that were cancelled; the next ones once these
        have ended, so that no more of them are in memory where ends cannot be stored."""
        async with self._claiming:
            if not any(map(self._tasks.has, self._due)):
                claims = await self._storage.claim_due(now_us())
                self._due = [claim.response_id for claim in claims]
                await self._take_up(claims)

    async def orphan(self, owner: str, response_id: str) -> Run | None:
        """A foreground run that a process left and nobody has taken up yet, taken up."""
        try:
            stored = await self._storage.get_response(owner, response_id)
        except NotFound:
            return None
        left = stored.run is not None and stored.run.state == "running" and stored.run.runner is None
        if left and not stored.background:
            await self.claim(response_id)
        return await self.find(response_id)


def _cannot_go_on(claim: RunClaim, run: Run) -> str | None:
    """Why a claimed run has to end, as a sentence for its client; None where it can go on."""
    if claim.state == "waiting":
        return f"{_not_answered(run)} came within {run.plan.tool_timeout_s:g} s."
    if claim.strikes >= MAX_STRIKES:
        return f"This response stopped the engine {claim.strikes} times; it is not tried again."
    if run.plan.newer:
        return "A newer version of the server began this response; this one cannot go on."
    if run.served.info.fingerprint != run.plan.fingerprint:
        return f"The model '{run.plan.model}' has changed since this response began."
    return None


def _not_answered(run: Run) -> str:
    """What a client did not send to a run that has waited for it, as the subject of a sentence."""
    waiting = pending_calls(run.assembler.output)
    asking = {key_of(item) for item in run.assembler.output if asks_approval(item)}
    approvals = [f"{name} ({key})" for key, name in waiting.items() if key in asking]
    if not approvals:
        return "No tool outputs"
    answers = f"answer to the request for approval of {', '.join(approvals)}"
    return f"No {answers}" if len(approvals) == len(waiting) else f"No tool outputs and no {answers}"
