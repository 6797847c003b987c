"""With `deterministic` a request's tokens and log probabilities are always the same to the bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LocalEngine
from engine.core.determinism_check import prove
from engine.executor import deterministic
from engine.kernels.torch_attention import GroupStep, Workspace
from engine.models.general import GeneralDecoder
from engine.step import RowLogprobs
from engine.tiny import CHECKPOINT
from engine.types import Done, GenerateRequest, LoadError, ReaderParams, RenderInput, SamplingParams
from tests.engine.kernels.test_torch_attention import plain
from tests.support.driver import Driver
from tests.support.kernels import need_kernels

Find = Callable[[str], Path]
Stream = list[RowLogprobs]

COUNT = 24
LENGTHS = (1, 3, 16, 17, 40, 90, 129, 200)
DRAW = random.Random(7)
PROMPTS = [tuple(DRAW.randrange(290) for _ in range(length)) for length in LENGTHS]
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9, "logprobs": 3},
    {"top_k": 40, "repetition_penalty": 1.2},
    {"min_p": 0.02, "logprobs": 20},
    {"temperature": 0.0, "frequency_penalty": 0.4},
]


def sampling(seed: int) -> SamplingParams:
    fields = {"temperature": 1.0, "logprobs": 0, **FILTERS[seed % len(FILTERS)]}
    return SamplingParams(seed=seed, max_tokens=COUNT, ignore_eos=True, **fields)


class Streams:
    """The streams of `PROMPTS` under one setting of the engine."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        defaults = {"num_blocks": 300, "max_model_len": 256, "deterministic": True}
        self.driver = Driver(folder, **{**defaults, **settings})

    def submit(self, seed: int, prefix: tuple[int, ...] = (), owner: str = "") -> int:
        own = (prefix,) if prefix else ()
        return self.driver.submit(PROMPTS[seed], sampling(seed), prefix=own, owner=owner)

    def read(self, handle: int, seed: int) -> Stream:
        """What was drawn, cut to the alternatives that were asked for."""
        assert self.driver.end(handle) == Done("length")
        top = sampling(seed).logprobs
        return [
            RowLogprobs(row.token_id, row.logprob, row.top_ids[:top], row.top_logprobs[:top])
            for output in self.driver.outputs[handle]
            for row in output.logprobs
        ]

    def alone(self) -> list[Stream]:
        streams = []
        for seed in range(len(PROMPTS)):
            handle = self.submit(seed, owner=str(seed))
            self.driver.run()
            streams.append(self.read(handle, seed))
        return streams

    def together(self, between: Callable[[], int] = lambda: 0) -> list[Stream]:
        """All at once, or with as many steps between them as `between` says."""
        handles = []
        for seed in range(len(PROMPTS)):
            handles.append(self.submit(seed))
            for _ in range(between()):
                self.driver.step()
        self.driver.run()
        return [self.read(handle, seed) for seed, handle in enumerate(handles)]


def ids(streams: list[Stream]) -> list[tuple[int, ...]]:
    return [tuple(row.token_id for row in stream) for stream in streams]


# the native decoder, also with windows; the general tier, with windows, a softcap, sinks and experts
CASES = [
    ("qwen3", "float32"),
    ("qwen3", "bfloat16"),
    ("mistral", "bfloat16"),
    ("gemma2", "float32"),
    ("qwen3-64", "float32"),
    ("qwen3-64", "bfloat16"),
    ("mistral-32", "bfloat16"),
    ("gemma2-32", "bfloat16"),
    ("gpt_oss-32", "bfloat16"),
    ("qwen3_moe-32", "float32"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_nothing_around_a_request_changes_a_bit(checkpoint: Find, name: str, dtype: str) -> None:
    folder = checkpoint(name)
    if name in ("gpt_oss-32", "qwen3_moe-32"):
        need_kernels()
    streams = Streams(folder, dtype=dtype)
    alone = streams.alone()
    assert [len(stream) for stream in alone] == [COUNT] * len(PROMPTS)
    assert streams.together() == alone
    hits = streams.driver.loop.scheduler.counters.prefix_hits
    draw = random.Random(1)
    assert streams.together(lambda: draw.randrange(5)) == alone
    assert streams.driver.loop.scheduler.counters.prefix_hits > hits
    chunks = Streams(folder, dtype=dtype, max_num_batched_tokens=37, block_size=4, num_blocks=1200)
    assert chunks.together() == alone
    blocks = 9 if name.startswith("mistral") else 20  # a window gives its blocks back
    few = Streams(folder, dtype=dtype, max_num_batched_tokens=16, num_blocks=blocks)
    assert few.together() == alone
    assert few.driver.loop.scheduler.counters.preemptions > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stream_goes_on_the_same_from_every_token(checkpoint: Find, dtype: str) -> None:
    streams = Streams(checkpoint("qwen3"), dtype=dtype)
    alone = streams.alone()
    splits = [(seed, at) for seed in range(len(PROMPTS)) for at in range(1, COUNT)]
    random.Random(2).shuffle(splits)
    handles = [streams.submit(seed, ids(alone)[seed][:at]) for seed, at in splits]
    streams.driver.run()
    for handle, (seed, at) in zip(handles, splits, strict=True):
        assert streams.read(handle, seed) == alone[seed][at:]


def test_without_it_the_batch_shows(checkpoint: Find) -> None:
    """Else the tests above would say nothing: what shares the batch shows in the last bits."""
    folder = checkpoint("mistral")
    for dtype in ("float32", "bfloat16"):
        streams = Streams(folder, dtype=dtype, deterministic=False)
        assert streams.alone() != streams.together()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_shipped_model_resumes_exactly(dtype: Any) -> None:
    engine = LocalEngine(CHECKPOINT, dtype=dtype, deterministic=True, kv_cache_bytes=64 << 20)
    assert "exact_resume" in (await engine.start()).capabilities
    prompt = (await engine.render(RenderInput([{"role": "user", "content": "My name is Mark."}]))).ids

    async def generate(seed: int, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
        asked = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, top_p=0.95 if seed % 2 else 1.0)
        request = GenerateRequest(
            str(seed), prompt, asked, ReaderParams(dialect=False), prefix=(prefix,) if prefix else ()
        )
        return tuple([token async for chunk in engine.generate(request) for token in chunk.token_ids])

    one_by_one = [await generate(seed) for seed in range(4)]
    again = [(seed, at) for seed in range(4) for at in (0, 1, 15, 16, 17, 31, 44, 59)]
    resumed = await asyncio.gather(*(generate(seed, one_by_one[seed][:at]) for seed, at in again))
    assert list(resumed) == [one_by_one[seed] for seed, _ in again]
    assert len(set(one_by_one)) > 1, "seeds draw differently"
    await engine.close()


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_attention_in_pieces_is_attention(
    window: int | None, softcap: float | None, with_sinks: bool, shared: bool
) -> None:
    generator, rng = torch.Generator().manual_seed(3), np.random.default_rng(3)
    positions = rng.integers(0, 400, deterministic.ROWS)
    pool = torch.randn(200, 2, 2, 16, 2, 16, generator=generator)
    k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
    tables = rng.integers(0, 200, (1 if shared else deterministic.ROWS, 25)).astype(np.int32)
    tables = np.broadcast_to(tables, (deterministic.ROWS, 25))
    queries = torch.randn(deterministic.ROWS, 6, 16, generator=generator)
    sinks = torch.randn(6, generator=generator) if with_sinks else None
    tiles = deterministic.make_tiles(
        tables,
        positions,
        block_size=16,
        num_kv_heads=2,
        window=window,
        dtype=torch.float32,
        move=torch.from_numpy,
    )
    nothing = torch.zeros(0)
    step = GroupStep(nothing, nothing, nothing, nothing, nothing, window, tiles)
    got = deterministic.attention(
        queries, k_cache, v_cache, step, Workspace(), scale=0.3, softcap=softcap, sinks=sinks
    )
    for row, position in enumerate(positions.tolist()):
        own = torch.from_numpy(tables[row].astype(np.int64))
        keys, values = (cache[own].reshape(-1, 2, 16)[: position + 1] for cache in (k_cache, v_cache))
        query = queries[row : row + 1]
        expected = plain(query, keys, values, position, window, 0.3, softcap, sinks)
        torch.testing.assert_close(got[row : row + 1].double(), expected, atol=2e-5, rtol=2e-5)


def test_what_cannot_be_kept_is_refused(checkpoint: Find) -> None:
    with pytest.raises(LoadError, match="mixture of experts, which is not served with deterministic"):
        Streams(checkpoint("gpt_oss"), cpu_kernels=False)
    assert isinstance(Streams(checkpoint("gpt_neox")).driver.loop.runner.model, GeneralDecoder)


def test_a_machine_on_which_neighbours_show_is_refused(
    checkpoint: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Streams(checkpoint("llama")).driver.loop
    runner, forward, held = loop.runner, loop.runner.model.forward, {1}

    def meddling(*args: Any) -> torch.Tensor:
        """Rows of another place come out one bit off unless one of `held` threads do the work."""
        logits = forward(*args)
        place = torch.arange(len(logits))[:, None] * 1e-3
        return logits if runner.num_threads in held else logits + place

    monkeypatch.setattr(runner.model, "forward", meddling)
    before = [pool.clone() for pool in runner.pools]
    runner.num_threads = 4
    prove(runner, loop.scheduler.kv, loop.scheduler.rows)
    assert runner.num_threads == 1  # fewer threads were tried until it held
    held.clear()
    with pytest.raises(LoadError, match="cannot be deterministic here"):
        prove(runner, loop.scheduler.kv, loop.scheduler.rows)
    loop.scheduler.check_integrity()
    assert all(torch.equal(pool, own) for pool, own in zip(runner.pools, before, strict=True))
