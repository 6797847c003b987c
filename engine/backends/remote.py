"""An engine in another process of this machine: several servers before it share one model and its KV cache.

Text is rendered and read here, and token ids go to the engine's process and come back, so that what each
server does for its clients is spread over as many interpreters as there are servers. Nothing is lost on the
way: constraints, adapters, KV that is kept and saved, and how much of a prompt was cached are as with an
engine in the process.

When the engine's process ends, what it had in hand waits until it is back, and goes on at the next token. One
request may be what ended it. So a request under which an engine has ended is a suspect: the engine works for
one suspect at a time, and the one under which it ends `MAX_ENDS` times without a token in between is given
up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from engine.admission import Admission, Place
from engine.backends.generation import Generation, end_of_prefix, is_last, takes_long
from engine.backends.remote_line import Begin, EngineLine, LineLost
from engine.backends.remote_wire import ints_text, merged, request_form
from engine.backends.request_checks import LONG_PROMPT, check_request
from engine.backends.scripted_tokens import DIALECT, scripted_tokenizer
from engine.backends.shared_parts import WithTexts
from engine.dialects import Dialect, dialect_named
from engine.model_folder import find_folder
from engine.step import RowOutput
from engine.tokenizer import TEXT_THREADS, Prompts, Tokenizer, open_dialect
from engine.types import (
    Chunk,
    Constraint,
    DeadlineExceeded,
    Done,
    EngineError,
    EngineStats,
    EngineUnavailable,
    GenerateRequest,
    ModelInfo,
    RequestFailed,
)

if TYPE_CHECKING:
    from engine.vision import ImageProcessor

T = TypeVar("T")

log = logging.getLogger("antiphon.engine")

MAX_ENDS = 4
"""Of engines under one request that got no token from them, before it is taken to be the cause."""

PATIENCE_S = 30.0
"""How long a request that the engine has not begun with waits for an engine that is away."""

CREDIT_STEP = 256
"""Tokens that a reader takes before the engine's process is told."""


class RemoteEngine(WithTexts):
    """An `Engine` in the process that serves `line`.

    model: the folder or hub id of its tokenizer and template; None: the scripted engine's. max_waiting,
    max_waiting_tokens: of all `num_servers` processes that ask it, together.
    """

    def __init__(
        self,
        line: EngineLine,
        model: str | Path | None,
        *,
        num_servers: int,
        max_waiting: int = 512,
        max_waiting_tokens: int | None = None,
        chat_template: str | None = None,
        allow_special_tokens: bool = False,
        tool_dialect: str | None = None,
        reasoning_dialect: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._line = line
        self._model = model
        self._max_waiting = math.ceil(max_waiting / num_servers)
        self._max_waiting_tokens = (
            None if max_waiting_tokens is None else math.ceil(max_waiting_tokens / num_servers)
        )
        self._chat_template = chat_template
        self._allow_special_tokens = allow_special_tokens
        self._tool_dialect = tool_dialect
        self._reasoning_dialect = reasoning_dialect
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="engine-text")
        self._running = 0

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> ModelInfo:
        """Wait until the engine's process serves, and read the tokenizer meanwhile. Raises LoadError."""
        text, _ = await asyncio.gather(self._in_pool(self._open_text), self._line.open())
        tokenizer, dialect = text
        assert self._line.info is not None
        self._info, self._number = self._line.info, self._line.num_replaced
        placer = await self._in_pool(self._open_images) if "image" in self._info.modalities else None
        limit = self._info.max_model_len
        self._prompts = Prompts(tokenizer, dialect, limit=limit, pool=self._pool, placer=placer)
        self._admission = Admission(
            max_running=self._line.max_running,
            max_waiting=self._max_waiting,
            max_waiting_tokens=self._max_waiting_tokens,
        )
        self._line.on_stats.append(self._note_others)
        return self._info

    def _open_text(self) -> tuple[Tokenizer, Dialect]:
        special = self._allow_special_tokens
        if self._model is None:
            return scripted_tokenizer(self._chat_template, allow_special_tokens=special), dialect_named(
                DIALECT
            )
        folder = find_folder(self._model, weights=False)
        tokenizer = Tokenizer.load(folder, self._chat_template, allow_special_tokens=special)
        return tokenizer, open_dialect(tokenizer, tools=self._tool_dialect, reasoning=self._reasoning_dialect)

    def _open_images(self) -> ImageProcessor:
        """What processes images here, where prompts are made; the engine's process has one for what it
        computes."""
        from engine.vision import ImageProcessor  # transformers and torch, only where they are needed

        assert self._model is not None
        folder = find_folder(self._model, weights=False)
        return ImageProcessor.load(folder, max_pixels=self._info.image_pixels)

    def _note_others(self) -> None:
        """What runs for other processes leaves less room for what waits here."""
        self._admission.note_elsewhere(max(0, self._line.stats.running - self._admission.num_running))

    @property
    def admission(self) -> Admission:
        """See `Engine.admission`: the places of this process."""
        return self._admission

    @property
    def info(self) -> ModelInfo:
        """See `Engine.info`."""
        return self._info

    @property
    def is_current(self) -> bool:
        """Whether the engine's process serves the model that this was started with."""
        return self._number == self._line.num_replaced

    async def dead(self) -> BaseException:
        """See `Engine.dead`: an engine that has ended is waited for, one that serves another model is not."""
        return await self._line.dead()

    async def close(self) -> None:
        """See `Engine.close`; the engine's process stays."""
        await self._line.close()
        self._pool.shutdown(wait=False)

    def stats(self) -> EngineStats:
        """See `Engine.stats`: of the engine, whoever asks it."""
        return self._line.stats if self._line.is_up else EngineStats(unavailable=1)

    def gpu(self) -> Mapping[str, float]:
        """See `Engine.gpu`, as of a few seconds ago."""
        return self._line.gpu if self._line.is_up else {}

    def check_integrity(self) -> None:
        """See `Engine.check_integrity`: of this side."""
        assert self._running >= 0

    # -- text ------------------------------------------------------------------------------------------------

    async def check(self, constraint: Constraint, owner: str = "") -> None:
        """See `Engine.check`; also raises EngineUnavailable."""
        await self._ask("check", constraint, owner)

    async def _ask(self, *parts: object) -> Any:
        return await ask(self._line, self._number, self._patience_s, *parts)

    async def prepare(self) -> None:
        """See `Engine.prepare`: the engine's process has done it."""

    # -- KV --------------------------------------------------------------------------------------------------

    def keep(self, name: str, request: GenerateRequest, output: Sequence[int], seconds: float) -> None:
        """See `Engine.keep`."""
        self._note("keep", name, request_form(request, pixels=False), ints_text(output), seconds)

    def let_go(self, name: str) -> None:
        """See `Engine.let_go`."""
        self._note("let_go", name)

    def save(
        self, name: str, request: GenerateRequest, output: Sequence[int], until: float | None = None
    ) -> None:
        """See `Engine.save`."""
        self._note("save", name, request_form(request, pixels=False), ints_text(output), until)

    def _note(self, *parts: object) -> None:
        if self.is_current:
            self._line.note(*parts)

    def forget(self, names: Collection[str]) -> None:
        """See `Engine.forget`; an engine that is away does it when it is back."""
        self._line.note("forget", list(names), owed=True)

    def forget_owner(self, owner: str) -> None:
        """See `Engine.forget_owner`; an engine that is away does it when it is back."""
        self._line.note("forget_owner", owner, owed=True)

    async def saved_names(self) -> frozenset[str]:
        """See `Engine.saved_names`; also raises EngineUnavailable."""
        return frozenset(await self._ask("saved_names"))

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, place: Place | None = None) -> AsyncGenerator[Chunk]:
        """See `Engine.generate`; also raises EngineUnavailable where the engine is away for longer than the
        patience, unless it had begun or the place is promised."""
        await self._beside(len(request.prompt_ids) > LONG_PROMPT, partial(check_request, request, self._info))
        generation = Generation(request, self._prompts.tokenizer, self._prompts.dialect)
        end = self._end_of(request)
        taking = nullcontext(place) if place is not None else self._enter(request, end is None)
        with taking as held:
            self._running += 1
            try:
                async with aclosing(self._outputs(request, held)) as stream:
                    output = None
                    if end is None and request.prefix and request.constraint is not None:
                        output = await anext(stream)
                        if not output.token_ids:  # the grammar had ended with the prefix
                            end, output = output.finish, None
                    for chunk in generation.replay(end):
                        if is_last(chunk):
                            await stream.aclose()
                        yield chunk
                        if is_last(chunk):
                            return
                    while output is not None or (output := await anext(stream, None)) is not None:
                        read = await self._beside(takes_long(output), partial(generation.read, [output]))
                        output = None
                        if read is None:
                            continue
                        if is_last(read):  # before the consumer sees the end: it may never come back
                            await stream.aclose()
                        yield read
                        if is_last(read):
                            return
            finally:
                self._running -= 1

    def _end_of(self, request: GenerateRequest) -> Done | None:
        """How the prefix has ended the generation, where that is known here: whether a grammar is complete
        with the last token that there may be, or was cut off there, is for the engine to say."""
        end = end_of_prefix(request, self._info)
        return None if request.constraint is not None and end == Done("length") else end

    def _enter(self, request: GenerateRequest, generates: bool) -> Any:
        return self._admission.enter(request.owner, request.weight) if generates else nullcontext()

    async def _outputs(self, request: GenerateRequest, place: Place | None) -> AsyncGenerator[RowOutput]:
        """What follows the prefix, from as many lives of the engine as it takes; the last one has `finish`.
        Raises the error that ends a request in another way."""
        produced: list[int] = []
        ends, suspect, told = 0, False, False
        while True:
            await self._wait(request, patient=suspect or (place is not None and place.promised))
            goes_on = replace(request, prefix=(*request.prefix, tuple(produced))) if produced else request
            progressed = False
            try:
                handle, reception = self._line.generate(
                    request_form(goes_on),
                    suspect=suspect,
                    begin=place.begin if place is not None else lambda: None,
                )
            except LineLost:
                continue
            try:
                while True:
                    output = merged(await self._within(request, reception.mailbox.take()))
                    lost = isinstance(output.error, LineLost)
                    if lost and not output.token_ids:
                        break
                    progressed = True
                    produced += output.token_ids
                    if told:  # these are of the first life's first step
                        output = output._replace(cached_tokens=None, timing=None, prompt_logprobs=None)
                    told = True
                    error = output.error
                    if output.token_ids or output.finish is not None:
                        yield output._replace(error=None)
                    if lost:
                        break
                    if error is not None:
                        raise error
                    if output.finish is not None:
                        return
                    if reception.mailbox.num_uncredited >= CREDIT_STEP:
                        self._line.credit(handle, reception.mailbox.num_uncredited)
                        reception.mailbox.num_uncredited = 0
            finally:
                self._line.end(handle)
            ends = 0 if progressed else ends + reception.begun
            suspect = True
            log.warning("%s waits for the engine's process behind %d tokens", request.id, len(produced))
            if ends == MAX_ENDS:
                raise RequestFailed(f"the engine's process ended {MAX_ENDS} times under this request")
            # The engine may have ended between the last token and the word that it was the last.
            if produced:
                so_far = replace(request, prefix=(*request.prefix, tuple(produced)))
                if (end := self._end_of(so_far)) is not None:
                    yield RowOutput(-1, finish=end)
                    return

    async def _wait(self, request: GenerateRequest, *, patient: bool) -> None:
        """Wait until the engine answers. Raises EngineUnavailable where it does not for the patience, and
        ModelChanged."""
        try:
            async with asyncio.timeout(None if patient else self._patience_s):
                await self._within(request, self._line.ready(self._number))
        except TimeoutError:
            raise EngineUnavailable("the engine's process is away") from None

    async def _within(self, request: GenerateRequest, awaitable: Awaitable[T]) -> T:
        """Wait, unless the request's deadline passes."""
        if request.deadline is None:
            return await awaitable
        try:
            async with asyncio.timeout(max(0.0, request.deadline - time.monotonic())):
                return await awaitable
        except TimeoutError:
            raise DeadlineExceeded(f"request {request.id} ran past its deadline") from None


async def ask(
    line: EngineLine, number: int, patience_s: float, *parts: object, begin: Begin = lambda: None
) -> Any:
    """The answer of the engine's process to a question for the model of this number, from as many lives of it
    as it takes, up to `MAX_ENDS`. Raises EngineUnavailable where it is away for longer than the patience, and
    ModelChanged."""
    for _ in range(MAX_ENDS):
        try:
            async with asyncio.timeout(patience_s):
                await line.ready(number)
        except TimeoutError:
            raise EngineUnavailable("the engine's process is away") from None
        try:
            return await line.ask(*parts, begin=begin)
        except LineLost:
            continue
    failure: EngineError = RequestFailed(f"the engine's process ended {MAX_ENDS} times under this request")
    raise failure
