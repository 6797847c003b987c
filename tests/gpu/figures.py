"""Measures the speed of models and of single kernels on a GPU.

Where the device's limit is known, a figure states its share of it. The limits are the bandwidth of a large
copy and the arithmetic of a large bf16 product, both measured on the same device. Some figures also carry a
goal for this share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from engine.benchmark.random_weights import SIZES
from engine.benchmark.roofline import step_bytes
from engine.kernels.fp8 import FP8, quantize_rows
from tests.gpu.models import Bench

CONTEXT = 1024
CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: what, its value, and in which unit; `share` of what the device allows, if that is known."""

    name: str
    value: float
    unit: str
    share: float | None = None
    goal: float | None = None

    def line(self) -> str:
        share = "" if self.share is None else f"{100 * self.share:7.1f} %"
        goal = "" if self.goal is None else f"  (goal {100 * self.goal:.0f} %)"
        return f"{self.name:58s} {self.value:12.3f} {self.unit:8s}{share}{goal}"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured: bytes a second of a large copy, and bf16 operations a second of a large product."""

    bandwidth: float
    arithmetic: float


def timed(run: Callable[[], object], *, seconds: float = 0.3) -> float:
    """Median seconds of one call on the device."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 10 or time.perf_counter() - began < seconds:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def ceilings() -> Ceilings:
    """Measure this device."""
    large = torch.randn(2, 1 << 29, device=CUDA)  # 2 GiB each
    bandwidth = large.nbytes / timed(lambda: large[0].copy_(large[1]))
    left, right = torch.randn(2, 8192, 8192, device=CUDA, dtype=torch.bfloat16)
    arithmetic = 2 * 8192**3 / timed(lambda: left @ right)
    return Ceilings(bandwidth, arithmetic)


def prompt(length: int, seed: int, vocab: int = 150_000) -> list[int]:
    """Random ids."""
    ids: list[int] = torch.randint(
        0, vocab, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return ids


# least shares of the floor at batches of 1, 32 and 256
GOALS = {"qwen3-0.6b": (0.6, 0.8, 0.8), "qwen3-1.7b": (0.75, 0.8, 0.8), "qwen3-8b": (0.85, 0.85, 0.85)}


def of_model(size: str, limits: Ceilings, left: Callable[[], float]) -> Iterator[Figure]:
    """Everything about one model; stops between figures when no time is left."""
    began = time.perf_counter()
    bench = Bench(size, CUDA)
    torch.cuda.synchronize()
    yield Figure(f"{size}: weights made, graphs captured", time.perf_counter() - began, "s")
    yield from prefill(bench, size, limits)
    for batch, goal in zip((1, 32, 256), GOALS[size], strict=True):
        if left() < 20:
            return
        yield from decode(bench, size, batch, limits, goal)
    if left() > 20:
        yield from prefix_hit(bench, size)
    for budget in (2048, 512):
        if left() > 20:
            yield from under_arrivals(bench, size, budget)


def of_eight_bits(size: str, limits: Ceilings, left: Callable[[], float]) -> Iterator[Figure]:
    """The same model with fp8 weights, and then with keys and values in fp8 too."""
    for name, kv_dtype in ((f"{size} fp8", None), (f"{size} fp8, fp8 KV", FP8)):
        if left() < 40:
            return
        bench = Bench(size, CUDA, quantization="fp8", kv_dtype=kv_dtype)
        if kv_dtype is None:
            yield from prefill(bench, name, limits)
        for batch, goal in ((1, 0.8), (32, None), (256, None)):
            if left() > 20:
                yield from decode(bench, name, batch, limits, goal)
        del bench
        torch.cuda.empty_cache()  # the next one's cache takes what is free


def decode(bench: Bench, size: str, batch: int, limits: Ceilings, goal: float | None) -> Iterator[Figure]:
    """Milliseconds of a step, and how near that is to reading weights and KV once."""
    steps = 64 if batch < 256 else 32
    bench.reset(2048)
    # the middle of the measured steps is at CONTEXT
    length = CONTEXT - steps // 2 - 4
    handles = [bench.submit(prompt(length, seed), steps + 16) for seed in range(batch)]
    bench.run_until_decoding(handles)
    for _ in range(6):
        bench.step()
    torch.cuda.synchronize()
    began, told = time.perf_counter(), sum(bench.num_tokens.values())
    for _ in range(steps):
        bench.step()
    seconds = time.perf_counter() - began
    assert sum(bench.num_tokens.values()) - told == batch * steps, "not every sequence was in every step"
    floor = step_bytes(bench.model, batch, CONTEXT, bench.runner.kv_dtype) / limits.bandwidth
    step = seconds / steps
    yield Figure(f"{size}: decode step, batch {batch}", step * 1000, "ms", floor / step, goal)
    yield Figure(f"{size}: tokens, batch {batch}", batch / step, "tok/s")


def prefill(bench: Bench, size: str, limits: Ceilings) -> Iterator[Figure]:
    """Milliseconds to the first token of one prompt of 2,048, and the share of the arithmetic."""
    times = []
    for seed in range(6):
        bench.reset(2048)
        handle = bench.submit(prompt(2048, 1000 + seed), 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        bench.run_until_decoding([handle])
        times.append(time.perf_counter() - began)
    shape = bench.model.shape
    matrices = bench.model.spec.num_parameters - shape.axes["hidden"] * shape.axes["vocab"]
    attention = len(shape.windows) * 4 * shape.axes["q"] * 2048**2 // 2
    seconds = statistics.median(times[1:])
    share = (2 * 2048 * matrices + attention) / limits.arithmetic / seconds
    yield Figure(f"{size}: prefill of 2,048 tokens", seconds * 1000, "ms", share, 0.6)


def prefix_hit(bench: Bench, size: str) -> Iterator[Figure]:
    """The first token of a prompt whose 4,096 first tokens are cached, beside that of an unknown one."""

    def first_token(ids: list[int]) -> float:
        handle = bench.submit(ids, 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        bench.run_until_decoding([handle])
        return time.perf_counter() - began

    bench.reset(2048)
    cold, hot = [], []
    for seed in range(3):
        ids = prompt(4096, 2000 + seed)
        cold.append(first_token([*ids, *prompt(32, seed)]))
        hot.append(first_token([*ids, *prompt(32, 50 + seed)]))
    ratio = statistics.median(hot) / statistics.median(cold)
    yield Figure(f"{size}: first token on a 4k prefix hit, of a cold one's", 100 * ratio, "%")


def under_arrivals(bench: Bench, size: str, budget: int) -> Iterator[Figure]:
    """Gaps between the tokens of 32 streams while prompts of 2,048 come one after the other."""
    bench.reset(budget)
    streams = [bench.submit(prompt(256, seed), 400) for seed in range(32)]
    bench.run_until_decoding(streams)
    gaps, arrived, last = [], [bench.submit(prompt(2048, 3000), 1)], time.perf_counter()
    for i in range(200):
        bench.step()
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        if i % 16 == 0:
            arrived.append(bench.submit(prompt(2048, 3001 + i), 1))
    gaps.sort()
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    name = f"{size}: gaps under arrivals, {budget} tokens a step"
    yield Figure(f"{name}, p50", p50 * 1000, "ms")
    yield Figure(f"{name}, p99 over p50", p99 / p50, "x")


def peer(size: str, batch: int = 32, count: int = 64) -> Iterator[Figure]:
    """transformers' own continuous batching on the same shape, its fastest attention that is installed."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model("qwen3", **{k: v for k, v in SIZES[size].items() if k != "architectures"})
    torch.manual_seed(0)
    with torch.device(CUDA):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.eval()
    prompts = [prompt(CONTEXT - count, seed) for seed in range(batch)]
    times = []
    for new_tokens in (1, count):
        generation = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        for _ in range(2):  # the first wakes the libraries up
            began = time.perf_counter()
            model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        times.append(seconds)
    step = (times[1] - times[0]) / (count - 1)
    name = f"{size}: transformers continuous batching (sdpa), batch {batch}"
    yield Figure(name, step * 1000, "ms")


# ------------------------------------------------------------------------------------------------------------
# Kernels by themselves: what to look at first when a step is slow


def of_kernels(limits: Ceilings) -> Iterator[Figure]:
    """Each kernel against the bytes that it has to move."""
    yield from _attention(limits)
    yield from _products(limits)
    yield from _draws(limits)


def _attention(limits: Ceilings) -> Iterator[Figure]:
    from engine.kernels.torch_attention import GroupStep
    from engine.kernels.triton.attention import paged_attention

    sizes = ((1, 1024), (1, 32768), (32, 4096), (256, 1024))
    for (batch, length), kept in product(sizes, (torch.bfloat16, FP8)):
        blocks = length // 16
        pool = torch.randn(batch * blocks, 1, 2, 16, 8, 128, device=CUDA, dtype=torch.bfloat16).to(kept)
        order = torch.randperm(batch * blocks, device=CUDA)
        step = GroupStep(
            order.int().view(batch, blocks),
            torch.arange(batch + 1, device=CUDA),
            torch.full((batch,), length, device=CUDA),
            order[:batch],
            order[:batch] % 16,
            None,
        )
        q = torch.randn(batch, 32, 128, device=CUDA, dtype=torch.bfloat16)
        k_cache, v_cache = pool[:, 0, 0], pool[:, 0, 1]
        graph = captured(lambda: paged_attention(q, k_cache, v_cache, step, scale=0.1))  # noqa: B023
        seconds = timed(graph)
        share = pool.nbytes / limits.bandwidth / seconds
        name = f"attention, {batch} x {length}{', fp8' if kept is FP8 else ''}"
        yield Figure(name, seconds * 1e6, "us", share)


def _products(limits: Ceilings) -> Iterator[Figure]:
    shapes = [(4096, 1024), (6144, 1024), (6144, 4096), (24576, 4096), (4096, 12288), (151936, 1024)]
    for outputs, width in shapes:
        for rows in (1, 4, 8):
            for name, seconds in _product(rows, outputs, width).items():
                itemsize = 1 if "fp8" in name else 2
                share = itemsize * outputs * width / limits.bandwidth / seconds
                yield Figure(f"{name} product, {rows} x [{outputs}, {width}]", seconds * 1e6, "us", share)


def _product(rows: int, outputs: int, width: int) -> dict[str, float]:
    """Seconds of one product, by way."""
    from engine.kernels.triton import thin

    # several copies, so that the cache does not hold them
    copies = max(2, (512 << 20) // (2 * outputs * width))
    weights = torch.randn(copies, outputs, width, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(rows, width, device=CUDA, dtype=torch.bfloat16)
    thinly = captured(lambda: [thin.linear(x, own) for own in weights])
    library = captured(lambda: [torch.nn.functional.linear(x, own) for own in weights])
    kept, scale = quantize_rows(weights.view(-1, width))
    narrow, scales = kept.view(weights.shape), scale.view(copies, outputs)
    eights = captured(
        lambda: [thin.linear(x, own, scale=each) for own, each in zip(narrow, scales, strict=True)]
    )
    ways = (("thin", thinly), ("library", library), ("thin fp8", eights))
    return {name: timed(run, seconds=0.05) / copies for name, run in ways}


def _draws(limits: Ceilings) -> Iterator[Figure]:
    import numpy as np

    from engine.kernels.triton import sampling

    kinds = {"plain": (1.0, 0, 1.0, 0.0), "k 20, p 0.95": (0.6, 20, 0.95, 0.0), "min_p": (1.0, 0, 1.0, 0.05)}
    for batch in (1, 256):
        scores = torch.randn(batch, 151936, device=CUDA) * 4
        for name, (temperature, top_k, top_p, min_p) in kinds.items():
            rows = np.zeros((batch, sampling.FIELDS), np.int32)
            rows[:, 0] = np.float32(temperature).view(np.int32)
            rows[:, 1] = np.float32(top_p).view(np.int32)
            with np.errstate(divide="ignore"):
                rows[:, 2] = np.log(np.float32(min_p)).view(np.int32)
            rows[:, 3] = top_k or 151936
            rows[:, 4:] = np.random.default_rng(0).integers(-(2**31), 2**31, (batch, 2))
            packed = torch.from_numpy(rows).to(CUDA)
            seconds = timed(lambda: sampling.draw(scores, packed), seconds=0.05)  # noqa: B023
            share = scores.nbytes / limits.bandwidth / seconds
            yield Figure(f"draw, {name}, batch {batch}", seconds * 1e6, "us", share)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same work as one graph: launches are not what is measured."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
