"""An engine without a model: it says what a script says, through the real tokenizer, dialect, parser and
grammar.

Owns: scripts, pacing, gates that tests release, and a byte-level tokenizer of its own (256 bytes and the
shipped model's tags). Refuses to know: torch. Everything else that the engine's door promises holds: limits,
stop strings, constraints, replay of a prefix, a queue that fills, a death that reaches every caller.

Its script is a callable over (request, prompt text) that yields steps (script.py, which also has the default
one). Under a constraint it says what the script says where the grammar lets it, and otherwise completes the
shape in the shortest way it knows: a minimal valid call.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import ascii_letters
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.dialects import Dialect, dialect_named
from engine.reader import Reader
from engine.script import Fail, Say, Script, Tick, Wait, obey
from engine.text import BYTE_ALPHABET, Tokenizer
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
    QueueFull,
    RenderInput,
    RequestFailed,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from engine.grammar import Grammar, Grammars, Matcher

TEMPLATE = Path(__file__).parent / "tiny" / "checkpoint" / "chat_template.jinja"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


_T = TypeVar("_T")
_Tokens = tuple[int, ...]
_Item = tuple[_Tokens, bool] | Wait | Fail | Tick  # tokens, and whether the grammar ends behind them


def scripted_tokenizer(template: str | None = None) -> Tokenizer:
    """A tokenizer of 256 bytes, ChatML's special tokens and the hermes tags; `template` replaces the shipped
    one."""
    alphabet = {char: value[0] for char, value in BYTE_ALPHABET.items()}
    backend = Backend(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tags = sorted(dialect_named("hermes").tags)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    ids = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        backend,
        templates={"default": template or TEMPLATE.read_text(encoding="utf-8")},
        special_tokens={"eos_token": "<|im_end|>"},
        eos_token_ids=(ids["<|im_end|>"], ids["<|endoftext|>"]),
    )


@dataclass
class _Counters:
    running: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    queue: deque[asyncio.Future[None]] = field(default_factory=deque)


class ScriptedEngine:
    """An `Engine` that follows a script (see the module's text for the one it has by itself).

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
        chat_template: str | None = None,
    ) -> None:
        self._script = script or obey
        self._chunk = chunk
        self._tick_s = tick_s
        self._max_running = max_running
        self._max_waiting = max_waiting
        self.tokenizer = scripted_tokenizer(chat_template)
        self._dialect: Dialect = dialect_named("hermes")
        self._grammars: Grammars | None = None
        self._info = ModelInfo(
            name=name,
            max_model_len=max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            fingerprint="scripted-" + self.tokenizer.fingerprint.hex(),
            eos_token_ids=self.tokenizer.eos_token_ids,
            capabilities=frozenset({"exact_resume", "grammar", "logprobs", "token_ids"}),
            dialect=self._dialect.name,
        )
        self._counters = _Counters()
        self._end: asyncio.Future[BaseException] | None = None  # why no request can go on; set by start
        self._killed = False
        self.requests: deque[GenerateRequest] = deque(maxlen=256)

    # -- the door --------------------------------------------------------------------------------------------

    async def start(self) -> ModelInfo:
        """Ready at once."""
        self._end = asyncio.get_running_loop().create_future()
        return self._info

    @property
    def info(self) -> ModelInfo:
        """The model served."""
        return self._info

    async def render(self, messages: RenderInput) -> Prompt:
        """Render messages by the chat template; raises RenderError."""
        text = self.tokenizer.render(messages, self._dialect.arguments)
        return Prompt(tuple(self.tokenizer.encode(text)), self._dialect.starts_in(text))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode text: a token a byte, tags aside."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        return self.tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token's text."""
        return self.tokenizer.token_bytes(token_id).decode(errors="replace")

    async def check(self, constraint: Constraint) -> None:
        """Compile a constraint ahead of time; raises ConstraintError."""
        await asyncio.to_thread(self._compile, constraint, "text")

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Follow the script; closing the generator aborts at once."""
        return self._generate(request)

    def stats(self) -> EngineStats:
        """Counters; there is no KV cache to count."""
        counters = self._counters
        return EngineStats(
            waiting=len(counters.queue),
            running=counters.running,
            prompt_tokens_total=counters.prompt_tokens,
            output_tokens_total=counters.output_tokens,
            steps_total=counters.chunks,
        )

    def check_integrity(self) -> None:
        """Nobody may wait while there is room."""
        counters = self._counters
        assert 0 <= counters.running <= self._max_running
        assert not counters.queue or counters.running == self._max_running

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

    def kill(self, error: BaseException) -> None:
        """Die: `dead` returns `error`, every request ends with EngineDead, no new one is taken."""
        self._killed = True
        self._stop(error)

    # -- one request -----------------------------------------------------------------------------------------

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        room = self._info.max_model_len - len(request.prompt_ids)
        if room <= 0:
            raise PromptTooLong(len(request.prompt_ids), self._info.max_model_len)
        self.requests.append(request)
        await self._enter(request)
        try:
            matcher = None
            if request.constraint is not None:
                compiled = asyncio.to_thread(self._compile, request.constraint, request.reader.starts_in)
                matcher = (await self._until(compiled, request)).matcher()
            self._counters.prompt_tokens += len(request.prompt_ids)
            async for chunk in self._follow(request, matcher, min(room, request.sampling.max_tokens)):
                self._counters.chunks += 1
                self._counters.output_tokens += 0 if chunk.replayed else len(chunk.token_ids)
                yield chunk
        finally:
            self._leave()

    async def _follow(
        self, request: GenerateRequest, matcher: Matcher | None, max_tokens: int
    ) -> AsyncGenerator[Chunk]:
        """The prefix as its chunks were, then what the script says behind it."""
        reader = Reader(self.tokenizer, self._dialect, request.reader, request.sampling)
        first = True
        num_tokens = 0
        for token_ids in request.prefix:
            num_tokens += len(token_ids)
            finish = self._finish(request.sampling, token_ids, num_tokens, max_tokens)
            chunk, done = self._read(reader, request, token_ids, finish, first, replayed=True)
            yield chunk
            if done:
                return
            first = False
        steps = self._steps(request)
        if matcher is not None:
            steps = self._constrained(steps, matcher)
        tick_s, due = self._tick_s, asyncio.get_running_loop().time()
        skip, num_tokens = num_tokens, 0
        for step in steps:
            if isinstance(step, Tick):
                tick_s = step.seconds
            elif isinstance(step, Wait | Fail):
                if not skip:  # gates in front of the prefix's end were passed by the first attempt
                    await self._obey(step, request)
            else:
                token_ids, ended = step
                token_ids, finish = self._cut(request.sampling, token_ids, num_tokens, max_tokens, ended)
                num_tokens += len(token_ids)
                behind = min(skip, len(token_ids))
                skip -= behind
                token_ids = token_ids[behind:]
                if skip or not (token_ids or finish):
                    continue
                due += tick_s
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                self._check(request)
                chunk, done = self._read(reader, request, token_ids, finish, first, replayed=False)
                first = False
                yield chunk
                if done:
                    return

    def _read(
        self,
        reader: Reader,
        request: GenerateRequest,
        token_ids: _Tokens,
        finish: Done | None,
        first: bool,
        *,
        replayed: bool,
    ) -> tuple[Chunk, bool]:
        count = request.sampling.logprobs
        logprobs = () if count is None else tuple(self._logprob(token_id, count) for token_id in token_ids)
        reading = reader.feed(token_ids, finish, logprobs)
        asked = request.sampling.prompt_logprobs if first else None
        prompt = None
        if asked is not None:
            prompt = (None, *(self._logprob(token_id, asked) for token_id in request.prompt_ids[1:]))
        chunk = Chunk(
            token_ids=token_ids[: reading.num_tokens],
            deltas=reading.deltas,
            logprobs=logprobs[: reading.num_tokens],
            reasoning_tokens=reading.reasoning_tokens,
            cached_tokens=0 if first else None,
            prompt_logprobs=prompt,
            replayed=replayed,
        )
        return chunk, reading.done

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
        """Take a place among the running, in the order of arrival; `_leave` gives it back."""
        counters = self._counters
        self._check(request)
        if counters.running < self._max_running:
            counters.running += 1
            return
        if len(counters.queue) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests wait already")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        counters.queue.append(place)
        try:
            await self._until(place, request)
        except BaseException:
            if place in counters.queue:
                counters.queue.remove(place)
            else:  # the place was given while this request was on its way out
                self._leave()
            raise

    def _leave(self) -> None:
        if self._counters.queue:
            self._counters.queue.popleft().set_result(None)
        else:
            self._counters.running -= 1

    async def _obey(self, step: Wait | Fail, request: GenerateRequest) -> None:
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

    def _compile(self, constraint: Constraint, starts_in: str) -> Grammar:
        from engine.grammar import Grammars  # llguidance, only where it is needed

        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self._dialect)
        return self._grammars.compile(constraint, starts_in)

    @cached_property
    def _closing_order(self) -> list[int]:
        """Every token but the reasoning tags, those first that end something."""
        assert self._dialect.calls is not None and self._dialect.reasoning is not None
        tags = (self._dialect.calls.close, self._dialect.calls.open)
        ends = [*self._info.eos_token_ids, *(self.tokenizer.token_id(tag) for tag in tags)]
        ends += self.tokenizer.encode('}]",: 0123456789')
        hidden = {self.tokenizer.token_id(self._dialect.reasoning.open)}
        order = dict.fromkeys(
            [*ends, *self.tokenizer.encode(ascii_letters), *range(self.tokenizer.vocab_size)]
        )
        return [token_id for token_id in order if token_id is not None and token_id not in hidden]

    # -- what it says, as tokens -----------------------------------------------------------------------------

    def _steps(self, request: GenerateRequest) -> Iterator[_Item]:
        """The script's steps, its text as chunks of tokens with a flag (the grammar has ended); then the end
        of turn, for ever, with filler in front where the end does not count."""
        prompt = self.tokenizer.decode(request.prompt_ids)
        for step in self._script(request, prompt):
            if isinstance(step, Say):
                for token_ids in self._pieces(step):
                    yield token_ids, False
            else:
                yield step
        eos = self._info.eos_token_ids[0]
        filler = tuple(self.tokenizer.encode(" more"))
        while True:
            yield ((eos,), False) if not request.sampling.ignore_eos else (filler, False)
            yield filler, False  # reached only when min_tokens has taken the end out

    def _pieces(self, say: Say) -> Iterator[_Tokens]:
        if say.whole:
            yield tuple(self.tokenizer.encode(say.text))
        elif self._chunk == "word":
            for word in re.findall(r"\s*\S+|\s+$", say.text):
                yield tuple(self.tokenizer.encode(word))
        else:
            token_ids = self.tokenizer.encode(say.text)
            for start in range(0, len(token_ids), self._chunk):
                yield tuple(token_ids[start : start + self._chunk])

    def _constrained(self, steps: Iterator[_Item], matcher: Matcher) -> Iterator[_Item]:
        """What of the steps the grammar lets through, and the shortest end from where it does not."""
        for step in steps:
            if not isinstance(step, tuple):
                yield step
                continue
            allowed: list[int] = []
            for token_id in step[0]:
                if not matcher.allows(token_id):
                    yield tuple(allowed), False
                    yield from self._complete(matcher)
                    return
                matcher.advance(token_id)
                allowed.append(token_id)
                if matcher.stopped:
                    break
            yield tuple(allowed), matcher.stopped
            if matcher.stopped:
                return

    def _complete(self, matcher: Matcher) -> Iterator[_Item]:
        """Tokens that close what is open as early as the grammar allows, up to eight a chunk."""
        while not matcher.stopped:
            chunk: list[int] = []
            while len(chunk) < 8 and not matcher.stopped:
                token_id = next(filter(matcher.allows, self._closing_order), None)
                if token_id is None:
                    raise RequestFailed("the grammar allows no token")
                matcher.advance(token_id)
                chunk.append(token_id)
            yield tuple(chunk), matcher.stopped

    # -- ends ------------------------------------------------------------------------------------------------

    def _finish(
        self, sampling: SamplingParams, token_ids: _Tokens, num_tokens: int, max_tokens: int
    ) -> Done | None:
        """How a generation of `num_tokens` whose last chunk is `token_ids` has ended, as its tokens tell."""
        last = token_ids[-1] if token_ids else -1
        if num_tokens > sampling.min_tokens:
            if last in sampling.stop_token_ids:
                return Done("stop", last)
            if last in self._info.eos_token_ids and not sampling.ignore_eos:
                return Done("stop")
        return Done("length") if num_tokens >= max_tokens else None

    def _cut(
        self, sampling: SamplingParams, token_ids: _Tokens, num_tokens: int, max_tokens: int, ended: bool
    ) -> tuple[_Tokens, Done | None]:
        """The chunk up to the first token that ends the generation."""
        kept: list[int] = []
        for token_id in token_ids:
            early = num_tokens + len(kept) < sampling.min_tokens
            if early and token_id in (*self._info.eos_token_ids, *sampling.stop_token_ids):
                continue
            kept.append(token_id)
            finish = self._finish(sampling, tuple(kept), num_tokens + len(kept), max_tokens)
            if finish is not None:
                return tuple(kept), finish
        return tuple(kept), Done("stop") if ended else None
