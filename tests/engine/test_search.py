"""Beam search as transformers does it, and the best of what was drawn."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import BeamParams, LocalEngine, Picked, ScriptedEngine, beam_search, best_of
from engine.types import (
    Chunk,
    Constraint,
    Done,
    GenerateRequest,
    QueueFull,
    ReaderParams,
    RequestError,
    SamplingParams,
    Shape,
    Text,
    TokenLogprob,
)
from tests.support.checkpoints import oracle, oracle_greedy
from tests.support.driver import EOS, greedy

Find = Callable[[str], Path]
PLAIN = ReaderParams(dialect=False)


@pytest.fixture
async def engine(checkpoint: Find) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(checkpoint("qwen3"), num_blocks=300, num_threads=1)
    await engine.start()
    yield engine
    await engine.settled()
    engine.check_integrity()
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    await engine.close()


def prompt(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(rng.randrange(2, 40)))


def request(seed: int, max_tokens: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        f"b{seed}", prompt(seed), SamplingParams(seed=0, max_tokens=max_tokens, **fields), PLAIN
    )


async def beams(engine: LocalEngine, request: GenerateRequest, params: BeamParams, count: int) -> Picked:
    return await beam_search(engine.generate, engine.info, request, params, count)


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def theirs(
    folder: Path, seed: int, stops: list[int], count: int, **settings: Any
) -> tuple[list[list[int]], Any]:
    """What transformers finds, and its scores."""
    ids = torch.tensor([prompt(seed)])
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        found = oracle(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_return_sequences=count,
            eos_token_id=[EOS, *stops],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    said = []
    for own in found.sequences[:, ids.shape[1] :].tolist():
        end = next((i + 1 for i, token in enumerate(own) if token in (EOS, *stops)), len(own))
        said.append(own[:end])
    return said, found.sequences_scores


# beams, length penalty, early stopping, tokens at most
CASES: list[tuple[int, float, Any, int]] = [
    (2, 1.0, False, 10),
    (3, 0.0, "never", 8),
    (3, 2.0, True, 12),
    (4, -1.0, False, 6),
    (4, 0.6, "never", 9),
    (6, 1.0, True, 5),
    (6, 2.0, "never", 6),
    (5, 1.0, False, 1),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(len(CASES)))
async def test_beams_are_those_of_transformers(engine: LocalEngine, checkpoint: Find, seed: int) -> None:
    num_beams, penalty, early, most = CASES[seed]
    # tokens that beams meet on their way end them, so that finished beams of several lengths compete
    met = await beams(engine, request(seed, 4), BeamParams(4), 4)
    stops = sorted({tokens(chunks)[-1 - seed % 2] for chunks in met.chunks})[:2]
    asked = request(seed, most, stop_token_ids=tuple(stops))
    found = await beams(engine, asked, BeamParams(num_beams, penalty, early), num_beams)
    settings = {"num_beams": num_beams, "length_penalty": penalty, "early_stopping": early}
    expected, scores = theirs(checkpoint("qwen3"), seed, stops, num_beams, max_new_tokens=most, **settings)
    assert [tokens(chunks) for chunks in found.chunks] == expected
    assert found.scores == pytest.approx(scores.tolist(), rel=1e-4)
    for chunks, own in zip(found.chunks, expected, strict=True):
        ended = own[-1] in (EOS, *stops)
        assert chunks[-1].deltas[-1] == (
            Done("length") if not ended else Done("stop", None if own[-1] == EOS else own[-1])
        )


async def test_one_beam_is_greedy_and_min_tokens_holds(engine: LocalEngine, checkpoint: Find) -> None:
    found = await beams(engine, request(3, 12), BeamParams(1), 1)
    assert tuple(tokens(found.chunks[0])) == oracle_greedy(checkpoint("qwen3"), prompt(3), 12)
    first = tokens(found.chunks[0])[0]
    for least in (0, 5):
        asked = request(3, 12, stop_token_ids=(first,), min_tokens=least)
        length = len(tokens((await beams(engine, asked, BeamParams(1), 1)).chunks[0]))
        assert length == 1 if least == 0 else length >= least


async def test_a_beam_reads_like_any_generation(engine: LocalEngine) -> None:
    found = await beams(engine, request(5, 6, logprobs=2), BeamParams(4), 2)
    assert len(found.chunks) == 2
    for chunks, score in zip(found.chunks, found.scores, strict=True):
        own = [entry for chunk in chunks for entry in chunk.logprobs]
        assert [entry.token_id for entry in own] == tokens(chunks)
        assert all(len(entry.top) == 2 for entry in own)
        assert sum(entry.logprob for entry in own) / len(own) == pytest.approx(score, rel=1e-5)
        text = "".join(d.text for chunk in chunks for d in chunk.deltas if isinstance(d, Text))
        assert text == await engine.detokenize(tokens(chunks)) and not chunks[0].replayed
        assert chunks[0].cached_tokens is not None


async def test_what_beams_cannot_do_is_refused(engine: LocalEngine) -> None:
    for asked, params in (
        (request(1, 5), BeamParams(17)),
        (request(1, 5), BeamParams(0)),
        (request(1, 5, stop_token_ids=tuple(range(30))), BeamParams(4)),
        (request(1, 5, stop=("x",)), BeamParams(2)),
    ):
        with pytest.raises(RequestError):
            await beams(engine, asked, params, 1)
    shaped = GenerateRequest("s", (1, 2), greedy(4), PLAIN, Constraint(answer=Shape("regex", "a+")))
    with pytest.raises(RequestError, match="constraints"):
        await beams(engine, shaped, BeamParams(2), 1)


async def test_a_search_that_is_cancelled_leaves_nothing_running(engine: LocalEngine) -> None:
    before = engine.stats().output_tokens_total
    task = asyncio.create_task(beams(engine, request(2, 400), BeamParams(4), 1))
    while engine.stats().output_tokens_total < before + 8:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_step_costs_as_much_at_the_end_as_at_the_beginning() -> None:
    num_beams, most = 8, 150
    peaks: list[int] = []  # bytes that were taken for a while before each request

    async def generate(asked: GenerateRequest) -> AsyncGenerator[Chunk]:
        if not asked.prefix:
            kept, peak = tracemalloc.get_traced_memory()
            peaks.append(peak - kept)
            tracemalloc.reset_peak()
        top = tuple((each, "x", b"x", -1.0 - each / 8) for each in range(num_beams))
        yield Chunk(asked.prefix[0] if asked.prefix else (), (), (TokenLogprob(0, "x", b"x", -1.0, top),))

    asked = request(1, most, ignore_eos=True, logprobs=0)
    tracemalloc.start()
    try:
        found = await beam_search(generate, ScriptedEngine().info, asked, BeamParams(num_beams), num_beams)
    finally:
        tracemalloc.stop()
    assert tokens(found.chunks[0]) == [0] * most
    steps = peaks[1::num_beams]  # the first request has all beams before it
    assert max(steps[-20:]) < 2 * max(steps[20:40])


async def drawn(engine: LocalEngine, count: int, **fields: Any) -> tuple[list[GenerateRequest], list[float]]:
    """Requests for as many choices, and the mean log probability of each."""
    params = SamplingParams(seed=7, max_tokens=12, logprobs=0, **fields)
    requests = [GenerateRequest(f"c{i}", prompt(9), params, PLAIN, choice=i) for i in range(count)]
    means = []
    for each in requests:
        own = [entry.logprob async for chunk in engine.generate(each) for entry in chunk.logprobs]
        means.append(sum(own) / len(own))
    return requests, means


async def test_the_best_are_those_with_the_highest_mean(engine: LocalEngine) -> None:
    requests, means = await drawn(engine, 6)
    found: Picked = await best_of(engine.generate, requests, 2)
    assert found.scores == pytest.approx(sorted(means, reverse=True)[:2], abs=1e-4)
    assert len(found.chunks) == 2
    assert found.scores[0] > found.scores[1]


async def test_the_first_failure_ends_all_candidates(engine: LocalEngine) -> None:
    requests, _ = await drawn(engine, 3)

    async def failing(asked: GenerateRequest) -> AsyncIterator[Chunk]:
        if asked.choice == 2:
            raise QueueFull("full")
        async for chunk in engine.generate(asked):
            yield chunk

    with pytest.raises(QueueFull):
        await best_of(failing, requests, 1)  # type: ignore[arg-type]
