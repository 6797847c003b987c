"""Runs the engine thread: handle commands, schedule, forward, draw, deliver; sleep when nothing is to do.

It also ends sequences by their tokens (stop ids, limits, grammars), and turns an exception that belongs to
one sequence into that sequence's error.

On a GPU the next forward can be launched before the host has read the tokens just drawn (`_launch_ahead`):
the draw is then read and booked while that in-flight step runs. This is done where the step needs nothing but
those tokens. A sequence that turns out to have ended has computed one token in vain.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.core.batch_state import Rows
from engine.core.determinism_check import prove
from engine.core.draft_model import open_assistant
from engine.core.kv_cache import BlockHasher, KVCache
from engine.core.messages import (
    Abort,
    Call,
    Close,
    Command,
    Credit,
    Forget,
    Inbox,
    Keep,
    LetGo,
    Save,
    Submit,
    Update,
)
from engine.core.scheduler import Batch, Scheduler
from engine.core.sequences import Sequence
from engine.core.speculation import ROOM, Drafter, Lookup, Speculation
from engine.core.tier_opening import NO_TIER, OpenedTier, open_tier
from engine.core.token_masks import ask_masks, make_masks, see_taken, take_drawn
from engine.executor import NO_TOKEN, Forwarded, PoolSizes, Runner, StepResult, size_pools
from engine.failures import of_device, without
from engine.kernels import set_threads
from engine.models import ModelSpec, load_model
from engine.step import Ints, RowLogprobs, RowOutput, StepPlan
from engine.structured.isolation import Move
from engine.types import (
    DeadlineExceeded,
    Done,
    EngineError,
    GenerateRequest,
    LoadError,
    RequestError,
    RequestFailed,
    SamplingParams,
    TierStats,
    Timing,
    readable_size,
)

if TYPE_CHECKING:
    from engine.config import EngineConfig

log = logging.getLogger("antiphon.engine")

Deliver = Callable[[list[RowOutput]], None]
Begin = Callable[[list[int]], None]
"""Told the handles of those whose first step is about to be computed."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A decode step whose forward runs already: logits of these sequences, in this order."""

    sequences: list[Sequence]
    slots: Ints
    forwarded: Forwarded


@dataclass(frozen=True, slots=True)
class Computed:
    """A batch whose draws are appended and not yet booked.

    `scored` are indices of sequences whose prompt was. Of those that drew, `drawing`: how many tokens each
    had (`known`), and how many it got (`added`). `failed`: draws that are none, and why.
    """

    batch: Batch
    plan: StepPlan
    scored: list[int]
    drawing: list[Sequence]
    result: StepResult
    failed: dict[int, EngineError]
    known: list[int]
    added: Ints


@dataclass(frozen=True, slots=True)
class Unsettled:
    """What one sequence drew in a step, until its grammar says how much of it counts.

    It had `num_tokens`; `drawn` says where its draws are among `ids`, the step's. `broken`: the model
    computed NaN for one of them, be it its last one or one after a rejected draft.
    """

    sequence: Sequence
    num_tokens: int
    ids: list[int]
    drawn: range
    part: Computed
    broken: bool
    move: Move | None

    @property
    def is_late(self) -> bool:
        """Whether the grammar has not said so yet."""
        return self.move is not None and not (self.move.booked or self.move.done)


_PROBE = GenerateRequest(
    id="", prompt_ids=(0,), sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0)
)


class EngineLoop:
    """One engine's step loop; all of it runs on the engine thread, but others may hold `lock` to read."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        inbox: Inbox,
        deliver: Deliver,
        begin: Begin = lambda handles: None,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        max_num_seqs: int,
        speculation: Speculation,
        tier: OpenedTier = NO_TIER,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tiering, self._untiered = tier.tiering, tier.untiered
        self.lock = threading.Lock()  # held while the books change, never during a forward
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self._inbox = inbox
        self._deliver = deliver
        self._begin = begin
        self._eos = frozenset(eos_token_ids)
        self._speculation = speculation
        self._closed = False
        self._in_flight: InFlightStep | None = None
        self._mask_width = -(-runner.vocab_size // 32)
        self._unsettled: list[Unsettled] = []

    def tier_stats(self) -> TierStats:
        """How it stands with saved KV; from any thread."""
        return self._untiered if self.tiering is None else self.tiering.stats()

    @property
    def spec(self) -> ModelSpec:
        return self.runner.model.spec

    def run(self) -> None:
        """Step until told to close; raises whatever a step raises."""
        with torch.inference_mode():
            while self.handle_commands():
                if not self.step():
                    self.runner.progress.at = None
                    self._wait()

    def step(self) -> bool:
        """One step; False when nothing could be computed.

        An exception that belongs to one sequence ends that sequence alone. Where an exception does not tell
        which sequence caused it, the batch is computed again in halves, until the culprit stands alone. A
        step can be repeated because nothing is booked before its draw. Raises what keeps the engine from
        computing anything.
        """
        began = time.perf_counter()
        outputs: list[RowOutput] = []
        batch, forwarded = self._next_batch(outputs)
        if begun := self.scheduler.take_begun():
            self._begin(begun)
        if batch is not None:
            self.runner.progress.at = time.monotonic()
            self._compute_and_settle(batch, forwarded, began, outputs)
        if outputs:
            self._deliver(outputs)
        return batch is not None

    def _next_batch(self, outputs: list[RowOutput]) -> tuple[Batch | None, Forwarded | None]:
        """What the next step computes, if anything, and its logits where it was launched ahead."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            self._speculation.propose(self.scheduler.running)
        with self.lock:
            self.scheduler.give_up_late_loads(time.monotonic())
            for sequence in self.scheduler.expired(time.monotonic()):
                self.scheduler.finish(sequence)
                outputs.append(RowOutput(sequence.handle, error=DeadlineExceeded("the deadline passed")))
            unsettled, self._unsettled = self._unsettled, []
            for each in unsettled:
                self._settle_row(each, outputs)
            if in_flight is not None:
                with without("going on from a step launched ahead"):
                    batch, forwarded = self._collect(in_flight)
                    if forwarded is not None:
                        return batch, forwarded
            return self._schedule(outputs), None

    def _compute_and_settle(
        self, batch: Batch, forwarded: Forwarded | None, began: float, outputs: list[RowOutput]
    ) -> None:
        """Compute and draw a batch, and book what came of it; `began`: when the step did."""
        spans = None if self.tiering is None or forwarded is not None else self._prompt_spans(batch)
        parts, failed = self._compute(batch, forwarded)
        counters = self.scheduler.counters
        with self.lock:
            counters.prefilling = batch.num_prefills
            counters.decoding = len(batch.sequences) - batch.num_prefills
            for sequence, error in failed:
                self._fail(sequence, error, outputs)
            for part in parts:
                self._settle(part, outputs)
            seconds = time.perf_counter() - began
            self.scheduler.took(batch, seconds)
            if self.tiering is not None and spans and len(parts) == 1:
                beside = 0.0 if batch.num_beside is None else self.scheduler.pace.plain_s
                self.tiering.computed(spans, seconds - beside)
        if not parts:
            self._probe_device()

    def _prompt_spans(self, batch: Batch) -> list[tuple[int, int]]:
        """From which position to which a batch computes prompts, or what was preempted."""
        starts = self.scheduler.rows.num_computed[batch.slots].tolist()
        return [
            (start, start + count)
            for sequence, start, count in zip(batch.sequences, starts, batch.counts.tolist(), strict=True)
            if sequence.began is None
        ]

    def _schedule(self, outputs: list[RowOutput]) -> Batch | None:
        """The next batch. A sequence that cannot be scheduled is ended, and the others are scheduled anew."""
        while True:
            try:
                return self.scheduler.schedule()
            except Exception as error:
                culprit = self.scheduler.considered
                if culprit is None or self.scheduler.find(culprit.handle) is None or of_device(error):
                    raise
                self._fail(culprit, error, outputs)

    def _compute(
        self, batch: Batch, forwarded: Forwarded | None
    ) -> tuple[list[Computed], list[tuple[Sequence, Exception]]]:
        """Compute and draw a batch. Returns its parts, which are several where something raised, and the
        sequences that failed, each with what was raised for it."""
        try:
            return [self._draw(batch, forwarded)], []
        except Exception as error:
            self._in_flight = None
            if of_device(error):
                raise
            if len(batch.sequences) == 1:
                return [], [(batch.sequences[0], error)]
        parts: list[Computed] = []
        failed: list[tuple[Sequence, Exception]] = []
        for half in batch.halves():
            computed, broken = self._compute(half, None)
            parts += computed
            failed += broken
        return parts, failed

    def _draw(self, batch: Batch, forwarded: Forwarded | None) -> Computed:
        """Compute a batch unless that was done already, draw, and append what was drawn."""
        rows = self.scheduler.rows
        wanted = [
            (i, sequence.request.sampling.prompt_logprobs or 0)
            for i, sequence in enumerate(batch.sequences)
            if sequence.wants_prompt_logprobs
        ]
        plan = rows.plan(self.scheduler.kv, batch.slots, batch.counts, wanted)
        drawing = [batch.sequences[i] for i in np.flatnonzero(plan.num_draws)]
        constrained = any(sequence.matcher is not None for sequence in drawing)
        draws, slots = plan.num_draws[plan.num_draws > 0], batch.slots[plan.num_draws > 0]
        if constrained:  # masks are made in a process of their own while the model runs
            ask_masks(drawing, draws.tolist(), rows, self._wake)
        if forwarded is None:
            forwarded = self.runner.forward(plan)
        mask_rows, masks, unmasked, late = make_masks(drawing, draws.tolist(), self._mask_width, rows)
        if self.runner.launcher is None:
            result = self.runner.draw(forwarded, plan, mask_rows, masks)
        else:
            launched = self.runner.launch_draw(forwarded, plan, mask_rows, masks)
            with without("launching a step ahead"):
                self._in_flight = None if late else self._launch_ahead(batch, plan)
            result = self.runner.fetch(launched)
        failed = _draw_failures(drawing, draws, result) | unmasked
        with self.lock:
            known = rows.num_tokens[slots].tolist()
            added = _append(rows, slots, result.ids, draws, late)
        return Computed(batch, plan, [i for i, _ in wanted], drawing, result, failed, known, added)

    def _probe_device(self) -> None:
        """Compute one token that no request asked for, after a batch in which every sequence failed.

        Raises what keeps the device from computing anything; if nothing does, the sequences were to blame.
        """
        rows, kv = self.scheduler.rows, self.scheduler.kv
        none, no_masks = np.zeros(0, np.int64), np.zeros((0, self._mask_width), np.int32)
        with self.lock:
            if not rows.num_free:  # those that run will show it
                return
            slot = rows.take(_PROBE, np.zeros(1, np.int32), 0, none, constrained=False)
            try:
                if kv.grow(slot, 1):
                    plan = rows.plan(kv, np.array([slot]), np.array([1]))
                    self.runner.draw(self.runner.forward(plan), plan, none, no_masks)
            finally:
                kv.release(slot)
                rows.give_back(slot)

    def _fail(self, sequence: Sequence, error: Exception, outputs: list[RowOutput]) -> None:
        """End one sequence by what was raised for it."""
        log.error("request %s failed, and no other", sequence.request.id, exc_info=error)
        if self.scheduler.find(sequence.handle) is sequence:
            blocks = self.scheduler.finish(sequence, forget=True)
            if blocks:  # they may hold NaN, which must not reach their next owner
                self.runner.clear(blocks)
        outputs.append(RowOutput(sequence.handle, error=_failure(error)))

    def _launch_ahead(self, batch: Batch, plan: StepPlan) -> InFlightStep | None:
        """Launch the next step's forward before this step's draws are read, if those draws are all that the
        next step still lacks.

        That is so where every running sequence decodes, none could be admitted, blocks are at hand and no
        drafts are to be expected. The next step leaves out sequences that this one ends by their length, or
        that wait for their consumers.
        """
        scheduler, rows = self.scheduler, self.scheduler.rows
        with self.lock:
            num_ready = sum(sequence.credit > 0 for sequence in scheduler.running)
            if len(batch.sequences) < num_ready:
                return None
            if scheduler.waiting and (rows.num_free or scheduler.lender() is not None):
                return None
            if any(sequence.slow for sequence in batch.sequences):
                return None
            if (plan.num_draws != 1).any() or len(plan.prompt_targets):
                return None
            lengths = (rows.num_tokens[batch.slots] + 1).tolist()
            going = [
                i
                for i, (sequence, length) in enumerate(zip(batch.sequences, lengths, strict=True))
                if length < sequence.limit and sequence.credit > 1
            ]
            sequences, slots = [batch.sequences[i] for i in going], batch.slots[going]
            if not going or not self._speculation.rests(sequences):
                return None
            for i in going:
                if not scheduler.kv.grow(int(batch.slots[i]), lengths[i]):
                    return None
            plan_ahead = rows.plan_ahead(scheduler.kv, slots, np.array(going))
        return InFlightStep(sequences, slots, self.runner.forward(plan_ahead))

    def _collect(self, step: InFlightStep) -> tuple[Batch | None, Forwarded | None]:
        """The batch of an in-flight step's sequences that go on, and their logits; None where none does."""
        left = [i for i, sequence in enumerate(step.sequences) if sequence.slot == step.slots[i]]
        if not left:
            return None, None
        batch = self.scheduler.decode([step.sequences[i] for i in left])
        if len(left) == len(step.sequences):
            return batch, step.forwarded
        return batch, self.runner.narrow(step.forwarded, left)

    # -- commands --------------------------------------------------------------------------------------------

    def _handle_command(self, command: Command) -> None:
        with self.lock:
            if isinstance(command, Credit):
                self.scheduler.credit(command.handle, command.num_tokens)
            elif isinstance(command, Submit):
                self._add(command)
            elif isinstance(command, Abort):
                sequence = self.scheduler.find(command.handle)
                if sequence is not None:
                    self.scheduler.finish(sequence)
            elif isinstance(command, Keep):
                with without("keeping KV for later"):
                    self.scheduler.keep(command)
            elif isinstance(command, LetGo):
                self.scheduler.kv.let_go(command.name)
            elif isinstance(command, Save):
                with without("saving KV on disk"):
                    self.scheduler.save(command)
            elif isinstance(command, Forget):
                self.scheduler.forget(command)
            elif isinstance(command, Update):
                with without("moving KV to or from disk"):
                    command.function()
            elif isinstance(command, Close):
                self._closed = True
        if isinstance(command, Call):
            command.function()

    def _add(self, submit: Submit) -> None:
        try:
            self.scheduler.add(submit)
        except Exception as error:
            log.exception("request %s could not be queued", submit.request.id)
            self._deliver([RowOutput(submit.handle, error=_failure(error))])

    def handle_commands(self) -> bool:
        """Handle the commands that have gathered; False once closed."""
        while not self._inbox.empty():
            self._handle_command(self._inbox.get())
        return not self._closed

    def _wake(self) -> None:
        """End a `_wait`, from any thread."""
        self._inbox.put(Call(lambda: None))

    def _wait(self) -> None:
        """Sleep until a command comes or a deadline passes."""
        deadline = self.scheduler.next_deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        with suppress(Empty):
            self._handle_command(self._inbox.get(timeout=timeout))

    # -- a step's parts --------------------------------------------------------------------------------------

    def _settle(self, part: Computed, outputs: list[RowOutput]) -> None:
        """Book what a step computed and drew."""
        scheduler, batch, plan, result = self.scheduler, part.batch, part.plan, part.result
        at = 0
        for i, count in zip(part.scored, plan.prompt_counts, strict=True):
            batch.sequences[i].prompt_logprobs += result.prompt_logprobs[at : at + count]
            at += count
        draws, slots = plan.num_draws[plan.num_draws > 0], batch.slots[plan.num_draws > 0]
        ids, first = result.ids.tolist(), 0
        parts = list(zip(part.drawing, part.known, draws.tolist(), part.added.tolist(), strict=True))
        moves = self._take_drawn(parts, ids, part.failed)
        rejected = np.zeros_like(batch.counts)
        rejected[plan.num_draws > 0] = draws - part.added
        for sequence, error in scheduler.computed(batch, rejected):
            self._fail(sequence, error, outputs)
        if len(result.ids) > len(part.drawing):
            drew = part.added > 0
            drafted, accepted = draws[drew] - 1, part.added[drew] - 1
            scheduler.counters.drafts += int(drafted.sum())
            scheduler.counters.drafts_accepted += int(accepted.sum())
            with without("learning which drafts were accepted"):
                self._speculation.learn(slots[drew], drafted, accepted)
        if moves:
            see_taken(part.drawing)
        for sequence, num_tokens, num_draws, num_added in parts:
            drawn, end = range(first, first + num_added), first + num_draws
            if drawn:
                broken = not part.failed.keys().isdisjoint(range(first, end))
                move = moves.get(sequence.handle)
                row = Unsettled(sequence, num_tokens, ids, drawn, part, broken, move)
                self._settle_row(row, outputs)
            first = end

    def _settle_row(self, row: Unsettled, outputs: list[RowOutput]) -> None:
        """Book what one sequence drew, later if its grammar is late."""
        sequence = row.sequence
        if self.scheduler.find(sequence.handle) is not sequence:  # it has ended already
            return
        sequence.unsettled = row.is_late
        if row.is_late:
            self._unsettled.append(row)
            return
        try:
            output = self._output(sequence, row.num_tokens, row.ids, row.drawn, row.part, row.move)
            self._book(sequence, output, row.broken)
            outputs.append(output)
        except Exception as error:
            if of_device(error):
                raise
            self._fail(sequence, error, outputs)

    def _take_drawn(
        self, parts: list[tuple[Sequence, int, int, int]], ids: list[int], failed: dict[int, EngineError]
    ) -> dict[int, Move]:
        """Have grammars take what was drawn; what will come of it, by handle. Where that raises, they all
        fail."""
        drawn = list(self._under_grammars(parts, ids, failed))
        try:
            return take_drawn(drawn, self._wake)
        except Exception as error:
            if of_device(error):
                raise
            log.exception("no grammar could be told what was drawn")
            return {
                sequence.handle: Move(sequence.matcher, done=True, error=_failure(error))
                for sequence, _, _ in drawn
                if sequence.matcher is not None
            }

    def _book(self, sequence: Sequence, output: RowOutput, broken: bool) -> None:
        """Let a sequence go that has ended; `broken`: see `Unsettled`."""
        blocks: list[list[int]] = []
        ended = output.error is not None or output.finish is not None
        if ended:
            blocks = self.scheduler.finish(sequence, forget=broken)
        elif broken:  # by a draft that was rejected
            blocks = self.scheduler.preempt(sequence, forget=True)
        if broken:  # what is in the cache must not reach the next token, or the next owner, as NaN
            self.runner.clear(blocks)

    def _under_grammars(
        self, parts: list[tuple[Sequence, int, int, int]], ids: list[int], failed: dict[int, EngineError]
    ) -> Iterator[tuple[Sequence, list[int], bool]]:
        """Sequences that have a grammar, the drawn tokens it is to take, and whether they go on without a
        draft, as far as is known."""
        first = 0
        for sequence, num_tokens, num_draws, num_added in parts:
            if sequence.matcher is not None and self.scheduler.find(sequence.handle) is sequence:
                token_ids: list[int] = []
                for row in range(first, first + min(num_added, sequence.limit - num_tokens)):
                    if row in failed or ids[row] in sequence.stop_ids:
                        break
                    token_ids.append(ids[row])
                if token_ids:
                    ends = num_tokens + len(token_ids) >= sequence.limit
                    yield sequence, token_ids, num_draws == 1 and not ends
            first += num_draws

    def _output(
        self,
        sequence: Sequence,
        num_tokens: int,
        ids: list[int],
        drawn: range,
        part: Computed,
        move: Move | None,
    ) -> RowOutput:
        """What its draws mean for a sequence of `num_tokens`; `drawn` says where they are among `ids`."""
        cached = prompt_logprobs = finish = failure = timing = None
        if not sequence.first_sent:
            now = time.perf_counter()
            timing = Timing(sequence.started - sequence.submitted, now - sequence.started)
            if sequence.wants_prompt_logprobs:
                prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.first_sent = True
            cached = sequence.cached_tokens
        token_ids: list[int] = []
        for row in drawn:
            num_tokens += 1
            failure = part.failed.get(row)
            if failure is None:
                finish = self._end(sequence, ids[row], num_tokens)
            if failure is None and finish is None and move is not None:
                at = row - drawn.start
                if move.error is not None and at >= move.taken:
                    failure = move.error
                elif move.matcher.stopped and at + 1 == move.taken:
                    finish = Done("stop")
            if failure is not None:
                break
            if finish is None and num_tokens >= sequence.limit:
                finish = Done("length")
            if num_tokens <= sequence.limit:  # else max_tokens is 0: the prompt alone was wanted
                token_ids.append(ids[row])
            if finish is not None:
                break
        sequence.credit -= len(token_ids)
        self.scheduler.counters.output_tokens += len(token_ids)
        logprobs: tuple[RowLogprobs, ...] = ()
        if drawn.start in part.result.logprobs:
            logprobs = tuple(part.result.logprobs[row] for row in drawn[: len(token_ids)])
        return RowOutput(
            sequence.handle, tuple(token_ids), finish, logprobs, failure, cached, prompt_logprobs, timing
        )

    def _end(self, sequence: Sequence, token: int, num_tokens: int) -> Done | None:
        """How a token ends a sequence that it need not be shown to a grammar for."""
        if num_tokens > sequence.limit:
            return Done("length")
        if token in sequence.stop_ids:
            ends_turn = token in self._eos and not (
                sequence.request.sampling.ignore_eos and sequence.matcher is None
            )
            return Done("stop", None if ends_turn else token)
        return None


def _append(rows: Rows, slots: Ints, ids: Ints, draws: Ints, late: list[int]) -> Ints:
    """Add what was drawn, as `Rows.append` does, except for these, whose masks were not there."""
    if not late:
        return rows.append(slots, ids, draws)
    kept = np.ones(len(slots), np.bool_)
    kept[late] = False
    added = np.zeros(len(slots), np.int64)
    if kept.any():
        added[kept] = rows.append(slots[kept], ids[np.repeat(kept, draws)], draws[kept])
    return added


def _draw_failures(drawing: list[Sequence], draws: Ints, result: StepResult) -> dict[int, EngineError]:
    """Why rows have no token, by row: where banned words have left none, the request asks for too much."""
    if not result.failed:
        return {}
    banning = np.repeat([sequence.banned is not None for sequence in drawing], draws)
    return {
        row: RequestError(why, param="bad_words") if why is NO_TOKEN and banning[row] else RequestFailed(why)
        for row, why in result.failed.items()
    }


def _failure(error: Exception) -> RequestFailed:
    failure = RequestFailed(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def build_loop(
    config: EngineConfig,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    inbox: Inbox,
    deliver: Deliver,
    begin: Begin = lambda handles: None,
) -> EngineLoop:
    """Load the models and allocate their KV, on the calling thread; `config` names them by their folders.

    Raises LoadError, or what torch raises.
    """
    if config.num_threads is not None:
        set_threads(config.num_threads)
    # every sequence that decodes has its token in every step, and one that prefills at least one
    config = replace(config, max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens))
    runner, sizes = _open_runner(config, vocab_size)
    model = runner.model
    kv = KVCache(model.spec.groups, sizes.num_blocks, config.block_size, config.max_num_seqs, sizes.max_len)
    rows = Rows(config.max_num_seqs, sizes.max_len)
    if config.deterministic:
        prove(runner, kv, rows)
    adapters = model.spec.adapters
    drafter: Drafter = Lookup(config.max_ngram_size)
    if config.draft_model is not None:
        drafter = open_assistant(config, runner, rows, max_model_len=sizes.max_len)
    # Behind all that may fail: it begins threads, which `build_loop` leaves to whoever has the loop.
    opened = open_tier(config, runner, kv, rows, tell=lambda function: inbox.put(Update(function)))
    scheduler = Scheduler(
        kv,
        rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizes.max_len,
        max_undelivered=config.max_undelivered,
        eos_token_ids=eos_token_ids,
        adapters={name: number for number, (name, _) in enumerate(adapters, 1)},
        prefix_caching=config.prefix_caching,
        hasher=BlockHasher(config.block_size, secret=opened.secret, adapters=dict(adapters)),
        tiering=opened.tiering,
    )
    return EngineLoop(
        runner,
        scheduler,
        inbox,
        deliver,
        begin,
        eos_token_ids=eos_token_ids,
        max_model_len=sizes.max_len,
        max_num_seqs=config.max_num_seqs,
        speculation=Speculation(
            rows,
            drafter,
            num_assistant_tokens=config.num_assistant_tokens,
            room=ROOM[runner.device.type],
        ),
        tier=opened,
    )


@torch.inference_mode()
def _open_runner(config: EngineConfig, vocab_size: int) -> tuple[Runner, PoolSizes]:
    """The model on its device, and the KV pools that it got there."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise LoadError(
            f"device cuda: torch {torch.__version__} finds no GPU that it can use; device cpu works"
        )
    device = torch.device(name)
    model = load_model(config, device)
    sizes = size_pools(model, config, device)
    num_ids = min(vocab_size, model.spec.vocab_size)
    runner = Runner(model, config, sizes, vocab_size=num_ids, device=device)
    log.info(
        "the KV cache may take %s, for %d tokens; %s now, the rest as it comes into use",
        readable_size(runner.kv_bytes),
        sizes.num_blocks[0] * config.block_size,
        readable_size(runner.kv_taken),
    )
    if sizes.shortened:
        log.warning("%s", sizes.shortened)
    return runner, sizes
