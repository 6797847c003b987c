"""The run loop: what is pending is a function of history; do it, journal it, repeat.

Owns carrying out steps and ending a run in exactly one way. It has no flag for stream, background or resume: who
watches is the feed's business. Refuses to know HTTP, SQL and how tokens are made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

import tools
from engine import CallEnd, Done, EngineDead, EngineError, GenerateRequest, PromptTooLong, RequestError
from server.models import ServedModel
from server.runs import steps
from server.runs.assembler import Assembler, Draft, Item, derived_id
from server.runs.journal import Entry, Journal
from server.runs.plan import RunPlan
from server.runs.prompt import OUTPUT_KINDS
from server.telemetry import Telemetry
from storage import ClosedItem, Finish, NewItem, Park

log = logging.getLogger("antiphon.runs")

Now = Callable[[], int]


def now_us() -> int:
    """Microseconds since the epoch: the one clock of everything that is stored or shown."""
    return time.time_ns() // 1000


@dataclass(slots=True, eq=False)
class Run:
    """One run in this process: its plan, its place in the journal and what it has made so far.

    context: the items before its output, pinned. first: the first generation's request, rendered with the plan.
    """

    plan: RunPlan
    served: ServedModel
    assembler: Assembler
    context: Sequence[Item]
    functions: Sequence[Item]
    entry: Entry = field(init=False)  # its place in the journal, given once it has one
    unlisted: tuple[str, ...] = ()
    input: Sequence[Item] = ()
    first: GenerateRequest | None = None
    progress: steps.Progress = field(default_factory=steps.Progress)
    held: list[int] = field(default_factory=list)  # tokens whose text is not out yet, so not logged yet
    cancelled: bool = False  # the task is being cancelled because somebody cancelled the run
    stepping: bool = True  # False once it has ended or parked: what is left is to make that durable
    task: asyncio.Task[None] | None = None

    def head(
        self, status: str, *, completed_at: int | None = None, error: dict[str, str] | None = None,
        reason: str | None = None, usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The part of the Response object that changes, without its output."""
        return {
            "id": self.plan.response_id,
            "object": "response",
            "created_at": self.plan.created_at // 1_000_000,
            "status": status,
            "completed_at": completed_at,
            "error": error,
            "incomplete_details": {"reason": reason} if reason else None,
            "usage": usage,
        }


def opening(head: dict[str, Any], *, background: bool) -> list[Draft]:
    """The first events of every run: `response.created` is first, always."""
    snapshot = {**head, "output": []}
    drafts: list[Draft] = [{"type": "response.created", "response": snapshot}]
    if background:
        drafts.append({"type": "response.queued", "response": snapshot})
    else:
        drafts.append({"type": "response.in_progress", "response": snapshot})
    return drafts


class Loop:
    """Carries out runs."""

    def __init__(self, journal: Journal, telemetry: Telemetry) -> None:
        self._journal = journal
        self._telemetry = telemetry

    async def advance(self, run: Run) -> None:
        """Carry a run on until it ends or is parked.

        Every way out of the steps becomes a state that somebody can read. Only the end of the process (this task
        cancelled without a reason) and the engine's death leave a run without a terminal event: it is still in the
        log as unfinished, and whoever starts next ends it.
        """
        try:
            await self._steps(run)
        except asyncio.CancelledError:
            if not run.cancelled:
                raise
            self._end(run, "cancelled")
        except EngineDead:
            raise
        except EngineError as failure:
            self._end(
                run, "failed", error={"code": _code(failure), "message": str(failure) or "The run failed."}
            )
        except Exception:
            log.exception("run %s failed", run.plan.response_id)
            message = "The server had an error while processing the run."
            self._end(run, "failed", error={"code": "server_error", "message": message})

    async def _steps(self, run: Run) -> None:
        while True:
            step = steps.next_step(
                run.assembler.output,
                run.progress,
                unlisted=run.unlisted,
                waits=run.plan.waits,
                max_output_tokens=run.plan.max_output_tokens,
            )
            match step:
                case steps.ListTools(labels):
                    self._list_tools(run, labels)
                case steps.Generate(forced, max_tokens):
                    await self._generate(run, forced, max_tokens)
                case steps.CallTools(calls):
                    await self._call_tools(run, calls)
                case steps.AwaitClient():
                    self._park(run)
                    return
                case steps.Finish(status, reason):
                    self._end(run, status, reason=reason)
                    return

    # -- steps --------------------------------------------------------------------------------------------------

    def _list_tools(self, run: Run, labels: Sequence[str]) -> None:
        for label in labels:
            offered = [tool for tool in run.functions if run.assembler.server_of(tool["name"]) == label]
            listed = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in offered
            ]
            self._write(run, run.assembler.tools_listed(label, listed))
        run.unlisted = ()

    async def _generate(self, run: Run, forced: bool, max_tokens: int | None) -> None:
        generation, since = run.progress.generations, len(run.assembler.output)
        request, run.first = run.first, None
        if request is None:
            offered = run.plan.offer(run.functions, forced=forced)
            context = [*run.context, *run.assembler.output]
            prompt = await run.served.engine.render(run.plan.render_input(context, offered))
            try:
                request = run.plan.request(
                    run.served, prompt, offered, generation=generation, max_tokens=max_tokens
                )
            except PromptTooLong:
                run.progress.ended = "length"  # the tools' outputs filled the context
                return
        facts: dict[str, Any] = {
            "generation": generation,
            "input_tokens": len(request.prompt_ids),
            "cached_tokens": 0,
        }
        drafts: list[Draft] = []
        reasoning = first_token = 0
        async with aclosing(self._telemetry.timed(run.served.engine.generate(request))) as chunks:
            async for chunk in chunks:
                if chunk.cached_tokens is not None:
                    facts["cached_tokens"] = chunk.cached_tokens
                reasoning += chunk.reasoning_tokens
                run.held.extend(chunk.token_ids)
                drafts += run.assembler.feed(chunk.deltas)
                last = chunk.deltas[-1] if chunk.deltas else None
                if isinstance(last, Done):
                    drafts += run.assembler.ensure_output(since)
                    facts |= {"ended": last.reason, "reasoning_tokens": reasoning}
                elif not drafts or isinstance(last, CallEnd):
                    continue  # no event yet, or the end of turn follows and would have none: one record with the next
                num_tokens = len(run.held)
                self._write(run, drafts, facts=facts, generation=generation, first_token=first_token)
                drafts, facts, first_token = [], {}, first_token + num_tokens
                await self._journal.has_room(run.entry)

    async def _call_tools(self, run: Run, calls: Sequence[Item]) -> None:
        """Run server tools. A call is durable before it runs, so that after a crash it is known to have begun."""
        await self._journal.flushed(run.entry)
        for call in calls:
            result = await tools.execute(tools.BUILTIN[call["name"]], call["arguments"])
            self._write(run, run.assembler.call_finished(call["id"], result.output, result.error))

    def _park(self, run: Run) -> None:
        deadline = now_us() + int(run.plan.tool_timeout_s * 1e6)
        run.stepping = False
        self._write(run, [], park=Park(deadline))

    # -- writing ------------------------------------------------------------------------------------------------

    def _write(
        self, run: Run, drafts: Sequence[Draft], *, facts: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        """Journal drafts with the tokens and closed items that belong to them, and count them."""
        held, run.held = tuple(run.held), []
        if "finish" not in fields:
            run.progress.add(facts or {}, len(held))
        closed = [ClosedItem(index, new_item(item)) for index, item in run.assembler.take_closed()]
        self._journal.write(run.entry, drafts, tokens=held, facts=facts, closed=closed, **fields)

    def started(self, run: Run) -> None:
        """A queued run begins."""
        head = run.head("in_progress")
        draft = {"type": "response.in_progress", "response": {**head, "output": []}}
        self._write(run, [draft], head=orjson.dumps(head), status="in_progress")

    def received(self, run: Run, outputs: Sequence[Item]) -> None:
        """Outputs that a client fed to the run appear in its stream."""
        self._write(run, [draft for item in outputs for draft in run.assembler.output_received(item)])

    def _end(
        self, run: Run, status: str, *, reason: str | None = None, error: dict[str, str] | None = None
    ) -> None:
        """Write the terminal event; whatever is open is closed first."""
        run.stepping = False
        self._telemetry.run_ended(status)
        completed_at = now_us()
        drafts = run.assembler.interrupt()
        run.progress.add({}, len(run.held))
        head = run.head(
            status,
            completed_at=completed_at // 1_000_000 if status == "completed" else None,
            error=error,
            reason=reason,
            usage=run.progress.usage(),
        )
        drafts.append({"type": f"response.{status}", "response": {**head, "output": run.assembler.output}})
        append = run.plan.conversation_id is not None and status in ("completed", "incomplete")
        finish = Finish(status, completed_at, append)
        if append and not run.plan.store:  # the conversation is the only store these items have
            inputs, outputs = tuple(map(new_item, run.input)), tuple(map(new_item, run.assembler.output))
            finish = Finish(status, completed_at, append, inputs, outputs)
        generation = max(run.progress.generations - 1, 0)
        self._write(run, drafts, generation=generation, head=orjson.dumps(head), finish=finish)

    def fail(self, run: Run, message: str) -> None:
        """End a run that nobody carries on."""
        self._end(run, "failed", error={"code": "server_error", "message": message})

    def cancel(self, run: Run) -> None:
        """End a run that waits, or is claimed to be cancelled."""
        self._end(run, "cancelled")


def new_item(item: Item) -> NewItem:
    """An item as storage takes it; `name` marks the calls that a client answers."""
    name = item["name"] if item["type"] in OUTPUT_KINDS.values() else None
    return NewItem(item["id"], item["type"], orjson.dumps(item), item.get("call_id"), name)


def output_id(plan: RunPlan, call_id: str) -> str:
    """The item id of a tool output that came without one: derived, so the same output posted twice has the same."""
    return derived_id(plan.id_secret, "function_call_output", int.from_bytes(call_id.encode()[:24]))


def _code(failure: EngineError) -> str:
    return "invalid_prompt" if isinstance(failure, RequestError) else "server_error"
