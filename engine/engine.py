"""The asyncio side of the local engine.

Owns: `LocalEngine`: starting and watching the engine thread, checking requests, and turning the tokens that
come out of it into chunks on the reader's side, so that text work never holds up the batch. Refuses to know:
torch (the thread imports it), schedules, blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, TypeVar

from engine.dialects import Dialect, detect_dialect, dialect_named
from engine.folder import find_folder, read_sampling_defaults
from engine.inbox import Abort, Call, Close, Credit, Inbox, RowLogprobs, RowOutput, Submit
from engine.reader import Reader
from engine.settings import Device, Dtype, EngineSettings
from engine.text import Tokenizer
from engine.types import (
    Chunk,
    Constraint,
    Done,
    EngineDead,
    EngineStats,
    GenerateRequest,
    LoadError,
    ModelInfo,
    Prompt,
    PromptTooLong,
    QueueFull,
    RenderInput,
    RequestError,
    SamplingDefaults,
    TokenLogprob,
)

if TYPE_CHECKING:
    from engine.grammar import Grammars, Matcher
    from engine.loop import EngineLoop

T = TypeVar("T")

CREDIT_STEP = 64  # tokens that a consumer takes before the engine thread is told
SMALL_TEXT = 4096  # characters that are encoded on the spot; more goes to a thread


class Mailbox:
    """What the engine thread delivered for one request and nobody has taken yet."""

    __slots__ = ("_outputs", "_waiter", "num_uncredited")

    def __init__(self) -> None:
        self._outputs: list[RowOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self.num_uncredited = 0

    def put(self, output: RowOutput) -> None:
        """Add an output and wake the taker."""
        self._outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[RowOutput]:
        """Everything that gathered; waits until there is something."""
        while not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs


class LocalEngine:
    """A model in this process, on an engine thread of its own; implements `Engine`.

    MODEL is a folder or a hub id. See `EngineSettings` for what the arguments mean.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str | None = None,
        dtype: Dtype = "auto",
        device: Device = "auto",
        max_model_len: int | None = None,
        max_waiting: int = 512,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        kv_cache_bytes: int | None = None,
        num_blocks: int | None = None,
        chat_template: str | None = None,
        dialect: str | None = None,
        generation_config: Literal["auto", "none"] = "auto",
        num_threads: int | None = None,
        step_timeout_s: float = 10.0,
    ) -> None:
        self._settings = EngineSettings(
            model=model,
            name=name,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
            chat_template=chat_template,
            dialect=dialect,
            generation_config=generation_config,
            num_threads=num_threads,
            step_timeout_s=step_timeout_s,
        )
        self._inbox: Inbox = SimpleQueue()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="engine-text")
        self._mailboxes: dict[int, Mailbox] = {}
        self._next_handle = 0
        self._num_submitted = 0  # in all; the loop's books say how many of them it has seen
        self._closed = False

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> ModelInfo:
        """See `Engine.start`. The engine thread imports torch and loads the model while this side reads text
        files.
        """
        self._asyncio = asyncio.get_running_loop()
        self._death: asyncio.Future[BaseException] = self._asyncio.create_future()
        folder = await self._in_pool(lambda: find_folder(self._settings.model))
        tokenizer: Future[Tokenizer] = self._pool.submit(Tokenizer.load, folder, self._settings.chat_template)
        loaded: asyncio.Future[EngineLoop] = self._asyncio.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(folder, tokenizer, loaded), name="engine", daemon=True
        )
        self._thread.start()
        self._loop = await loaded
        self._tokenizer = tokenizer.result()
        self._dialect = _dialect(self._settings.dialect, self._tokenizer)
        self._info = self._describe(folder)
        self._grammars: Grammars | None = None
        self._watch()
        return self._info

    def _run(self, folder: Path, tokenizer: Future[Tokenizer], loaded: asyncio.Future[EngineLoop]) -> None:
        """The engine thread: load, say so, then step until closed or dead."""
        try:
            from engine.loop import build_loop

            text = tokenizer.result()
            loop = build_loop(
                self._settings,
                folder,
                vocab_size=text.vocab_size,
                eos_token_ids=text.eos_token_ids,
                inbox=self._inbox,
                deliver=lambda outputs: self._post(lambda: self._receive(outputs)),
            )
        except BaseException as error:
            failure = error  # the name is unbound when the block ends, and the callback runs later
            self._post(lambda: loaded.done() or loaded.set_exception(failure))
            return
        self._post(lambda: loaded.done() or loaded.set_result(loop))
        try:
            loop.run()
        except BaseException as error:  # whatever ends the engine thread ends the engine, for every caller
            death = error
            self._post(lambda: self._die(death))

    def _post(self, callback: Callable[[], object]) -> None:
        """Run something on the asyncio loop, from the engine thread."""
        try:
            self._asyncio.call_soon_threadsafe(callback)
        except RuntimeError:
            self._inbox.put(Close())  # the asyncio loop is gone, and with it every caller

    def _die(self, error: BaseException) -> None:
        """Tell everybody, once."""
        if self._death.done():
            return
        self._death.set_result(error)
        reason = EngineDead(f"the engine died: {type(error).__name__}: {error}")
        reason.__cause__ = error
        for handle, mailbox in self._mailboxes.items():
            mailbox.put(RowOutput(handle, error=reason))

    def _watch(self) -> None:
        """A step that makes no progress for `step_timeout_s` counts as the engine's death."""
        if self._death.done() or self._closed:
            return
        at = self._loop.runner.progress.at
        limit = self._settings.step_timeout_s
        if at is not None and time.monotonic() - at > limit:
            self._die(TimeoutError(f"a step made no progress for {limit:g} s"))
            return
        self._watchdog = self._asyncio.call_later(min(1.0, limit / 4), self._watch)

    async def dead(self) -> BaseException:
        """See `Engine.dead`."""
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(Close())
        if hasattr(self, "_watchdog"):
            self._watchdog.cancel()
            hung = self._death.done()
            if not hung:
                await self._in_pool(self._thread.join)
            for handle, mailbox in self._mailboxes.items():
                mailbox.put(RowOutput(handle, error=EngineDead("the engine was closed")))
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
        capabilities = {"grammar", "grammar_resume", "logprobs", "priority", "token_ids"}
        if str(spec.dtype) == "torch.float32":
            capabilities.add("exact_resume")
        auto = self._settings.generation_config == "auto"
        return ModelInfo(
            name=self._settings.name or str(self._settings.model).rstrip("/").rsplit("/", 1)[-1],
            max_model_len=self._loop.max_model_len,
            vocab_size=self._loop.runner.vocab_size,
            fingerprint=digest.hexdigest(),
            eos_token_ids=self._tokenizer.eos_token_ids,
            defaults=read_sampling_defaults(folder) if auto else SamplingDefaults(),
            capabilities=frozenset(capabilities),
            dialect=self._dialect.name,
        )

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        scheduler = self._loop.scheduler
        counters, pool = scheduler.counters, scheduler.kv.pools[0]
        cached = pool.num_cached
        return EngineStats(
            waiting=scheduler.num_waiting + self._inbox.qsize(),
            running=len(scheduler.running),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_blocks - pool.num_available,
            kv_blocks_cached=cached,
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            prompt_tokens_total=counters.prompt_tokens,
            output_tokens_total=counters.output_tokens,
            preemptions_total=counters.preemptions,
            steps_total=counters.steps,
        )

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`; exact at any time, it waits at most for a step's bookkeeping."""
        with self._loop.lock:
            self._loop.scheduler.check_integrity()

    async def settled(self) -> None:
        """Wait until the engine thread has obeyed every command given so far: an abort has freed its blocks
        then.
        """
        obeyed: asyncio.Future[None] = self._asyncio.create_future()
        self._inbox.put(Call(lambda: self._post(lambda: obeyed.done() or obeyed.set_result(None))))
        await asyncio.wait({obeyed, self._death}, return_when=asyncio.FIRST_COMPLETED)

    # -- text ------------------------------------------------------------------------------------------------

    async def render(self, messages: RenderInput) -> Prompt:
        """See `Engine.render`."""

        def work() -> Prompt:
            text = self._tokenizer.render(messages, self._dialect.arguments)
            return Prompt(tuple(self._tokenizer.encode(text)), self._dialect.starts_in(text))

        return await self._in_pool(work)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """See `Engine.tokenize`."""

        def work() -> tuple[int, ...]:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

        return work() if len(text) < SMALL_TEXT else await self._in_pool(work)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Engine.detokenize`."""
        if len(token_ids) < SMALL_TEXT:
            return self._tokenizer.decode(token_ids)
        return await self._in_pool(lambda: self._tokenizer.decode(token_ids))

    def token_text(self, token_id: int) -> str:
        """See `Engine.token_text`; bytes that are not whole characters show as U+FFFD."""
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    async def check(self, constraint: Constraint) -> None:
        """See `Engine.check`."""
        grammars = await self._open_grammars()
        await self._in_pool(lambda: grammars.compile(constraint, "text"))

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`."""
        self._require_alive()
        self._validate(request)
        reader = Reader(self._tokenizer, self._dialect, request.reader, request.sampling)
        prefix_end = self._end_of(request)
        matcher = None
        if request.constraint is not None:
            matcher, stopped = await self._matcher(request, request.constraint)
            if stopped and prefix_end is None:
                prefix_end = Done("stop")
        handle, mailbox = self._next_handle, Mailbox()
        self._next_handle += 1
        if prefix_end is None:
            self._require_room()
            self._mailboxes[handle] = mailbox
            self._inbox.put(Submit(handle, request, matcher))
        over = prefix_end is not None
        try:
            for chunk in self._replay(request, reader, prefix_end):
                yield chunk
                if chunk.deltas and isinstance(chunk.deltas[-1], Done):
                    return
            while not over:
                outputs = await mailbox.take()
                chunk, over = self._read(request, reader, outputs)
                if over and outputs[-1].finish is not None:
                    del self._mailboxes[handle]
                else:
                    self._give_credit(handle, mailbox, outputs)
                if chunk is not None:
                    yield chunk
                if outputs[-1].error is not None:
                    self._mailboxes.pop(handle, None)
                    raise outputs[-1].error
        finally:
            if self._mailboxes.pop(handle, None) is not None:
                self._inbox.put(Abort(handle))

    def _replay(self, request: GenerateRequest, reader: Reader, end: Done | None) -> list[Chunk]:
        """The chunks of the durable prefix, read again; `end` is what the last of them ended the generation
        with.
        """
        chunks = []
        for i, token_ids in enumerate(request.prefix):
            last = i == len(request.prefix) - 1
            reading = reader.feed(token_ids, end if last else None)
            chunks.append(
                Chunk(
                    tuple(token_ids[: reading.num_tokens]),
                    reading.deltas,
                    reasoning_tokens=reading.reasoning_tokens,
                    replayed=True,
                )
            )
            if reading.done:
                break
        if end is not None and not request.prefix:  # nothing was to be generated at all
            chunks.append(Chunk((), reader.feed((), end).deltas, cached_tokens=0))
        return chunks

    def _read(
        self, request: GenerateRequest, reader: Reader, outputs: list[RowOutput]
    ) -> tuple[Chunk | None, bool]:
        """One chunk of what gathered (None: only an error did), and whether it is the last."""
        token_ids = tuple(token for output in outputs for token in output.token_ids)
        finish, error = outputs[-1].finish, outputs[-1].error
        if not token_ids and finish is None:
            return None, error is not None
        logprobs: tuple[TokenLogprob, ...] = ()
        sampling = request.sampling
        if sampling.logprobs is not None:
            rows = (row for output in outputs for row in output.logprobs)
            logprobs = tuple(self._logprob(row, sampling.logprobs) for row in rows)
        reading = reader.feed(token_ids, finish, logprobs)
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if (scored := outputs[0].prompt_logprobs) is not None:
            count = sampling.prompt_logprobs or 0
            prompt_logprobs = (None, *(self._logprob(row, count) for row in scored))
        chunk = Chunk(
            token_ids[: reading.num_tokens],
            reading.deltas,
            logprobs=logprobs[: reading.num_tokens],
            reasoning_tokens=reading.reasoning_tokens,
            cached_tokens=outputs[0].cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
        return chunk, reading.done or error is not None

    def _logprob(self, row: RowLogprobs, count: int) -> TokenLogprob:
        def text(token_id: int) -> tuple[str, bytes]:
            data = self._tokenizer.token_bytes(token_id)
            return data.decode(errors="replace"), data

        best = zip(row.top_ids[:count], row.top_logprobs[:count], strict=True)
        top = tuple((token_id, *text(token_id), logprob) for token_id, logprob in best)
        return TokenLogprob(row.token_id, *text(row.token_id), row.logprob, top)

    def _receive(self, outputs: list[RowOutput]) -> None:
        """A step's outputs arrive on the asyncio loop; those of requests that are gone are dropped."""
        mailboxes = self._mailboxes
        for output in outputs:
            mailbox = mailboxes.get(output.handle)
            if mailbox is not None:
                mailbox.put(output)

    def _give_credit(self, handle: int, mailbox: Mailbox, outputs: list[RowOutput]) -> None:
        mailbox.num_uncredited += sum(len(output.token_ids) for output in outputs)
        if mailbox.num_uncredited >= CREDIT_STEP:
            self._inbox.put(Credit(handle, mailbox.num_uncredited))
            mailbox.num_uncredited = 0

    # -- checks ----------------------------------------------------------------------------------------------

    def _require_alive(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")
        if self._death.done():
            error = self._death.result()
            raise EngineDead(f"the engine died: {type(error).__name__}: {error}") from error

    def _require_room(self) -> None:
        scheduler = self._loop.scheduler
        waiting = scheduler.num_waiting + self._inbox.qsize()
        free = self._settings.max_num_seqs - len(scheduler.running)
        if waiting - free >= self._settings.max_waiting:
            raise QueueFull(f"{waiting} requests wait already")

    def _validate(self, request: GenerateRequest) -> None:
        limit, vocab_size = self._info.max_model_len, self._info.vocab_size
        sampling = request.sampling
        if not request.prompt_ids:
            raise RequestError("the prompt is empty")
        if len(request.prompt_ids) + 1 > limit:
            raise PromptTooLong(len(request.prompt_ids), limit)
        prefix = [token for chunk in request.prefix for token in chunk]
        named = {
            "prompt": request.prompt_ids,
            "prefix": prefix,
            "logit_bias": [token for token, _ in sampling.logit_bias],
            "stop_token_ids": sampling.stop_token_ids,
        }
        for field, ids in named.items():
            if ids and not (0 <= min(ids) and max(ids) < vocab_size):
                raise RequestError(f"{field} has a token id outside 0..{vocab_size - 1}")
        for field, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if count is not None and not 0 <= count <= 20:
                raise RequestError(f"{field} must be between 0 and 20")
        if request.adapter is not None:
            raise RequestError(f"there is no adapter {request.adapter!r}")
        if request.media:
            raise RequestError("this model takes text only")

    def _end_of(self, request: GenerateRequest) -> Done | None:
        """What ended the generation at the last token of its prefix, if anything did (token-level ends)."""
        prefix = [token for chunk in request.prefix for token in chunk]
        sampling = request.sampling
        if prefix:
            last = prefix[-1]
            if last in self._info.eos_token_ids and not (sampling.ignore_eos and request.constraint is None):
                return Done("stop")
            if last in sampling.stop_token_ids:
                return Done("stop", last)
        elif sampling.max_tokens > 0 or sampling.prompt_logprobs is not None:
            return None
        total = len(request.prompt_ids) + len(prefix)
        full = len(prefix) >= sampling.max_tokens or total >= self._info.max_model_len
        return Done("length") if full else None

    # -- grammars --------------------------------------------------------------------------------------------

    async def _open_grammars(self) -> Grammars:
        if self._grammars is None:

            def load() -> Grammars:
                from engine.grammar import Grammars  # llguidance is only imported where it is needed

                return Grammars(self._tokenizer, self._dialect)

            grammars = await self._in_pool(load)
            if self._grammars is None:
                self._grammars = grammars
        return self._grammars

    async def _matcher(self, request: GenerateRequest, constraint: Constraint) -> tuple[Matcher, bool]:
        """A matcher that has read the prefix, and whether the grammar ended there."""
        grammars = await self._open_grammars()

        def work() -> tuple[Matcher, bool]:
            matcher = grammars.compile(constraint, request.reader.starts_in).matcher()
            for chunk in request.prefix:
                for token in chunk:
                    if token not in self._info.eos_token_ids:
                        matcher.advance(token)
            return matcher, bool(request.prefix) and matcher.stopped

        return await self._in_pool(work)

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _dialect(name: str | None, tokenizer: Tokenizer) -> Dialect:
    if name is None:
        return detect_dialect(tokenizer.chat_template)
    try:
        return dialect_named(name)
    except KeyError as error:
        raise LoadError(str(error.args[0])) from None
