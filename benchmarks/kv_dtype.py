"""What a step takes whose keys and values are kept in eight bits, on a CPU: `python -m benchmarks.kv_dtype`.

A random-weight model in bfloat16, made from a seed. As many sequences behind as many tokens, each its own, in
an engine that keeps keys and values as they are computed and in one that keeps them as int8; steps of the
engine's loop in turn, so that a drift of the machine hits both alike. Prints the seconds of the prompts and
the milliseconds of a step of each, and of the steps the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.cpu import in_turn
from engine.benchmark.random_weights import SIZES, write_random_model
from tests.support.driver import Driver, greedy

KINDS = ("auto", "int8")


def fill(driver: Driver, rows: int, context: int, vocab_size: int) -> float:
    """Start `rows` sequences behind `context` tokens each; the seconds until all have a token."""
    generator = torch.Generator().manual_seed(context)
    prompts = torch.randint(vocab_size, (rows, context), generator=generator).tolist()
    began = time.perf_counter()
    params = greedy(10_000, ignore_eos=True, num_assistant_tokens=0)
    handles = [driver.submit(prompt, params) for prompt in prompts]
    while not all(driver.outputs[handle] for handle in handles):
        driver.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="qwen3-0.6b")
    parser.add_argument("--cases", nargs="+", default=["1:4000", "4:4000", "16:2000", "16:230"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    vocab_size = SIZES[options.size]["vocab_size"]
    print("| sequences: tokens behind each | prompts: auto, int8, s | a step: auto, int8, ms | ratio |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / options.size
        write_random_model(options.size, folder)
        drivers: dict[str, Driver] = {}
        for case in options.cases:
            rows, context = map(int, case.split(":"))
            drivers.clear()  # their memory is wanted for the next ones
            drivers |= {
                kind: Driver(
                    folder,
                    vocab_size=vocab_size,
                    num_threads=options.threads,
                    num_assistant_tokens=0,
                    kv_cache_bytes=4 << 30,
                    kv_cache_dtype=kind,
                    max_model_len=8192,
                )
                for kind in KINDS
            }
            prompts = [fill(driver, rows, context, vocab_size) for driver in drivers.values()]
            times = in_turn(drivers, options.rounds)
            ratio = statistics.median(int8 / auto for auto, int8 in zip(*times.values(), strict=True))
            auto, int8 = (1e3 * statistics.median(found) for found in times.values())
            first, second = prompts
            print(
                f"| {case} | {first:.2f}, {second:.2f} | {auto:.1f}, {int8:.1f} | {ratio:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
