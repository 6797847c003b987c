"""Searches several continuations of a prompt for the best: beam search, and best-of.

Both drive `Engine.generate`, as the caller gives it. Neither can be streamed, since the best continuation is
known at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from engine.types import (
    Chunk,
    GenerateRequest,
    ModelInfo,
    ReaderParams,
    RequestError,
    SamplingParams,
    TokenLogprob,
)

MAX_BEAMS = 16
MAX_ALTERNATIVES = 20  # log probabilities that an engine gives for one token

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How beams are searched and ranked, as transformers does it.

    A finished beam's score is the sum of its log probabilities over its length to the power `length_penalty`.
    early_stopping: True ends with as many finished beams as there are beams; False once no running beam would
    beat the worst of them if it ended now; "never" once none can.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One continuation, the end-of-turn token included; `score` ranks finished ones and is the sum before.

    It has its last token and the beam that it goes on from, if any: each step makes many beams and keeps few,
    so none copies the tokens before.
    """

    score: float
    token: TokenLogprob
    before: Beam | None = field(repr=False)

    def tokens(self) -> list[TokenLogprob]:
        """All of its tokens, oldest first."""
        found, beam = list[TokenLogprob](), cast(Beam | None, self)
        while beam is not None:
            found.append(beam.token)
            beam = beam.before
        return found[::-1]


@dataclass(frozen=True, slots=True)
class Picked:
    """The best continuations, best first, each as the chunks of one generation.

    scores: what they were ranked by.
    """

    chunks: list[list[Chunk]]
    scores: list[float]


Generate = Callable[[GenerateRequest], AsyncGenerator[Chunk]]
"""`Engine.generate`, by which the caller sees all that is generated, also what is not picked."""


async def best_of(generate: Generate, requests: Sequence[GenerateRequest], count: int) -> Picked:
    """Run all requests side by side and pick the `count` with the highest mean log probability of a token.

    Raises what the engine raises; the first failure ends them all.
    """

    async def run(request: GenerateRequest) -> list[Chunk]:
        asked = replace(request.sampling, logprobs=request.sampling.logprobs or 0)
        async with aclosing(generate(replace(request, sampling=asked))) as stream:
            return [chunk async for chunk in stream]

    found = await _together([run(request) for request in requests])
    found.sort(key=_mean, reverse=True)
    return Picked(found[:count], [_mean(chunks) for chunks in found[:count]])


async def beam_search(
    generate: Generate, info: ModelInfo, request: GenerateRequest, params: BeamParams, count: int
) -> Picked:
    """The `count` best continuations of a prompt that beams of likely tokens find; nothing is drawn.

    info: of the engine that generates. Of the sampling only `max_tokens`, `min_tokens`, `ignore_eos`,
    `stop_token_ids` and `logprobs` count. Raises RequestError for what beams cannot do, and what the engine
    raises.
    """
    sampling = request.sampling
    eos = set() if sampling.ignore_eos else set(info.eos_token_ids)
    stops = eos | set(sampling.stop_token_ids)
    if not 1 <= params.num_beams <= MAX_BEAMS:
        raise RequestError(f"beams must be between 1 and {MAX_BEAMS}")
    # of a beam's continuations as many may be needed as there are beams, should all that stop be likelier
    num_alternatives = params.num_beams + len(stops)
    if num_alternatives > MAX_ALTERNATIVES:
        raise RequestError(f"beams and tokens that end them must together be at most {MAX_ALTERNATIVES}")
    if request.constraint is not None or sampling.stop:
        raise RequestError("beam search takes neither constraints nor stop strings")
    most = min(sampling.max_tokens, info.max_model_len - len(request.prompt_ids))
    # Each with the ids of the prompt and its own, which all that grow from it share.
    running: list[tuple[Beam | None, tuple[int, ...]]] = [(None, tuple(request.prompt_ids))]
    finished, cached = list[Beam](), 0
    for length in range(1, most + 1):
        heads = await _together([_next(generate, request, ids, num_alternatives) for _, ids in running])
        if length == 1:
            cached = heads[0].cached_tokens or 0
        grown = [_grow(beam, head) for (beam, _), head in zip(running, heads, strict=True)]
        heirs = [(heir, ids) for (_, ids), beams in zip(running, grown, strict=True) for heir in beams]
        heirs.sort(key=lambda heir: heir[0].score, reverse=True)
        going = [heir for heir in heirs if heir[0].token.token_id not in stops]
        if length < sampling.min_tokens:
            heirs = going
        ended = [
            replace(heir, score=heir.score / length**params.length_penalty)
            for heir, _ in heirs[: params.num_beams]
            if length == most or heir.token.token_id in stops
        ]
        finished = sorted(finished + ended, key=_score, reverse=True)[: params.num_beams]
        running = [(heir, (*ids, heir.token.token_id)) for heir, ids in going[: params.num_beams]]
        if length == most or not going or not _can_improve(going[0][0], finished, length, most, params):
            break
    best = finished[:count]
    chunks = await _together([_written(generate, request, beam, cached) for beam in best])
    return Picked(chunks, [beam.score for beam in best])


def _grow(beam: Beam | None, head: Chunk) -> list[Beam]:
    """The beam, continued by each of the likeliest tokens."""
    alternatives, score = head.logprobs[0].top, 0.0 if beam is None else beam.score
    return [
        Beam(score + logprob, TokenLogprob(token_id, token, data, logprob, alternatives), beam)
        for token_id, token, data, logprob in alternatives
    ]


def _can_improve(best: Beam, finished: list[Beam], length: int, most: int, params: BeamParams) -> bool:
    """Whether going on may still change what is finished. best: of those that go on."""
    if len(finished) < params.num_beams:
        return True
    if params.early_stopping is True:
        return False
    longest = most if params.early_stopping == "never" and params.length_penalty > 0 else length
    reached: float = best.score / longest**params.length_penalty
    return reached > finished[-1].score


async def _next(
    generate: Generate, request: GenerateRequest, prompt_ids: tuple[int, ...], num_alternatives: int
) -> Chunk:
    """One step after a prompt: a chunk whose only token has the alternatives."""
    asked = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=num_alternatives)
    step = replace(request, prompt_ids=prompt_ids, sampling=asked, reader=ReaderParams(dialect=False))
    async with aclosing(generate(step)) as stream:
        return await anext(stream)


async def _written(generate: Generate, request: GenerateRequest, beam: Beam, cached: int) -> list[Chunk]:
    """A finished beam as the chunks of a generation that is read to its end, with no token left to draw."""
    sampling, tokens = request.sampling, beam.tokens()
    prefix = tuple(token.token_id for token in tokens)
    given: tuple[tuple[TokenLogprob, ...], ...] = ()
    if sampling.logprobs is not None:
        given = (tuple(replace(token, top=token.top[: sampling.logprobs]) for token in tokens),)
    whole = replace(
        request, prefix=(prefix,), prefix_logprobs=given, sampling=replace(sampling, max_tokens=len(prefix))
    )
    async with aclosing(generate(whole)) as stream:
        return [replace(chunk, replayed=False, cached_tokens=cached) async for chunk in stream]


def _score(beam: Beam) -> float:
    return beam.score


def _mean(chunks: list[Chunk]) -> float:
    logprobs = [token.logprob for chunk in chunks for token in chunk.logprobs]
    return sum(logprobs) / max(1, len(logprobs))


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first failure, or being cancelled, ends them all."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
