"""The engine thread: take commands, schedule, forward, draw, deliver; sleep when there is nothing to do.

Owns: the order of a step, token-level ends, and turning one row's failure into that row's error. Refuses to
know: asyncio (it is handed a function to deliver to), text, devices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine import exact
from engine.blocks import KVCache
from engine.inbox import Abort, Call, Close, Command, Credit, Inbox, RowLogprobs, RowOutput, Submit
from engine.models import ModelSpec, load_model
from engine.rows import Rows, StepPlan
from engine.runner import Runner, StepResult, size_pools
from engine.scheduler import Batch, Scheduler, Sequence
from engine.types import DeadlineExceeded, Done, RequestFailed

if TYPE_CHECKING:
    from pathlib import Path

    from engine.settings import EngineSettings

Deliver = Callable[[list[RowOutput]], None]


class EngineLoop:
    """One engine's step loop; all of it runs on the engine thread, but others may hold `lock` to read."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        inbox: Inbox,
        deliver: Deliver,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        max_num_seqs: int,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.lock = threading.Lock()  # held while the books change, never during a forward
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self._inbox = inbox
        self._deliver = deliver
        self._eos = frozenset(eos_token_ids)
        self._closed = False
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-masks")

    @property
    def spec(self) -> ModelSpec:
        return self.runner.model.spec

    def run(self) -> None:
        """Step until told to close; raises whatever a step raises."""
        with torch.inference_mode(), self._beside:
            while self._obey_all():
                if not self.step():
                    self.runner.progress.at = None
                    self._wait()

    def step(self) -> bool:
        """One step; False when nothing could be computed."""
        outputs: list[RowOutput] = []
        with self.lock:
            for sequence in self.scheduler.expired(time.monotonic()):
                self.scheduler.finish(sequence)
                outputs.append(RowOutput(sequence.handle, error=DeadlineExceeded("the deadline passed")))
            batch = self.scheduler.schedule()
        if batch is None:
            if outputs:
                self._deliver(outputs)
            return False
        self.runner.progress.at = time.monotonic()
        wanted = [
            (i, sequence.request.sampling.prompt_logprobs or 0)
            for i, sequence in enumerate(batch.sequences)
            if sequence.wants_prompt_logprobs
        ]
        plan = self.scheduler.rows.plan(self.scheduler.kv, batch.slots, batch.counts, wanted)
        drawing = [batch.sequences[i] for i in np.flatnonzero(plan.drawing)]
        constrained = any(sequence.matcher is not None for sequence in drawing)
        # llguidance lets go of the interpreter, so masks are made while the model runs.
        early = self._beside.submit(self._masks, drawing) if constrained else None
        forwarded = self.runner.forward(plan)
        mask_rows, masks, unmasked = self._masks(drawing) if early is None else early.result()
        result = self.runner.draw(forwarded, plan, mask_rows, masks)
        result.failed.update(unmasked)
        with self.lock:
            self._settle(batch, plan, [i for i, _ in wanted], drawing, result, outputs)
        if outputs:
            self._deliver(outputs)
        return True

    # -- commands --------------------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        with self.lock:
            if isinstance(command, Credit):
                self.scheduler.credit(command.handle, command.num_tokens)
            elif isinstance(command, Submit):
                self.scheduler.add(command)
            elif isinstance(command, Abort):
                sequence = self.scheduler.find(command.handle)
                if sequence is not None:
                    self.scheduler.finish(sequence)
            elif isinstance(command, Close):
                self._closed = True
        if isinstance(command, Call):
            command.function()

    def _obey_all(self) -> bool:
        """Obey what has gathered; False once closed."""
        while not self._inbox.empty():
            self._obey(self._inbox.get())
        return not self._closed

    def _wait(self) -> None:
        """Sleep until a command comes or a deadline passes."""
        deadline = self.scheduler.next_deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        with suppress(Empty):
            self._obey(self._inbox.get(timeout=timeout))

    # -- a step's parts --------------------------------------------------------------------------------------

    def _masks(self, drawing: list[Sequence]) -> tuple[NDArray[np.int64], NDArray[np.int32], dict[int, str]]:
        """Token masks of the rows under a grammar, and why a row could not have one."""
        rows = [row for row, sequence in enumerate(drawing) if sequence.matcher is not None]
        masks = np.zeros((len(rows), -(-self.runner.vocab_size // 32)), np.int32)
        failed = {}
        for mask, row in zip(masks, rows, strict=True):
            matcher = drawing[row].matcher
            assert matcher is not None
            try:
                matcher.fill(mask)
            except Exception as error:  # one grammar's failure is that row's
                mask[:] = -1
                failed[row] = f"the grammar failed: {error}"
        return np.array(rows, np.int64), masks, failed

    def _settle(
        self,
        batch: Batch,
        plan: StepPlan,
        scored: list[int],
        drawing: list[Sequence],
        result: StepResult,
        outputs: list[RowOutput],
    ) -> None:
        """Book what a step computed and drew."""
        scheduler, rows = self.scheduler, self.scheduler.rows
        at = 0
        for i, count in zip(scored, plan.prompt_counts, strict=True):
            batch.sequences[i].prompt_logprobs += result.prompt_logprobs[at : at + count]
            at += count
        scheduler.computed(batch)
        slots = batch.slots[plan.drawing]
        rows.append(slots, result.ids)
        num_tokens = rows.num_tokens[slots].tolist()
        for row, (sequence, token) in enumerate(zip(drawing, result.ids.tolist(), strict=True)):
            logprobs = result.logprobs.get(row)
            output = self._output(sequence, token, num_tokens[row], logprobs, result.failed.get(row))
            outputs.append(output)
            if output.error is not None:
                self.runner.clear(scheduler.finish(sequence, forget=True) or [[] for _ in self.runner.pools])
            elif output.finish is not None:
                scheduler.finish(sequence)

    def _output(
        self,
        sequence: Sequence,
        token: int,
        num_tokens: int,
        logprobs: RowLogprobs | None,
        failure: str | None,
    ) -> RowOutput:
        """What one drawn token means for its row; `num_tokens` counts it."""
        cached = prompt_logprobs = None
        if not sequence.first_sent:
            if sequence.wants_prompt_logprobs:
                prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.first_sent = True
            cached = sequence.cached_tokens
        finish = None
        if failure is None:
            try:
                finish = self._end(sequence, token, num_tokens)
            except Exception as error:  # one grammar's failure is that row's
                failure = f"the grammar failed: {error}"
        if failure is not None:
            return RowOutput(sequence.handle, error=RequestFailed(failure), cached_tokens=cached)
        if num_tokens > sequence.limit:  # max_tokens is 0: the prompt alone was wanted
            return RowOutput(sequence.handle, (), finish, (), None, cached, prompt_logprobs)
        sequence.credit -= 1
        self.scheduler.counters.output_tokens += 1
        own = () if logprobs is None else (logprobs,)
        return RowOutput(sequence.handle, (token,), finish, own, None, cached, prompt_logprobs)

    def _end(self, sequence: Sequence, token: int, num_tokens: int) -> Done | None:
        if num_tokens > sequence.limit:
            return Done("length")
        if token in sequence.stop_ids:
            ends_turn = token in self._eos and not (
                sequence.request.sampling.ignore_eos and sequence.matcher is None
            )
            return Done("stop", None if ends_turn else token)
        if sequence.matcher is not None:
            sequence.matcher.advance(token)
            if sequence.matcher.stopped:
                return Done("stop")
        return Done("length") if num_tokens >= sequence.limit else None


def build_loop(
    settings: EngineSettings,
    folder: Path,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    inbox: Inbox,
    deliver: Deliver,
) -> EngineLoop:
    """Load the model and allocate its KV, on the calling thread; raises LoadError, or what torch raises."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    # every sequence that decodes has its token in every step, and one that prefills at least one
    max_num_seqs = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    with torch.inference_mode():
        model = load_model(
            folder,
            dtype=settings.dtype,
            device=device,
            max_model_len=settings.max_model_len,
            deterministic=settings.deterministic,
        )
        num_blocks, max_model_len = size_pools(
            model,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
            max_num_seqs=max_num_seqs,
            max_chunk=settings.max_num_batched_tokens,
            device=device,
            kv_cache_bytes=settings.kv_cache_bytes,
            num_blocks=settings.num_blocks,
        )
        runner = Runner(
            model,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            vocab_size=min(vocab_size, model.spec.vocab_size),
            device=device,
            num_threads=settings.num_threads,
            deterministic=settings.deterministic,
        )
    kv = KVCache(model.spec.groups, num_blocks, settings.block_size, max_num_seqs, max_model_len)
    rows = Rows(max_num_seqs, max_model_len)
    if settings.deterministic:
        exact.prove(runner, kv, rows)
    scheduler = Scheduler(
        kv,
        rows,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_undelivered=settings.max_undelivered,
        eos_token_ids=eos_token_ids,
    )
    return EngineLoop(
        runner,
        scheduler,
        inbox,
        deliver,
        eos_token_ids=eos_token_ids,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
