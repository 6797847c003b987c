"""What a step takes whose sequences begin alike, on a CPU: `python -m benchmarks.common_beginnings`.

A random-weight model in bfloat16, made from a seed. As many sequences behind one beginning (the instructions
of an application, the branches of a conversation) and behind beginnings of their own, each with some tokens
that nobody else has; steps of the engine's loop in turn, so that a drift of the machine hits both alike.
Prints the milliseconds of a step of each, and the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.cpu import in_turn
from engine.benchmark.random_weights import SIZES, write_random_model
from tests.support.driver import Driver, greedy

OWN = 50  # tokens of each sequence that no other has


def fill(driver: Driver, rows: int, common: int, vocab_size: int, *, shared: bool) -> list[int]:
    """Start `rows` sequences behind `common` tokens, the same or each their own; their handles."""
    generator = torch.Generator().manual_seed(common + shared)

    def draw(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    begin, handles = draw(common), []
    for _ in range(rows):
        prompt = (begin if shared else draw(common)) + draw(OWN)
        handles.append(driver.submit(prompt, greedy(10_000, ignore_eos=True, num_assistant_tokens=0)))
    while not all(driver.outputs[handle] for handle in handles):
        driver.step()
    return handles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="qwen3-0.6b")
    parser.add_argument("--cases", nargs="+", default=["2:256", "2:2000", "8:256", "8:2000", "16:1000"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    vocab_size = SIZES[options.size]["vocab_size"]
    print("| sequences: tokens in common | each its own, ms a step | the same | ratio |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / options.size
        write_random_model(options.size, folder)
        for case in options.cases:
            rows, common = map(int, case.split(":"))
            # a driver for each kind, since all sequences of a driver are in every step
            drivers = {
                shared: Driver(
                    folder,
                    vocab_size=vocab_size,
                    num_threads=options.threads,
                    num_assistant_tokens=0,
                    kv_cache_bytes=3 << 30,
                    max_model_len=8192,
                )
                for shared in (False, True)
            }
            for shared, driver in drivers.items():
                fill(driver, rows, common, vocab_size, shared=shared)
            times = in_turn(drivers, options.rounds)
            ratio = statistics.median(own / same for own, same in zip(*times.values(), strict=True))
            own, same = (1e3 * statistics.median(found) for found in times.values())
            print(f"| {case} | {own:.1f} | {same:.1f} | {ratio:.2f} x |", flush=True)


if __name__ == "__main__":
    main()
