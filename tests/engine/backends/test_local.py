"""The engine behind its door: what callers of `LocalEngine` may rely on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import pickle
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LocalEngine, Place
from engine.backends import local
from engine.backends.generation import is_last
from engine.model_folder import read_sampling_defaults
from engine.step import RowOutput
from engine.structured.isolation.constraints import Matcher
from engine.types import (
    CallArgs,
    CallStart,
    Chunk,
    Constraint,
    ConstraintError,
    DeadlineExceeded,
    Done,
    EngineDead,
    GenerateRequest,
    LoadError,
    PromptTooLong,
    QueueFull,
    ReaderParams,
    RenderInput,
    RequestError,
    RequestFailed,
    SamplingDefaults,
    SamplingParams,
    Shape,
    Text,
    ToolShape,
)
from tests.support.checkpoints import oracle_greedy, oracle_logits
from tests.support.driver import EOS, greedy

Find = Callable[[str], Path]
PROMPT = tuple(b"What does the cat say?")
A, B, C = 32, 33, 34  # the tokens of these letters: the alphabet begins at "!"
PLAIN = ReaderParams(dialect=False)


@pytest.fixture
def folder(checkpoint: Find) -> Path:
    return checkpoint("qwen3")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(folder, num_blocks=300, max_num_batched_tokens=64, num_threads=1)
    await engine.start()
    yield engine
    if not engine._thread.is_dead:
        await engine.settled()
        engine.check_integrity()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    await engine.close()


def request(sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerateRequest:
    return GenerateRequest(id="r", prompt_ids=prompt, sampling=sampling, **{"reader": PLAIN, **fields})


async def collect(engine: LocalEngine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def tokens(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def text(chunks: list[Chunk]) -> str:
    return "".join(d.text for chunk in chunks for d in chunk.deltas if isinstance(d, Text))


def sampled(max_tokens: int = 12, seed: int = 1, **fields: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, **fields)


# -- what comes out ------------------------------------------------------------------------------------------


async def test_greedy_chunks_equal_the_oracle(engine: LocalEngine, folder: Path) -> None:
    chunks = await collect(engine, request(greedy(20)))
    assert tokens(chunks) == oracle_greedy(folder, PROMPT, 20)
    assert chunks[-1].deltas[-1] == Done("length")
    assert sum(isinstance(d, Done) for chunk in chunks for d in chunk.deltas) == 1
    assert chunks[0].cached_tokens == 0 and all(chunk.cached_tokens is None for chunk in chunks[1:])
    assert text(chunks) == await engine.detokenize(tokens(chunks))


async def test_info_and_text(engine: LocalEngine, folder: Path) -> None:
    info = engine.info
    assert (info.name, info.max_model_len, info.vocab_size) == (folder.name, 512, 300)
    assert info.eos_token_ids == (EOS,) and "exact_resume" in info.capabilities
    assert pickle.loads(pickle.dumps(info)) == info
    prompt = await engine.render(RenderInput(messages=[{"role": "user", "content": "hi"}]))
    assert await engine.detokenize(prompt.ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert await engine.tokenize("hi" * 3000) == await engine.tokenize("hi") * 3000
    assert engine.token_text(EOS) == "<|endoftext|>"


async def test_requests_and_chunks_are_picklable(engine: LocalEngine) -> None:
    asked = request(sampled(4, logprobs=2, prompt_logprobs=1))
    assert pickle.loads(pickle.dumps(asked)) == asked
    chunks = await collect(engine, asked)
    assert pickle.loads(pickle.dumps(chunks)) == chunks


async def test_many_at_once_equal_the_oracle(engine: LocalEngine, folder: Path) -> None:
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(256) for _ in range(rng.randrange(1, 60))) for _ in range(24)]
    results = await asyncio.gather(*(collect(engine, request(greedy(10), prompt)) for prompt in prompts))
    assert [tokens(chunks) for chunks in results] == [oracle_greedy(folder, p, 10) for p in prompts]


async def test_a_seed_draws_the_same_alone_and_in_a_batch(engine: LocalEngine) -> None:
    asked = [
        request(sampled(30, seed=i % 3, temperature=t, top_p=p, top_k=k), choice=i % 2)
        for i, (t, p, k) in enumerate([(1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 20), (0.9, 0.8, 50)] * 3)
    ]
    alone = [tokens(await collect(engine, one)) for one in asked]
    together = await asyncio.gather(*(collect(engine, one) for one in asked))
    assert [tokens(chunks) for chunks in together] == alone
    same_but = [request(sampled(30), **change) for change in ({}, {"choice": 1}, {"generation": 1})]
    assert len({tokens(await collect(engine, one)) for one in same_but}) == 3


async def test_resuming_behind_any_prefix_draws_the_rest(engine: LocalEngine) -> None:
    params = sampled(
        16, temperature=0.9, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((7, 3.0),)
    )
    whole = await collect(engine, request(params))
    ids = tokens(whole)
    for cut in range(1, len(ids)):
        chunks = await collect(engine, request(params, prefix=(ids[: cut - 1], ids[cut - 1 : cut])))
        assert [chunk.replayed for chunk in chunks[:3]] == [True, True, False]
        assert tokens(chunks) == ids and text(chunks) == text(whole)
        assert chunks[0].cached_tokens is None


@pytest.mark.parametrize(
    ("params", "prefix", "end"),
    [
        (sampled(2), ((A, B),), Done("length")),
        (sampled(9), ((A,), (EOS,)), Done("stop")),
        (sampled(9, stop_token_ids=(B,)), ((A,), (B,)), Done("stop", B)),
        (sampled(9, stop=("BC",)), ((A,), (B, C)), Done("stop", "BC")),
        (sampled(0), (), Done("length")),
    ],
)
async def test_a_prefix_that_had_ended_ends_again(
    engine: LocalEngine, params: SamplingParams, prefix: tuple[tuple[int, ...], ...], end: Done
) -> None:
    chunks = await collect(engine, request(params, prefix=prefix))
    assert chunks[-1].deltas[-1] == end
    assert all(chunk.replayed for chunk in chunks) == bool(prefix)


# -- ends ----------------------------------------------------------------------------------------------------


async def test_the_end_of_turn_stop_tokens_and_ignore_eos(engine: LocalEngine) -> None:
    force = ((EOS, 100.0),)
    chunks = await collect(engine, request(greedy(5, logit_bias=force)))
    assert tokens(chunks) == (EOS,) and chunks[-1].deltas == (Done("stop"),)
    chunks = await collect(engine, request(greedy(5, logit_bias=force, ignore_eos=True)))
    assert tokens(chunks) == (EOS,) * 5 and chunks[-1].deltas[-1] == Done("length")
    chunks = await collect(engine, request(greedy(5, logit_bias=((70, 100.0),), stop_token_ids=(70,))))
    assert tokens(chunks) == (70,) and chunks[-1].deltas == (Done("stop", 70),)
    chunks = await collect(
        engine, request(greedy(5, logit_bias=force, ignore_eos=True, stop_token_ids=(EOS,)))
    )
    assert tokens(chunks) == (EOS,) and chunks[-1].deltas == (Done("stop", EOS),)


async def test_min_tokens_holds_back_the_end(engine: LocalEngine) -> None:
    params = greedy(8, logit_bias=((EOS, 100.0), (70, 90.0)), stop_token_ids=(70,), min_tokens=3)
    ids = tokens(await collect(engine, request(params)))
    assert len(ids) == 4 and ids[3] == EOS and not {EOS, 70} & set(ids[:3])


async def test_a_stop_string_cuts_the_record_and_aborts(engine: LocalEngine) -> None:
    whole = await collect(engine, request(greedy(40)))
    stop = text(whole)[10:13]
    chunks = await collect(engine, request(greedy(400, stop=(stop,))))
    assert chunks[-1].deltas[-1] == Done("stop", stop)
    assert text(chunks) == text(whole)[: text(whole).index(stop)]
    assert tokens(chunks) == tokens(whole)[: len(tokens(chunks))]
    await engine.settled()
    assert engine.stats().running == 0


async def test_the_context_is_a_limit(engine: LocalEngine) -> None:
    prompt = tuple(range(250)) * 2 + tuple(range(5))
    chunks = await collect(engine, request(greedy(100, ignore_eos=True), prompt))
    assert len(tokens(chunks)) == 512 - 505 and chunks[-1].deltas[-1] == Done("length")
    assert len(tokens(await collect(engine, request(greedy(100), tuple(range(250)) * 2 + (1,) * 11)))) == 1


async def test_max_tokens_zero_scores_the_prompt_only(engine: LocalEngine) -> None:
    chunks = await collect(engine, request(greedy(0, prompt_logprobs=0)))
    assert tokens(chunks) == () and chunks[-1].deltas == (Done("length"),)
    assert chunks[0].prompt_logprobs is not None and len(chunks[0].prompt_logprobs) == len(PROMPT)


# -- log probabilities ---------------------------------------------------------------------------------------


async def test_logprobs_are_those_of_the_raw_logits(engine: LocalEngine, folder: Path) -> None:
    params = sampled(6, temperature=0.7, top_k=5, logprobs=3, logit_bias=((5, 4.0),))
    chunks = await collect(engine, request(params))
    ids = tokens(chunks)
    expected = torch.log_softmax(oracle_logits(folder, PROMPT + ids), -1)
    found = [one for chunk in chunks for one in chunk.logprobs]
    assert [one.token_id for one in found] == list(ids)
    for i, one in enumerate(found):
        row = expected[len(PROMPT) - 1 + i]
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
        assert [top[0] for top in one.top] == row.topk(3).indices.tolist()
        assert [top[3] for top in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert one.data.decode(errors="replace") == one.token


async def test_prompt_logprobs_in_chunks_and_whatever_is_cached(engine: LocalEngine, folder: Path) -> None:
    prompt = tuple(random.Random(3).randrange(256) for _ in range(150))
    expected = torch.log_softmax(oracle_logits(folder, prompt), -1)
    for _ in range(2):
        first, *_ = await collect(engine, request(greedy(3, prompt_logprobs=2), prompt))
        assert first.prompt_logprobs is not None and first.cached_tokens == 0
        assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == len(prompt)
        for i, one in enumerate(first.prompt_logprobs[1:], 1):
            assert one is not None and one.token_id == prompt[i]
            assert one.logprob == pytest.approx(expected[i - 1, prompt[i]].item(), abs=1e-4)
            assert [top[0] for top in one.top] == expected[i - 1].topk(2).indices.tolist()


# -- coming and going ----------------------------------------------------------------------------------------


async def test_closing_the_generator_frees_its_blocks(engine: LocalEngine) -> None:
    stream = engine.generate(request(greedy(400, ignore_eos=True)))
    await anext(stream)
    assert engine.stats().running == 1
    await stream.aclose()
    await engine.settled()
    stats = engine.stats()
    assert (stats.running, stats.kv_blocks_used) == (0, 0)


async def test_aborts_at_random_moments_leak_nothing(engine: LocalEngine) -> None:
    rng = random.Random(11)

    async def consume(prompt: tuple[int, ...], most: int) -> None:
        stream = engine.generate(request(sampled(60, ignore_eos=True), prompt))
        taken = 0
        while taken < most:
            taken += len((await anext(stream)).token_ids)
        await stream.aclose()

    async def cancelled(prompt: tuple[int, ...], turns: int) -> None:
        task = asyncio.create_task(consume(prompt, 60))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    work = []
    for _ in range(60):
        prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 90)))
        work.append(
            consume(prompt, rng.randrange(50)) if rng.random() < 0.5 else cancelled(prompt, rng.randrange(99))
        )
    await asyncio.gather(*work)
    await engine.settled()
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


async def test_tokens_of_many_streams_go_out_together(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "UNHELD", 2)
    monkeypatch.setattr(local, "HELD_S", 10.0)
    monkeypatch.setattr(local, "MOST_HELD_S", 0.5)
    few = await asyncio.gather(*(collect(engine, request(sampled(24))) for _ in range(2)))
    assert engine._waking is None, "nothing of two is held"
    many = await asyncio.gather(*(collect(engine, request(sampled(24))) for _ in range(4)))
    assert [tokens(chunks) for chunks in many] == [tokens(few[0])] * 4
    # The first token goes at once, with what has come until its reader looks, and so does the last, with all
    # that was held: in half a second that were all of them.
    assert all(len(chunks[0].token_ids) < 12 and len(chunks) <= 6 for chunks in many), many


async def test_a_slow_consumer_is_paused_and_loses_nothing(engine: LocalEngine, folder: Path) -> None:
    stream = engine.generate(request(greedy(450, ignore_eos=True)))
    chunks = [await anext(stream)]
    others = [await collect(engine, request(greedy(100, ignore_eos=True), (i,))) for i in range(4)]
    assert all(len(tokens(other)) == 100 for other in others)
    produced = engine.stats().output_tokens_total - 400
    assert produced <= 256 + 64  # what it was credited for, and no more
    waiting = engine.stats().steps_total
    await engine.settled()
    assert engine.stats().steps_total == waiting  # it stands still, and does not spin
    chunks += [chunk async for chunk in stream]
    assert len(tokens(chunks)) == 450 and len(chunks[1].token_ids) > 100  # what gathered came as one chunk


async def test_a_deadline_ends_a_request(engine: LocalEngine) -> None:
    with pytest.raises(DeadlineExceeded):
        await collect(engine, request(greedy(5), deadline=time.monotonic() - 1))
    with pytest.raises(DeadlineExceeded):
        await collect(engine, request(greedy(450, ignore_eos=True), deadline=time.monotonic() + 0.02))


async def test_a_deadline_wakes_an_engine_that_waits_for_a_consumer(engine: LocalEngine) -> None:
    late = asyncio.Event()
    receive = engine._receive

    def watched(outputs: list[RowOutput]) -> None:
        receive(outputs)
        if outputs[-1].error is not None:
            late.set()

    engine._receive = watched  # type: ignore[method-assign]
    stream = engine.generate(request(greedy(450, ignore_eos=True), deadline=time.monotonic() + 0.5))
    await anext(stream)
    await asyncio.wait_for(late.wait(), 10)
    assert engine.stats().running == 0
    with pytest.raises(DeadlineExceeded):
        while True:
            await anext(stream)


async def test_a_place_begins_with_the_first_step_of_its_prompt(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a token: what is computed of a prompt counts for whoever leaves meanwhile."""
    forward, go_on, computing = engine._loop.runner.forward, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        computing.set()
        assert go_on.wait(60)
        return forward(*args)

    monkeypatch.setattr(engine._loop.runner, "forward", held)
    with engine.admission.enter() as first, engine.admission.enter() as second:

        async def collected(place: Place, **fields: Any) -> list[Chunk]:
            return [chunk async for chunk in engine.generate(request(greedy(5), **fields), place)]

        try:
            work = asyncio.create_task(collected(first))
            await asyncio.to_thread(computing.wait, 60)
            async with asyncio.timeout(10):
                while not first.has_begun:
                    await asyncio.sleep(0)
            late = asyncio.create_task(collected(second, deadline=time.monotonic()))
            await asyncio.sleep(0)
        finally:
            go_on.set()
        assert len(tokens(await work)) == 5
        with pytest.raises(DeadlineExceeded):
            await late
        assert not second.has_begun, "its deadline passed in the queue"


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1, 300)}, "prompt has a token id"),
        ({"sampling": greedy(1, logit_bias=((300, 1.0),))}, "logit_bias"),
        ({"sampling": greedy(1, stop_token_ids=(-1,))}, "stop_token_ids"),
        ({"sampling": greedy(1, logprobs=21)}, "logprobs"),
        ({"prefix": ((1, 2), (999,))}, "prefix"),
        ({"adapter": "lora"}, "adapter"),
    ],
)
async def test_what_cannot_run_is_refused(engine: LocalEngine, change: dict[str, Any], match: str) -> None:
    fields = {"sampling": greedy(1), "prompt": PROMPT, **change}
    with pytest.raises(RequestError, match=match):
        await collect(engine, request(fields.pop("sampling"), fields.pop("prompt"), **fields))


async def test_a_prompt_that_fills_the_context_is_too_long(engine: LocalEngine) -> None:
    with pytest.raises(PromptTooLong) as caught:
        await collect(engine, request(greedy(1), (1,) * 512))
    assert (caught.value.num_tokens, caught.value.limit) == (512, 512)
    assert len(tokens(await collect(engine, request(greedy(9, ignore_eos=True), (1,) * 511)))) == 1


async def test_a_full_queue_refuses_at_once(folder: Path) -> None:
    engine = LocalEngine(folder, num_blocks=64, max_num_seqs=1, max_waiting=2, num_threads=1)
    await engine.start()
    asked = request(greedy(400, ignore_eos=True))
    streams = [engine.generate(asked)]
    await anext(streams[0])
    streams += [engine.generate(asked) for _ in range(3)]
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams[1:3]]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await anext(streams[3])
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    for stream in streams:
        await stream.aclose()
    await engine.settled()
    engine.check_integrity()
    await engine.close()


# -- grammars ------------------------------------------------------------------------------------------------

WEATHER = ToolShape(
    "get_weather",
    json.dumps(
        {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        }
    ),
)
FORCED = Constraint((WEATHER,), max_calls=1)


@pytest.fixture
async def caller(folder: Path) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(folder, num_blocks=300, tool_dialect="llama3-json", num_threads=1)
    await engine.start()
    yield engine
    await engine.settled()
    engine.check_integrity()
    await engine.close()


async def test_a_forced_call_always_comes_and_always_fits(caller: LocalEngine) -> None:
    asked = [
        request(
            sampled(200, seed=seed, temperature=1.5 if seed else 0.0),
            constraint=FORCED,
            reader=ReaderParams(calls=True, max_calls=1),
        )
        for seed in range(8)
    ]
    free = request(greedy(30))
    alone = tokens(await collect(caller, free))
    *called, beside = await asyncio.gather(*(collect(caller, one) for one in [*asked, free]))
    assert tokens(beside) == alone
    for chunks in called:
        deltas = [d for chunk in chunks for d in chunk.deltas]
        assert [d.name for d in deltas if isinstance(d, CallStart)] == ["get_weather"]
        arguments = json.loads("".join(d.text for d in deltas if isinstance(d, CallArgs)))
        assert arguments["city"] in ("Paris", "Rome") and set(arguments) <= {"city", "days"}
        assert deltas[-1] == Done("stop")


async def test_a_constrained_generation_resumes_behind_any_prefix(caller: LocalEngine) -> None:
    asked = request(sampled(200, seed=3), constraint=FORCED, reader=ReaderParams(calls=True, max_calls=1))
    whole = await collect(caller, asked)
    ids = tokens(whole)
    for cut in {1, 5, len(ids) // 2, len(ids) - 1, len(ids)}:
        resumed = await collect(
            caller,
            request(asked.sampling, constraint=FORCED, reader=asked.reader, prefix=(ids[:cut],)),
        )
        assert tokens(resumed) == ids and resumed[-1].deltas[-1] == Done("stop")


async def test_a_constraint_that_cannot_be_honoured(caller: LocalEngine) -> None:
    bad = Constraint((ToolShape("f", '{"type": "object", "not": {}}'),))
    with pytest.raises(ConstraintError):
        await caller.check(bad)
    with pytest.raises(ConstraintError):
        await collect(caller, request(greedy(5), constraint=bad))
    await caller.check(FORCED)


# -- failures ------------------------------------------------------------------------------------------------


async def test_a_row_that_is_not_finite_fails_alone(engine: LocalEngine, folder: Path) -> None:
    decoder: Any = engine._loop.runner.model
    embedding = decoder.embedding
    poisoned = decoder.embed(torch.arange(decoder.spec.vocab_size))
    poisoned[298] = math.nan
    decoder.embedding = poisoned  # the head, tied to it, keeps the clean one
    bad = (*PROMPT, 298, *PROMPT)
    results = await asyncio.gather(
        collect(engine, request(greedy(8), bad)), collect(engine, request(greedy(8))), return_exceptions=True
    )
    assert isinstance(results[0], RequestFailed)
    assert isinstance(results[1], list) and tokens(results[1]) == oracle_greedy(folder, PROMPT, 8)
    await engine.settled()
    decoder.embedding = embedding
    # the blocks that held what is not finite are clean again, for whoever has them next
    for pool in engine._loop.runner.pools:
        assert torch.isfinite(pool).all()
    assert tokens(await collect(engine, request(greedy(8), bad))) == oracle_greedy(folder, bad, 8)


async def test_a_matcher_that_fails_fails_its_row_alone(engine: LocalEngine, folder: Path) -> None:
    letters = Constraint(answer=Shape("regex", "[a-z]+"))
    find = engine._matcher

    async def broken(asked: GenerateRequest, constraint: Constraint) -> tuple[Matcher, bool]:
        matcher, stopped = await find(asked, constraint)
        matcher.grammar.failure = "out of fuel"
        return matcher, stopped

    engine._matcher = broken  # type: ignore[method-assign]
    results = await asyncio.gather(
        collect(engine, request(greedy(8), constraint=letters)),
        collect(engine, request(greedy(8))),
        return_exceptions=True,
    )
    assert isinstance(results[0], ConstraintError) and "out of fuel" in str(results[0])
    assert isinstance(results[1], list) and tokens(results[1]) == oracle_greedy(folder, PROMPT, 8)


async def test_a_step_that_raises_ends_the_engine_for_all(engine: LocalEngine) -> None:
    streams = [engine.generate(request(greedy(400, ignore_eos=True))) for _ in range(3)]
    for stream in streams:
        await anext(stream)

    def broken(*_: object) -> Any:
        raise RuntimeError("the device is on fire")

    engine._loop.runner.forward = broken  # type: ignore[method-assign]
    for stream in streams:
        with pytest.raises(EngineDead, match="on fire"):
            while True:
                await anext(stream)
    assert "on fire" in str(await engine.dead())
    with pytest.raises(EngineDead):
        await collect(engine, request(greedy(1)))


async def test_a_step_that_hangs_counts_as_death(folder: Path) -> None:
    engine = LocalEngine(folder, num_blocks=64, step_timeout_s=0.05, num_threads=1)
    await engine.start()
    hung, release = threading.Event(), threading.Event()

    def hang(*_: object) -> Any:
        hung.set()
        release.wait(30)
        raise RuntimeError("too late")

    engine._loop.runner.forward = hang  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match="no progress"):
        await collect(engine, request(greedy(1)))
    assert hung.is_set() and isinstance(await engine.dead(), TimeoutError)
    release.set()
    await engine.close()


async def test_closing_ends_what_runs(folder: Path) -> None:
    before = threading.enumerate()
    engine = LocalEngine(folder, num_blocks=64, num_threads=1)
    await engine.start()
    stream = engine.generate(request(greedy(400, ignore_eos=True)))
    await anext(stream)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDead):
        while True:
            await anext(stream)
    with pytest.raises(EngineDead):
        await collect(engine, request(greedy(1)))
    assert "engine" not in {thread.name for thread in threading.enumerate() if thread not in before}


@pytest.mark.parametrize("kept", [True, False])
async def test_what_is_kept_outlives_a_flood_that_fills_the_cache(folder: Path, kept: bool) -> None:
    engine = LocalEngine(folder, num_blocks=40, num_threads=1)
    await engine.start()
    asked = request(sampled(20), prompt=PROMPT * 5)
    output = tokens(await collect(engine, asked))
    if kept:
        engine.keep("run", asked, output, 60.0)
    for letter in range(A, A + 12):  # other prompts, which need the cache three times over
        await collect(engine, request(sampled(2), prompt=(letter,) * 160))
    going_on = (*asked.prompt_ids, *output, A, B, C)
    chunks = await collect(engine, request(sampled(2), prompt=going_on))
    full = (len(asked.prompt_ids) + len(output) - 1) // 16 * 16
    assert chunks[0].cached_tokens == (full if kept else 0)
    engine.let_go("run")
    await engine.settled()
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    await engine.close()


async def test_an_idle_engine_sleeps(engine: LocalEngine) -> None:
    await collect(engine, request(greedy(3)))
    await engine.settled()
    asked = 0
    step = engine._loop.step

    def counted() -> bool:
        nonlocal asked
        asked += 1
        return step()

    engine._loop.step = counted  # type: ignore[method-assign]
    for _ in range(50):
        await asyncio.sleep(0)
    await engine.settled()
    assert asked <= 2  # once for the command that `settled` gives, not for nothing


# -- starting ------------------------------------------------------------------------------------------------


async def test_generation_config_gives_the_defaults(checkpoint: Find, tmp_path: Path) -> None:
    for file in checkpoint("qwen3").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 64, "num_assistant_tokens": 5}'
    )
    for mode, expected in (
        (
            "auto",
            SamplingDefaults(
                temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=64, num_assistant_tokens=5
            ),
        ),
        ("none", SamplingDefaults()),
    ):
        engine = LocalEngine(tmp_path, name="mine", generation_config=mode, num_threads=1)  # type: ignore[arg-type]
        info = await engine.start()
        assert info.defaults == expected and info.name == "mine"
        await engine.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "-3"),
        ("temperature", '"hot"'),
        ("temperature", "NaN"),
        ("top_p", "7"),
        ("min_p", "3"),
        ("top_k", "-2"),
        ("top_k", "Infinity"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "true"),
        ("max_new_tokens", "0"),
        ("num_assistant_tokens", "-1"),
    ],
)
def test_a_default_that_no_request_may_have_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, value: str
) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"{field}": {value}}}')
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    (said,) = caplog.messages
    assert f"generation_config.json: {field} is left out: {value} is no number from" in said


def test_a_top_k_that_is_off_elsewhere_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": -1, "top_p": null}')
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(top_k=0)
    assert not caplog.messages


async def test_the_fingerprint_names_weights_tokenizer_and_dialect(checkpoint: Find) -> None:
    found = []
    for name, dialect in (("qwen3", None), ("qwen3", None), ("qwen3", "hermes"), ("llama", None)):
        engine = LocalEngine(checkpoint(name), tool_dialect=dialect, num_blocks=64, num_threads=1)
        found.append((await engine.start()).fingerprint)
        await engine.close()
    assert found[0] == found[1] and len(set(found)) == 3


@pytest.mark.parametrize(
    ("model", "settings", "match"),
    [
        ("/nowhere/at/all", {}, "not a folder"),
        ("not-an-id", {}, "not a folder"),
        ("qwen3", {"tool_dialect": "klingon"}, "klingon"),
        ("qwen3", {"dtype": "int3"}, "int3"),
        ("qwen3", {"device": "abacus"}, "abacus"),
        ("qwen3", {"max_model_len": 513}, "512 positions"),
        ("qwen3", {"max_model_len": 512, "num_blocks": 31}, "cannot hold one sequence"),
    ],
)
async def test_what_cannot_be_loaded_says_why_in_one_line(
    checkpoint: Find, model: str, settings: dict[str, Any], match: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(LoadError, match=match) as caught:
            engine = LocalEngine(checkpoint(model) if model == "qwen3" else model, num_threads=1, **settings)
            stack.push_async_callback(engine.close)
            await engine.start()
    assert "\n" not in str(caught.value)


async def test_a_gpu_that_torch_cannot_use_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = LocalEngine(folder, device="cuda", num_threads=1)
    with pytest.raises(LoadError, match="finds no GPU that it can use"):
        await engine.start()
    await engine.close()


async def test_a_hub_id_offline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    engine = LocalEngine("nobody/nothing")
    with pytest.raises(LoadError, match="cannot fetch nobody/nothing"):
        await engine.start()
    await engine.close()


async def test_a_small_pool_shortens_the_context(folder: Path) -> None:
    engine = LocalEngine(folder, num_blocks=10, num_threads=1)
    assert (await engine.start()).max_model_len == 160
    chunks = await collect(engine, request(greedy(999, ignore_eos=True)))
    assert len(tokens(chunks)) == 160 - len(PROMPT)
    await engine.close()


async def test_an_engine_that_was_not_started_says_so(folder: Path) -> None:
    engine = LocalEngine(folder)
    assert engine.stats().kv_blocks == 0
    with pytest.raises(EngineDead, match="not started"):
        await collect(engine, request(greedy(1)))
    await engine.close()


async def test_a_consumer_that_leaves_at_the_end_leaves_nothing(engine: LocalEngine) -> None:
    whole = text(await collect(engine, request(greedy(40))))
    stream = engine.generate(request(greedy(400, stop=(whole[5:8],))))
    while not is_last(await anext(stream)):
        pass
    await engine.settled()  # the stream is neither closed nor exhausted
    assert engine.stats().running == 0
    await stream.aclose()


async def test_the_first_chunk_says_how_long_the_request_waited_and_its_prompt_took(
    engine: LocalEngine,
) -> None:
    chunks = [chunk async for chunk in engine.generate(request(greedy(8)))]
    first, *rest = chunks
    assert first.timing is not None and first.timing.queue_s >= 0 and first.timing.prefill_s > 0
    assert all(chunk.timing is None for chunk in rest)


async def test_the_time_in_the_queue_is_that_of_those_before(folder: Path) -> None:
    """With room for one sequence the second request waits until the first has ended."""
    engine = LocalEngine(folder, num_blocks=300, max_num_seqs=1, num_threads=1)
    await engine.start()
    try:
        began = time.perf_counter()
        both = [engine.generate(request(greedy(40), (*PROMPT, tail))) for tail in (A, B)]

        async def timing(chunks: Any) -> tuple[Any, float]:
            found = [chunk async for chunk in chunks]
            return found[0].timing, time.perf_counter() - began

        (first, first_took), (second, second_took) = await asyncio.gather(*map(timing, both))
        assert first.queue_s < second.queue_s <= second_took
        assert second.queue_s > first_took / 2
    finally:
        await engine.close()


async def test_what_a_step_was_is_counted(engine: LocalEngine) -> None:
    seen = set[tuple[int, int]]()
    for _ in range(50):  # a reader that the machine lets come late sees no step but the last
        async for _ in engine.generate(request(greedy(12))):
            stats = engine.stats()
            seen.add((stats.prefilling, stats.decoding))
        await engine.settled()
        if (0, 1) in seen:
            break
    assert seen <= {(1, 0), (0, 1), (0, 0)} and (0, 1) in seen
    idle = engine.stats()
    assert (idle.prefilling, idle.decoding, idle.paused) == (0, 0, 0)
    assert idle.kv_bytes > 0 and idle.kv_blocks >= 300
