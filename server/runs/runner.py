"""The runner: which runs this process carries on, from their start to their end.

Owns the tasks of runs, the claims on them, recovery at start, waiting runs and their deadlines, cancelling, and the
grace of a run that nobody reads. Everything enters a run through `Loop.advance`. Refuses to know HTTP and SQL.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

import tools
from engine import EngineDead, QueueFull
from server.errors import ApiError
from server.runs.assembler import Assembler, fold, reopen
from server.runs.feed import Feed, Reader
from server.runs.journal import Journal
from server.runs.loop import Loop, Run, new_item, now_us, opening, output_id
from server.runs.plan import TERMINAL, Planned, RunPlan, count_input, drop_oldest, make_plan, replayable
from server.runs.prompt import OUTPUT_KINDS, Item
from server.runs.snapshot import echo_members, response_json, terminal_response
from server.runs.steps import Progress, pending_calls
from server.schema.responses import echo as response_echo
from storage import (
    ECHO_MARK,
    ConversationLocked,
    ItemConflict,
    NewResponse,
    OutputConflict,
    Record,
    RunClaim,
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
        self._journal = Journal(storage, telemetry.committed)
        self._loop = Loop(self._journal, telemetry)
        self._active: dict[str, Run] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}
        self._deadlines: asyncio.Task[None] | None = None
        self.feed = Feed(storage)
        self.feed.on_left = self._left

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the journal and settle what an earlier process left: queued runs start, broken ones end failed."""
        self._journal.start()
        for claim in await self._storage.claim_dead():
            run = await self._restore(claim)
            if claim.cancel_requested:
                self._loop.cancel(run)
            elif claim.state == "queued":
                self._loop.started(run)
                self._spawn(run)
                continue
            else:
                self._loop.fail(run, "The server stopped while this response was in progress.")
            await self._settle(run)
        self._deadlines = asyncio.create_task(self._expire(), name="deadlines")

    async def drain(self, grace_s: float) -> None:
        """Let runs finish for `grace_s`, then stop: what is left is cut without a terminal event."""
        clock = asyncio.get_running_loop().time
        until = clock() + grace_s
        while (tasks := self._tasks()) and clock() < until:
            await asyncio.wait(tasks, timeout=until - clock())
        self.feed.stop()
        stopped = [*self._tasks(), *([self._deadlines] if self._deadlines is not None else [])]
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)
        await self._journal.close()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [run.task for run in self._active.values() if run.task is not None]

    @property
    def num_active(self) -> int:
        """Runs that this process carries on now."""
        return len(self._active)

    # -- starting -----------------------------------------------------------------------------------------------

    async def create(self, owner: str, request: CreateResponse, input_items: Sequence[Item]) -> Started:
        """Plan a request and start its run; the start transaction is durable when this returns.

        Raises ApiError, the engine's RequestErrors and QueueFull, ConversationLocked, StorageUnavailable.
        """
        served = self._models.get(request.model)
        if served.engine.stats().waiting >= self._config.max_waiting:
            raise QueueFull("The server has too many requests waiting.")
        planned = await make_plan(
            request,
            await self._resolve(owner, input_items),
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
        while True:
            try:
                return await self._begin(planned, echo)
            except ConversationLocked as locked:
                if not await self._unlock(owner, locked.holder):
                    raise
            except ItemConflict as conflict:
                # The client's id for an item is taken by another item: the new one gets an id of ours.
                planned = _with_fresh_id(planned, conflict.item_id)

    async def count_input(self, owner: str, request: CreateResponse, input_items: Sequence[Item]) -> int:
        """How many prompt tokens a request would have. Raises ApiError."""
        return await count_input(
            request,
            await self._resolve(owner, input_items),
            owner=owner,
            storage=self._storage,
            served=self._models.get(request.model),
            builtin=tools.BUILTIN,
            now=now_us(),
        )

    async def _begin(self, planned: Planned, echo: bytes) -> Started:
        plan = planned.plan
        run = self._run(plan, planned.context, planned.input)
        run.first = planned.request
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
        )
        channel = self.feed.open(plan.response_id, echo, stored=plan.store)
        try:
            run.entry = await self._journal.begin(new, opening(head, background=plan.background), channel)
        except BaseException:
            self.feed.release(plan.response_id)
            raise
        snapshot = orjson.dumps({**head, "output": []})[:-1] + b"," + echo + b"}"
        started = Started(plan.response_id, snapshot, self.feed.join(plan.response_id))
        if plan.background:
            self._loop.started(run)
        self._spawn(run)
        return started

    async def _resolve(self, owner: str, items: Sequence[Item]) -> list[Item]:
        """Input items with every `item_reference` replaced by the item it names. Raises ApiError 404."""
        wanted = [item["id"] for item in items if item["type"] == "item_reference"]
        if not wanted:
            return list(items)
        found = await self._storage.get_items(owner, wanted)
        for index, item in enumerate(items):
            if item["type"] == "item_reference" and item["id"] not in found:
                message = f"Item with id '{item['id']}' not found."
                raise ApiError(404, message, param=f"input[{index}].id")
        return [orjson.loads(found[i["id"]].body) if i["type"] == "item_reference" else i for i in items]

    async def _unlock(self, owner: str, holder: str) -> bool:
        """Cancel a foreground run that nobody reads, to make way for its client's next turn; True when it is gone."""
        run = self._active.get(holder)
        if run is None or run.plan.owner != owner or run.plan.background or self.feed.num_readers(holder):
            return False
        await self._stop(run)
        return True

    def _run(
        self, plan: RunPlan, context: Sequence[Item], input_items: Sequence[Item], output: Sequence[Item] = ()
    ) -> Run:
        """A run in memory; the caller gives it its place in the journal."""
        functions, servers = plan.functions(tools.BUILTIN)
        listed = {item["server_label"] for item in (*context, *output) if item["type"] == "mcp_list_tools"}
        labels = dict.fromkeys(label for label in servers.values() if label not in listed)
        assembler = Assembler(plan.id_secret, servers=servers, logprobs=plan.logprobs, output=output)
        # A model that is served no more still has runs to end; whether one may go on is for its fingerprint to say.
        served = self._models.get(plan.model if plan.model in self._models else None)
        return Run(plan, served, assembler, context, functions, unlisted=tuple(labels), input=input_items)

    # -- carrying on --------------------------------------------------------------------------------------------

    def _spawn(self, run: Run) -> None:
        run.entry.on_lost = lambda: self._lost(run)
        self._active[run.plan.response_id] = run
        run.task = asyncio.create_task(self._carry(run), name=run.plan.response_id)

    async def _carry(self, run: Run) -> None:
        """Own a run's task until what it wrote is durable."""
        try:
            await self._loop.advance(run)
            await self._journal.flushed(run.entry)
        except EngineDead as dead:
            self._cut(run, dead)
        finally:
            self._forget(run)

    def _forget(self, run: Run) -> None:
        response_id = run.plan.response_id
        if self._active.get(response_id) is run:
            del self._active[response_id]
        grace = self._graces.pop(response_id, None)
        if grace is not None:
            grace.cancel()
        self.feed.release(response_id)

    def _cut(self, run: Run, dead: EngineDead) -> None:
        """The engine is gone: a stored stream stops and can be resumed; an unstored one learns that it failed."""
        if run.plan.store:
            run.entry.channel.stop()
        else:
            self._loop.fail(run, str(dead) or "The engine stopped.")

    def _lost(self, run: Run) -> None:
        run.entry.channel.stop()
        if run.task is not None:
            run.task.cancel()

    async def _settle(self, run: Run) -> None:
        """Make the end of a run that has no task durable."""
        await self._journal.flushed(run.entry)
        self._forget(run)

    async def _stop(self, run: Run) -> None:
        """Cancel a run that has a task, unless it is over; wait until how it stands is durable."""
        assert run.task is not None
        if run.stepping and not run.cancelled:
            run.cancelled = True
            run.task.cancel()
        await asyncio.wait({run.task})

    # -- readers ------------------------------------------------------------------------------------------------

    def _left(self, response_id: str) -> None:
        """The last reader has gone: an unstored run ends at once, a stored one after its grace."""
        run = self._active.get(response_id)
        if run is None or run.plan.background or response_id in self._graces:
            return
        if not run.plan.store:
            self._cancel_unread(response_id)
            return
        grace = self._config.resume_grace_s
        self._graces[response_id] = asyncio.get_running_loop().call_later(
            grace, self._cancel_unread, response_id
        )

    def _cancel_unread(self, response_id: str) -> None:
        self._graces.pop(response_id, None)
        run = self._active.get(response_id)
        if (
            run is not None
            and run.task is not None
            and run.stepping
            and not self.feed.num_readers(response_id)
        ):
            run.cancelled = True
            run.task.cancel()

    # -- reading ------------------------------------------------------------------------------------------------

    async def get(self, owner: str, response_id: str) -> bytes:
        """The Response object. Raises NotFound."""
        return response_json(await self._storage.get_response(owner, response_id))

    async def follow(self, owner: str, response_id: str) -> tuple[Reader, StoredResponse]:
        """A reader of a stored response, joined before its state was read, and that state. Raises NotFound."""
        stored = await self._storage.get_response(
            owner, response_id
        )  # the 404 comes before anything is opened
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
        records = await self._records(response_id)
        return records[-1].first_seq + records[-1].num_events if records else 0

    # -- cancelling and deleting --------------------------------------------------------------------------------

    async def cancel(self, owner: str, response_id: str) -> bytes:
        """Cancel a run in flight, wherever it stands; partial output and true usage stay. Returns the Response.

        Raises NotFound, and ApiError 400 for a foreground response that has ended already.
        """
        run = self._active.get(response_id)
        if run is not None and run.plan.owner == owner and not run.plan.store:
            await self._stop(run)
            assert run.entry.channel.last is not None
            return terminal_response(run.entry.channel.last.data)
        stored = await self._storage.get_response(owner, response_id)
        if stored.status in TERMINAL:
            if not stored.background:
                message = f"Cannot cancel a response that has ended (status {stored.status})."
                raise ApiError(400, message, code="response_not_cancellable")
            return response_json(stored)
        await self._storage.request_cancel(owner, response_id)
        if run is not None:
            await self._stop(run)
        claim = await self._storage.claim(response_id)
        if claim is not None:  # it waits for tool outputs: nobody carries it on
            waiting = await self._restore(claim)
            self._loop.cancel(waiting)
            await self._settle(waiting)
        return await self.get(owner, response_id)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, cancelling it if it runs; its readers' streams end. Raises NotFound."""
        await self._storage.delete_response(owner, response_id, now_us())
        run = self._active.get(response_id)
        if run is not None:
            run.entry.lose()
        self.feed.stop(response_id)

    # -- tool outputs -------------------------------------------------------------------------------------------

    async def pending(self, owner: str, response_id: str) -> tuple[StoredResponse, dict[str, str]]:
        """A response, and the calls of it that nobody has answered: call_id -> name. Raises NotFound.

        A client may see a call before its run could park: it parks, or ends, within this generation, so wait for it.
        """
        run = self._active.get(response_id)
        if run is not None and run.task is not None and run.plan.owner == owner:
            if run.plan.waits and pending_calls(run.assembler.output):
                await asyncio.wait({run.task})
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
                await self._wake(stored.id)
        return await self.get(owner, stored.id)

    async def _wake(self, response_id: str) -> None:
        """Claim a run whose outputs are all there, journal them, and carry it on."""
        claim = await self._storage.claim(response_id)
        if claim is None or response_id in self._active:
            return
        run = await self._restore(claim)
        if run.served.info.fingerprint != run.plan.fingerprint:
            self._loop.fail(run, f"The model '{run.plan.model}' has changed since this response began.")
            await self._settle(run)
            return
        inputs = await self._storage.waiting_inputs(response_id)
        self._loop.received(run, [orjson.loads(item.body) for item in inputs])
        self._spawn(run)

    async def _expire(self) -> None:
        """End waiting runs whose deadline has passed."""
        while True:
            try:
                deadline = await self._storage.next_deadline()
                due = deadline is not None and deadline <= now_us()
                for claim in await self._storage.claim_due(now_us()) if due else ():
                    run = await self._restore(claim)
                    self._loop.fail(run, f"No tool outputs came within {run.plan.tool_timeout_s:g} s.")
                    await self._settle(run)
            except StorageUnavailable as error:
                log.warning("waiting runs could not be looked at: %s", error)
            await asyncio.sleep(DEADLINE_POLL_S)

    # -- from storage -------------------------------------------------------------------------------------------

    async def _restore(self, claim: RunClaim) -> Run:
        """A run as its records left it, in the hands of this process."""
        stored = await self._storage.get_response(claim.owner, claim.response_id)
        plan = RunPlan.load(stored.plan)
        records = await self._records(claim.response_id)
        events = [
            orjson.loads(event.replace(b"," + ECHO_MARK, b""))
            for record in records
            for event in record.events.split(b"\n")
        ]
        output, unfinished = fold(events)
        history = await self._storage.history(
            plan.owner, previous_response_id=plan.response_id, as_of=plan.created_at
        )
        before = [e for e in history if not (e.response_id == plan.response_id and e.direction == "out")]
        run = self._run(plan, drop_oldest(replayable(before), plan.num_dropped), (), output)
        reopen(run.assembler, unfinished)
        run.progress = _progress(records)
        channel = self.feed.open(plan.response_id, stored.echo, stored=True, next_seq=claim.next_seq)
        run.entry = self._journal.resume(claim, channel)
        return run

    async def _records(self, response_id: str) -> list[Record]:
        records: list[Record] = []
        after = -1
        while page := await self._storage.records(response_id, after=after):
            records.extend(page)
            after = page[-1].first_seq + page[-1].num_events - 1
        return records


def _with_fresh_id(planned: Planned, item_id: str) -> Planned:
    prefix = item_id.partition("_")[0][:8] or "item"
    fresh = f"{prefix}_{secrets.token_hex(24)}"
    return replace(
        planned, input=tuple({**i, "id": fresh} if i["id"] == item_id else i for i in planned.input)
    )


def _progress(records: Sequence[Record]) -> Progress:
    progress = Progress()
    for record in records:
        progress.add(orjson.loads(record.facts) if record.facts else {}, len(record.token_ids))
    return progress


def _tool_output(plan: RunPlan, item: Item) -> ToolOutput:
    """An output as storage takes it. Its id is derived and its hash is of the output alone: posting it again is
    posting the same."""
    item = {**item, "id": output_id(plan, item["call_id"])}
    digest = hashlib.blake2b(orjson.dumps(item["output"]), digest_size=16).digest()
    return ToolOutput(call_id=item["call_id"], body=orjson.dumps(item), body_hash=digest, item_id=item["id"])
