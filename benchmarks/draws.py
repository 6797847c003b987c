"""Draws of tokens on a CPU, and steps beside a busy thread: `python -m benchmarks.draws`.

First a draw by the compiled kernels beside the same draw by torch, on one thread, the best of seven. Then
steps of the shipped model, sampled, alone and beside a thread that computes in Python all the time: what the
steps lose by that is what they wait for the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from engine import GenerateRequest, SamplingParams
from engine.config import EngineConfig
from engine.core.loop import EngineLoop, build_loop
from engine.core.messages import Inbox, Submit
from engine.kernels import sampler
from engine.kernels.cpu import open_library
from engine.step import DrawPlan, plain_draws
from engine.tiny import CHECKPOINT
from server.process.process_ends import tune_process

VOCABULARIES = (3072, 151_936)
WAYS: dict[str, dict[str, Any]] = {
    "without filters": {},
    "temperature 0.2, top-p 0.9": {"temperature": 0.2, "top_p": 0.9},
    "temperature 0.7, top-k 20, top-p 0.95": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "temperature 1.5, top-p 0.99": {"temperature": 1.5, "top_p": 0.99},
    "min-p 0.05": {"min_p": 0.05},
}
HISTORY = 600  # tokens that a row has said, for penalties
STEPS = 150


def plan(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> DrawPlan:
    """The same draw for every row."""
    return replace(
        plain_draws(rows),
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
        noise=np.arange(rows) * 987654321987654321,
        draw_index=np.arange(rows),
    )


def penalized(rows: int, vocabulary: int) -> DrawPlan:
    """With a presence penalty."""
    ids = np.random.default_rng(1).integers(0, vocabulary, rows * HISTORY)
    zeros = np.zeros(rows, np.float32)
    return replace(
        plan(rows),
        penalized=np.arange(rows),
        repetition=zeros + 1,
        presence=zeros + 1.5,
        frequency=zeros,
        history_rows=np.repeat(np.arange(rows), HISTORY),
        history_ids=ids,
        history_is_output=np.ones(len(ids), np.bool_),
    )


def best(work: Callable[[], Any]) -> float:
    """Milliseconds, the least of seven."""
    times = []
    for _ in range(7):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def draws() -> None:
    library = open_library()
    assert library is not None, "no kernels on this machine"
    torch.set_num_threads(1)
    no_masks = np.zeros(0, np.int64), np.zeros((0, 0), np.int32)
    for vocabulary in VOCABULARIES:
        for rows in (1, 16, 64):
            scores = torch.randn(rows, vocabulary) * 3
            plans = {name: plan(rows, **fields) for name, fields in WAYS.items()}
            plans["presence penalty"] = penalized(rows, vocabulary)
            for name, own in plans.items():
                by_torch = best(partial(sampler.draw, scores, own, *no_masks))
                here = best(partial(sampler.draw_here, scores.numpy(), own, *no_masks, library.draw))
                print(f"{vocabulary:7} ids, {rows:2} rows, {name}: torch {by_torch:.2f} ms, here {here:.2f}")


def made(sequences: int) -> EngineLoop:
    """A loop with so many sequences that go on and on."""
    inbox: Inbox = Inbox()
    config = EngineConfig(CHECKPOINT, num_assistant_tokens=0, max_undelivered=100_000)
    loop = build_loop(config, vocab_size=3072, eos_token_ids=(), inbox=inbox, deliver=lambda outputs: None)
    draw = np.random.default_rng(0)
    for i in range(sequences):
        sampling = SamplingParams(seed=i, max_tokens=3000, temperature=1.0, ignore_eos=True)
        inbox.put(Submit(i, GenerateRequest(f"r{i}", tuple(draw.integers(5, 1000, 30).tolist()), sampling)))
    return loop


def steps(loop: EngineLoop, count: int) -> float:
    """Milliseconds of each."""
    began = time.perf_counter()
    for _ in range(count):
        assert loop.handle_commands() and loop.step()
    return (time.perf_counter() - began) / count * 1e3


def beside() -> None:
    tune_process()
    for sequences in (1, 16, 64):
        with torch.inference_mode():
            found = []
            for busy in (False, True):
                loop = made(sequences)
                steps(loop, 20)
                ended = threading.Event()

                def compute(ended: threading.Event = ended) -> None:
                    while not ended.is_set():
                        sum(i * i for i in range(200))

                thread = threading.Thread(target=compute)
                if busy:
                    thread.start()
                found.append(steps(loop, STEPS))
                ended.set()
                if busy:
                    thread.join()
        print(f"{sequences:2} sequences: {found[0]:.2f} ms a step, beside a busy thread {found[1]:.2f}")


if __name__ == "__main__":
    draws()
    beside()
