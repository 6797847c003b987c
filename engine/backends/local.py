"""Runs a model in this process, and serves it to asyncio.

`LocalEngine` starts and watches the engine thread, checks requests, and turns the tokens of the thread into
chunks where they are read, so that work on text never delays a step. Only the thread imports torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from engine.admission import Admission, Place
from engine.backends.generation import Generation, Mailbox, end_of_prefix, is_last, takes_long
from engine.backends.request_checks import LONG_PROMPT, check_request
from engine.backends.shared_parts import WithTexts
from engine.config import EngineConfig, read_settings
from engine.core import Abort, Call, Close, Credit, Forget, Inbox, Keep, LetGo, Save, Submit
from engine.engine_thread import EngineThread, resolve
from engine.model_folder import find_folder, known_folder, read_config, read_sampling_defaults
from engine.step import RowOutput
from engine.tokenizer import TEXT_THREADS, Prompts, Tokenizer, open_dialect
from engine.types import (
    Chunk,
    Constraint,
    Done,
    EngineDead,
    EngineStats,
    GenerateRequest,
    LoadError,
    ModelInfo,
    ReaderParams,
    RequestFailed,
    SamplingDefaults,
)

if TYPE_CHECKING:
    from engine.core import EngineLoop, Tiering
    from engine.structured.isolation import Constraints, Matcher
    from engine.tokenizer import BannedTexts
    from engine.vision import ImageProcessor

T = TypeVar("T")

log = logging.getLogger("antiphon.engine")

SAVING_S = 5.0  # at most, that closing waits for what is on its way to the disk

CREDIT_STEP = 64  # tokens that a consumer takes before the engine thread is told

UNHELD = 16
"""Sequences that a step may compute before the tokens of any are held for those of the next step."""
HELD_S = 0.4e-3
"""Seconds that tokens are held, for each sequence above that. What becomes of an output on its way to a
client takes the loop's thread some 0.1 ms, however many tokens it has. So that takes a quarter of it at most,
and neither other requests wait for it nor the engine, which needs the interpreter's lock, too."""
MOST_HELD_S = 0.05
"""At most: nobody sees that."""


def _look_at_folders(config: EngineConfig) -> None:
    for model in (config.model, config.draft_model):
        if model is not None and (folder := known_folder(model)) is not None:
            read_config(folder)
    for name, where in config.lora.items():
        try:
            known_folder(where)
        except LoadError as error:
            raise LoadError(f"the adapter {name!r} is not served: {error}") from error


class LocalEngine(WithTexts):
    """A model in this process, on an engine thread of its own; implements `Engine`.

    config: an `EngineConfig`, or its `model`, with its other fields as `settings`. Raises LoadError for
    values that cannot be, and for folders that are not there or hold no model: a wrong path is told before
    anything is loaded.
    """

    def __init__(self, config: EngineConfig | str | Path, **settings: Any) -> None:
        if isinstance(config, str | Path):
            config = read_settings(config, settings)
        elif settings:
            raise TypeError(f"the configuration has its settings already: {', '.join(settings)}")
        _look_at_folders(config)
        self._config = config
        self._credit_step = min(CREDIT_STEP, max(1, config.max_undelivered // 2))
        self._inbox: Inbox = SimpleQueue()
        self._thread = EngineThread(
            "engine", "the engine", lambda: self._inbox.put(Close()), ended=self._end_requests
        )
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="engine-text")
        self._mailboxes: dict[int, Mailbox] = {}
        self._next_handle = 0
        self._waking: asyncio.TimerHandle | None = None  # set while tokens are held
        self._watchdog: asyncio.TimerHandle | None = None  # set once the engine is started
        self._constraints: Constraints | None = None
        self._closed = False

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> ModelInfo:
        """See `Engine.start`; the engine thread loads torch and weights while another reads the tokenizer."""
        folder = await self._in_pool(lambda: find_folder(self._config.model))
        tokenizer: Future[Tokenizer] = self._pool.submit(
            Tokenizer.load,
            folder,
            self._config.chat_template,
            allow_special_tokens=self._config.allow_special_tokens,
        )
        self._loop = await self._thread.start(
            self._config.model, partial(self._load, folder, tokenizer), self._compute
        )
        self._admission = Admission(
            max_running=self._loop.max_num_seqs,
            max_waiting=self._config.max_waiting,
            max_waiting_tokens=self._config.max_waiting_tokens,
        )
        self._tokenizer = tokenizer.result()
        self._dialect = open_dialect(
            self._tokenizer, tools=self._config.tool_dialect, reasoning=self._config.reasoning_dialect
        )
        self._info = self._describe(folder)
        self._prompts = Prompts(
            self._tokenizer,
            self._dialect,
            limit=self._info.max_model_len,
            pool=self._pool,
            placer=self._images,
        )
        self._watch()
        return self._info

    def _load(self, folder: Path, tokenizer: Future[Tokenizer]) -> EngineLoop:
        """On the engine thread."""
        from engine.core import build_loop

        text = tokenizer.result()
        return build_loop(
            replace(self._config, model=folder, draft_model=self._find_draft(text)),
            vocab_size=text.vocab_size,
            eos_token_ids=text.eos_token_ids,
            inbox=self._inbox,
            deliver=lambda outputs: self._thread.post(self._receive, outputs),
            begin=lambda handles: self._thread.post(self._begun, handles),
        )

    def _compute(self, loop: EngineLoop) -> None:
        """On the engine thread."""
        try:
            loop.run()
        finally:
            # Closed while it was loading: `close` had nothing to close yet, and is over.
            if self._watchdog is None and loop.tiering is not None:
                loop.tiering.disk.close(SAVING_S)

    def _find_draft(self, tokenizer: Tokenizer) -> Path | None:
        """The draft model's folder; raises LoadError when its tokens are not the model's."""
        if self._config.draft_model is None:
            return None
        folder = find_folder(self._config.draft_model)
        if not Tokenizer.load(folder).agrees_with(tokenizer):
            raise LoadError(f"the draft model {folder} has another tokenizer than the model it drafts for")
        return folder

    def _end_requests(self, failure: EngineDead) -> None:
        for handle, mailbox in self._mailboxes.items():
            mailbox.put(RowOutput(handle, error=failure))

    def _watch(self) -> None:
        """A step that makes no progress for `step_timeout_s` counts as the engine's death."""
        if self._thread.is_dead or self._closed:
            return
        at = self._loop.runner.progress.at
        limit = self._config.step_timeout_s
        if at is not None and time.monotonic() - at > limit:
            self._thread.die(TimeoutError(f"a step made no progress for {limit:g} s"))
            return
        self._watchdog = asyncio.get_running_loop().call_later(min(1.0, limit / 4), self._watch)

    async def dead(self) -> BaseException:
        """See `Engine.dead`."""
        return await self._thread.dead()

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        await self._thread.close(self._config.step_timeout_s)
        if self._waking is not None:
            self._waking.cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
            if (tiering := self._loop.tiering) is not None:
                await self._in_pool(lambda: tiering.disk.close(SAVING_S))
        if self._constraints is not None:
            await self._in_pool(self._constraints.close)
        self._pool.shutdown(wait=False)

    # -- what is served --------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """See `Engine.info`."""
        return self._info

    def _describe(self, folder: Path) -> ModelInfo:
        spec = self._loop.spec
        digest = hashlib.blake2b(digest_size=16)
        for part in (spec.fingerprint, self._tokenizer.fingerprint, self._dialect.name.encode()):
            digest.update(part)
        if self._config.kv_cache_dtype != "auto":
            digest.update(self._config.kv_cache_dtype.encode())
        capabilities = {"bad_words", "beams", "drafts", "grammar", "grammar_resume", "logprobs", "priority"}
        capabilities.add("token_ids")
        if self._config.draft_model is not None:
            capabilities.add("draft_model")
        if self._dialect.calls is not None:
            capabilities.add("calls")
        # a run that goes on elsewhere rounds differently: in f32 that is too little to change a token
        exact = str(self._loop.runner.kv_dtype) == "torch.float32" and self._config.kv_tier_dtype == "auto"
        if self._config.deterministic or exact:
            capabilities.add("exact_resume")

        def adapted(fingerprint: bytes) -> str:
            return hashlib.blake2b(digest.digest() + fingerprint, digest_size=16).hexdigest()

        auto = self._config.generation_config == "auto"
        return ModelInfo(
            name=self._config.name or str(self._config.model).rstrip("/").rsplit("/", 1)[-1],
            max_model_len=self._loop.max_model_len,
            shortened=self._loop.runner.shortened,
            vocab_size=self._loop.runner.vocab_size,
            fingerprint=digest.hexdigest(),
            eos_token_ids=self._tokenizer.eos_token_ids,
            defaults=self._sampling_defaults(folder) if auto else SamplingDefaults(),
            capabilities=frozenset(capabilities),
            dialect=self._dialect.name,
            modalities=frozenset({"text"} if self._images is None else {"text", "image"}),
            image_options=frozenset() if self._images is None else self._images.options,
            image_pixels=None if self._images is None else self._images.max_pixels,
            template_variables=self._tokenizer.template_variables,
            adapters=tuple((name, adapted(own)) for name, own in spec.adapters),
            cache_block=self._config.block_size if self._config.prefix_caching else 0,
        )

    @property
    def _images(self) -> ImageProcessor | None:
        """What processes images for a model that sees."""
        sight = self._loop.runner.model.sight
        return None if sight is None else sight.processor

    def _sampling_defaults(self, folder: Path) -> SamplingDefaults:
        """The checkpoint's, but for drafts where the operator has turned these off."""
        defaults = read_sampling_defaults(folder)
        return defaults if self._config.num_assistant_tokens else replace(defaults, num_assistant_tokens=None)

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        if self._watchdog is None:
            return EngineStats()
        scheduler = self._loop.scheduler
        counters, pools = scheduler.counters, scheduler.kv.pools
        return EngineStats(
            waiting=scheduler.num_waiting + self._inbox.qsize(),
            running=len(scheduler.running),
            paused=scheduler.num_paused,
            prefilling=counters.prefilling if scheduler.running else 0,
            decoding=counters.decoding if scheduler.running else 0,
            kv_bytes=self._loop.runner.kv_bytes,
            kv_blocks=sum(pool.num_blocks for pool in pools),
            kv_blocks_used=sum(pool.num_blocks - pool.num_available for pool in pools),
            kv_blocks_cached=sum(pool.num_cached for pool in pools),
            kv_evictions_total=sum(pool.num_evictions for pool in pools),
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            hit_tokens={"pool": counters.pool_hits, "disk": counters.disk_hits},
            prompt_tokens_total=counters.prompt_tokens,
            output_tokens_total=counters.output_tokens,
            preemptions_total=counters.preemptions,
            steps_total=counters.steps,
            drafts_total=counters.drafts,
            drafts_accepted_total=counters.drafts_accepted,
            tier=self._loop.tier_stats(),
        )

    def gpu(self) -> Mapping[str, float]:
        """See `Engine.gpu`."""
        from engine.executor import gpu_readings

        return {} if self._watchdog is None else gpu_readings(self._loop.runner.device)

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`; exact at any time, it waits at most for a step's bookkeeping."""
        with self._loop.lock:
            self._loop.scheduler.check_integrity()

    async def settled(self) -> None:
        """Wait until the engine thread has handled every command so far; aborts have freed blocks by then."""
        with suppress(EngineDead):
            await self._thread.answer(lambda handled: self._call(handled, lambda: None))

    async def read_rate(self) -> float:
        """Bytes a second at which the device reads its memory, measured now, between two steps."""

        def measure() -> float:
            from engine.benchmark import read_rate

            return read_rate(self._loop.runner.device)

        return await self._thread.answer(lambda measured: self._call(measured, measure))

    def _call(self, answer: asyncio.Future[T], work: Callable[[], T]) -> None:
        """Have the engine thread do some work between two steps, in its turn. What that raises is the
        answer."""
        self._inbox.put(Call(partial(self._answer, answer, work)))

    def _answer(self, answer: asyncio.Future[T], work: Callable[[], T]) -> None:
        outcome: T | BaseException
        try:
            outcome = work()
        except Exception as error:  # no memory to read, nothing on the disk: no reason for a thread to end
            outcome = error
        self._thread.post(resolve, answer, outcome)

    def step_bytes(self, num_seqs: int, context: int) -> int:
        """Bytes that one decode step of so many sequences reads, each `context` tokens long."""
        from engine.benchmark import step_bytes

        runner = self._loop.runner
        return step_bytes(runner.model, num_seqs, context, runner.kv_dtype)

    # -- text ------------------------------------------------------------------------------------------------

    async def check(self, constraint: Constraint, owner: str = "") -> None:
        """See `Engine.check`."""
        constraints = await self._open_constraints()
        await constraints.compile(constraint, ReaderParams(tools=constraint.tools), owner)

    async def prepare(self) -> None:
        """See `Engine.prepare`: the process that reads the vocabulary for grammars, and the one that steps
        them."""
        constraints = await self._open_constraints()
        await self._in_pool(constraints.start)

    # -- generation ------------------------------------------------------------------------------------------

    @property
    def admission(self) -> Admission:
        """See `Engine.admission`."""
        return self._admission

    async def generate(self, request: GenerateRequest, place: Place | None = None) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`."""
        begun = await self._begin(request)
        end = begun.end
        generation = Generation(request, self._tokenizer, self._dialect)
        with self._submitted(request, begun, place) as arriving:
            for chunk in generation.replay(end):
                if is_last(chunk):
                    arriving.drop()
                yield chunk
            while (outputs := await arriving.take()) is not None:
                read = await self._beside(takes_long(outputs[0]), partial(generation.read, outputs))
                if read is not None:
                    if is_last(read):  # before the consumer sees the end: it may never come back
                        arriving.drop()
                    yield read
                error = outputs[-1].error
                if error is not None and not (read is not None and is_last(read)):
                    raise error

    async def outputs(
        self, request: GenerateRequest, place: Place | None = None
    ) -> AsyncGenerator[list[RowOutput]]:
        """What comes after the request's prefix as the engine thread gives it, for whoever reads it as text
        elsewhere: to the output that has `finish` or `error`. Where the prefix has ended the generation, the
        only output is one without tokens that says how. Raises what `generate` raises before it begins.
        """
        begun = await self._begin(request)
        if begun.end is not None:
            yield [RowOutput(-1, finish=begun.end, cached_tokens=None if request.prefix else 0)]
            return
        with self._submitted(request, begun, place) as arriving:
            while (outputs := await arriving.take()) is not None:
                yield outputs

    async def _begin(self, request: GenerateRequest) -> _Begun:
        """Check a request, and prepare what its tokens are held to."""
        self._thread.require_alive()
        much = len(request.prompt_ids) > LONG_PROMPT
        await self._beside(much, partial(check_request, request, self._info))
        if request.media and self._images is not None:  # so that the engine's thread finds it done
            await self._in_pool(partial(self._images.prepare, request.media))
        end = end_of_prefix(request, self._info)
        matcher = None
        if request.constraint is not None:
            matcher, stopped = await self._matcher(request, request.constraint)
            if stopped and (end is None or end.reason == "length"):
                end = Done("stop")  # what is complete was not cut, also where its last token was the last one
        banned = None
        if texts := request.sampling.bad_words:
            banned = await self._in_pool(partial(self._tokenizer.banning, texts))
        return _Begun(end, matcher, banned)

    @contextmanager
    def _submitted(self, request: GenerateRequest, begun: _Begun, place: Place | None) -> Iterator[_Arriving]:
        """Have the engine thread generate, unless there is an end already, for as long as the context
        lasts. Without a place one is taken."""
        handle = self._next_handle
        self._next_handle += 1
        own_place = None
        if begun.end is None:
            self._thread.require_alive()  # still, after a grammar was compiled
            if place is None:
                place = own_place = self._admission.enter(request.owner, request.weight)
            self._mailboxes[handle] = Mailbox(place.begin)
            self._inbox.put(Submit(handle, request, begun.matcher, begun.banned))
        try:
            yield _Arriving(self, handle)
        finally:
            self._drop(handle)
            if own_place is not None:
                own_place.leave()

    async def _take(self, handle: int) -> list[RowOutput] | None:
        """What has gathered for a request, once there is something; None where there will be no more."""
        mailbox = self._mailboxes.get(handle)
        if mailbox is None:
            return None
        outputs = await mailbox.take()
        if outputs[-1].finish is not None or outputs[-1].error is not None:
            self._mailboxes.pop(handle, None)  # the engine thread has dropped it already
        elif mailbox.num_uncredited >= self._credit_step:
            self._inbox.put(Credit(handle, mailbox.num_uncredited))
            mailbox.num_uncredited = 0
        return outputs

    def keep(self, name: str, request: GenerateRequest, output: Sequence[int], seconds: float) -> None:
        """See `Engine.keep`."""
        self._inbox.put(Keep(name, request, tuple(output), time.monotonic() + seconds))

    def let_go(self, name: str) -> None:
        """See `Engine.let_go`."""
        self._inbox.put(LetGo(name))

    def save(
        self, name: str, request: GenerateRequest, output: Sequence[int], until: float | None = None
    ) -> None:
        """See `Engine.save`."""
        self._inbox.put(Save(name, request, tuple(output), until))

    def forget(self, names: Collection[str]) -> None:
        """See `Engine.forget`."""
        self._inbox.put(Forget(frozenset(names)))

    def forget_owner(self, owner: str) -> None:
        """See `Engine.forget_owner`."""
        self._inbox.put(Forget(owner=owner))

    async def saved_names(self) -> frozenset[str]:
        """See `Engine.saved_names`."""
        return await self._on_disk(lambda tiering: tiering.disk.names(), frozenset())

    async def saved(self) -> None:
        """Wait until what was to be saved or forgotten so far has been, or could not be."""
        await self._on_disk(lambda _: None, None)

    async def _on_disk(self, work: Callable[[Tiering], T], otherwise: T) -> T:
        """What some work says once the disk has done all that it was asked to; `otherwise`: where no KV is
        saved."""
        self._thread.require_alive()
        await self.settled()
        tiering = self._loop.tiering
        if tiering is None:
            return otherwise
        return await self._thread.answer(
            lambda done: tiering.disk.call(partial(self._answer, done, partial(work, tiering)))
        )

    def _drop(self, handle: int) -> None:
        """Have the engine thread forget a request, if it still runs there."""
        if self._mailboxes.pop(handle, None) is not None:
            self._inbox.put(Abort(handle))

    def _begun(self, handles: list[int]) -> None:
        """The engine thread begins with requests."""
        for handle in handles:
            if (mailbox := self._mailboxes.get(handle)) is not None:
                mailbox.begin()

    def _receive(self, outputs: list[RowOutput]) -> None:
        """A step's outputs arrive on the asyncio loop; those of requests that are gone are dropped."""
        mailboxes = self._mailboxes
        if self._thread.is_dead:  # a step that hung has returned after all: its requests have ended already
            return
        interval_s = min((len(outputs) - UNHELD) * HELD_S, MOST_HELD_S)
        if interval_s > 0 and self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(interval_s, self._wake)
        for output in outputs:
            mailbox = mailboxes.get(output.handle)
            if mailbox is None:
                continue
            try:
                mailbox.put(output, waits=self._waking is not None)
            except Exception as error:  # one reader's failure is that request's
                log.exception("what request %s was told did not arrive", output.handle)
                mailbox.fail(RequestFailed(f"{type(error).__name__}: {error}"))
                self._inbox.put(Abort(output.handle))

    def _wake(self) -> None:
        """What was held of the tokens since the last time goes on to its readers."""
        self._waking = None
        for mailbox in self._mailboxes.values():
            mailbox.wake()

    # -- grammars --------------------------------------------------------------------------------------------

    async def _open_constraints(self) -> Constraints:
        if self._constraints is None:

            def load() -> Constraints:
                from engine.structured.isolation import Constraints  # numpy, only where it is needed

                return Constraints(self._tokenizer, self._dialect)

            constraints = await self._in_pool(load)
            if self._constraints is None:
                self._constraints = constraints
        return self._constraints

    async def _matcher(self, request: GenerateRequest, constraint: Constraint) -> tuple[Matcher, bool]:
        """A matcher that has read the prefix, and whether the grammar ended there."""
        constraints = await self._open_constraints()
        grammar = await constraints.compile(constraint, request.reader, request.owner)
        matcher = grammar.matcher(request.sampling.max_tokens)
        ends = self._info.eos_token_ids
        prefix = [token for chunk in request.prefix for token in chunk if token not in ends]
        return matcher, bool(prefix) and await constraints.replay(matcher, prefix)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is known of a request before it is submitted: how its prefix has ended the generation, if it has,
    the matcher of its constraint, and what it must not say."""

    end: Done | None
    matcher: Matcher | None
    banned: BannedTexts | None


@dataclass(frozen=True, slots=True)
class _Arriving:
    """The outputs of one request, for the one who reads them."""

    engine: LocalEngine
    handle: int

    async def take(self) -> list[RowOutput] | None:
        """See `LocalEngine._take`."""
        return await self.engine._take(self.handle)

    def drop(self) -> None:
        """No more are wanted."""
        self.engine._drop(self.handle)
