"""Starts, cancels and deletes the runs of this process, on behalf of the HTTP routes.

Runs come from new requests (`Intake` reads these), posted tool outputs (`ToolOutputs`), the queue, and
processes that have ended (`Takeover`). `Loop.advance` carries out every one of them, and `Views` shows them;
`Runs` starts the first ones, and ends any of them from outside: on a cancel or a delete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import orjson

from engine import EngineUnavailable, Place
from server.access import Actor, Principal, admitted
from server.clock import now_us
from server.errors import ApiError, to_api_error
from server.item_ids import identify
from server.items import Item, asks_approval, key_of
from server.limits import LiveRuns
from server.mcp_servers import Directory, Reach
from server.pooling import Moderator, require_moderator
from server.runs.cluster import Fleet, Follower, Presence, Queue
from server.runs.events import (
    POLL_AFTER_MS,
    Events,
    Feed,
    Journal,
    Reader,
    Snapshot,
    echo_members,
    join_response,
    snapshot,
    terminal_response,
)
from server.runs.execution import Loop, Probation, Restorer, Run, RunTasks, Seals, new_items, opening
from server.runs.intake import Intake
from server.runs.planning import (
    TERMINAL,
    Past,
    Pasts,
    Planned,
    RunPlan,
    SavedNames,
    kv_folders,
    make_plan,
    not_found,
    spent_so_far,
)
from server.runs.takeover import Takeover
from server.runs.tool_outputs import ToolOutputs, approval_entry
from server.runs.views import Views
from server.schema import MAX_TOOL_TIMEOUT_S
from server.schema import echo as response_echo
from server.telemetry import current, note_end_user
from server.threads import aside, in_large_request
from storage import (
    AuditEntry,
    ConversationLocked,
    ConversationMoved,
    ItemConflict,
    KeyedRequest,
    NewItem,
    NewResponse,
    NotFound,
    ResponseKnown,
    RunLost,
    StorageUnavailable,
    TooManyQueued,
)

if TYPE_CHECKING:
    from server.config import Config
    from server.encrypted_reasoning import Sealing
    from server.limits import Entrance, Limiter, Visit
    from server.model_registry import Models, ServedModel
    from server.quota import Quota
    from server.schema import CreateResponse
    from server.telemetry import Telemetry
    from server.usage import Meter
    from storage import Storage
    from tools import Registry

log = logging.getLogger("antiphon.runs")

T = TypeVar("T")


class Planning(Protocol):
    """Awaits what leads to a plan, and may give it up."""

    async def __call__(self, work: Coroutine[Any, Any, T], /) -> T:
        """What the work comes to."""
        ...


MAX_AHEAD = 8
"""How many requests may wait in the engine. While as many wait, background runs stay in the database, where
other processes can take them, too."""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that has begun. `reader` counts as watching it from the first event on; the caller closes it.

    failure: why it has failed in this process, as an HTTP error; None where it has not, or where nothing is
    known of it but what its last event says. past: once it has ended with a status, what a next turn stands
    on: for callers that keep what is not stored.
    """

    response_id: str
    response: Snapshot  # as it stood then
    reader: Reader
    failure: Callable[[], ApiError | None]
    past: Callable[[str], Past]
    over: Callable[[], Awaitable[None]]  # waits until it is, and what it has used is counted
    secret: bytes = b""  # of its plan

    async def finished(self) -> Events | None:
        """The last events of the run, as its reader has them. By then its limits say what it has used."""
        events = await self.reader.finished()
        if events is not None:
            await self.over()
        return events


@dataclass(frozen=True, slots=True)
class _Held:
    """What a run holds from before its start: its place in the engine's queue, where it needs one at once,
    and its places among the requests at once and the live runs."""

    place: Place | None
    visit: Visit
    entrance: Entrance


class Runs:
    """All runs of this process."""

    def __init__(
        self,
        storage: Storage,
        models: Models,
        sealing: Sealing,
        config: Config,
        telemetry: Telemetry,
        quota: Quota,
        registry: Registry,
        meter: Meter,
        limiter: Limiter,
        moderator: Moderator | None = None,
    ) -> None:
        self._storage = storage
        self._names: set[str] = set()  # ids that clients chose for what is being started
        self.moderator = moderator
        self._models = models
        self._sealing = sealing
        self._config = config
        self._quota = quota
        self._registry = registry
        self._limiter = limiter
        self._live = LiveRuns(storage, config.max_live_runs, telemetry.limited)
        self.feed = Feed(storage)
        self._pasts = Pasts(storage)
        self.saved = SavedNames(storage, models, kv_folders(config))
        self._journal = Journal(storage, telemetry.committed)
        self._loop = Loop(
            self._journal,
            Probation(storage),
            telemetry,
            registry,
            meter,
            limiter,
            config.max_generations,
            config.max_tool_output_bytes,
            moderator,
        )
        self._directory = Directory(config.mcp, config.egress_policy)
        self.intake = Intake(storage, models, sealing, config, quota, registry, limiter, self._directory)
        self._restorer = Restorer(
            storage, models, sealing, self._journal, self.feed, registry, self._directory
        )
        self._tasks = RunTasks(
            self._loop, self._journal, self._restorer, self.feed, storage, config.resume_grace_s
        )
        self.views = Views(storage, self._tasks, self.feed)
        self._takeover = Takeover(
            storage,
            models,
            self._restorer,
            self._loop,
            self._tasks,
            want=lambda: self._queue.want(),
            elsewhere=lambda: self._fleet.elsewhere,
        )
        self.tool_outputs = ToolOutputs(
            storage, models, config, quota, limiter, self._tasks, self.intake, self.views, self._takeover
        )
        self._queue = Queue(self._room, self._takeover.take)
        self._tasks.on_over = self._over
        self._follower = Follower(storage, self.feed, self._tasks, config.resume_grace_s)
        self._presence = Presence(config.data / "runners", storage.runner)
        self._fleet = Fleet(
            storage,
            config.lease_s,
            self._presence,
            serves=models.serves,
            at_work=lambda: bool(self._tasks.stored()),
            free=self._queue.want,
            due=self._takeover.end_due,
        )
        self._chores: list[asyncio.Task[None]] = []
        self._num_starting = 0  # not at work yet, but about to be
        self._draining = False  # what is queued is left to others, or to the next process

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the journal and go on with what an earlier process left."""
        self._journal.start()
        if self._storage.shared:
            self._presence.enter()
        else:
            await self._storage.free_all()
        longest_s = max(self._config.tool_timeout_s, MAX_TOOL_TIMEOUT_S)
        await self._storage.cap_deadlines(now_us(), int(longest_s * 1e6))
        await self._live.look()
        if not self._storage.shared and (left := sum((states := self._live.readings()).values())):
            waiting = f", of which {states['waiting']} wait for their clients" if states["waiting"] else ""
            log.info("an earlier process has left %d runs, which go on%s", left, waiting)
        self._queue.want()
        chores = {
            "live runs": self._live.run(),
            "queue": self._queue.run(),
            "follower": self._follower.run(),
            "beats": self._fleet.beat(),
            "watch": self._fleet.watch(),
            "saved names": self.saved.run(),
            "lost runs": self._takeover.watch(),
        }
        for name, chore in chores.items():
            task = asyncio.create_task(chore, name=name)
            task.add_done_callback(_report)
            self._chores.append(task)

    async def drain(self, grace_s: float, *, blameless: bool = True) -> None:
        """Let runs finish for `grace_s`, then cut what is left: the next process goes on with it.

        blameless: no run can have brought this process to its end.
        """
        self._draining = True
        if left := await self._tasks.drain(grace_s):
            kept = sum(bool(run.entry.fence) for run in left)
            log.info("%d runs go on at the next start, %d unstored ones are cut", kept, len(left) - kept)
        await self._directory.close()
        self._takeover.stop()
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self._journal.close()
        try:
            await self._storage.release(blameless=blameless)
        except StorageUnavailable as error:
            log.warning("unfinished runs could not be given back: %s", error)
        self._presence.leave()

    def model_loaded(self) -> None:
        """A model is there that was not: its runs can go on, and what it has kept on disk is compared with
        what there is."""
        self._queue.want()
        self.saved.stir()

    @property
    def num_active(self) -> int:
        """Runs that this process carries on now."""
        return len(self._tasks)

    def readings(self) -> dict[str, int]:
        """Runs that this process carries on now, and those of all processes by their state, for metrics."""
        return {"active": self.num_active, **self._live.readings()}

    def unstored(self) -> list[tuple[RunPlan, int]]:
        """Runs at work that the database knows nothing of: their plans, and their output tokens so far."""
        return [(run.plan, run.num_tokens) for run in self._tasks if not run.entry.fence]

    # -- starting --------------------------------------------------------------------------------------------

    async def create(
        self,
        principal: Principal,
        request: CreateResponse,
        input_items: Sequence[Item],
        keyed: KeyedRequest | None = None,
        planning: Planning | None = None,
        *,
        by: Actor | None = None,
        past: Past | None = None,
    ) -> Started:
        """Plan a request and start its run; the start transaction is durable when this returns.

        keyed: what makes the request the same as another one; it is recorded with the start. planning: awaits
        the plan and what is read for it, and may give it up, where nothing is to be kept of it without its
        client. by: whom the audit log names for the calls that the request approves; None is the principal.
        past: what its previous response leads to, where that is not stored and the caller has it. Raises
        ApiError (403 where the principal may not use the model or a tool), the engine's RequestErrors,
        QueueFull and EngineUnavailable, ConversationLocked, RequestKnown, StorageUnavailable.
        """
        served = self.intake.served(request)
        tools = self.intake.allowed(principal, served, request, input_items)
        request = admitted(service := principal.service, request)
        require_moderator(request.moderation, self.moderator)
        if served.engine.stats().unavailable:
            raise EngineUnavailable("The engine is away.")
        with tools.named():
            await self.intake.require_stores(principal.owner, tools.tools)
        person = note_end_user(principal.owner, request.safety_identifier or request.user)
        visit = await self._limiter.enter(principal.subjects, served.name, person)
        with self._naming(request.request_id) as name, ExitStack() as stack:
            stack.callback(visit.leave)
            if name is not None and await self._storage.response_is_known(name):
                raise ResponseKnown(name)
            entrance = self._live.enter(served.engine.admission.wait_s)
            stack.callback(entrance.leave)
            # Before anything is read or written for it: a refusal must cost next to nothing, and what was
            # begun must not be refused. A background response waits in the database where no place is free.
            place = None
            if not request.background:
                place = stack.enter_context(served.engine.admission.enter(principal.owner, service.weight))
            started = await self._create(
                principal,
                request,
                input_items,
                served,
                _Held(place, visit, entrance),
                keyed,
                planning,
                by or Actor(principal.key_id or principal.owner),
                past,
            )
            stack.pop_all()  # the run's task gives both back
            return started

    @contextmanager
    def _naming(self, request_id: str | None) -> Iterator[str | None]:
        """Held while a response is started whose client chose the id. ResponseKnown where this process makes
        one of the same, or starts one."""
        if request_id is None:
            yield None
            return
        id = f"resp_{request_id}"
        if id in self._names or self._tasks.get(id) is not None:
            raise ResponseKnown(id)
        self._names.add(id)
        try:
            yield id
        finally:
            self._names.discard(id)

    async def _create(
        self,
        principal: Principal,
        request: CreateResponse,
        input_items: Sequence[Item],
        served: ServedModel,
        held: _Held,
        keyed: KeyedRequest | None,
        planning: Planning | None,
        by: Actor,
        past: Past | None,
    ) -> Started:
        """Plan and begin; see `create`."""
        owner = principal.owner
        await_work = _patiently if planning is None or request.background else planning
        request, items = await await_work(
            self.intake.read(principal, request, input_items, served, keyed=keyed is not None)
        )
        sealed_by = await self._sealing.by(request.include, served.info.name)
        compacts = request.compacts or request.compact_threshold is not None
        compaction_key = (await self._sealing.key()).number if compacts else None
        while True:
            making = make_plan(
                self.intake.turn(request, items, principal, served, past),
                self._storage,
                self._registry,
                tool_timeout_s=self._config.tool_timeout_s,
                keyed=keyed is not None,
                sealed_by=sealed_by,
                compaction_key=compaction_key,
                pasts=self._pasts,
            )
            planned = await await_work(making)
            await self.intake.check_images(owner, items, served)
            if held.place is not None:
                held.visit.bring(held.place, len(planned.request.prompt_ids))
            await held.visit.reserve(len(planned.request.prompt_ids), planned.request.sampling.max_tokens)
            echo = await aside(in_large_request(), _echo, planned.asked, served, planned)
            try:
                queue_limit = self._limiter.least(
                    principal.subjects, "queued_responses", self._config.max_queued
                )
                sealed = await self._sealing.sealed_secrets(owner, planned.plan.response_id, planned.secrets)
                given_to = [planned.plan.tools[int(index)]["server_label"] for index in planned.secrets]
                plan = replace(planned.plan, secrets=sealed, secured=given_to, charge=held.visit.charge)
                planned = replace(planned, plan=plan)
                reach = self._directory.reach(planned.plan.tools, planned.secrets, owner)
                return await self._begin(planned, echo, held, keyed, queue_limit, reach, by)
            except ConversationMoved:
                continue
            except ConversationLocked as locked:
                if not await self._unlock(owner, locked.holder):
                    raise
            except ItemConflict as conflict:
                items = await identify(self._storage, owner, items, taken=conflict.item_id)
            except TooManyQueued as full:
                refusal = to_api_error(full)
                refusal.headers["retry-after"] = str(served.engine.admission.wait_s(full.limit))
                raise refusal from None
            except NotFound as unknown:
                raise not_found(request, unknown) from None

    async def _begin(
        self,
        planned: Planned,
        echo: bytes,
        held: _Held,
        keyed: KeyedRequest | None,
        queue_limit: int | None,
        reach: Reach,
        by: Actor,
    ) -> Started:
        plan = planned.plan
        seals = await Seals.of(plan, self._sealing)
        run = Run.of(plan, self._models.get(plan.model), planned.functions, planned.context, seals)
        run.input, run.place, run.reach = planned.input, held.place, reach
        run.told, run.past = planned.told, planned.past
        run.first = None if planned.compacts else planned.request
        planned.functions.teach(reach)
        if (record := current.get()) is not None:
            record.model, record.response_id = plan.model, plan.response_id
            record.end_user = plan.end_user
        head = run.head("queued" if plan.background else "in_progress")
        new = await self._new_response(planned, head, echo, keyed, queue_limit, by)
        queued = plan.background and (self._queue.busy or self._room() <= 0)
        if queued:
            new = replace(new, runner=None)
        channel = self.feed.open(plan.response_id, echo, stored=plan.store)
        self._num_starting += 1
        try:
            if not (plan.store or plan.conversation_id):  # no transaction tells of this start
                for entry in new.audit:
                    await self._storage.add_audit(entry)
            run.entry = await self._journal.begin(new, opening(head, background=plan.background), channel)
        except BaseException:
            self.feed.release(plan.response_id)
            raise
        finally:
            self._num_starting -= 1
        held.entrance.begun(in_database=bool(run.entry.fence))
        held.visit.hand_over()
        if plan.background:
            held.visit.leave()
        run.visit = held.visit
        response = Snapshot(join_response(orjson.dumps(head), [], echo), POLL_AFTER_MS[new.status])
        reader = self.feed.join(plan.response_id)
        behind = partial(_behind, run)
        over = partial(self._tasks.settled, run)
        started = Started(
            plan.response_id, response, reader, lambda: run.failure, behind, over, plan.id_secret
        )
        if queued:
            return await self._queued(plan, started)
        if plan.background:
            self._loop.started(run)
        self._tasks.spawn(run)
        return started

    async def _new_response(
        self,
        planned: Planned,
        head: Mapping[str, Any],
        echo: bytes,
        keyed: KeyedRequest | None,
        queue_limit: int | None,
        by: Actor,
    ) -> NewResponse:
        """The rows that a run begins with, for a run that this process carries on."""
        dumped, input_items = await aside(in_large_request(), _as_stored, planned)
        plan = planned.plan
        return NewResponse(
            id=plan.response_id,
            named=plan.own_id,
            owner=plan.owner,
            created_at=plan.created_at,
            status=head["status"],
            model=plan.model,
            background=plan.background,
            store=plan.store,
            head=orjson.dumps(head),
            echo=echo,
            plan=dumped,
            previous_response_id=plan.previous_response_id,
            conversation_id=plan.conversation_id,
            input_items=input_items,
            record=None,
            runner=self._storage.runner,
            conversation_head=planned.conversation_head,
            request=keyed,
            hidden=plan.hidden,
            audit=_approvals(planned, by),
            metadata=planned.asked.metadata,
            priority=plan.priority,
            queue_limit=queue_limit,
            conversation_limit=self._config.max_items_per_conversation,
            cost=self._likely_cost(planned),
        )

    async def _queued(self, plan: RunPlan, started: Started) -> Started:
        """What is told of a run that is carried on once there is room for it: its place in the queue."""
        self.feed.release(plan.response_id)
        self._queue.want()
        with suppress(StorageUnavailable, NotFound):  # it has begun, and that is told in any case
            stored = await self._storage.get_response(plan.owner, plan.response_id)
            turn = None if stored.run is None else stored.run.place
            return replace(started, response=replace(started.response, queue_position=turn))
        return started

    def _over(self, run: Run) -> None:
        """A run has no task any more. Where it has ended or parked, what it has used is counted against its
        limits in place of what was reserved for it; otherwise whoever goes on with it does that."""
        self._queue.has_room()
        if not run.entry.fence or (run.ended and not run.lost):
            self._live.ended(in_database=bool(run.entry.fence))
        left_to_others = run.lost and not run.purged
        if (run.stepping or left_to_others) and run.plan.store:
            return
        if run.progress.output_tokens:
            self._limiter.note_answer(run.plan.owner, run.progress.output_tokens)
        if (charge := run.plan.charge) is None:
            return
        used = run.progress.num_limited
        self._limiter.settle(charge, used - (charge.tokens if run.counted is None else run.counted))
        run.counted = used

    def _likely_cost(self, planned: Planned) -> int:
        """The tokens of a run's first prompt and of an answer as long as its owner's mostly are."""
        request = planned.request
        guess = self._limiter.guess(planned.plan.owner)
        return len(request.prompt_ids) + min(request.sampling.max_tokens, guess)

    def _room(self) -> int:
        """How many more runs this process can carry on."""
        all_engines = {id(served.engine): served.engine.stats() for served in self._models}.values()
        engines = [stats for stats in all_engines if not stats.unavailable]
        if self._draining or not engines or any(stats.waiting > MAX_AHEAD for stats in engines):
            return 0
        at_work = sum(stats.running + stats.waiting for stats in engines)
        return self._config.max_num_seqs - max(at_work, len(self._tasks) + self._num_starting)

    async def _unlock(self, owner: str, holder: str) -> bool:
        """Make way for a turn: cancel a foreground run that nobody reads. True when it is gone."""
        run = self._tasks.get(holder) or await self._takeover.orphan(owner, holder)
        if run is None or run.plan.owner != owner or run.plan.background or await self._tasks.is_read(run):
            return False
        self._tasks.cancel(run, "next_turn")
        try:
            await self._tasks.over(run)
        except ApiError:  # it names that run, and of this turn nothing was done
            raise run.entry.channel.stall_error(begun=False) from None
        return True

    # -- cancelling and deleting -----------------------------------------------------------------------------

    async def cancel(self, owner: str, response_id: str) -> Snapshot:
        """Cancel a run in flight, wherever it stands; its output and usage so far stay. Returns the Response.

        Raises NotFound, and ApiError 400 for a foreground response that has ended already.
        """
        run = self._tasks.get(response_id)
        if run is not None and run.plan.owner == owner and (run.plan.hidden or not run.plan.store):
            self._tasks.cancel(run)
            await self._tasks.over(run)
            if run.entry.channel.ended and (last := run.entry.channel.last) is not None:
                return Snapshot(terminal_response(last.bodies[-1]))
        stored = await self._storage.get_response(owner, response_id)
        if stored.status in TERMINAL:
            if not stored.background:
                message = f"Cannot cancel a response that has ended (status {stored.status})."
                raise ApiError(400, message, code="response_not_cancellable")
            return snapshot(stored)
        await self._cancel(owner, response_id)
        return await self.views.get(owner, response_id)

    async def cancel_any(self, response_id: str, by: Actor, *, owner: str | None = None) -> None:
        """Cancel a run in flight of any owner, for administrators, and wait for its end. owner: whose it has
        to be; None: anybody's. NotFound("run"), RunEnded."""
        run = self._tasks.get(response_id)
        if run is not None and not run.entry.fence:  # the database knows nothing of it
            if owner not in (None, run.plan.owner):
                raise NotFound("run", response_id)
            await self._storage.add_audit(by.did("run.cancelled", response_id, run.plan.owner))
            self._tasks.cancel(run)
            await self._tasks.over(run)
            return
        whose = await self._storage.run_owner(response_id)
        if owner not in (None, whose):
            raise NotFound("run", response_id)
        await self._storage.cancel_run(response_id, entry=by.did("run.cancelled", response_id, whose))
        await self._ended(whose, response_id, hidden=True)

    def cancel_unstored(self, owner: str) -> None:
        """Have an owner's runs end of which the database knows nothing."""
        for run in tuple(self._tasks):
            if run.plan.owner == owner and not run.entry.fence:
                self._tasks.cancel(run)

    async def _cancel(self, owner: str, response_id: str) -> None:
        """Cancel a stored run in flight, whoever carries it on, and wait for its end."""
        await self._storage.request_cancel(owner, response_id)
        await self._ended(owner, response_id)

    async def _ended(self, owner: str, response_id: str, *, hidden: bool = False) -> None:
        """Have a stored run that is marked as to be cancelled end, and wait for that."""
        if (run := await self._takeover.find(response_id)) is not None:
            self._tasks.cancel(run)
            await self._tasks.over(run)
        # Where it is queued, or waits for tool outputs, nobody carries it on.
        await self._takeover.claim(response_id)
        if self._storage.shared or self._tasks.has(response_id):
            reader, stored = await self.views.follow(owner, response_id, hidden=hidden)
            try:
                if stored.status not in TERMINAL:  # its end has yet to be noticed elsewhere, or stored
                    await reader.finished()
            finally:
                reader.close()

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. One in flight is cancelled first, so that its readers see it end. Raises
        NotFound."""
        stored = await self._storage.get_response(owner, response_id)
        if stored.status not in TERMINAL:
            await self._cancel(owner, response_id)
        await self._storage.delete_response(owner, response_id, now_us(), spending=spent_so_far)
        self.gone([response_id])

    async def delete_conversation(self, owner: str, id: str) -> None:
        """Delete a conversation. A run at work in it goes on; one that waits for tool outputs is cancelled.
        Raises NotFound."""
        waits = await self._storage.delete_conversation(owner, id, now_us())
        self.changed(id)
        if waits is not None:
            await self._ended(owner, waits, hidden=True)

    def gone(self, response_ids: Sequence[str]) -> None:
        """Stop carrying on, and showing, responses that are in the database no more."""
        for response_id in response_ids:
            run = self._tasks.get(response_id)
            if run is not None:
                run.purged = True
                run.entry.lose(RunLost(response_id))
            self.feed.remove(response_id)
        self._pasts.forget(response_ids)
        self.saved.forget(response_ids)

    def changed(self, conversation_id: str) -> None:
        """Let go of what is remembered of a conversation that was deleted, or that items were taken out
        of."""
        self._pasts.forget([conversation_id])
        self.saved.stir()

    async def forget_gone(self) -> None:
        """Let go of what is remembered in memory, and have that go that is on disk, of responses and
        conversations that are in the database no more, whoever has deleted them: retention, or another
        server. Raises StorageUnavailable."""
        self.saved.stir()  # nobody waits for it: a disk that hangs holds up no sweep
        await self._pasts.forget_gone()


async def _patiently(work: Coroutine[Any, Any, T], /) -> T:
    return await work


def _behind(run: Run, status: str) -> Past:
    """What stands before the turn that goes on from a run which has ended with this status."""
    return (run.past or Past()).and_turn((*run.input, *run.assembler.output), status)


def _report(chore: asyncio.Task[None]) -> None:
    if not chore.cancelled() and (error := chore.exception()) is not None:
        log.critical("%s has stopped", chore.get_name(), exc_info=error)


def _echo(request: CreateResponse, served: ServedModel, planned: Planned) -> bytes:
    drawn = planned.request.sampling
    return echo_members(
        response_echo(request, model=served.name, temperature=drawn.temperature, top_p=drawn.top_p)
    )


def _as_stored(planned: Planned) -> tuple[bytes, tuple[NewItem, ...]]:
    """A plan and its new items as storage takes them."""
    return planned.plan.dump(), new_items(planned.input)


def _approvals(planned: Planned, by: Actor) -> tuple[AuditEntry, ...]:
    """What the audit log is to tell of the calls that a request approves."""
    plan, wanted = planned.plan, set(planned.plan.approved)
    if not wanted:  # mostly; and the context is all of the history
        return ()
    asked = (item for item in planned.context if asks_approval(item) and key_of(item) in wanted)
    return tuple(approval_entry(item, plan, by) for item in asked)


def require_servers(output: Sequence[Item]) -> None:
    """ApiError 424 where a response has failed because another server could not be asked for its tools."""
    if output and output[-1]["type"] == "mcp_list_tools" and (why := output[-1].get("error")):
        raise ApiError(
            424,
            why,
            code="external_connector_error",
            type="external_connector_error",
            headers={"x-should-retry": "false"},
        )
