"""An engine without a model: it says what a script says, for tests and for trying the API.

It uses the real tokenizer, dialect, parser and grammars, and keeps everything that `Engine` promises: limits,
stop strings, constraints, replay of a prefix, a queue that fills, a death that reaches every caller. Tests
set its pace, hold it at gates and make it fail.

A script is a callable over (request, prompt text) that yields steps; see `script`. Under a constraint the
engine says what the script says as far as the grammar allows, and completes the rest in the shortest way:
with a minimal valid call, for instance.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine.admission import Admission, Place
from engine.backends.script import Fail, Script, Tick, Wait, obey
from engine.backends.scripted_tokens import DIALECT, Speech, Tokens, scripted_tokenizer
from engine.backends.shared_parts import WithoutKV
from engine.core import FairShare
from engine.dialects import Dialect, dialect_named
from engine.parsing import Reader
from engine.tokenizer import GrowingPrompts
from engine.types import (
    Chunk,
    Constraint,
    DeadlineExceeded,
    Done,
    EngineDead,
    EngineError,
    EngineStats,
    GenerateRequest,
    ModelInfo,
    Prompt,
    PromptTooLong,
    ReaderParams,
    RenderInput,
    RequestFailed,
    TokenLogprob,
)

if TYPE_CHECKING:
    from engine.step import RowLogprobs, RowOutput
    from engine.structured.isolation import Constraints, Grammar

_T = TypeVar("_T")

_Scores = tuple[TokenLogprob | None, ...]

SMALL_TEXT = 4096  # characters, or tokens, that are gone through on the spot; more goes to a thread


@dataclass
class _Counters:
    running: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    waiting: dict[str, deque[asyncio.Future[None]]] = field(default_factory=dict)  # by owner
    share: FairShare = field(default_factory=FairShare)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))


class ScriptedEngine(WithoutKV):
    """An `Engine` that follows a script (see script.py for the one it has by itself).

    chunk: "word" (a chunk is a word with the space before it) or a number of tokens. tick_s: seconds between
    chunks. max_running: how many generate at once; `max_waiting` more wait, the next gets QueueFull.
    `requests` holds the latest requests, newest last.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        name: str = "antiphon-scripted",
        chunk: Literal["word"] | int = "word",
        tick_s: float = 0.0,
        max_model_len: int = 262_144,
        max_running: int = 256,
        max_waiting: int = 512,
        max_waiting_tokens: int | None = None,
        chat_template: str | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        self._script = script or obey
        self._tick_s = tick_s
        self._max_running = max_running
        self._admission = Admission(
            max_running=max_running, max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens
        )
        self.tokenizer = scripted_tokenizer(chat_template, allow_special_tokens=allow_special_tokens)
        self._dialect: Dialect = dialect_named(DIALECT)
        self._prompts = GrowingPrompts(self.tokenizer, self._dialect)
        self._speech = Speech(self.tokenizer, self._dialect, chunk)
        self._constraints: Constraints | None = None
        self._info = ModelInfo(
            name=name,
            max_model_len=max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            fingerprint="scripted-" + self.tokenizer.fingerprint.hex(),
            eos_token_ids=self.tokenizer.eos_token_ids,
            capabilities=frozenset({"calls", "exact_resume", "grammar", "logprobs", "token_ids"}),
            dialect=self._dialect.name,
        )
        self._counters = _Counters()
        self._end: asyncio.Future[BaseException] | None = None  # why no request can go on; set by start
        self._killed = False
        self.requests: deque[GenerateRequest] = deque(maxlen=256)

    # -- the door --------------------------------------------------------------------------------------------

    async def start(self) -> ModelInfo:
        """Ready at once."""
        self._info = replace(self._info, template_variables=self.tokenizer.template_variables)
        self._end, self._killed = asyncio.get_running_loop().create_future(), False
        return self._info

    @property
    def admission(self) -> Admission:
        """See `Engine.admission`."""
        return self._admission

    @property
    def info(self) -> ModelInfo:
        """The model served."""
        return self._info

    async def render(self, messages: RenderInput) -> Prompt:
        """Render messages by the chat template; raises RenderError."""

        def work() -> Prompt:
            return self._prompts.prompt(messages)

        size = sum(64 + len(message.get("content") or "") for message in messages.messages)
        large = size > SMALL_TEXT or bool(messages.tools)
        return await asyncio.to_thread(work) if large else work()

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, owner: str = ""
    ) -> tuple[int, ...]:
        """Encode text: a token a byte, tags aside."""

        def work() -> tuple[int, ...]:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

        return await asyncio.to_thread(work) if len(text) > SMALL_TEXT else work()

    async def detokenize(self, token_ids: Sequence[int], *, owner: str = "") -> str:
        """Decode ids, special tokens included."""
        if len(token_ids) > SMALL_TEXT:
            return await asyncio.to_thread(self.tokenizer.decode, token_ids)
        return self.tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token's text."""
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")

    async def check(self, constraint: Constraint, owner: str = "") -> None:
        """Compile a constraint ahead of time; raises ConstraintError."""
        await self._compile(constraint, ReaderParams(), owner)

    async def prepare(self) -> None:
        """Nothing: a script begins when it is asked."""

    def generate(self, request: GenerateRequest, place: Place | None = None) -> AsyncGenerator[Chunk]:
        """Follow the script; closing the generator aborts at once."""
        return self._generate(request, place, self._reader(request))

    async def outputs(
        self, request: GenerateRequest, place: Place | None = None
    ) -> AsyncGenerator[list[RowOutput]]:
        """The same as tokens that nobody has read yet, without the prefix; see `LocalEngine.outputs`."""
        from engine.step import RowOutput  # numpy, only where it is needed

        unread = replace(
            request, reader=ReaderParams(dialect=False), sampling=replace(request.sampling, stop=())
        )
        first = True
        async with aclosing(self._generate(request, place, self._reader(unread))) as chunks:
            async for chunk in chunks:
                end = chunk.deltas[-1] if chunk.deltas else None
                finish = end if isinstance(end, Done) else None
                if not chunk.replayed:
                    yield [_output(chunk, finish, first=first)]
                    first = False
                elif finish is not None:
                    yield [RowOutput(-1, finish=finish)]

    def stats(self) -> EngineStats:
        """Counters; there is no KV cache to count."""
        counters = self._counters
        return EngineStats(
            waiting=counters.num_waiting,
            running=counters.running,
            prompt_tokens_total=counters.prompt_tokens,
            output_tokens_total=counters.output_tokens,
            steps_total=counters.chunks,
        )

    def gpu(self) -> Mapping[str, float]:
        """See `Engine.gpu`."""
        return {}

    def check_integrity(self) -> None:
        """Nobody may wait while there is room."""
        counters = self._counters
        assert 0 <= counters.running <= self._max_running
        assert not counters.waiting or counters.running == self._max_running

    async def dead(self) -> BaseException:
        """Wait for `kill`; returns its error. A closed engine has not died."""
        assert self._end is not None, "the engine has not started"
        error = await asyncio.shield(self._end)
        if not self._killed:
            await asyncio.get_running_loop().create_future()
        return error

    async def close(self) -> None:
        """Running requests end with EngineDead."""
        self._stop(EngineDead("the engine was closed"))
        if self._constraints is not None:
            await asyncio.to_thread(self._constraints.close)
            self._constraints = None

    def kill(self, error: BaseException) -> None:
        """Die: `dead` returns `error`, every request ends with EngineDead, no new one is taken."""
        self._killed = True
        self._stop(error)

    # -- one request -----------------------------------------------------------------------------------------

    def _reader(self, request: GenerateRequest) -> Reader:
        return Reader(self.tokenizer, self._dialect, request.reader, request.sampling)

    async def _generate(
        self, request: GenerateRequest, given: Place | None, reader: Reader
    ) -> AsyncGenerator[Chunk]:
        room = self._info.max_model_len - len(request.prompt_ids)
        if room <= 0:
            raise PromptTooLong(len(request.prompt_ids), self._info.max_model_len)
        self.requests.append(request)
        self._check(request)
        place = self._admission.enter(request.owner, request.weight) if given is None else given
        entered = False
        try:
            await self._enter(request)
            entered = True
            place.begin()
            grammar = None
            if request.constraint is not None:
                compiled = self._compile(request.constraint, request.reader, request.owner)
                grammar = await self._until(compiled, request)
            self._counters.prompt_tokens += len(request.prompt_ids)
            self._counters.share.charge(request.owner, len(request.prompt_ids), request.weight)
            follow = self._follow(request, reader, grammar, min(room, request.sampling.max_tokens))
            async with aclosing(follow) as chunks:
                async for chunk in chunks:
                    self._counters.chunks += 1
                    num_new = 0 if chunk.replayed else len(chunk.token_ids)
                    self._counters.output_tokens += num_new
                    self._counters.share.charge(request.owner, num_new, request.weight)
                    yield chunk
        finally:
            if entered:
                self._leave()
            if given is None:
                place.leave()

    async def _follow(
        self, request: GenerateRequest, reader: Reader, grammar: Grammar | None, max_tokens: int
    ) -> AsyncGenerator[Chunk]:
        """The prefix as its chunks were, then what the script says after it."""
        parts = request.prefix
        scored = await self._scored(request)
        if max_tokens == 0 and not parts:
            yield self._read(reader, request, (), Done("length"), scored, first=True)[0]
            return
        skip = 0
        for index, token_ids in enumerate(parts):
            skip += len(token_ids)
            finish = self._speech.finish(request.sampling, token_ids, skip, max_tokens)
            if finish is None and index + 1 == len(parts) and _stopped(grammar, parts, max_tokens):
                finish = Done("stop")
            chunk, done = self._read(
                reader, request, token_ids, finish, scored, first=not index, replayed=True
            )
            scored = None
            yield chunk
            if done:
                return
        first = not parts
        loop = asyncio.get_running_loop()
        tick_s, due = self._tick_s, loop.time()
        matcher = None if grammar is None else grammar.matcher(max_tokens)
        prompt = await self.detokenize(request.prompt_ids)
        for step in self._speech.chunks(request, prompt, self._script, matcher, max_tokens):
            if isinstance(step, Tick):
                tick_s = step.seconds
            elif isinstance(step, Wait | Fail):
                if not skip:  # gates in front of the prefix's end were passed by the first attempt
                    await self._wait_or_fail(step, request)
                    due = loop.time()
            else:
                token_ids, finish = step
                behind = min(skip, len(token_ids))
                skip -= behind
                token_ids = token_ids[behind:]
                if not token_ids and not finish:
                    continue
                due += tick_s
                await asyncio.sleep(max(0.0, due - loop.time()))
                self._check(request)
                chunk, done = self._read(reader, request, token_ids, finish, scored, first=first)
                first, scored = False, None
                yield chunk
                if done:
                    return

    def _read(
        self,
        reader: Reader,
        request: GenerateRequest,
        token_ids: Tokens,
        finish: Done | None,
        scored: _Scores | None,
        *,
        first: bool,
        replayed: bool = False,
    ) -> tuple[Chunk, bool]:
        count = request.sampling.logprobs
        logprobs = () if count is None else tuple(self._logprob(token_id, count) for token_id in token_ids)
        reading = reader.feed(token_ids, finish, logprobs)
        chunk = Chunk(
            token_ids=token_ids[: reading.num_tokens],
            deltas=reading.deltas,
            logprobs=logprobs[: reading.num_tokens],
            reasoning_tokens=reading.reasoning_tokens,
            cached_tokens=0 if first else None,
            prompt_logprobs=scored,
            replayed=replayed,
        )
        return chunk, reading.done

    async def _scored(self, request: GenerateRequest) -> _Scores | None:
        """The log probabilities of a prompt's own tokens, where they are asked for."""
        count = request.sampling.prompt_logprobs
        if count is None:
            return None

        def work() -> _Scores:
            return (None, *(self._logprob(token_id, count) for token_id in request.prompt_ids[1:]))

        return await asyncio.to_thread(work) if len(request.prompt_ids) > SMALL_TEXT else work()

    def _logprob(self, token_id: int, count: int) -> TokenLogprob:
        """Made up and always the same: the token first, then its neighbours by id, each e times less
        likely."""
        others = [(token_id + step) % self.tokenizer.vocab_size for step in range(count)]
        top = tuple(
            (other, self.token_text(other), self.tokenizer.token_bytes(other), -0.5 - rank)
            for rank, other in enumerate(others)
        )
        return TokenLogprob(
            token_id, self.token_text(token_id), self.tokenizer.token_bytes(token_id), -0.5, top
        )

    # -- waiting ---------------------------------------------------------------------------------------------

    async def _enter(self, request: GenerateRequest) -> None:
        """Come to be among the running until `_leave`: the owner that was served least is next, and of its
        requests the oldest."""
        counters = self._counters
        if request.owner not in counters.waiting:
            counters.share.join(request.owner, counters.waiting)
        if counters.running < self._max_running:
            counters.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        counters.waiting.setdefault(request.owner, deque()).append(turn)
        try:
            await self._until(turn, request)
        except BaseException:
            if turn in counters.waiting.get(request.owner, ()):
                self._take(request.owner, turn)
            else:  # its turn had come while this request was on its way out
                self._leave()
            raise

    def _leave(self) -> None:
        counters = self._counters
        if counters.waiting:
            owner = counters.share.least(counters.waiting)
            turn = counters.waiting[owner][0]
            self._take(owner, turn)
            turn.set_result(None)
        else:
            counters.running -= 1
            if not counters.running:
                counters.share = FairShare()  # nobody competes: who was served what no longer counts

    def _take(self, owner: str, turn: asyncio.Future[None]) -> None:
        """Take a turn out of those that wait; of owners served alike, another one is next."""
        queue = self._counters.waiting.pop(owner)
        queue.remove(turn)
        if queue:
            self._counters.waiting[owner] = queue

    async def _wait_or_fail(self, step: Wait | Fail, request: GenerateRequest) -> None:
        if isinstance(step, Fail):
            if isinstance(step.error, EngineError):
                raise step.error
            raise RequestFailed(str(step.error)) from step.error
        if step.reached is not None:
            step.reached.set()
        await self._until(step.release.wait(), request)

    async def _until(self, awaitable: Awaitable[_T], request: GenerateRequest) -> _T:
        """Wait, unless the engine ends or the request's deadline passes first."""
        assert self._end is not None
        task = asyncio.ensure_future(awaitable)
        left = None if request.deadline is None else max(0.0, request.deadline - time.monotonic())
        try:
            waited: set[asyncio.Future[Any]] = {task, self._end}
            await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            self._check(request)
            return task.result()
        finally:
            task.cancel()

    def _check(self, request: GenerateRequest) -> None:
        if self._end is None:
            raise EngineDead("the engine has not started")
        if self._end.done():
            raise EngineDead(f"the engine stopped: {self._end.result()}") from self._end.result()
        if request.deadline is not None and time.monotonic() >= request.deadline:
            raise DeadlineExceeded(f"request {request.id} ran past its deadline")

    def _stop(self, error: BaseException) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(error)

    async def _compile(self, constraint: Constraint, reader: ReaderParams, owner: str = "") -> Grammar:
        from engine.structured.isolation import Constraints  # numpy, only where it is needed

        if self._constraints is None:
            self._constraints = Constraints(self.tokenizer, self._dialect, lasting=True)
        return await self._constraints.compile(constraint, reader, owner)


def _output(chunk: Chunk, finish: Done | None, *, first: bool) -> RowOutput:
    """A chunk as the engine thread would have given it."""
    from engine.step import RowOutput

    return RowOutput(
        -1,
        chunk.token_ids,
        finish,
        tuple(map(_unread, chunk.logprobs)),
        cached_tokens=0 if first else None,
        prompt_logprobs=None
        if chunk.prompt_logprobs is None
        else tuple(_unread(score) for score in chunk.prompt_logprobs if score is not None),
    )


def _unread(score: TokenLogprob) -> RowLogprobs:
    from engine.step import RowLogprobs

    ids, values = tuple(each[0] for each in score.top), tuple(each[3] for each in score.top)
    return RowLogprobs(score.token_id, score.logprob, ids, values)


def _stopped(grammar: Grammar | None, parts: tuple[Tokens, ...], max_tokens: int) -> bool:
    """Whether the grammar ends after these tokens, so that no end of turn had to be drawn."""
    if grammar is None:
        return False
    matcher = grammar.matcher(max_tokens)
    matcher.take(list(chain.from_iterable(parts)))
    return matcher.stopped
