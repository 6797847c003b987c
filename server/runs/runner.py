"""Starts, reads, continues, cancels and deletes the runs of this process, on behalf of the HTTP routes.

Runs come from new requests, posted tool outputs, the queue, and processes that have ended. `Loop.advance`
carries out every one of them; `Runs` decides when, and ends runs from outside: on a cancel, a delete, or a
passed deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from engine import EngineUnavailable, Place
from server.access import Actor, Principal, admitted, require_use
from server.clock import now_us
from server.containers import cell_limits, unkept_memory
from server.errors import ApiError, to_api_error
from server.ignored import ignore
from server.input_files import InputFiles, InputImages, SeenImages
from server.item_ids import identify, may_be_known
from server.items import (
    SEEN,
    Item,
    answering,
    answers_of,
    approves,
    asks_approval,
    dump_private,
    input_files_of,
    is_client_call,
    is_output,
    key_of,
    lacks,
    link_of,
    load_item,
    path_of_image,
    private_bytes,
    stores_of,
    unseen_images_of,
    with_private,
)
from server.limits import LiveRuns
from server.mcp_servers import Directory, Reach
from server.pooling import Moderator, require_moderator
from server.runs.cluster import Fleet, Follower, Presence, Queue
from server.runs.events import (
    POLL_AFTER_MS,
    RETRY_S,
    Feed,
    Journal,
    Reader,
    Snapshot,
    echo_members,
    join_response,
    snapshot,
    terminal_response,
)
from server.runs.execution import (
    MAX_STRIKES,
    Loop,
    Probation,
    Restorer,
    Run,
    RunTasks,
    Seals,
    as_it_stands,
    at_its_end,
    new_items,
    opening,
    output_id,
)
from server.runs.planning import (
    TERMINAL,
    Past,
    Pasts,
    Planned,
    RunPlan,
    SavedNames,
    Turn,
    TurnTools,
    count_input,
    make_plan,
    not_found,
    pending_calls,
    require_readable,
    spent_so_far,
    turn_tools,
)
from server.schema import LEAD, check_sizes
from server.schema import echo as response_echo
from server.telemetry import current, note_end_user
from server.threads import aside, in_large_request
from server.vector_stores import usable_stores
from storage import (
    AuditEntry,
    ConversationLocked,
    ConversationMoved,
    ItemConflict,
    KeyedRequest,
    NewItem,
    NewResponse,
    NotFound,
    OfModels,
    OutputConflict,
    Page,
    ResponseKnown,
    RunClaim,
    RunLost,
    StorageUnavailable,
    StoredResponse,
    ToolOutput,
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

Planning = Callable[[Coroutine[Any, Any, Planned]], Awaitable[Planned]]

LAST_COMMIT_S = 1.0
"""How long a process whose engine or database has died waits for its last commit."""

TAKE_UP_AT_ONCE = 8
"""Runs whose records are read side by side."""

UNSERVED_S = 600.0
"""For how long no process of a database serves the model of a run, before the run is ended."""

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
    secret: bytes = b""  # of its plan


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
        self.saved = SavedNames(storage, models)
        self._journal = Journal(storage, telemetry.committed)
        self._loop = Loop(
            self._journal,
            Probation(storage),
            telemetry,
            registry,
            meter,
            limiter,
            config.max_tool_output_bytes,
            moderator,
        )
        self._directory = Directory(config.mcp, config.egress_policy)
        self.input_files = InputFiles(storage, config.egress_policy)
        self._input_images = InputImages(storage, config.egress_policy)
        self._seen_images = SeenImages(storage, config)
        self._restorer = Restorer(
            storage, models, sealing, self._journal, self.feed, registry, self._directory
        )
        self._tasks = RunTasks(
            self._loop, self._journal, self._restorer, self.feed, storage, config.resume_grace_s
        )
        self._queue = Queue(storage, self._room, self._take)
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
            due=self._end_due,
        )
        self._chores: list[asyncio.Task[None]] = []
        # Held from the claim of a run until the run is at work or has ended. In between, the run is claimed
        # but not yet among the tasks, so whoever looks for it has to wait.
        self._claiming = asyncio.Lock()
        self._unserved: dict[str, float] = {}  # models of runs that no process serves, and since when
        self._num_starting = 0  # not at work yet, but about to be
        self._draining = False  # what is queued is left to others, or to the next process
        self._stopped = False  # no run is claimed any more, whatever becomes runnable

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the journal and go on with what an earlier process left."""
        self._journal.start()
        if self._storage.shared:
            self._presence.enter()
        else:
            await self._storage.free_all()
        await self._live.look()
        self._queue.want()
        chores = {
            "live runs": self._live.run(),
            "queue": self._queue.run(),
            "follower": self._follower.run(),
            "beats": self._fleet.beat(),
            "watch": self._fleet.watch(),
            "saved names": self.saved.run(),
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
        self._stopped = True
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self._journal.close(patience_s=None if blameless else LAST_COMMIT_S)
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
        the plan, and may give it up, where nothing is to be kept of it without its client. by: whom the audit
        log names for the calls that the request approves; None is the principal. past: what its previous
        response leads to, where that is not stored and the caller has it. Raises ApiError
        (403 where the principal may not use the model or a tool), the engine's RequestErrors, QueueFull and
        EngineUnavailable, ConversationLocked, RequestKnown, StorageUnavailable.
        """
        served = self._served(request)
        tools = self._allowed(principal, served, request, input_items)
        request = admitted(service := principal.service, request)
        require_moderator(request.moderation, self.moderator)
        if served.engine.stats().unavailable:
            raise EngineUnavailable("The engine is away.")
        with tools.named():
            await self._require_stores(principal.owner, tools.tools)
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
        large = in_large_request()
        num_bytes = await aside(large, _num_bytes, request, input_items, self._config)
        if request.store or keyed is not None or request.conversation_id is not None:
            await self._quota.require(owner, num_bytes, self._limiter.stored_bytes(principal.subjects))
        # Items of an unstored turn are stored at its end, when it is too late to find that an id is taken.
        late = request.conversation_id is not None and not request.store and keyed is None
        items = await self._sealing.opened(owner, input_items, model=served.info.name)
        if late or any(map(may_be_known, items)):
            items = await identify(self._storage, owner, items)
        items = await self.read_inputs(owner, items, served)
        told = await aside(in_large_request(), private_bytes, items, SEEN)
        if told and (request.store or keyed is not None or late):
            await self._quota.require(owner, told, self._limiter.stored_bytes(principal.subjects))
        request = await self._lead_read(principal, request, served)
        sealed_by = await self._sealing.by(request.include, served.info.name)
        compacts = request.compacts or request.compact_threshold is not None
        compaction_key = (await self._sealing.key()).number if compacts else None
        while True:
            making = make_plan(
                self._turn(request, items, principal, served, past),
                self._storage,
                self._registry,
                tool_timeout_s=self._config.tool_timeout_s,
                keyed=keyed is not None,
                sealed_by=sealed_by,
                compaction_key=compaction_key,
                pasts=self._pasts,
            )
            planned = await (making if planning is None or request.background else planning(making))
            if not served.sees:
                await self._input_images.check(owner, items)
            if held.place is not None:
                held.visit.bring(held.place, len(planned.request.prompt_ids))
            await held.visit.reserve(len(planned.request.prompt_ids), planned.request.sampling.max_tokens)
            echo = await aside(large, _echo, planned.asked, served, planned)
            try:
                queue_limit = self._limiter.least(
                    principal.subjects, "queued_responses", self._config.max_queued
                )
                sealed = await self._sealing.sealed_secrets(owner, planned.plan.response_id, planned.secrets)
                plan = replace(planned.plan, secrets=sealed, charge=held.visit.charge)
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

    async def read_inputs(
        self,
        owner: str,
        items: Sequence[Item],
        served: ServedModel | None,
        *,
        param: str = "input",
        files: Sequence[str] | None = None,
        images: Sequence[str] | None = None,
    ) -> list[Item]:
        """Normalised items with the texts of their files, and, where the model sees, the pixels of their
        images. served: None where it is not known which model is to read them. files, images: the paths of
        these, in their order, where they are not those of items in `param`. Raises ApiError: see
        `InputFiles.read` and `SeenImages.read`."""
        items = await self.input_files.read(owner, items, param=param, paths=files)
        return await self.read_images(owner, items, served, param=param, paths=images)

    async def read_images(
        self,
        owner: str,
        items: Sequence[Item],
        served: ServedModel | None,
        *,
        param: str = "input",
        paths: Sequence[str] | None = None,
    ) -> list[Item]:
        """The same of images alone."""
        sees = any(model.sees for model in self._models) if served is None else served.sees
        if not sees:
            return list(items)
        return await self._seen_images.read(owner, items, param=param, paths=paths)

    async def _lead_read(
        self, principal: Principal, request: CreateResponse, served: ServedModel
    ) -> CreateResponse:
        """A request with the files among the messages of its prompt template read. Raises ApiError, also for
        what the model cannot read."""
        prompt = request.prompt
        if prompt is None or not prompt.items:
            return request
        with prompt.named():
            require_readable(prompt.items, served, LEAD)
            items = await self.read_inputs(principal.owner, prompt.items, served, param=LEAD)
            if told := private_bytes(items, SEEN):
                await self._quota.require(
                    principal.owner, told, self._limiter.stored_bytes(principal.subjects)
                )
        return request.model_copy(update={"prompt": replace(prompt, items=tuple(items))})

    def _served(self, request: CreateResponse) -> ServedModel:
        """The model that answers a request, which has started. Raises ApiError."""
        served = self._models.get(request.model)
        return served if request.asked_model is None else replace(served, asked=request.asked_model)

    def _turn(
        self,
        request: CreateResponse,
        items: Sequence[Item],
        principal: Principal,
        served: ServedModel,
        past: Past | None = None,
    ) -> Turn:
        approvals = partial(self._directory.approvals, owner=principal.owner)
        return Turn(request, items, principal, served, now_us(), approvals, past)

    def _allowed(
        self,
        principal: Principal,
        served: ServedModel,
        request: CreateResponse,
        input_items: Sequence[Item],
    ) -> TurnTools:
        """The tools that a request itself gives. Raises ApiError: 403 where the principal may not use them,
        or the model; 400 for MCP servers that cannot be reached."""
        tools = turn_tools(request, input_items, len(input_items))
        require_use(principal, served.allowed_as, tools.tools)
        with tools.named():
            self._directory.require(tools.tools, tools.secrets, principal.owner)
        return tools

    async def _require_stores(self, owner: str, tools: Sequence[Item]) -> None:
        """Raise ApiError 404 where a tool is to search a vector store that the owner does not have, 400 where
        it has expired."""
        for index, tool in enumerate(tools):
            for place, id in enumerate(stores_of(tool)):
                try:
                    await usable_stores(self._storage, owner, [id])
                except (NotFound, ApiError) as unusable:
                    error = to_api_error(unusable)
                    error.param = f"tools[{index}].vector_store_ids[{place}]"
                    raise error from None

    def lacking(self, tools: Sequence[Item]) -> dict[int, str]:
        """The tools of a request that this server cannot run though it knows how: index -> why."""
        found = {index: lacks(tool, self._registry) for index, tool in enumerate(tools)}
        return {index: why for index, why in found.items() if why is not None}

    def name_unkept_memory(self, tools: Sequence[Item], paths: Sequence[str]) -> None:
        """Name among what is ignored of a request the memory that its containers cannot have."""
        limits = cell_limits(self._config)
        for tool, path in zip(tools, paths, strict=True):
            if (end := unkept_memory(tool, limits)) is not None:
                ignore(f"{path}.{end}")

    def servers_of(self, owner: str) -> list[dict[str, str]]:
        """The MCP servers that an owner's requests reach by name, as their tools would write them."""
        return self._directory.named(owner)

    def asking(self, tools: Sequence[Item]) -> dict[int, str]:
        """The tools of a request whose calls its client may have to approve: index -> why, as sentences."""
        return self._directory.asking(tools)

    async def count_input(
        self, principal: Principal, request: CreateResponse, input_items: Sequence[Item]
    ) -> int:
        """How many prompt tokens a request would have. Raises ApiError."""
        owner = principal.owner
        served = self._served(request)
        self._allowed(principal, served, request, input_items)
        items = await self._sealing.opened(owner, input_items, model=served.info.name)
        items = await identify(self._storage, owner, items)
        items = await self.read_inputs(owner, items, served)
        request = await self._lead_read(principal, request, served)
        turn = self._turn(request, items, principal, served)
        return await count_input(turn, self._storage, self._registry)

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
        dumped, input_items = await aside(in_large_request(), _as_stored, planned)
        run = Run.of(plan, self._models.get(plan.model), planned.functions, planned.context, seals)
        run.input, run.place, run.reach = planned.input, held.place, reach
        run.told, run.past = planned.told, planned.past
        run.first = None if planned.compacts else planned.request
        planned.functions.teach(reach)
        if (record := current.get()) is not None:
            record.model, record.response_id = plan.model, plan.response_id
            record.end_user = plan.end_user
        queued = plan.background and (self._queue.busy or self._room() <= 0)
        status = "queued" if plan.background else "in_progress"
        head = run.head(status)
        new = NewResponse(
            id=plan.response_id,
            named=plan.own_id,
            owner=plan.owner,
            created_at=plan.created_at,
            status=status,
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
            runner=None if queued else self._storage.runner,
            conversation_head=planned.conversation_head,
            request=keyed,
            hidden=plan.hidden,
            audit=_approvals(planned, by),
            priority=plan.priority,
            queue_limit=queue_limit,
            conversation_limit=self._config.max_items_per_conversation,
            cost=self._likely_cost(planned),
        )
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
        response = Snapshot(join_response(orjson.dumps(head), [], echo), POLL_AFTER_MS[status])
        reader = self.feed.join(plan.response_id)
        behind = partial(_behind, run)
        started = Started(plan.response_id, response, reader, lambda: run.failure, behind, plan.id_secret)
        if queued:
            self.feed.release(plan.response_id)
            self._queue.want()
            with suppress(StorageUnavailable, NotFound):  # it has begun, and that is told in any case
                stored = await self._storage.get_response(plan.owner, plan.response_id)
                turn = None if stored.run is None else stored.run.place
                started = replace(started, response=replace(response, queue_position=turn))
            return started
        if plan.background:
            self._loop.started(run)
        self._tasks.spawn(run)
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
        run = self._tasks.get(holder) or await self._orphan(owner, holder)
        if run is None or run.plan.owner != owner or run.plan.background or self.feed.num_readers(holder):
            return False
        self._tasks.cancel(run, "next_turn")
        await self._tasks.over(run)
        return True

    async def _orphan(self, owner: str, response_id: str) -> Run | None:
        """A foreground run that a process left and nobody has taken up yet, taken up."""
        try:
            stored = await self._storage.get_response(owner, response_id)
        except NotFound:
            return None
        left = stored.run is not None and stored.run.state == "running" and stored.run.runner is None
        if left and not stored.background:
            await self._claim(response_id)
        async with self._claiming:
            return self._tasks.get(response_id)

    # -- reading ---------------------------------------------------------------------------------------------

    async def get(
        self, owner: str, response_id: str, *, wait_s: float = 0.0, include: Sequence[str] = ()
    ) -> Snapshot:
        """The Response object; one that is not stored can be had where it is made, until it has ended. Raises
        NotFound.

        wait_s: how long to wait, in seconds, for it to end, or to need the outputs of its client's tools.
        include: what its items are to say besides.
        """
        if (run := self.unkept(owner, response_id)) is not None:
            return await at_its_end(run, self.feed, wait_s) if wait_s > 0 else as_it_stands(run)
        hidden = self._is_at_work(owner, response_id)
        if wait_s <= 0:
            stored = await self._storage.get_response(owner, response_id, hidden=hidden)
            return await self._snapshot(stored, include)
        reader, stored = await self.follow(owner, response_id, hidden=hidden)
        try:
            async with asyncio.timeout(wait_s):
                stored = await self._at_rest(reader, stored)
        except TimeoutError:
            stored = await self._storage.get_response(owner, response_id, hidden=hidden)
        finally:
            reader.close()
        return await self._snapshot(stored, include)

    def unkept(self, owner: str, response_id: str) -> Run | None:
        """A run of an owner that is at work here, and that is not stored."""
        run = self._tasks.get(response_id)
        return run if run is not None and run.plan.owner == owner and not run.plan.store else None

    def _is_at_work(self, owner: str, response_id: str) -> bool:
        """Whether a run of an owner is at work here: as long as it is, it is shown, though it may be stored
        for the repeats of its request alone."""
        run = self._tasks.get(response_id)
        return run is not None and run.plan.owner == owner

    async def rejoin(self, owner: str, response_id: str) -> tuple[Reader, StoredResponse]:
        """The same as `follow`, for a client that comes back to a response."""
        return await self.follow(owner, response_id, hidden=self._is_at_work(owner, response_id))

    async def answer(self, owner: str, response_id: str) -> Snapshot:
        """What the request that started a response is answered with, once more: it at its end, or, in the
        background, as it stands. Raises NotFound, and ApiError 503 where this server stops before its end.
        """
        reader, stored = await self.follow(owner, response_id, hidden=True)
        try:
            if not stored.background:
                stored = await self._at_rest(reader, stored)
                if stored.status not in TERMINAL:
                    raise interrupted(response_id)
        finally:
            reader.close()
        return await self._snapshot(stored)

    async def _at_rest(self, reader: Reader, stored: StoredResponse) -> StoredResponse:
        """A response once nothing happens to it any more without its client, or once its stream is cut."""
        while not (stored.waiting or stored.status in TERMINAL or reader.cut):
            await reader.rested()
            stored = await self._storage.get_response(stored.owner, stored.id, hidden=True)
        return stored

    async def bodies(self, page: Page[StoredResponse]) -> list[bytes]:
        """The Response objects of a page."""
        return [(await self._snapshot(stored)).body for stored in page.data]

    async def _snapshot(self, stored: StoredResponse, include: Sequence[str] = ()) -> Snapshot:
        pending: Mapping[str, str] | None = None
        if stored.waiting:
            pending = (await self._storage.pending_calls(stored.owner, stored.id)).pending
        return snapshot(stored, pending, include)

    async def follow(
        self, owner: str, response_id: str, *, hidden: bool = False
    ) -> tuple[Reader, StoredResponse]:
        """A reader of a stored response, and its state, read after the reader had joined. Raises NotFound.

        hidden: it may be one that is stored for the repeats of its request alone.
        """
        # An unknown id is refused here, before a feed is opened for it.
        stored = await self._storage.get_response(owner, response_id, hidden=hidden)
        reader = self.feed.join(response_id, stored.echo)
        try:
            return reader, await self._storage.get_response(owner, response_id, hidden=hidden)
        except BaseException:
            reader.close()
            raise

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
        return await self.get(owner, response_id)

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

    async def _cancel(self, owner: str, response_id: str) -> None:
        """Cancel a stored run in flight, whoever carries it on, and wait for its end."""
        await self._storage.request_cancel(owner, response_id)
        await self._ended(owner, response_id)

    async def _ended(self, owner: str, response_id: str, *, hidden: bool = False) -> None:
        """Have a stored run that is marked as to be cancelled end, and wait for that."""
        async with self._claiming:
            run = self._tasks.get(response_id)
        if run is not None:
            self._tasks.cancel(run)
            await self._tasks.over(run)
        await self._claim(response_id)  # where it is queued, or waits for tool outputs, nobody carries it on
        if self._storage.shared:
            reader, stored = await self.follow(owner, response_id, hidden=hidden)
            try:
                if stored.status not in TERMINAL:  # whoever does carry it on has yet to notice
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

    def gone(self, response_ids: Sequence[str]) -> None:
        """Stop carrying on, and showing, responses that are in the database no more."""
        for response_id in response_ids:
            run = self._tasks.get(response_id)
            if run is not None:
                run.purged = True
                run.entry.lose(RunLost(response_id))
            self.feed.stop(response_id)
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

    # -- tool outputs ----------------------------------------------------------------------------------------

    async def pending(self, owner: str, response_id: str) -> tuple[StoredResponse, dict[str, str]]:
        """A response, and the calls of it that nobody has answered: call_id -> name. Raises NotFound.

        A client may see a call before its run could park; that it parks or ends is waited for.
        """
        run = self._tasks.get(response_id)
        if run is not None and run.plan.owner == owner and run.awaits():
            await self._tasks.over(run)
        stored = await self._storage.get_response(owner, response_id)
        elsewhere = stored.run is not None and stored.run.runner not in (None, self._storage.runner)
        if elsewhere and _pending(stored) and RunPlan.load(stored.plan).waits:
            reader, stored = await self.follow(owner, response_id)
            try:
                stored = await self._at_rest(reader, stored)
            finally:
                reader.close()
        return stored, _pending(stored)

    async def feed_outputs(
        self, principal: Principal, stored: StoredResponse, outputs: Sequence[Item], *, by: Actor
    ) -> Snapshot:
        """Give tool outputs to a waiting run; returns the Response as it then stands.

        The same output again changes nothing. by: whom the audit log names for approvals. Raises NotFound,
        NotWaiting, UnknownCall, OutputConflict, and ApiError 429 where the request is one too many.
        """
        owner = principal.owner
        if stored.waiting:
            (await self._limiter.enter(principal.subjects, stored.model)).leave()
        num_bytes, new = await aside(in_large_request(), _new_outputs, stored, outputs, self._config)
        served = self._models.standing_in(stored.model)
        require_readable(outputs, served, "tool_outputs")
        items = await self._outputs_read(stored, new, served)
        num_bytes += await aside(in_large_request(), private_bytes, items, SEEN)
        await self._quota.require(owner, num_bytes, self._limiter.stored_bytes(principal.subjects))
        if items:
            fresh = await aside(in_large_request(), _tool_outputs, stored, items, by)
            waiting = await self._storage.add_tool_outputs(owner, stored.id, fresh, now_us())
            if waiting.runnable:
                await self._claim(stored.id)
        return await self.get(owner, stored.id)

    async def _outputs_read(
        self, stored: StoredResponse, new: Mapping[int, Item], served: ServedModel
    ) -> list[Item]:
        """Outputs by their index in the request, as items whose files and images have been read. ApiError
        400, 404."""
        if not any(input_files_of(item) or unseen_images_of(item) for item in new.values()):
            return [*new.values()]
        # What was posted before is as it was read then, also where the file is gone.
        posted = {item.id: item for item in await self._storage.waiting_inputs(stored.id)}
        outputs = []
        for item in new.values():
            before = posted.get(item["id"])
            private = None if before is None or before.private is None else orjson.loads(before.private)
            outputs.append(with_private(dict(item), private))
        paths = [
            f"tool_outputs[{index}].output[{position}]"
            for index, item in zip(new, outputs, strict=True)
            for position, _ in input_files_of(item)
        ]
        images = [
            path_of_image(item, f"tool_outputs[{index}]", position)
            for index, item in zip(new, outputs, strict=True)
            for position, _ in unseen_images_of(item)
        ]
        return await self.read_inputs(stored.owner, outputs, served, files=paths, images=images)

    # -- taking up -------------------------------------------------------------------------------------------

    async def _claim(self, response_id: str) -> None:
        """Take up a run that nobody carries on, if it is one."""
        async with self._claiming:
            models = self._of_models()
            claim = None if self._stopped else await self._storage.claim(response_id, models)
            if claim is not None:
                await self._take_up([claim])
            elif models is not None:  # its model may have to be loaded
                self._queue.want()

    async def _take_up(self, claims: Sequence[RunClaim]) -> None:
        """Set claimed runs to work, or end them where that is what is left."""
        at_once = asyncio.Semaphore(TAKE_UP_AT_ONCE)

        async def one(claim: RunClaim) -> None:
            async with at_once:
                run = await self._restored(claim)
            if run is not None:
                await self._tasks.settle(run)

        await asyncio.gather(*map(one, claims))

    async def _restored(self, claim: RunClaim) -> Run | None:
        """A claimed run at work again, or with its end written.

        None for one that was deleted meanwhile, or that cannot be read.
        """
        while True:
            try:
                run = await self._restorer.run(claim)
                inputs = await self._storage.waiting_inputs(claim.response_id)
                break
            except (StorageUnavailable, EngineUnavailable) as error:
                log.warning("run %s waits: %s", claim.response_id, error)
                await asyncio.sleep(RETRY_S)
            except NotFound:
                return None
            except Exception:  # it must not keep the others, or the server, down
                log.exception("run %s cannot be taken up", claim.response_id)
                return None
        # What its limits have counted already: all that it had used when it parked the last time.
        answers = [index for index, item in enumerate(run.assembler.output) if is_output(item)]
        if claim.state == "waiting" or inputs:
            run.counted = run.progress.num_limited
        elif run.plan.waits and answers:
            run.counted = run.progress.limited_before(answers[-1])
        if claim.cancel_requested:
            self._loop.cancel(run)
        elif claim.state == "waiting":
            self._loop.fail(run, f"{_not_answered(run)} came within {run.plan.tool_timeout_s:g} s.")
        elif claim.strikes >= MAX_STRIKES:
            self._loop.fail(
                run, f"This response stopped the engine {claim.strikes} times; it is not tried again."
            )
        elif run.served.info.fingerprint != run.plan.fingerprint:
            self._loop.fail(run, f"The model '{run.plan.model}' has changed since this response began.")
        elif run.gone is not None:
            self._loop.fail(run, run.gone.message, code="invalid_prompt", why=run.gone)
        else:
            if run.queued:
                self._loop.started(run)
            elif run.claim is not None:
                self._loop.resumed(run)
            self._loop.received(run, [load_item(item.body, item.private) for item in inputs])
            self._tasks.spawn(run)
        return run

    async def _take(self, limit: int) -> int:
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
            return None
        free = await self._storage.free_models()
        for name in later:
            if name in free:
                self._models.want(name)
        unserved = set(free) - {*now, *later} - self._fleet.elsewhere
        clock = asyncio.get_running_loop().time()
        self._unserved = {name: self._unserved.get(name, clock) for name in unserved}
        return self._of_models()

    def _of_models(self) -> OfModels | None:
        """The runs that this process can go on with now, by their models; None: whatever there is.

        Alone on its database it also ends those of models that it does not serve at all. Where others are,
        these are theirs, until for `UNSERVED_S` nobody has served them.
        """
        now, later = self._models.claimable
        if not self._storage.shared:
            return OfModels(tuple(later), others=True) if later else None
        clock = asyncio.get_running_loop().time()
        left = [name for name, since in self._unserved.items() if clock - since >= UNSERVED_S]
        return OfModels((*now, *left))

    async def _end_due(self) -> None:
        """End waiting runs whose deadline has passed, or that were cancelled."""
        async with self._claiming:
            await self._take_up(await self._storage.claim_due(now_us()))


def _behind(run: Run, status: str) -> Past:
    """What stands before the turn that goes on from a run which has ended with this status."""
    return (run.past or Past()).and_turn((*run.input, *run.assembler.output), status)


def _report(chore: asyncio.Task[None]) -> None:
    if not chore.cancelled() and (error := chore.exception()) is not None:
        log.critical("%s has stopped", chore.get_name(), exc_info=error)


def _num_bytes(request: CreateResponse, items: Sequence[Item], config: Config) -> int:
    """What a request takes in storage; ApiError 400 for an item that is larger than it may be."""
    size = check_sizes(items, config.max_item_bytes, outputs=config.max_tool_output_bytes)
    if request.prompt is not None:
        with request.prompt.named():
            size += check_sizes(request.lead, config.max_item_bytes, param=LEAD)
        size += len(orjson.dumps(request.prompt.echo()))
    return size + len(orjson.dumps([request.instructions, request.tools]))


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
    return tuple(_approval(item, plan, by) for item in asked)


def _approval(request: Item, plan: RunPlan, by: Actor) -> AuditEntry:
    """The entry of one approval. plan: of the response that makes the call."""
    said: Item = {name: request[name] for name in ("server_label", "name") if name in request}
    if plan.end_user is not None:
        said["safety_identifier"] = plan.end_user
    return by.did(
        "tool_call.approved", str(key_of(request)), plan.owner, response_id=plan.response_id, **said
    )


def _pending(stored: StoredResponse) -> dict[str, str]:
    return pending_calls([orjson.loads(item.body) for item in stored.output])


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


def interrupted(response_id: str) -> ApiError:
    """503 `response_interrupted`: this server stops before a run that is read here has ended."""
    message = f"The server stopped before response '{response_id}' was done."
    return ApiError(503, message, code="response_interrupted", headers={"retry-after": "5"})


def _new_outputs(
    stored: StoredResponse, outputs: Sequence[Item], config: Config
) -> tuple[int, dict[int, Item]]:
    """The bytes of tool outputs, and those of them that their run does not have yet, by their index. Raises
    OutputConflict, and ApiError 400 for an output that is larger than it may be."""
    num_bytes = check_sizes(
        outputs, config.max_item_bytes, outputs=config.max_tool_output_bytes, param="tool_outputs"
    )
    plan = RunPlan.load(stored.plan)
    items = [orjson.loads(item.body) for item in stored.output]
    taken = answers_of(items)
    new: dict[int, Item] = {}
    for index, item in enumerate(answering(outputs, items)):
        name, key = link_of(item)
        if link_of(item) not in taken:
            # Its id is such that posting it again is posting the same.
            new[index] = {**item, "id": output_id(plan, item)}
        elif _said(taken[link_of(item)]) != _said(item):
            raise to_api_error(OutputConflict(str(key)), param=f"tool_outputs[{index}].{name}")
    return num_bytes, new


def _tool_outputs(stored: StoredResponse, items: Sequence[Item], by: Actor) -> list[ToolOutput]:
    """Outputs as storage takes them, with what the audit log is to tell of approvals."""
    made = [orjson.loads(item.body) for item in stored.output]
    calls = {link_of(item): item for item in made if is_client_call(item)}
    plan = RunPlan.load(stored.plan)
    return [
        replace(
            _tool_output(item),
            audit=_approval(calls[link_of(item)], plan, by) if approves(item) else None,
        )
        for item in items
    ]


def _said(output: Item) -> Item:
    """What an output says, whatever its id."""
    return {name: value for name, value in sorted(output.items()) if name != "id"}


def _tool_output(item: Item) -> ToolOutput:
    digest = hashlib.blake2b(orjson.dumps(_said(item)), digest_size=16).digest()
    return ToolOutput(
        str(key_of(item)),
        orjson.dumps(item),
        digest,
        item["id"],
        kind=item["type"],
        private=dump_private(item),
    )


def _not_answered(run: Run) -> str:
    """What a client did not send to a run that has waited for it, as the subject of a sentence."""
    waiting = pending_calls(run.assembler.output)
    asking = {key_of(item) for item in run.assembler.output if asks_approval(item)}
    approvals = [f"{name} ({key})" for key, name in waiting.items() if key in asking]
    if not approvals:
        return "No tool outputs"
    answers = f"answer to the request for approval of {', '.join(approvals)}"
    return f"No {answers}" if len(approvals) == len(waiting) else f"No tool outputs and no {answers}"
