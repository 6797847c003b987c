"""Carries out a run step by step, and journals each result, until the run ends or waits for its client.

The next step follows from what the run has made so far, so a run that another process left goes on the same
way. The steps are the same for streamed, background and resumed runs. A run ends with exactly one terminal
event. When the process ends or the engine dies, a stored run stays unfinished in the log until taken up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from engine import (
    CallArgs,
    CallEnd,
    Chunk,
    ConstraintError,
    Done,
    EngineDead,
    EngineError,
    GenerateRequest,
    Prompt,
    PromptTooLong,
    Reasoning,
    RequestError,
    Text,
)
from server.clock import now_us
from server.errors import ApiError, to_api_error
from server.items import (
    Elsewhere,
    Execution,
    Item,
    Route,
    Scene,
    execution_of,
    is_unfinished_compaction,
    source_of,
)
from server.limits import Limiter
from server.mcp_servers import Reach
from server.moderation import Verdict, asked_in, blocks, said_in, unjudged
from server.pooling import Moderator, judged
from server.prompting import Offer, to_messages
from server.runs.events import UNMADE, Assembler, Draft, Journal, RunLog
from server.runs.execution.recovery_probation import Probation
from server.runs.execution.recovery_replay import Diverged, Replay, fingerprint
from server.runs.execution.run import Run, Unlogged, new_item
from server.runs.planning import (
    Part,
    drop_oldest,
    enforced,
    fit,
    is_long,
    next_part,
    spent,
    steps,
    used_by_tool,
    without_secrets,
)
from server.telemetry import Asked, RequestRecord, Telemetry, current
from server.threads import THREADED_TOKENS, aside, in_large_request
from server.usage import Meter
from server.vector_stores import Payer
from server.webhooks import notice, waiting_notice
from storage import ClosedItem, Finish, Park, RunLost, StoredResponse
from tools import UNKNOWN_EFFECT, Registry, ToolResult, with_doubt

log = logging.getLogger("antiphon.runs")

UNCERTAIN = f"The server stopped while this call was being made. {UNKNOWN_EFFECT}"
"""What the model is told of a call that may have been made and must not be made twice."""

KEPT_S = 900.0
"""How long the engine keeps the KV of a run whose calls another server answers: no call takes longer."""


class Loop:
    """Carries out runs."""

    def __init__(
        self,
        journal: Journal,
        probation: Probation,
        telemetry: Telemetry,
        registry: Registry,
        meter: Meter,
        limiter: Limiter,
        max_generations: int,
        max_tool_output_bytes: int | None = None,
        moderator: Moderator | None = None,
    ) -> None:
        self._journal = journal
        self._probation = probation
        self._telemetry = telemetry
        self._registry = registry
        self._meter = meter
        self._limiter = limiter
        self._max_generations = max_generations
        self._max_output_bytes = max_tool_output_bytes
        self._moderator = moderator

    async def advance(self, run: Run) -> None:
        """Carry a run on until it ends or is parked.

        Every way out of the steps becomes a state that somebody can read. Only the end of the process (this
        task cancelled without a reason) and the engine's death leave a run without a terminal event: it is
        still in the log as unfinished, and whoever takes it over goes on with it.
        """
        record = self._take_record(run)
        try:
            await self._steps(run)
        except asyncio.CancelledError:
            if not run.cancelled:
                raise
            self.cancel(run)
        except EngineDead:
            self._probation.stop()
            raise
        except EngineError as failure:
            log.warning("run %s failed: %r", run.plan.response_id, failure)
            error = to_api_error(failure)
            if isinstance(failure, ConstraintError):
                error = run.plan.named(failure, run.functions)
            self.fail(run, error.message, code=_code(failure), retry_after=error.retry_after_s, why=error)
        except ApiError as refusal:  # what a request said of tools that nobody knew when it came
            log.warning("run %s failed: %s", run.plan.response_id, refusal.message)
            self.fail(run, refusal.message, code="invalid_prompt", why=refusal)
        except RunLost as lost:  # deleted, or another's, before an engine was given it
            run.entry.lose(lost)
        except Diverged as why:
            log.warning("run %s cannot go on: %s", run.plan.response_id, why)
            self.fail(run, str(why))
        except Exception:
            log.exception("run %s failed", run.plan.response_id)
            self.fail(run, "The server had an error while processing the run.")
        finally:
            self._probation.leave(run)
            if run.reach is not None:
                run.reach.close()
            if record.owned and self._telemetry.tracing is not None:
                self._telemetry.tracing.left(record)

    def _take_record(self, run: Run) -> RequestRecord:
        """The record of the request that began a run, if this task works for it; else one of the run's own,
        in whose trace the run goes on, or to which it is linked where another process began it."""
        record, kept = current.get(), run.plan.trace or {}
        if record is not None and record.request_id == kept.get("request_id"):
            return record
        record = RequestRecord.load(kept)
        if self._telemetry.tracing is not None:
            resumed = run.claim is not None or run.progress.generations > 0
            self._telemetry.tracing.taken_up(record, run.plan.response_id, resumed=resumed)
        current.set(record)
        return record

    async def _steps(self, run: Run) -> None:
        while True:
            step = steps.next_step(
                run.assembler.output,
                run.progress,
                unlisted=run.unlisted,
                approved=run.approved,
                waits=run.plan.waits,
                max_output_tokens=run.plan.max_output_tokens,
                max_generations=self._max_generations,
                compacts=run.plan.compaction is not None and run.plan.compaction.is_all,
            )
            match step:
                case steps.ListTools(routes):
                    if not await self._list_tools(run, routes):
                        return
                case steps.Compact(generation):
                    await self._probation.enter(run)
                    await self._compact(run, generation)
                case steps.Generate(generation, max_tokens):
                    if run.plan.generates and not await self._may_begin(run):
                        self._end(run, "incomplete", reason="content_filter")
                        return
                    if await self._is_due(run):
                        self._write(run, run.assembler.compaction_begun())
                        continue
                    await self._probation.enter(run)
                    shown = await self._generate(run, generation, max_tokens if run.plan.generates else 1)
                    if not run.plan.generates:
                        self._end(run, "completed")
                        return
                    if not shown:
                        self._end(run, "incomplete", reason="content_filter")
                        return
                case steps.MakeCalls(requests):
                    for request in requests:
                        self._write(run, run.assembler.call_approved(request))
                    run.first = None  # it does not have what comes of them
                case steps.CallTools():
                    await self._call_tools(run)
                case steps.AwaitClient():
                    self._park(run)
                    return
                case steps.Finish(status, reason, message):
                    await self._judge_output(run)
                    self._end(run, status, reason=reason, message=message)
                    return

    # -- steps -----------------------------------------------------------------------------------------------

    async def _list_tools(self, run: Run, routes: Sequence[Route]) -> bool:
        """List tools; False where a server could not be asked for its own, which ends the run."""
        for route in routes:
            if route not in run.functions.unlisted:
                self._write(run, run.assembler.tools_listed(route, run.functions.of(route)))
                continue
            assert run.reach is not None, "tools of other servers are listed where these can be reached"
            await self._probation.enter(run)  # what they answer may be anything
            if begun := run.assembler.listing_begun(route):
                self._write(run, begun)
            answer = await run.reach.list_tools(route.fields["server_label"])
            self._write(run, run.assembler.server_listed(route, answer))
            if answer.error is not None:
                self.fail(run, answer.error)
                return False
        if run.functions.unlisted:
            await self._learn(run)
        run.unlisted = ()
        return True

    async def _learn(self, run: Run) -> None:
        """Find the run's functions anew, by what it has made. Whoever takes the run over finds the same
        ones, among the same items."""
        items = [*run.functions.listings, *run.functions.loading, *run.assembler.output]
        known = await aside(in_large_request(), run.plan.functions, self._registry, items)
        run.learn(await enforced(known, run.served, run.plan.owner))
        run.first = None

    async def _generate(self, run: Run, generation: int, max_tokens: int | None) -> bool:
        """Make one generation. False where it is withheld, because its run's moderation blocks it: its tokens
        count, and nothing of it is shown."""
        replay = None if run.unfinished is None else Replay(run.unfinished)
        output = run.assembler.output if replay is None else replay.assembler.output
        is_first = run.progress.answers == (0 if replay is None else 1)
        if run.has_loaded:
            await self._learn(run)
        request, run.first = run.first, None
        num_dropped = 0
        if request is None:
            try:
                request, num_dropped = await self._request(
                    run, generation, max_tokens, output, is_first=is_first, begun=replay is not None
                )
            except PromptTooLong:
                if is_first:
                    raise
                run.progress.is_full = True
                return True
        return await self._ask(run, request, replay, generation, {"num_dropped": num_dropped})

    async def require_room(self, run: Run, outputs: Sequence[Item], reserve: int) -> None:
        """Raises PromptTooLong where these outputs of its client, and `reserve` tokens more, leave a run no
        room to go on."""
        output, number = [*run.assembler.output, *outputs], run.progress.generations
        request, _ = await self._request(run, number, None, output, is_first=False, begun=False)
        most = len(request.prompt_ids) + reserve
        limit = min(run.served.info.max_model_len, run.served.caps.prompt_tokens or most + 1)
        if reserve and most >= limit:
            raise PromptTooLong(most, limit)

    async def _is_due(self, run: Run) -> bool:
        """Whether the conversation is compacted before the next generation."""
        plan = run.plan
        if plan.compaction is None or run.first is not None or run.unfinished is not None:
            return False
        if run.has_loaded:
            await self._learn(run)
        offered = await aside(in_large_request(), partial(plan.offer, run.functions, forced=False))
        items = [*run.context, *run.assembler.output]
        return await is_long(plan, run.served, items, offered, run.functions, run.told)

    async def _compact(self, run: Run, generation: int) -> None:
        """Go on with a compaction: by one generation of the model, or to its end where it needs none."""
        replay = None if run.unfinished is None else Replay(run.unfinished)
        if not any(map(is_unfinished_compaction, run.assembler.output)):
            self._write(run, run.assembler.compaction_begun())
        assembler = run.assembler if replay is None else replay.assembler
        plan, items = run.plan, [*run.context, *assembler.output[:-1]]
        if assembler.compaction_seal is None:
            raise Diverged("The key that this response's compaction is sealed with is gone.")
        offered = await aside(in_large_request(), partial(plan.offer, run.functions, forced=False))
        part = await next_part(plan, run.served, items, offered, run.functions, run.progress)
        if not isinstance(part, Part):
            self._write(run, run.assembler.compacted(part))
            return
        assembler.summary_begins(part.content)
        request = plan.summary_request(run.served, part, offered, generation=generation)
        await self._ask(run, request, replay, generation, {"summarises": part.summarises})

    async def _ask(
        self,
        run: Run,
        request: GenerateRequest,
        replay: Replay | None,
        generation: int,
        facts: Mapping[str, Any],
    ) -> bool:
        """Have the engine generate, and journal what it says. replay: of what was journaled already. facts:
        what the generation's first record says besides. False where it is withheld (`_generate`)."""
        assembler = run.assembler if replay is None else replay.assembler
        output = assembler.output
        assembler.first_item = first_item = len(output)
        if replay is not None:
            request = replay.request(request)
            run.unlogged = Unlogged(generation, first_token=replay.num_tokens)
        else:
            said = {**facts, "asked": run.verdicts.get("input")}
            run.unlogged = Unlogged(generation, facts=await _facts(request, generation, first_item, said))
        if run.place is not None:
            run.place.bring(len(request.prompt_ids))
        asked = Asked(
            run.plan.model,
            run.served.engine,
            request,
            response_id=run.plan.response_id,
            conversation_id=run.plan.conversation_id,
            messages=lambda: to_messages([*run.context, *output], run.plan.lead, run.functions.names),
            answered=run.served.answered,
        )
        withholds = run.withholds and "summarises" not in facts  # nobody is shown the tokens of a summary
        produced: list[int] = []
        read: list[Chunk] = []  # all that is to be judged, where flagged generations are withheld
        held: list[Chunk] = []  # what of it waits for the verdict
        async with aclosing(self._telemetry.generate(asked, run.place)) as chunks:
            async for chunk in chunks:
                produced += chunk.token_ids
                read += [chunk] if withholds else []
                if run.unfinished is not None and replay is not None:
                    # Only a replay that is through: an earlier end would follow events that are not written.
                    if replay.take(chunk):
                        run.assembler, run.unfinished = replay.assembler, None
                elif withholds:
                    held.append(chunk)
                elif self._take(run, chunk, first_item):
                    self._write(run)
                    await self._journal.has_room(run.entry)
                    self._probation.look(run)
        run.generated = request, produced
        return not withholds or await self._show(run, read, held, first_item)

    async def _request(
        self,
        run: Run,
        generation: int,
        max_tokens: int | None,
        output: Sequence[Item],
        *,
        is_first: bool,
        begun: bool,
    ) -> tuple[GenerateRequest, int]:
        """What an engine is asked for one generation, and how many more of the oldest items it leaves out
        than the plan does. is_first: no answer came before it. begun: an earlier owner of the run has begun
        the generation. Raises PromptTooLong."""
        large, num_dropped = in_large_request(), 0
        offered = await aside(large, partial(run.plan.offer, run.functions, forced=is_first))
        if is_first and generation == 0 and not begun:
            prompt, num_dropped = await self._first_prompt(run, offered)
        else:
            items = [*run.context, *output]
            prompt = await run.plan.rendered(run.served, items, offered, run.functions, run.told)
        make = partial(run.plan.request, generation=generation, max_tokens=max_tokens)
        return await aside(large, make, run.served, prompt, offered), num_dropped

    # -- moderation ------------------------------------------------------------------------------------------

    async def _may_begin(self, run: Run) -> bool:
        """Whether a model may be asked, as far as a moderation of the input says: of all that the client has
        given until now, which is judged as it comes. What was flagged once stays so."""
        wanted = run.plan.moderation
        if wanted is None:
            return True
        before, output = run.verdicts.get("input"), run.assembler.output
        num_asked = len(output)
        text = asked_in(run.context if before is None else (), output[run.num_asked :])
        if before is None or text:
            verdict = await self._judge(run, text)
            run.verdicts["input"] = before if before is not None and before.get("flagged") else verdict
        run.num_asked = num_asked
        return not blocks(wanted["input"], run.verdicts["input"])

    async def _show(self, run: Run, chunks: Sequence[Chunk], held: Sequence[Chunk], first_item: int) -> bool:
        """Show what was held back of a generation, all of whose chunks are given, unless that is flagged."""
        text = "".join(
            delta.text
            for chunk in chunks
            for delta in chunk.deltas
            if isinstance(delta, Text | Reasoning | CallArgs)
        )
        verdict = run.verdicts["output"] = await self._judge(run, text)
        shown = not blocks("block", verdict)
        for chunk in held:
            if not shown:
                self._count(run, chunk)
            elif self._take(run, chunk, first_item):
                self._write(run)
                await self._journal.has_room(run.entry)
        return shown

    async def _judge_output(self, run: Run) -> None:
        """Have the whole output judged, unless that was one generation and is."""
        if run.plan.moderation is None or ("output" in run.verdicts and run.progress.answers < 2):
            return
        run.verdicts["output"] = await self._judge(run, said_in(run.assembler.output))

    async def _judge(self, run: Run, text: str) -> Verdict:
        """The verdict on a text, which counts as the run's owner's use."""
        if self._moderator is None:  # it was planned by a server that had one
            return unjudged("not_moderated", "No model for moderation is configured here.")
        plan = run.plan
        payer = Payer(plan.owner, key_id=plan.key_id, weight=plan.weight)
        [verdict] = await judged(self._moderator, [text], payer)
        return verdict

    async def _first_prompt(self, run: Run, offered: Offer) -> tuple[Prompt, int]:
        """The prompt of a run's first generation, where it was not made with the plan, and how many more of
        the oldest items it leaves out than the plan does."""
        output = run.assembler.output
        items = [*run.context, *output]
        num_dropped, prompt = await fit(
            run.plan, run.served, items, offered, run.functions, run.told, kept=len(output) + 1
        )
        if num_dropped:
            run.context, run.told = drop_oldest(run.context, num_dropped), None
        run.assembler.know(run.context)
        return prompt, num_dropped

    def _take(self, run: Run, chunk: Chunk, first_item: int) -> bool:
        """Take an engine chunk in; True when a record is to be made of what was taken since the last one."""
        self._count(run, chunk)
        unlogged, summarised = run.unlogged, run.assembler.is_summarising
        if not run.plan.generates:  # a token is drawn to have the prompt computed, and shown to nobody
            return False
        unlogged.logprobs.extend(chunk.logprobs)
        last = chunk.deltas[-1] if chunk.deltas else None
        if drafts := run.assembler.feed(chunk.deltas):
            unlogged.drafts += drafts
            # The end of the turn may be all that follows a call, and has no event: it joins that of the call.
            unlogged.complete = not isinstance(last, CallEnd)
        elif unlogged.drafts and last is not None:  # it is another call, which is shown once it is whole
            unlogged.complete = True
        if isinstance(last, Done):
            if run.assembler.is_summarising:  # and has to go on with that
                unlogged.facts["summary"] = run.assembler.summary
            elif not summarised:
                unlogged.drafts += run.assembler.ensure_output(first_item, last.reason)
            unlogged.facts["ended"] = last.reason
            unlogged.complete = True
        return unlogged.complete

    def _count(self, run: Run, chunk: Chunk) -> None:
        """Count the tokens of a chunk, but for the one that is drawn to have a prompt computed."""
        unlogged = run.unlogged
        if chunk.cached_tokens is not None and "generation" in unlogged.facts:
            unlogged.facts["cached_tokens"] = chunk.cached_tokens
            num_tokens = unlogged.facts["input_tokens"]
            if written := run.served.info.num_cache_writes(num_tokens, chunk.cached_tokens):
                unlogged.facts["cache_write_tokens"] = written
        if not run.plan.generates:
            return
        if chunk.reasoning_tokens:
            reasoning = unlogged.facts.get("reasoning_tokens", 0)
            unlogged.facts["reasoning_tokens"] = reasoning + chunk.reasoning_tokens
        unlogged.token_ids.extend(chunk.token_ids)

    async def _call_tools(self, run: Run) -> None:
        """Make the calls of a turn. Each is durable before it begins, and its outcome is written as soon as
        it is there; one that has to wait begins once the outcomes that it waited for are durable."""
        making: dict[str, asyncio.Task[None]] = {}
        try:
            while calls := steps.under_way(run.assembler.output):
                await self._journal.flushed(run.entry)
                new = [call for call in calls if call["id"] not in making]
                away = [call for call in new if self._elsewhere(run, call) is not None]
                if away:  # the others take no time
                    self._keep(run, KEPT_S)
                for call in away:
                    making[call["id"]] = asyncio.create_task(self._make_call(run, call))
                for call in new:
                    if call not in away:  # it might end this process
                        await self._probation.enter(run)
                        making[call["id"]] = asyncio.create_task(self._make_call(run, call))
                await asyncio.wait(making.values(), return_when=asyncio.FIRST_COMPLETED)
                going = {call["id"] for call in steps.under_way(run.assembler.output)}
                for call_id in [key for key, task in making.items() if task.done() or key not in going]:
                    await making.pop(call_id)
        finally:
            for task in making.values():
                task.cancel()
            await asyncio.gather(*making.values(), return_exceptions=True)

    async def _make_call(self, run: Run, call: Item) -> None:
        await self._finish_call(run, call, await self._outcome(run, call))

    async def _finish_call(self, run: Run, call: Item, result: ToolResult) -> None:
        """Journal the outcome of a call, and what the tool has changed with it."""
        stored = False
        try:
            if not run.entry.stored:
                await self._journal.apply(result.effects)
            self._write(run, run.assembler.call_finished(call["id"], result), effects=result.effects)
            if result.settle is not None:
                await self._journal.flushed(run.entry)
                stored = not run.entry.lost
        finally:
            if result.settle is not None:
                result.settle(stored)

    async def _outcome(self, run: Run, call: Item) -> ToolResult:
        """Run a call, or say why not: it may have run before a crash, or a limit is reached."""
        if call["id"] in run.begun and not self._repeatable(run, call):
            return ToolResult(error=self._execution(call).uncertain or UNCERTAIN)
        if source_of(call) is not None and not run.functions.allow(call):
            return ToolResult(error=f"There is no tool {call.get('name')!r} among those of this response.")
        if run.plan.charge is not None and (refusal := await self._limiter.tool_call(run.plan.charge)):
            return ToolResult(error=refusal)
        run.begun.add(call["id"])
        tracing, name = self._telemetry.tracing, call.get("name") or call["type"]
        if tracing is None:
            result = self._bounded(await self._carry_out(run, call))
        else:
            with tracing.tool(name, call["type"], call["id"], call.get("arguments", "")) as told:
                result = self._bounded(await self._carry_out(run, call))
                told(result.output, result.error)
        known = name if self._registry.get(name) is not None else call["type"]
        self._telemetry.tool_called(run.plan.model, known, "ok" if result.error is None else "error")
        if result.fault is not None:
            said = {"response_id": run.plan.response_id, "model": run.plan.model, "tool": name}
            words = (name, run.plan.response_id, result.fault)
            log.warning("tool %s failed in run %s: %s", *words, extra=said)
        counts = self._execution(call).counts
        counted = counts(result) if counts is not None and result.error is None else None
        if counted is not None:
            self._meter.add(used_by_tool(run.plan, *counted, now_us()))
        return result

    async def _carry_out(self, run: Run, call: Item) -> ToolResult:
        if (found := self._elsewhere(run, call)) is not None:
            elsewhere, reach = found
            return await elsewhere.run(call, reach)

        def show(event: str, fields: Mapping[str, Any]) -> None:
            self._write(run, run.assembler.call_shows(call["id"], event, fields))

        items = [*run.context, *run.assembler.output]
        plan, deferred = run.plan, run.functions.deferred
        of = (plan.owner, plan.key_id, plan.created_at)
        scene = Scene(plan.tools, plan.lead_text, items, deferred, *of, show)
        return await self._execution(call).run(call, self._registry, scene)

    def _repeatable(self, run: Run, call: Item) -> bool:
        if (found := self._elsewhere(run, call)) is not None:
            elsewhere, reach = found
            return elsewhere.repeatable(call, reach)
        return self._execution(call).repeatable(call, self._registry)

    def _cut_short(self, run: Run, call: Item) -> ToolResult:
        """What is told of a call that has no outcome when its run ends."""
        if call["id"] not in run.begun:
            return UNMADE
        result = ToolResult(error="The response ended before the tool did.", uncertain=True)
        return with_doubt(result, repeatable=self._repeatable(run, call))

    def _elsewhere(self, run: Run, call: Item) -> tuple[Elsewhere, Reach] | None:
        """How a call of another server is carried out, and what reaches it; None for a call of this one."""
        elsewhere = self._execution(call).elsewhere
        if elsewhere is None or run.reach is None or not elsewhere.holds(call, run.reach):
            return None
        return elsewhere, run.reach

    def _execution(self, call: Item) -> Execution:
        execution = execution_of(call)
        assert execution is not None, "the plan's steps run calls that this server carries out"
        return execution

    def _bounded(self, result: ToolResult) -> ToolResult:
        """What a tool said, unless that is larger than the operator takes."""
        most, num_bytes = self._max_output_bytes, len((result.output or "").encode())
        if most is None or num_bytes <= most:
            return result
        error = f"The output has {num_bytes} bytes; at most {most} are taken."
        return replace(result, output=None, error=error, fault=error)

    def _keep(self, run: Run, seconds: float) -> None:
        """Ask the engine not to forget what it computed of a run that waits for at most so long."""
        if run.generated is not None:
            run.served.engine.keep(run.plan.response_id, *run.generated, seconds)

    def _park(self, run: Run) -> None:
        self._keep(run, run.plan.tool_timeout_s)
        run.stepping = False
        at = now_us()
        told = waiting_notice(run.plan.response_id, run.entry.fence, at) if run.plan.background else None
        park = Park(int(run.plan.tool_timeout_s * 1e6), at, told)
        self._journal.write(run.entry, [], park=park)

    # -- writing ---------------------------------------------------------------------------------------------

    def _write(self, run: Run, drafts: Sequence[Draft] = (), **fields: Any) -> None:
        """Journal what was not yet logged, and drafts, with the items that they close."""
        held, tokens = run.take_unlogged()
        self._journal.write(run.entry, [*held, *drafts], tokens=tokens, closed=self._closed(run), **fields)

    def _closed(self, run: Run) -> list[ClosedItem]:
        """The items that have closed since the last record; calls among them that a client answers count."""
        closed = [ClosedItem(index, new_item(item)) for index, item in run.assembler.take_closed()]
        for each in closed:
            if each.item.name is not None:
                self._telemetry.tool_called(run.plan.model, "client", "asked")
        return closed

    def started(self, run: Run) -> None:
        """A queued run begins."""
        head = run.head("in_progress")
        run.queued = False
        draft = {"type": "response.in_progress", "response": {**head, "output": []}}
        self._write(run, [draft], head=orjson.dumps(head), status="in_progress")

    def resumed(self, run: Run) -> None:
        """A run whose owner ended while it made it goes on here: its response tells of that from now on."""
        self._journal.write(run.entry, [], head=orjson.dumps(run.head("in_progress")))

    def received(self, run: Run, outputs: Sequence[Item]) -> None:
        """Outputs that a client fed to the run appear in its stream."""
        if outputs:
            self._write(run, [draft for item in outputs for draft in run.assembler.output_received(item)])

    def cancel(self, run: Run) -> None:
        """End a run because somebody wants it ended."""
        self._end(run, "cancelled")

    def fail(
        self, run: Run, message: str, *, code: str = "server_error", keep: bool = True,
        retry_after: int | None = None, why: ApiError | None = None,
    ) -> None:  # fmt: skip
        """End a run that cannot go on. `keep` False: the items closed by this end cannot be stored.
        retry_after: seconds after which the same request may succeed, if it may. why: the same as an HTTP
        error, where it has a status of its own."""
        run.failure = why
        error: dict[str, Any] = {"code": code, "message": message}
        if retry_after is not None:
            error["retry_after"] = retry_after
        self._end(run, "failed", error=error, keep=keep)

    def _end(
        self, run: Run, status: str, *, reason: str | None = None, message: str | None = None,
        error: dict[str, Any] | None = None, keep: bool = True,
    ) -> None:  # fmt: skip
        """Write the terminal event; whatever is open is closed first."""
        run.stepping, run.ended = False, True
        if run.plan.tools:  # it may have waited for some, perhaps in the care of an earlier task
            run.served.engine.let_go(run.plan.response_id)
        ended_at = now_us()
        drafts, tokens = run.take_unlogged()
        drafts += run.assembler.interrupt(partial(self._cut_short, run))
        head = run.head(
            status,
            completed_at=ended_at // 1_000_000 if status == "completed" else None,
            error=error,
            reason=reason,
            message=message,
            usage=run.progress.usage(),
        )
        if run.plan.tells_messages and status in ("completed", "incomplete"):
            names = run.functions.names
            head["input_messages"] = to_messages(run.context, run.plan.lead, names)
            head["output_messages"] = to_messages(run.assembler.output, None, names)
        drafts.append({"type": f"response.{status}", "response": {**head, "output": run.assembler.output}})
        append = run.plan.conversation_id is not None and status in ("completed", "incomplete")
        used = spent(run.plan, run.progress, ended_at)
        if used is not None and not run.entry.fence:  # no transaction tells of this end
            self._meter.add(used)
        finish = Finish(status, ended_at, append, spent=used)
        if append and not run.plan.store:  # the conversation is the only store that these items have
            inputs, outputs = tuple(map(new_item, run.input)), tuple(map(new_item, run.assembler.output))
            finish = replace(finish, inputs=inputs, outputs=outputs)
        if run.plan.secrets is not None:
            finish = replace(finish, plan=replace(run.plan, secrets=None).dump())
        if run.plan.background:
            finish = replace(finish, notice=notice(run.plan.response_id, status, ended_at))
        self._journal.write(
            run.entry,
            drafts,
            tokens=tokens,
            closed=self._closed(run) if keep else (),
            head=orjson.dumps(head),
            finish=finish,
        )
        self._tell(run, status, reason, error, (ended_at - run.plan.created_at) / 1e6)

    def end_unread(
        self, stored: StoredResponse, entry: RunLog, made: Assembler, error: dict[str, Any] | None
    ) -> None:
        """End a run whose plan cannot be read, so that nobody can say what it has used. made: its output.
        error: None where it is cancelled."""
        status, ended_at = "cancelled" if error is None else "failed", now_us()
        head = {**orjson.loads(stored.head), "status": status, "error": error}
        drafts = made.interrupt(lambda call: ToolResult(error=UNCERTAIN))
        drafts.append({"type": f"response.{status}", "response": {**head, "output": made.output}})
        closed = [ClosedItem(index, new_item(item)) for index, item in made.take_closed()]
        finish = Finish(status, ended_at, append=False, plan=without_secrets(stored.plan))
        if stored.background:
            finish = replace(finish, notice=notice(stored.id, status, ended_at))
        self._journal.write(entry, drafts, closed=closed, head=orjson.dumps(head), finish=finish)
        self._telemetry.run_ended(stored.model, status, (ended_at - stored.created_at) / 1e6)
        if error is not None:
            self._telemetry.error(error["code"])
        log.error("run %s, which cannot be restored, is %s", stored.id, status)

    def _tell(
        self, run: Run, status: str, reason: str | None, error: dict[str, Any] | None, seconds: float
    ) -> None:
        """Count a run that has ended, and log it."""
        plan, progress = run.plan, run.progress
        self._telemetry.run_ended(plan.model, status, seconds)
        if error is not None:
            self._telemetry.error(error["code"])
        said = {
            "response_id": plan.response_id,
            "owner": plan.owner,
            "model": plan.model,
            "safety_identifier": plan.end_user,
            "status": status,
            "finish_reason": reason or progress.ended,
            "cancel_reason": run.cancel_reason if status == "cancelled" else None,
            "error_code": None if error is None else error["code"],
            "prompt_tokens": progress.input_tokens,
            "cached_tokens": progress.cached_tokens,
            "output_tokens": progress.output_tokens,
            "duration_ms": round(seconds * 1000, 3),
        }
        words = (plan.response_id, status, progress.input_tokens, progress.output_tokens, seconds * 1000)
        log.info("run %s %s: %d prompt tokens, %d output tokens, %.0f ms", *words, extra=said)


async def _facts(
    request: GenerateRequest, generation: int, first_item: int, others: Mapping[str, Any]
) -> dict[str, Any]:
    """What the first record of a generation says of it. others: what else there is to say, if it is."""
    facts: dict[str, Any] = {"generation": generation, "first_item": first_item}
    facts |= {"input_tokens": len(request.prompt_ids), "cached_tokens": 0}
    facts |= {name: value for name, value in others.items() if value}
    long = len(request.prompt_ids) > THREADED_TOKENS
    return {**facts, "prompt": await aside(long, fingerprint, request.prompt_ids)}


def _code(failure: EngineError) -> str:
    """The official code (`ResponseErrorCode`) of an engine error."""
    return "invalid_prompt" if isinstance(failure, RequestError) else "server_error"
