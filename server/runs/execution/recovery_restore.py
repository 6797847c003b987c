"""Rebuilds a run in memory from its stored plan, history and event records.

The run can then go on or be ended. Restoring only reads from storage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from server.errors import ApiError
from server.items import Private, with_private
from server.runs.events import Assembler, Journal, fold
from server.runs.execution.run import Run, Seals, Unfinished, assembler_of
from server.runs.planning import (
    Functions,
    Progress,
    RunPlan,
    drop_oldest,
    enforced,
    read_items,
    replayable,
    steps,
)
from server.threads import THREADED_PARTS, aside
from storage import ECHO_MARK, Record, RunClaim, StoredResponse

if TYPE_CHECKING:
    from server.encrypted_reasoning import Sealing
    from server.mcp_servers import Directory, Reach
    from server.model_registry import Models
    from server.runs.events import Feed
    from storage import Storage
    from tools import Registry


class NewerPlan(Exception):
    """A newer version has begun a run, with something in its plan that this one cannot heed."""


class Restorer:
    """Brings runs back from the log."""

    def __init__(
        self,
        storage: Storage,
        models: Models,
        sealing: Sealing,
        journal: Journal,
        feed: Feed,
        registry: Registry,
        directory: Directory,
    ) -> None:
        self._storage = storage
        self._models = models
        self._sealing = sealing
        self._journal = journal
        self._feed = feed
        self._registry = registry
        self._directory = directory

    async def run(self, claim: RunClaim, *, ends: bool = False) -> Run:
        """A run that this process has claimed. ends: it is only to be ended. Raises NotFound for a deleted
        one, and NewerPlan for one that is to go on."""
        run = await self.again(claim.owner, claim.response_id, claim.fence, ends=ends)
        run.watched, run.watched_at = claim.watched, asyncio.get_running_loop().time()
        if claim.state == "running":
            run.claim, run.restarts = claim, run.restarts + 1
        return run

    async def again(self, owner: str, response_id: str, fence: int, *, ends: bool = False) -> Run:
        """A run of this process as its log has it. ends: it is only to be ended, for which its engine, which
        may be away, is not asked. Raises NotFound for a deleted one."""
        run, stored, next_seq = await self._read(owner, response_id, ends=ends)
        channel = self._feed.open(response_id, stored.echo, stored=True, next_seq=next_seq)
        run.entry = self._journal.resume(channel, fence, next_seq)
        return run

    async def look(self, owner: str, response_id: str) -> Run:
        """A run as its log has it, whoever's it is, to be looked at alone: it has no place in the journal.
        Raises NotFound, NewerPlan and EngineUnavailable."""
        return (await self._read(owner, response_id, ends=False))[0]

    async def _read(self, owner: str, response_id: str, *, ends: bool) -> tuple[Run, StoredResponse, int]:
        """A run, its response, and the number of its next event."""
        stored = await self._storage.get_response(owner, response_id, hidden=True)
        plan = RunPlan.load(stored.plan)
        if plan.newer and not ends:
            raise NewerPlan(", ".join(plan.newer))
        history = await self._storage.history(
            owner, previous_response_id=response_id, as_of=plan.created_at, hidden=True
        )
        before = [e for e in history if not (e.response_id == response_id and e.direction == "out")]
        records = await self.records(response_id)
        past = replayable(read_items(before), ())
        context = drop_oldest(drop_oldest(past, plan.num_dropped), _num_dropped(records))
        kept = _private_halves(stored)
        output, unfinished = await aside(len(records) > THREADED_PARTS, _folded, records, kept)
        # A model that is served no more still has runs to end; whether one may go on is for its fingerprint
        # to say.
        served = self._models.standing_in(plan.model)
        gone: ApiError | None = None
        try:
            functions = plan.functions(self._registry, [*past, *output])
        except ApiError as why:  # the operator has taken a tool away, or named one as the client's
            functions, gone = Functions((), {}), why
        if not ends:
            functions = await enforced(functions, served, owner)
        seals = await Seals.of(plan, self._sealing)
        run = Run.of(plan, served, functions, context, seals, output, unfinished)
        run.reach = await self._reach(plan)
        run.learn(functions)
        run.queued = stored.status == "queued"
        run.restarts = orjson.loads(stored.head).get("restarts", 0)
        run.gone = gone
        run.progress = Progress.of((len(record.token_ids), record.facts) for record in records)
        run.assembler.first_item = run.progress.first_item
        if (asked := run.progress.asked) is not None:
            run.verdicts["input"], run.num_asked = asked, run.progress.num_asked
        if run.progress.generations and run.progress.ended is None:
            begun = max(index for index, record in enumerate(records) if "generation" in _facts(record))
            front = assembler_of(plan, functions, seals, context, *_folded(records[:begun], kept))
            run.unfinished = Unfinished(front, tuple(records[begun:]))
        elif run.progress.ended != "length":  # no calls are made behind a generation that was cut
            run.begun = {call["id"] for call in steps.under_way(output)}
        return run, stored, records[-1].first_seq + records[-1].num_events

    async def made(self, stored: StoredResponse) -> Assembler:
        """What a run has made that cannot be restored, ready to be closed: by its log, or, where that is what
        cannot be read, the items that have closed."""
        kept = _private_halves(stored)
        try:
            output, unfinished = _folded(await self.records(stored.id), kept)
            made = Assembler(b"", output=output, unfinished=unfinished)
        except (ValueError, LookupError, TypeError):
            closed = (with_private(orjson.loads(item.body), kept.get(item.id)) for item in stored.output)
            made = Assembler(b"", output=closed)
        # It generates no more, and which generation has made what is not known.
        made.first_item = len(made.output)
        return made

    async def _reach(self, plan: RunPlan) -> Reach:
        """The MCP servers of a plan."""
        secrets = await self._sealing.opened_secrets(plan.owner, plan.response_id, plan.secrets)
        return self._directory.reach(plan.tools, secrets, plan.owner)

    async def records(self, response_id: str) -> Sequence[Record]:
        """The whole log of a response."""
        records: list[Record] = []
        after = -1
        while page := await self._storage.records(response_id, after=after):
            records.extend(page)
            after = page[-1].first_seq + page[-1].num_events - 1
        return records


def _private_halves(stored: StoredResponse) -> dict[str, Private]:
    """Those of the items that have closed, by their ids."""
    return {item.id: orjson.loads(item.private) for item in stored.output if item.private is not None}


def _folded(records: Sequence[Record], kept: Mapping[str, Private]) -> tuple[list[dict[str, Any]], set[int]]:
    """The output items of a log, and the indices of those still open. kept: private halves, by item id."""
    output, unfinished = fold(_events(records))
    return [with_private(item, kept.get(item["id"])) for item in output], unfinished


def _events(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    for record in records:
        for event in record.events.split(b"\n"):
            yield orjson.loads(event.replace(b"," + ECHO_MARK, b""))


def _num_dropped(records: Sequence[Record]) -> int:
    """How many items the first prompt left out besides those that the plan does."""
    return sum(_facts(record).get("num_dropped", 0) for record in records)


def _facts(record: Record) -> dict[str, Any]:
    return orjson.loads(record.facts) if record.facts else {}
