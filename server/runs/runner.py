"""The runner: every run of this process, from a request to its end. The door that routes knock at.

Owns the ways into a run (create, tool outputs, recovery, deadlines) and the ways to end it from outside
(cancel, delete). Everything enters a run through `Loop.advance`. Refuses to know HTTP and SQL.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

import tools
from engine import QueueFull
from server.clock import now_us
from server.errors import ApiError
from server.identity import identify, may_be_known
from server.runs.context import not_found
from server.runs.feed import Feed, Reader
from server.runs.journal import RETRY_S, Journal
from server.runs.loop import Loop
from server.runs.plan import Planned, RunPlan, count_input, make_plan
from server.runs.prompt import OUTPUT_KINDS, Item
from server.runs.restore import Restorer
from server.runs.run import Run, new_item, opening, output_id
from server.runs.snapshot import echo_members, join_response, response_json, terminal_response
from server.runs.steps import TERMINAL, pending_calls
from server.runs.tasks import RunTasks
from server.schema.responses import echo as response_echo
from storage import (
    ConversationLocked,
    ConversationMoved,
    ItemConflict,
    NewResponse,
    NotFound,
    OutputConflict,
    Page,
    RunClaim,
    RunLost,
    StorageUnavailable,
    StoredResponse,
    ToolOutput,
)

if TYPE_CHECKING:
    from server.config import Config
    from server.models import Models
    from server.schema.responses import CreateResponse
    from server.telemetry import Telemetry
    from storage import Storage

log = logging.getLogger("antiphon.runs")

DEADLINE_POLL_S = 1.0
"""How late the end of a tool timeout may be noticed."""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that has begun. `reader` counts as watching it from the first event on; the caller closes it."""

    response_id: str
    response: bytes  # the Response object as it stood then
    reader: Reader


class Runs:
    """All runs of this process."""

    def __init__(self, storage: Storage, models: Models, config: Config, telemetry: Telemetry) -> None:
        self._storage = storage
        self._models = models
        self._config = config
        self.feed = Feed(storage)
        self._journal = Journal(storage, telemetry.committed)
        self._loop = Loop(self._journal, telemetry)
        self._restorer = Restorer(storage, models, self._journal, self.feed)
        self._tasks = RunTasks(self._loop, self._journal, self._restorer, self.feed, config.resume_grace_s)
        self._deadlines: asyncio.Task[None] | None = None
        # Held from a claim until its run is at work or has ended: who looks meanwhile would see neither.
        self._claiming = asyncio.Lock()
        self._stopped = False  # runs that come to be runnable are left to the next process

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the journal and take up what an earlier process left."""
        self._journal.start()
        await self._take_up(await self._storage.claim_dead())
        self._deadlines = asyncio.create_task(self._expire(), name="deadlines")

    async def drain(self, grace_s: float) -> None:
        """Let runs finish for `grace_s`, then stop: what is left is cut without a terminal event."""
        await self._tasks.drain(grace_s)
        self._stopped = True
        if self._deadlines is not None:
            self._deadlines.cancel()
            await asyncio.gather(self._deadlines, return_exceptions=True)
        await self._journal.close()

    @property
    def num_active(self) -> int:
        """Runs that this process carries on now."""
        return len(self._tasks)

    # -- starting --------------------------------------------------------------------------------------------

    async def create(self, owner: str, request: CreateResponse, input_items: Sequence[Item]) -> Started:
        """Plan a request and start its run; the start transaction is durable when this returns.

        Raises ApiError, the engine's RequestErrors and QueueFull, ConversationLocked, StorageUnavailable.
        """
        served = self._models.get(request.model)
        if served.engine.stats().waiting >= self._config.max_waiting:
            raise QueueFull("The server has too many requests waiting.")
        # Items of an unstored turn are stored at its end, when it is too late to find that an id is taken.
        late = request.conversation_id is not None and not request.store
        items = list(input_items)
        if late or any(map(may_be_known, items)):
            items = await identify(self._storage, owner, items)
        while True:
            planned = await make_plan(
                request,
                items,
                owner=owner,
                storage=self._storage,
                served=served,
                builtin=tools.BUILTIN,
                now=now_us(),
                tool_timeout_s=self._config.tool_timeout_s,
            )
            drawn = planned.request.sampling
            echo = echo_members(
                response_echo(request, model=served.name, temperature=drawn.temperature, top_p=drawn.top_p)
            )
            try:
                return await self._begin(planned, echo)
            except ConversationMoved:
                continue
            except ConversationLocked as locked:
                if not await self._unlock(owner, locked.holder):
                    raise
            except ItemConflict as conflict:
                items = await identify(self._storage, owner, items, taken=conflict.item_id)
            except NotFound as unknown:
                raise not_found(request, unknown) from None

    async def count_input(self, owner: str, request: CreateResponse, input_items: Sequence[Item]) -> int:
        """How many prompt tokens a request would have. Raises ApiError."""
        return await count_input(
            request,
            await identify(self._storage, owner, input_items),
            owner=owner,
            storage=self._storage,
            served=self._models.get(request.model),
            builtin=tools.BUILTIN,
            now=now_us(),
        )

    async def _begin(self, planned: Planned, echo: bytes) -> Started:
        plan = planned.plan
        run = Run.of(plan, self._models.get(plan.model), planned.functions, planned.context)
        run.input, run.first = planned.input, planned.request
        status = "queued" if plan.background else "in_progress"
        head = run.head(status)
        new = NewResponse(
            id=plan.response_id,
            owner=plan.owner,
            created_at=plan.created_at,
            status=status,
            model=plan.model,
            background=plan.background,
            store=plan.store,
            head=orjson.dumps(head),
            echo=echo,
            plan=plan.dump(),
            previous_response_id=plan.previous_response_id,
            conversation_id=plan.conversation_id,
            input_items=tuple(map(new_item, planned.input)),
            record=None,
            runner=self._storage.runner,
            conversation_head=planned.conversation_head,
        )
        channel = self.feed.open(plan.response_id, echo, stored=plan.store)
        try:
            run.entry = await self._journal.begin(new, opening(head, background=plan.background), channel)
        except BaseException:
            self.feed.release(plan.response_id)
            raise
        response = join_response(orjson.dumps(head), [], echo)
        started = Started(plan.response_id, response, self.feed.join(plan.response_id))
        if plan.background:
            self._loop.started(run)
        self._tasks.spawn(run)
        return started

    async def _unlock(self, owner: str, holder: str) -> bool:
        """Make way for a turn: cancel a foreground run that nobody reads. True when it is gone."""
        run = self._tasks.get(holder)
        if run is None or run.plan.owner != owner or run.plan.background or self.feed.num_readers(holder):
            return False
        self._tasks.cancel(run)
        await self._tasks.over(run)
        return True

    # -- reading ---------------------------------------------------------------------------------------------

    async def get(self, owner: str, response_id: str) -> bytes:
        """The Response object. Raises NotFound."""
        return await self._json(await self._storage.get_response(owner, response_id))

    async def bodies(self, page: Page[StoredResponse]) -> list[bytes]:
        """The Response objects of a page."""
        return [await self._json(stored) for stored in page.data]

    async def _json(self, stored: StoredResponse) -> bytes:
        pending: Mapping[str, str] | None = None
        if stored.waiting:
            pending = (await self._storage.pending_calls(stored.owner, stored.id)).pending
        return response_json(stored, pending)

    async def follow(self, owner: str, response_id: str) -> tuple[Reader, StoredResponse]:
        """A reader of a stored response, and its state, read after the reader had joined. Raises NotFound."""
        stored = await self._storage.get_response(owner, response_id)  # before anything is opened
        reader = self.feed.join(response_id, stored.echo)
        try:
            return reader, await self._storage.get_response(owner, response_id)
        except BaseException:
            reader.close()
            raise

    async def next_seq(self, response_id: str) -> int:
        """The number of the next event of a stored response."""
        channel = self.feed.find(response_id)
        if channel is not None and channel.next_seq is not None:
            return channel.next_seq
        records = await self._restorer.records(response_id)
        return records[-1].first_seq + records[-1].num_events if records else 0

    # -- cancelling and deleting -----------------------------------------------------------------------------

    async def cancel(self, owner: str, response_id: str) -> bytes:
        """Cancel a run in flight, wherever it stands; its output and usage so far stay. Returns the Response.

        Raises NotFound, and ApiError 400 for a foreground response that has ended already.
        """
        run = self._tasks.get(response_id)
        if run is not None and run.plan.owner == owner and not run.plan.store:
            self._tasks.cancel(run)
            await self._tasks.over(run)
            if run.entry.channel.ended and (last := run.entry.channel.last) is not None:
                return terminal_response(last.data)
        stored = await self._storage.get_response(owner, response_id)
        if stored.status in TERMINAL:
            if not stored.background:
                message = f"Cannot cancel a response that has ended (status {stored.status})."
                raise ApiError(400, message, code="response_not_cancellable")
            return response_json(stored)
        await self._storage.request_cancel(owner, response_id)
        async with self._claiming:
            run = self._tasks.get(response_id)
        if run is not None:
            self._tasks.cancel(run)
            await self._tasks.over(run)
        await self._claim(response_id)  # where it waits for tool outputs, nobody carries it on
        return await self.get(owner, response_id)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, cancelling it if it runs; its readers' streams end. Raises NotFound."""
        await self._storage.delete_response(owner, response_id, now_us())
        run = self._tasks.get(response_id)
        if run is not None:
            run.entry.lose(RunLost(response_id))
        self.feed.stop(response_id)

    # -- tool outputs ----------------------------------------------------------------------------------------

    async def pending(self, owner: str, response_id: str) -> tuple[StoredResponse, dict[str, str]]:
        """A response, and the calls of it that nobody has answered: call_id -> name. Raises NotFound.

        A client may see a call before its run could park; that it parks or ends is waited for.
        """
        run = self._tasks.get(response_id)
        if run is not None and run.plan.owner == owner and run.awaits():
            await self._tasks.over(run)
        stored = await self._storage.get_response(owner, response_id)
        return stored, pending_calls([orjson.loads(item.body) for item in stored.output])

    async def feed_outputs(self, owner: str, stored: StoredResponse, outputs: Sequence[Item]) -> bytes:
        """Give tool outputs to a waiting run; returns the Response as it then stands.

        The same output again changes nothing. Raises NotFound, NotWaiting, UnknownCall, OutputConflict.
        """
        plan = RunPlan.load(stored.plan)
        items = [orjson.loads(item.body) for item in stored.output]
        taken = {item["call_id"]: item["output"] for item in items if item["type"] in OUTPUT_KINDS}
        fresh = []
        for item in outputs:
            if item["call_id"] not in taken:
                fresh.append(_tool_output(plan, item))
            elif taken[item["call_id"]] != item["output"]:
                raise OutputConflict(item["call_id"])
        if fresh:
            waiting = await self._storage.add_tool_outputs(owner, stored.id, fresh, now_us())
            if waiting.runnable:
                await self._claim(stored.id)
        return await self.get(owner, stored.id)

    # -- taking up -------------------------------------------------------------------------------------------

    async def _claim(self, response_id: str) -> None:
        """Take up a run that nobody carries on, if it is one."""
        async with self._claiming:
            claim = None if self._stopped else await self._storage.claim(response_id)
            if claim is not None:
                await self._take_up([claim])

    async def _take_up(self, claims: Sequence[RunClaim]) -> None:
        """Set claimed runs to work, or end them where that is what is left."""
        runs = [run for run in [await self._resume(claim) for claim in claims] if run is not None]
        for run in runs:
            await self._tasks.settle(run)

    async def _resume(self, claim: RunClaim) -> Run | None:
        """A claimed run, with what comes next written; it is at work unless it has ended.

        None for one that was deleted meanwhile, or that cannot be read.
        """
        while True:
            try:
                run = await self._restorer.run(claim.owner, claim.response_id, claim.fence)
                inputs = await self._storage.waiting_inputs(claim.response_id)
                break
            except StorageUnavailable as error:
                log.warning("run %s waits: %s", claim.response_id, error)
                await asyncio.sleep(RETRY_S)
            except NotFound:
                return None
            except Exception:  # it must not keep the others, or the server, down
                log.exception("run %s cannot be taken up", claim.response_id)
                return None
        if claim.cancel_requested:
            self._loop.cancel(run)
        elif claim.state == "running":
            self._loop.fail(run, "The server stopped while this response was in progress.")
        elif claim.state == "waiting":
            self._loop.fail(run, f"No tool outputs came within {run.plan.tool_timeout_s:g} s.")
        elif run.served.info.fingerprint != run.plan.fingerprint:
            self._loop.fail(run, f"The model '{run.plan.model}' has changed since this response began.")
        else:
            self._loop.received(run, [orjson.loads(item.body) for item in inputs])
            self._tasks.spawn(run)
        return run

    async def _expire(self) -> None:
        """End waiting runs whose deadline has passed."""
        while True:
            try:
                deadline = await self._storage.next_deadline()
                if deadline is not None and deadline <= now_us():
                    async with self._claiming:
                        await self._take_up(await self._storage.claim_due(now_us()))
            except StorageUnavailable as error:
                log.warning("waiting runs could not be looked at: %s", error)
            await asyncio.sleep(DEADLINE_POLL_S)


def _tool_output(plan: RunPlan, item: Item) -> ToolOutput:
    """An output as storage takes it; id and hash are such that posting it again is posting the same."""
    item = {**item, "id": output_id(plan, item["call_id"])}
    digest = hashlib.blake2b(orjson.dumps(item["output"]), digest_size=16).digest()
    return ToolOutput(call_id=item["call_id"], body=orjson.dumps(item), body_hash=digest, item_id=item["id"])
