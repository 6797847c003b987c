"""`LLM`: answers batches of prompts without a server, on the engine that a server would use.

The engine's asyncio loop runs in a thread of its own. Every prompt has `n` results, one by default, which
stand together and in the prompts' order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from tqdm import tqdm

from engine.config import EngineConfig
from engine.interface import Engine
from engine.llm_options import Options
from engine.search import Generate, best_of
from engine.shipped import TINY
from engine.structured import closed_schema
from engine.types import (
    CallArgs,
    CallEnd,
    CallStart,
    Chunk,
    Constraint,
    Done,
    EngineError,
    GenerateRequest,
    ReaderParams,
    Reasoning,
    RenderInput,
    RequestFailed,
    Text,
    TokenLogprob,
    ToolShape,
)

T = TypeVar("T")

IN_FLIGHT = 512  # requests that the engine is given at once; it takes as many into its queue by default


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model wrote; `arguments` is JSON text, cut short where `complete` is False."""

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one prompt.

    finish: "stop", "length", or None where `error` says why there is no more; what came before stays.
    stop: the stop string or token id that ended it. cached_tokens: of the prompt, found in the prefix cache.
    prompt: as it was given, a text, token ids or messages. index: which of its prompt's answers this is, from
    0. score: the mean log probability of a token, where `best_of` asked for the best.
    """

    prompt_ids: tuple[int, ...] = field(repr=False)
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    finish: Literal["stop", "length"] | None = None
    stop: str | int | None = None
    cached_tokens: int = 0
    error: EngineError | None = None
    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] = field(default="", repr=False)
    index: int = 0
    score: float | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    """One prompt: a text, token ids, or messages; and how to answer it. given: as its caller has it."""

    given: str | Sequence[int] | Sequence[Mapping[str, Any]]
    prompt: str | Sequence[int] | RenderInput
    options: Options
    reader: ReaderParams
    constraint: Constraint | None


class LLM:
    """A model for batches of prompts.

    model: a folder, a hub id, the shipped one's name, an `EngineConfig`, or an engine that was not started;
    `settings` are the other fields of `EngineConfig`. The model is loaded once, here, and serves every call
    until `close`, or the end of a `with`. Calls may come from several threads, and from a notebook, whose own
    loop waits meanwhile. Raises LoadError.
    """

    def __init__(self, model: str | Path | EngineConfig | Engine = TINY, **settings: Any) -> None:
        if isinstance(model, str | Path):
            from engine.backends import LocalEngine

            self._engine: Engine = LocalEngine(model, **{"name": Path(model).name, **settings})
        elif isinstance(model, EngineConfig):
            from engine.backends import LocalEngine

            self._engine = LocalEngine(model, **settings)
        elif settings:
            raise TypeError(f"an engine has its settings already: {', '.join(settings)}")
        else:
            self._engine = model
        self._numbers = count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            self.info = self._run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the model go; a call still at work elsewhere ends with CancelledError. Again: nothing."""
        if self._loop.is_closed():
            return
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- batches ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        options: Options | Sequence[Options] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Result]:
        """Go on from each prompt, a text or token ids, as plain text: no template, no calls.

        options: for all, or one for each. progress: a bar on stderr; None: where that is a terminal. One
        result a prompt (or `n`, beside each other), in order; a prompt that fails has its error in its
        result. Raises ValueError.
        """
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        reader = ReaderParams(dialect=False)
        asks = [
            _Ask(
                prompt,
                prompt,
                option,
                reader,
                Constraint(answer=shape) if (shape := option.shape()) else None,
            )
            for prompt, option in zip(asked, _each(options, len(asked)), strict=True)
        ]
        return self._run(self._answer(asks, progress))

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        options: Options | Sequence[Options] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        effort: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> list[Result]:
        """Answer each conversation (a list of messages, as chat completions take them) by the chat template.

        tools: functions in the form of chat completions. tool_choice: "auto", "none", "required", or the name
        of the one to call. effort: of reasoning, where the template can be told. The rest as `generate`.
        """
        many = _conversations(conversations)
        functions = [tool.get("function", tool) for tool in tools]
        shown, typed, max_calls = _offer(functions, tool_choice)
        asks = []
        for messages, option in zip(many, _each(options, len(many)), strict=True):
            answer = option.shape()
            constraint = Constraint(answer=answer) if answer else None
            if typed and tool_choice != "auto":
                constraint = Constraint(typed, max_calls)
            elif typed and answer:
                constraint = Constraint(typed, None, answer)
            reader = ReaderParams(
                calls=bool(typed), tools=typed, max_calls=max_calls, shaped=answer is not None
            )
            prompt = RenderInput(
                messages=messages,
                tools=[{"type": "function", "function": function} for function in shown],
                template_kwargs=dict(template_kwargs or {}),
                effort=effort,
                answer=answer,
                now=time.time(),
            )
            asks.append(_Ask(messages, prompt, option, reader, constraint))
        return self._run(self._answer(asks, progress))

    async def _answer(self, asks: Sequence[_Ask], progress: bool | None) -> list[Result]:
        gate = asyncio.Semaphore(IN_FLIGHT)
        began, num_tokens = time.monotonic(), 0
        with tqdm(total=len(asks), unit="prompt", disable=None if progress is None else not progress) as bar:

            async def one(ask: _Ask) -> list[Result]:
                nonlocal num_tokens
                results = await self._one(ask, gate)
                num_tokens += sum(len(result.token_ids) for result in results)
                bar.set_postfix_str(f"{num_tokens / (time.monotonic() - began):.0f} tok/s", refresh=False)
                bar.update()
                return results

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(ask)) for ask in asks]
        return [result for task in tasks for result in task.result()]

    async def _one(self, ask: _Ask, gate: asyncio.Semaphore) -> list[Result]:
        """All answers to one prompt; each is there, also where it failed."""
        ids: tuple[int, ...] = ()
        options = ask.options
        try:
            async with gate:  # as many prompts are rendered at once as are answered
                ids, reader = await self._prompt(ask)
            sampling = options.sampling(self.info, len(ids))
            requests = [
                GenerateRequest(
                    id=f"llm-{next(self._numbers)}",
                    prompt_ids=ids,
                    sampling=replace(sampling, seed=(sampling.seed + draw) % (1 << 63)),
                    reader=reader,
                    constraint=ask.constraint,
                    adapter=options.adapter,
                )
                for draw in range(options.best_of or options.n)
            ]
        except Exception as error:
            return [replace(_Answer().result(ids, _failure(error)), prompt=ask.given)] * options.n

        async def generate(request: GenerateRequest) -> AsyncGenerator[Chunk]:
            async with gate, aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

        if len(requests) > options.n:
            results = await self._best(generate, requests, options)
        else:
            results = await asyncio.gather(*(self._answered(generate, request) for request in requests))
        return [replace(result, prompt=ask.given, index=index) for index, result in enumerate(results)]

    async def _answered(self, generate: Generate, request: GenerateRequest) -> Result:
        answer = _Answer()
        try:
            async with aclosing(generate(request)) as chunks:
                async for chunk in chunks:
                    answer.add(chunk)
        except Exception as error:  # the other prompts of a long batch must not be lost to one
            return answer.result(tuple(request.prompt_ids), _failure(error))
        return answer.result(tuple(request.prompt_ids), None)

    async def _best(
        self, generate: Generate, requests: Sequence[GenerateRequest], options: Options
    ) -> list[Result]:
        ids = tuple(requests[0].prompt_ids)
        try:
            picked = await best_of(generate, requests, options.n)
        except Exception as error:
            return [_Answer().result(ids, _failure(error)) for _ in range(options.n)]
        results = []
        for chunks, score in zip(picked.chunks, picked.scores, strict=True):
            answer = _Answer()
            for chunk in chunks:
                answer.add(chunk)
            result = answer.result(ids, None)
            # They were ranked by log probabilities that nobody may have asked for.
            shown = result.logprobs if options.logprobs is not None else ()
            results.append(replace(result, score=score, logprobs=shown))
        return results

    async def _prompt(self, ask: _Ask) -> tuple[tuple[int, ...], ReaderParams]:
        if isinstance(ask.prompt, str):
            return await self._engine.tokenize(ask.prompt), ask.reader
        if not isinstance(ask.prompt, RenderInput):
            return tuple(ask.prompt), ask.reader
        prompt = await self._engine.render(ask.prompt)
        return tuple(prompt.ids), replace(ask.reader, starts_in=prompt.starts_in)

    # -- the loop's thread -----------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it on the loop and wait; an interrupt here ends it there."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._engine.close()
        await self._loop.shutdown_asyncgens()


def _failure(error: Exception) -> EngineError:
    """An error as a result has it."""
    if isinstance(error, EngineError):
        return error
    failure = RequestFailed(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class _Answer:
    """Chunks of one request, put together."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Call] = []
        self._arguments: list[str] = []
        self._name = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._done: Done | None = None
        self._cached = 0

    def add(self, chunk: Chunk) -> None:
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._cached = chunk.cached_tokens if chunk.cached_tokens is not None else self._cached
        for delta in chunk.deltas:
            match delta:
                case Text():
                    self._text.append(delta.text)
                case Reasoning():
                    self._reasoning.append(delta.text)
                case CallStart():
                    self._name, self._arguments = delta.name, []
                case CallArgs():
                    self._arguments.append(delta.text)
                case CallEnd():
                    self._calls.append(Call(self._name, "".join(self._arguments), delta.complete))
                case Done():
                    self._done = delta

    def result(self, prompt_ids: tuple[int, ...], error: EngineError | None) -> Result:
        return Result(
            prompt_ids=prompt_ids,
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(self._calls),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish=self._done.reason if self._done else None,
            stop=self._done.stop if self._done else None,
            cached_tokens=self._cached,
            error=error,
        )


# ------------------------------------------------------------------------------------------------------------
# What was asked


def _each(options: Options | Sequence[Options] | None, num_prompts: int) -> Sequence[Options]:
    if options is None or isinstance(options, Options):
        return [options or Options()] * num_prompts
    if len(options) != num_prompts:
        raise ValueError(f"{len(options)} options for {num_prompts} prompts")
    return options


def _conversations(given: Sequence[Any]) -> list[list[dict[str, Any]]]:
    many = [given] if given and isinstance(given[0], Mapping) else given
    return [[_message(message) for message in messages] for messages in many]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it: content is a text. Raises ValueError for parts of another kind."""
    plain, content = dict(message), message.get("content")
    if isinstance(content, list):
        kinds = {part.get("type") for part in content} - {"text"}
        if kinds:
            raise ValueError(f"a message has content of type {', '.join(map(str, kinds))}; only text is read")
        plain["content"] = "\n".join(part["text"] for part in content)
    return plain


def _offer(
    functions: Sequence[Mapping[str, Any]], choice: str
) -> tuple[Sequence[Mapping[str, Any]], tuple[ToolShape, ...], int | None]:
    """(what the template shows, what may be called, how many calls); raises ValueError for a choice that
    names none."""
    shapes = {
        function["name"]: ToolShape(function["name"], closed_schema(function.get("parameters") or _NOTHING))
        for function in functions
    }
    if choice in ("auto", "none", "required"):
        if choice == "required" and not shapes:
            raise ValueError("tool_choice requires a call, but there is no tool to call")
        return ((), (), None) if choice == "none" else (functions, tuple(shapes.values()), None)
    if choice not in shapes:
        raise ValueError(f"tool_choice names {choice!r}, which is not among the tools")
    return functions, (shapes[choice],), 1


_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
