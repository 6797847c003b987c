"""What chat completions and text completions share: the choices of one request, generated side by side.

A `Writer` for each choice makes parts of engine chunks. A streamed reply sends these parts in an envelope; a
whole reply folds them again. So what is streamed and what is not cannot differ.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import orjson

from engine import (
    Chunk,
    ConstraintError,
    Engine,
    EngineError,
    Generate,
    GenerateRequest,
    ModelInfo,
    Place,
    TokenLogprob,
    beam_search,
    best_of,
    check_request,
)
from server.errors import ApiError, to_api_error
from server.event_profiles import padded
from server.model_registry import ServedModel
from server.runs.events import item_logprob
from server.schema import ChatStreamOptions, Search, num_requests
from server.sse_frame import frame
from server.stateless.cancellation import Cancellation
from server.stateless.moderated import Moderated
from server.telemetry import Asked, Telemetry, current
from server.threads import THREADED_PARTS, aside, in_large_request
from server.usage import Meter
from storage import Account, Counts

Part = dict[str, Any]
Keep = Callable[[bytes], Awaitable[None]]
"""Stores the body of a completion."""
T = TypeVar("T")

log = logging.getLogger("antiphon")

DONE = b"data: [DONE]\n\n"
PATIENCE_S = 0.05
"""How long headers wait for the first chunk, so that what fails at once is an HTTP error and not an event."""


class Writer(Protocol):
    """How one choice is written: engine chunks to parts (the `choices` entries of a stream), parts to the
    whole."""

    def write(self, chunk: Chunk) -> list[Part]:
        """The parts of one engine chunk, in order; the last chunk's last part has the finish reason."""
        ...

    def fold(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The choice that all its parts make."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """How an API writes what its choices come to: the body of a whole reply (of the head, the name of the
    object, the choices and the usage), the frames of a stream (see `framed`), and the frame of a failure.
    keepalive: the event that is sent where a stream is silent, in the place of a comment."""

    body: Callable[[Mapping[str, Any], str, Sequence[dict[str, Any]], dict[str, Any]], bytes]
    framed: Callable[..., AsyncGenerator[bytes]]
    failure: Callable[[Exception], bytes]
    keepalive: bytes | None = None


class Usage:
    """Counts of one request. A prompt counts once however many choices share it, from the moment that the
    engine begins with one of them (`place`), and its cached tokens are those that every choice found."""

    def __init__(self, prompt_tokens: Sequence[int], num_choices: int, place: Place, info: ModelInfo) -> None:
        self._prompt_tokens = prompt_tokens
        self._info = info
        self._cached: list[int | None] = [None] * num_choices
        self._place = place
        self._shown = 0
        self._searched = 0
        self._reasoning = 0
        self._answered = False

    def add(self, choice: int, chunk: Chunk, *, silent: bool = False) -> None:
        """Count a chunk; a silent one's tokens are not part of the answer."""
        self._answered = True
        if chunk.cached_tokens is not None:
            self._cached[choice] = chunk.cached_tokens
        if not silent:
            self._shown += len(chunk.token_ids)
            self._reasoning += chunk.reasoning_tokens

    def search(self, chunk: Chunk) -> None:
        """Count a chunk of a candidate as it comes: which of them the choices show (`add`) is known when all
        have ended."""
        if not chunk.replayed:
            self._searched += len(chunk.token_ids)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far. Those of choices are among those of candidates; but what beams begin with in
        common is generated once, and shown by each."""
        return max(self._shown, self._searched)

    @property
    def _begun(self) -> bool:
        return self._answered or self._place.has_begun  # an answer of no tokens needs no engine

    def counts(self) -> Counts:
        """What is counted for the request's owner; nothing where the engine has not begun."""
        if not self._begun:
            return Counts()
        totals = self.totals()
        return Counts(
            requests=1,
            input_tokens=totals["prompt_tokens"],
            cached_tokens=totals["prompt_tokens_details"]["cached_tokens"],
            output_tokens=self.num_tokens,
            reasoning_tokens=self._reasoning,
        )

    def limited(self) -> tuple[int, int]:
        """Tokens that count against limits, and those of one answer: nothing before the engine has begun, and
        prompt tokens that it is known to have had cached never."""
        if not self._begun:
            return 0, 0
        totals = self.totals()
        cached = totals["prompt_tokens_details"]["cached_tokens"]
        return totals["total_tokens"] - cached, self.num_tokens // len(self._cached)

    def totals(self) -> dict[str, Any]:
        """The official usage object."""
        prompt = sum(self._prompt_tokens)
        num = len(self._cached) // len(self._prompt_tokens)
        per_prompt = [self._cached[start : start + num] for start in range(0, len(self._cached), num)]
        cached = [min(found or 0 for found in choices) for choices in per_prompt]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached),
                "cache_write_tokens": sum(map(self._info.num_cache_writes, self._prompt_tokens, cached)),
            },
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }


@dataclass(slots=True, eq=False)
class PromptTold:
    """What a chat completion says of its prompt beside the choices, where that was asked for.

    token_ids: those of the prompt. num_scores: how many alternatives each of them shows. scores: their log
    probabilities, once they are known.
    """

    token_ids: Sequence[int] | None = None
    num_scores: int | None = None
    scores: list[dict[str, Any] | None] | None = None

    def take(self, chunk: Chunk) -> None:
        """Keep the log probabilities that the first chunk brings."""
        if chunk.prompt_logprobs is not None and self.num_scores is not None and self.scores is None:
            self.scores = prompt_scores(chunk.prompt_logprobs, self.num_scores)

    def members(self) -> dict[str, Any]:
        """The members of the body, or of a stream's first chunk, that say it."""
        told: dict[str, Any] = {}
        if self.token_ids is not None:
            told["prompt_token_ids"] = list(self.token_ids)
        if self.scores is not None:
            told["prompt_logprobs"] = self.scores
        return told


@dataclass(frozen=True, slots=True)
class Completion:
    """The choices of one request, ready to run once.

    requests: one per choice, prompt after prompt; with a search one per candidate, or per prompt for beams.
    writers: one per choice. place: that of all of them in the engine's queue; whoever took it gives it back.
    head: what every body and chunk says (id, created, model, ...). silent: the
    tokens that come are not part of the answer (no token was asked for). account: by which `meter` counts
    what is used, however the request ends. named: the error for a constraint that failed in the middle of a
    text. operation, messages: what a span says of it. told: what is said of the prompt beside the choices.
    form: how the API writes it. answered: see `telemetry.Asked`. moderated: what judges it; None where nobody
    asked. num_scores: log probabilities of its prompts' tokens (see `check_scores`).
    """

    engine: Engine
    telemetry: Telemetry
    meter: Meter
    account: Account
    requests: Sequence[GenerateRequest]
    writers: Sequence[Writer]
    head: dict[str, Any]
    usage: Usage
    place: Place
    named: Callable[[ConstraintError], ApiError]
    silent: bool = False
    search: Search | None = None
    operation: Literal["chat", "text_completion"] = "chat"
    messages: Callable[[], list[dict[str, Any]]] | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)
    told: PromptTold = field(default_factory=PromptTold)
    form: Form = field(default_factory=lambda: PLAIN)
    answered: Callable[[EngineError | None], None] | None = None
    moderated: Moderated | None = None
    num_scores: int = 0

    def tokens(self) -> tuple[int, int]:
        """Of all prompts together, each counted once, and the most that one answer may have."""
        prompts = {id(request.prompt_ids): len(request.prompt_ids) for request in self.requests}
        return sum(prompts.values()), max(request.sampling.max_tokens for request in self.requests)

    def parts(self) -> AsyncGenerator[list[Part]]:
        """The parts of each engine chunk as it comes, whatever choice it belongs to. Closing it aborts them
        all."""
        return self._made() if self.moderated is None else self.moderated.judge(self._made())

    async def _made(self) -> AsyncGenerator[list[Part]]:
        cancellation = self.cancellation
        try:
            with cancellation.at_work():
                async with aclosing(self._chunks()) as chunks:
                    async for choice, chunk in chunks:
                        self.usage.add(choice, chunk, silent=self.silent)
                        much = len(chunk.prompt_logprobs or ()) > THREADED_PARTS
                        parts = await aside(much, self._written, choice, chunk)
                        if parts:
                            cancellation.rest()
                            yield parts
                            cancellation.wait()
        except ConstraintError as error:
            raise self.named(error) from None
        finally:
            if (counts := self.usage.counts()).requests:
                self.meter.spend(self.account, counts)

    def _written(self, choice: int, chunk: Chunk) -> list[Part]:
        self.told.take(chunk)
        return self.writers[choice].write(chunk)

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """(choice, chunk) as they come; where the best are to be found first, when they are."""
        generate = self._scored_once(self._timed)
        if self.search is None:
            async with aclosing(side_by_side([generate(request) for request in self.requests])) as chunks:
                async for choice_and_chunk in chunks:
                    yield choice_and_chunk
            return
        per_prompt = 1 if self.search.beams is not None else self.search.num_candidates
        num_prompts = len(self.requests) // per_prompt
        count = len(self.writers) // num_prompts
        candidates = [self.requests[at * per_prompt : (at + 1) * per_prompt] for at in range(num_prompts)]
        picks = [
            self._pick(self.search, generate, each, at * count, count) for at, each in enumerate(candidates)
        ]
        async with aclosing(side_by_side(picks)) as picked:
            async for _, best in picked:
                yield best

    async def _pick(
        self,
        search: Search,
        generate: Generate,
        requests: Sequence[GenerateRequest],
        first: int,
        count: int,
    ) -> AsyncGenerator[tuple[int, Chunk]]:
        """The chunks of the best of one prompt's candidates, as choices from `first` on."""
        if search.beams is not None:
            steps = partial(self.engine.generate, place=self.place)
            info, beams = self.engine.info, search.beams
            picked = await beam_search(self._counted(steps), info, requests[0], beams, count)
        else:
            picked = await best_of(self._counted(generate), requests, count)
        for choice, chunks in enumerate(picked.chunks, first):
            for chunk in chunks:
                yield choice, chunk

    def _counted(self, generate: Generate) -> Generate:
        """The same, of which every token counts when it comes: a search may never end."""

        async def counted(request: GenerateRequest) -> AsyncGenerator[Chunk]:
            async with aclosing(generate(request)) as chunks:
                async for chunk in chunks:
                    if not self.silent:
                        self.usage.search(chunk)
                    yield chunk

        return counted

    def _scored_once(self, generate: Generate) -> Generate:
        """The same, of which all choices of a prompt bring the scores of its tokens that one has found: the
        others begin behind that one."""
        asked = [request for request in self.requests if request.sampling.prompt_logprobs is not None]
        if len(asked) in (0, len(self.requests)):
            return generate
        loop = asyncio.get_running_loop()
        scores: dict[int, asyncio.Future[Any]] = {id(each.prompt_ids): loop.create_future() for each in asked}

        async def scored(request: GenerateRequest) -> AsyncGenerator[Chunk]:
            found = scores.get(id(request.prompt_ids))
            given = None
            if found is not None and request.sampling.prompt_logprobs is None:
                given = await found
            async with aclosing(generate(request)) as chunks:
                async for chunk in chunks:
                    if found is not None and not found.done():
                        found.set_result(chunk.prompt_logprobs)
                    yield chunk if given is None else replace(chunk, prompt_logprobs=given)
                    given = None

        return scored

    def _timed(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        asked = Asked(
            self.head["model"],
            self.engine,
            request,
            operation=self.operation,
            completion_id=self.head["id"],
            messages=self.messages,
            answered=self.answered,
        )
        return self.telemetry.generate(asked, self.place)

    async def whole(self, object_name: str) -> bytes:
        """The body of a reply that is not streamed. Raises the engine's errors."""
        gathered: list[list[Part]] = [[] for _ in self.writers]
        async with aclosing(self.parts()) as stream:
            async for parts in stream:
                for part in parts:
                    gathered[part["index"]].append(part)
        much = in_large_request() or sum(map(len, gathered)) > THREADED_PARTS
        return await aside(much, self._folded, object_name, gathered)

    def _folded(self, object_name: str, gathered: list[list[Part]]) -> bytes:
        choices = [writer.fold(parts) for writer, parts in zip(self.writers, gathered, strict=True)]
        gathered.clear()  # here, because to free a long answer's parts takes long enough to hold the loop
        head = {**self.head, **self.told.members(), **self._judged()}
        return self.form.body(head, object_name, choices, self.usage.totals())

    def _judged(self) -> dict[str, Any]:
        return {} if self.moderated is None else self.moderated.members()

    def frames(
        self, object_name: str, options: ChatStreamOptions, keep: Keep | None = None
    ) -> AsyncGenerator[bytes]:
        """The frames of a streamed reply: one write per engine chunk, usage if asked for, then [DONE]. keep:
        stores the whole completion before its last chunk.

        Raises the engine's errors; `begin` says what becomes of them.
        """
        parts = self.parts() if keep is None else self._kept_parts(keep)
        usage = self.usage.totals if options.include_usage else None
        return self.form.framed(
            self.head,
            object_name,
            parts,
            usage,
            continuous=options.continuous_usage_stats,
            first=self.told.members(),
            last=self._judged,
            pads=bool(options.include_obfuscation),
        )

    async def _kept_parts(self, keep: Keep) -> AsyncGenerator[list[Part]]:
        """The parts, of which the last come once the completion is stored."""
        gathered: list[list[Part]] = [[] for _ in self.writers]
        left = len(self.writers)
        async with aclosing(self.parts()) as stream:
            async for parts in stream:
                for part in parts:
                    gathered[part["index"]].append(part)
                    left -= part["finish_reason"] is not None
                if not left:
                    much = sum(map(len, gathered)) > THREADED_PARTS
                    await keep(await aside(much, self._folded, "chat.completion", gathered))
                yield parts


def body(
    head: Mapping[str, Any], object_name: str, choices: Sequence[dict[str, Any]], usage: dict[str, Any]
) -> bytes:
    """The body of a reply that is not streamed. head: see `new_head`."""
    return orjson.dumps({**_opening(head, object_name), "choices": choices, "usage": usage})


async def framed(
    head: Mapping[str, Any],
    object_name: str,
    parts: AsyncGenerator[list[Part]],
    usage: Callable[[], dict[str, Any]] | None,
    *,
    continuous: bool = False,
    first: Mapping[str, Any] | None = None,
    last: Callable[[], Mapping[str, Any]] = dict,
    pads: bool = False,
) -> AsyncGenerator[bytes]:
    """The frames of a streamed reply: one write for parts that come together, then what `usage` returns
    (None: it was not asked for), then [DONE]. continuous: every chunk has the usage so far. first: members
    that the first chunk alone has. last: those of one more chunk behind all parts, if there are any. pads:
    chunks of parts have a member `obfuscation`, lest their length tells what they say. Raises what the parts
    raise."""
    start = b"data: " + orjson.dumps(_opening(head, object_name))[:-1]
    opening, closing = start + b',"choices":[', b"]}\n\n" if usage is None else b'],"usage":null}\n\n'
    beginning = start + b"," + orjson.dumps(first)[1:-1] + b',"choices":[' if first else opening
    key, number = secrets.token_bytes(16) if pads else None, 0
    async with aclosing(parts) as stream:
        async for together in stream:
            if continuous and usage is not None:
                closing = b'],"usage":' + orjson.dumps(usage()) + b"}\n\n"
            frames = []
            for part in together:
                written = beginning + orjson.dumps(part) + closing
                beginning, number = opening, number + 1
                frames.append(written if key is None else _padded(written, number, key))
            yield frames[0] if len(frames) == 1 else b"".join(frames)
    if told := last():
        yield start + b"," + orjson.dumps(told)[1:-1] + b',"choices":[' + closing
    if usage is not None:
        yield opening + b'],"usage":' + orjson.dumps(usage()) + b"}\n\n"
    yield DONE


def _padded(written: bytes, number: int, key: bytes) -> bytes:
    start, end = len(b"data: "), len(b"\n\n")
    return written[:start] + padded(written[start:-end], number, key) + written[-end:]


def _opening(head: Mapping[str, Any], object_name: str) -> dict[str, Any]:
    return {"id": head["id"], "object": object_name, **head}


def prompt_requests(
    asked: GenerateRequest, served: ServedModel, search: Search | None, n: int, *, first: int = 0
) -> list[GenerateRequest]:
    """One request for each of `n` choices of a prompt, or for each candidate that a search chooses from. Only
    the first has the prompt's tokens scored: none must compute again what another one has.

    asked: what they have in common; its id is the completion's. first: how many requests other prompts of the
    completion have before. Raises the engine's RequestErrors.
    """
    check_request(asked, served.info)  # once: they differ by their numbers alone
    unscored = replace(asked, sampling=replace(asked.sampling, prompt_logprobs=None))
    return [
        replace(unscored if choice else asked, id=f"{asked.id}/{first + choice}", choice=choice)
        for choice in range(num_requests(search, n))
    ]


def new_head(completion_id: str, served: ServedModel) -> dict[str, Any]:
    """What every body and chunk of a completion begins with."""
    return {
        "id": completion_id,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": served.info.fingerprint,
    }


def check_logprobs(asked: int | None, served: ServedModel, param: str = "logprobs") -> None:
    """Raise ApiError 400 when log probabilities are asked of an engine that has none."""
    if asked is not None and "logprobs" not in served.info.capabilities:
        message = f"The model '{served.name}' gives no log probabilities."
        raise ApiError(400, message, code="unsupported_parameter", param=param)


MAX_SCORES = 1 << 21
"""Log probabilities of prompts' tokens in one reply, and in all that a process makes at once: they take up to
600 bytes each meanwhile, 1.3 GB together."""


def check_scores(num_tokens: int, count: int | None, param: str) -> int:
    """How many scores a reply has: of so many tokens of prompts, in every choice that shows them, their own
    and those of `count` alternatives; None: they have none. ApiError 400 where these are more than it may
    have."""
    num_scores = 0 if count is None else num_tokens * (count + 1)
    if num_scores > MAX_SCORES:
        message = (
            f"The log probabilities of {num_tokens} prompt tokens, with {count} alternatives each, are more "
            f"than the {MAX_SCORES} that one reply may have. Ask for fewer alternatives, or for fewer "
            "prompts and choices at once."
        )
        raise ApiError(400, message, code="invalid_value", param=param)
    return num_scores


def prompt_scores(entries: Sequence[TokenLogprob | None], count: int) -> list[dict[str, Any] | None]:
    """Log probabilities of a prompt's tokens in vLLM's form: for each but the first, by token id, its own and
    those of the `count` likeliest. A rank counts from 1; that of a token beyond those is not known."""
    return [None if entry is None else _scores(entry, count) for entry in entries]


def _scores(entry: TokenLogprob, count: int) -> dict[str, Any]:
    own = str(entry.token_id)
    shown = {own: {"logprob": entry.logprob, "rank": None, "decoded_token": entry.token}}
    for rank, (token_id, token, _, logprob) in enumerate(entry.top, 1):
        if rank <= count or token_id == entry.token_id:
            shown[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": token}
    return shown


def logprob_by_id(entry: TokenLogprob) -> dict[str, Any]:
    """The log probability of an output token, in the form of chat, whose tokens are written as their ids."""
    named = item_logprob(entry)
    for shown, (token_id, *_) in zip(named["top_logprobs"], entry.top, strict=True):
        shown["token"] = f"token_id:{token_id}"
    return {**named, "token": f"token_id:{entry.token_id}"}


def check_search(search: Search | None, served: ServedModel) -> None:
    """Raise ApiError 400 when an engine is asked for a search that it cannot do."""
    wanted, param = ("logprobs", "best_of")
    if search is not None and search.beams is not None:
        wanted, param = ("beams", "use_beam_search")
    if search is not None and wanted not in served.info.capabilities:
        message = f"The model '{served.name}' cannot rank candidates by '{param}'."
        raise ApiError(400, message, code="unsupported_parameter", param=param)


AT_ONCE = 64
"""Choices of one request that the engine is asked for at once. More of them would take all of its places, and
whoever comes next would wait for whole answers; so each further one comes behind those who came meanwhile."""


async def side_by_side(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(place, item) of all streams as they come, `AT_ONCE` of them at a time; the first failure, or closing
    it, ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    # Room for one item a stream: a slow reader holds the streams back, not memory.
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(len(streams))
    places = asyncio.Semaphore(AT_ONCE)

    async def pull(place: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(stream) as items, places:
                async for item in items:
                    await queue.put((place, item))
        except Exception as exc:
            await queue.put(exc)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pull(place, stream)) for place, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            event = await queue.get()
            if event is None:  # one of the streams has ended
                running -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Begun(AsyncIterator[bytes]):
    """Frames whose first was asked for before the headers went out; see `begin`."""

    def __init__(self, frames: AsyncGenerator[bytes], failure: Callable[[Exception], bytes]) -> None:
        self._frames = frames
        self._failure = failure
        self._first: asyncio.Task[bytes] | None = asyncio.create_task(_next(frames))
        self._failed = False

    async def settle(self, patience_s: float) -> None:
        """Wait a moment for the first frame; raises what it raised."""
        assert self._first is not None
        await asyncio.wait({self._first}, timeout=patience_s)
        if self._first.done():
            self._first.result()

    async def __anext__(self) -> bytes:
        if self._failed:
            raise StopAsyncIteration
        try:
            if self._first is None:
                return await anext(self._frames)
            frame = await self._first
            self._first = None
            return frame
        except StopAsyncIteration:
            raise
        except Exception as exc:
            # The one place where a failure after the headers is told: the status is out, so it becomes an
            # event.
            self._failed = True
            return self._failure(exc)

    async def aclose(self) -> None:
        """Abort what runs; safe at any time, and needed even when no frame was ever taken."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._frames.aclose()


async def _next(frames: AsyncGenerator[bytes]) -> bytes:
    return await anext(frames)


async def begin(
    frames: AsyncGenerator[bytes],
    patience_s: float = PATIENCE_S,
    failure: Callable[[Exception], bytes] | None = None,
) -> Begun:
    """Start a stream before its headers go out. failure: makes the event of a failure; by default that of
    chat completions.

    What fails within `patience_s` is raised here and becomes an HTTP error; later it is the stream's last
    event, and [DONE] does not come. A prompt that takes longer to read does not hold the headers back,
    because proxies count silence from the request on.
    """
    begun = Begun(frames, failure or error_frame)
    try:
        await begun.settle(patience_s)
    except BaseException:
        await begun.aclose()
        raise
    return begun


def error_frame(exc: Exception) -> bytes:
    """The event of a failure: the official error object alone, which makes SDKs raise."""
    return frame(None, orjson.dumps({"error": noted_failure(exc).in_stream()}))


def noted_failure(exc: Exception) -> ApiError:
    """The error that a stream ends with, once it is in the request's record, and in the log where nobody
    expected it."""
    error = to_api_error(exc)
    if (record := current.get()) is not None:
        record.error_code = error.code or error.type
    if error.status == 500:
        log.error("a stream failed", exc_info=exc)
    return error


PLAIN: Form = Form(body, framed, error_frame)
"""That of chat completions and text completions."""
