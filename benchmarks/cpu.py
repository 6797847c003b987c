"""Decoding on a CPU as a share of what its memory can do: `python -m benchmarks.cpu`.

A random-weight Qwen3-0.6B in bfloat16, made from a seed. Steps of the engine's loop (schedule, forward, draw)
with 1 and 16 sequences, by layout of the weights: plain rows (as transformers has them) and oneDNN's blocks,
both by torch's operations; panels (the default), int8 and int4, by the kernels. The layouts take turns, so
that a drift of the machine hits all alike; the memory's read rate is measured in the same run, beside each
round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from engine.benchmark.random_weights import SIZES, write_random_model
from engine.benchmark.roofline import read_rate, step_bytes, weight_bytes
from engine.models import linear
from tests.support.driver import Driver, greedy

Kind = TypeVar("Kind")

CONTEXT = 230  # tokens of every prompt
ROWS = (1, 16)
STEPS = 4  # of one layout before the next has its turn
TURN = 6  # of one driver `in_turn`
WARM = 2
SETTLE_S = 5.0  # the pools' pages are taken on a thread beside


def opened(folder: Path, vocab_size: int, layout: str, threads: int) -> Driver:
    """An engine loop over the folder; without speculation, so that a step is a token."""
    settings: dict[str, Any] = {
        "num_threads": threads,
        "num_assistant_tokens": 0,
        "kv_cache_bytes": 1 << 30,
        "max_model_len": 4096,
        "quantization": layout if layout in ("int8", "int4", "fp8") else "none",
        "cpu_kernels": layout not in ("plain", "blocks"),
    }
    if layout != "plain":
        return Driver(folder, vocab_size=vocab_size, **settings)
    with patch.object(linear, "_has_blocks", lambda weight: False):
        return Driver(folder, vocab_size=vocab_size, **settings)


def fill(driver: Driver, rows: int, vocab_size: int) -> list[int]:
    """Start `rows` sequences and compute their prompts; their handles."""
    generator = torch.Generator().manual_seed(rows)
    handles = []
    for _ in range(rows):
        prompt = torch.randint(vocab_size, (CONTEXT,), generator=generator).tolist()
        handles.append(driver.submit(prompt, greedy(1000, ignore_eos=True, num_assistant_tokens=0)))
    while not all(driver.outputs[handle] for handle in handles):
        driver.step()
    return handles


def timed(driver: Driver) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    driver.step()
    return time.perf_counter() - began


def in_turn(drivers: Mapping[Kind, Driver], rounds: int) -> dict[Kind, list[float]]:
    """The median seconds of `TURN` steps of each driver in each round, behind `WARM` that are not counted.
    They take turns, so that a drift of the machine hits all alike."""
    times: dict[Kind, list[float]] = {kind: [] for kind in drivers}
    for _ in range(rounds):
        for kind, driver in drivers.items():
            taken = [timed(driver) for _ in range(WARM + TURN)]
            times[kind].append(statistics.median(taken[WARM:]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="qwen3-0.6b")
    parser.add_argument("--layouts", nargs="+", default=["plain", "blocks", "panels", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    vocab_size = SIZES[options.size]["vocab_size"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / options.size
        write_random_model(options.size, folder)
        drivers = {}
        for layout in options.layouts:
            began = time.perf_counter()
            drivers[layout] = opened(folder, vocab_size, layout, options.threads)
            seconds, model = time.perf_counter() - began, drivers[layout].loop.runner.model
            print(
                f"{layout}: loaded in {seconds:.1f} s, {weight_bytes(model) / 1e9:.2f} GB a step", flush=True
            )
    time.sleep(SETTLE_S)
    rates = [read_rate(torch.device("cpu"))]
    print(f"\nmemory read at {rates[0] / 1e9:.1f} GB/s, {options.threads} threads\n")
    print("| layout, sequences | ms a step, best | median | share of the read rate | beside the first |")
    print("|---|---|---|---|---|")
    for rows in ROWS:
        handles = {layout: fill(driver, rows, vocab_size) for layout, driver in drivers.items()}
        times: dict[str, list[float]] = {layout: [] for layout in drivers}
        for _ in range(options.rounds):
            rates.append(read_rate(torch.device("cpu")))
            for layout, driver in drivers.items():
                times[layout] += [timed(driver) for _ in range(WARM + STEPS)][WARM:]
        rate = max(rates)
        first = min(times[options.layouts[0]])
        for layout, driver in drivers.items():
            best, middle = min(times[layout]), statistics.median(times[layout])
            share = step_bytes(driver.loop.runner.model, rows, CONTEXT) / best / rate
            print(
                f"| {layout}, {rows} | {best * 1e3:.1f} | {middle * 1e3:.1f} | {share:.0%} "
                f"| {first / best:.2f} x |",
                flush=True,
            )
            for handle in handles[layout]:
                driver.abort(handle)
            driver.step()


if __name__ == "__main__":
    main()
