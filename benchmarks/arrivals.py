"""How evenly streams go on while long prompts arrive: `python -m benchmarks.arrivals`.

Steps of the engine's loop: 4 sequences decode, and every so often a prompt of 2,048 tokens comes, of which
one token is wanted. With prompts at the pace that decoding allows, and as many tokens a step as the budget
has, in turn. Prints the gaps between tokens and the time to a prompt's first one. The shipped model, or
random weights of a real size (`--size qwen3-0.6b`).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.prefill_budget import Pace

STREAMS, CONTEXT, PROMPT = 4, 200, 2048
BUDGET = 2048
IDLE = 2  # as long as an unhindered prompt takes, between two of them


@dataclass(slots=True)
class Found:
    """Seconds: gaps between two tokens of the streams, alone and in all; first tokens of prompts."""

    alone: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        p50, p99 = statistics.median(self.gaps), sorted(self.gaps)[int(0.99 * len(self.gaps))]
        alone = statistics.median(self.alone)
        return (
            f"gaps p50 {p50 * 1e3:.1f} ms ({alone * 1e3:.1f} alone), p99 {p99 * 1e3:.1f} ms, "
            f"{p99 / p50:.1f} x p50, longest {max(self.gaps) * 1e3:.0f} ms; first token of a prompt: median "
            f"{statistics.median(self.firsts):.2f} s, longest {max(self.firsts):.2f} s "
            f"({len(self.gaps)} gaps, {len(self.firsts)} prompts)"
        )


class Unpaced(Pace):
    """As many prompt tokens as fit."""

    def allowance(self, num_prompts: int, num_decodes: int) -> int:
        """See `Pace.allowance`."""
        return BUDGET

    def took_alone(self, num_tokens: int, seconds: float) -> None:
        """Learns nothing from it: no step is held to a time."""


class Load:
    """An engine loop and its prompts."""

    def __init__(self, folder: Path, vocab_size: int, seed: int = 0) -> None:
        import torch

        from tests.support.driver import Driver

        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(seed)
        self.driver = Driver(
            folder,
            vocab_size=vocab_size,
            num_threads=None,
            num_assistant_tokens=0,
            kv_cache_bytes=2 << 30,
            max_model_len=8192,
            max_num_batched_tokens=BUDGET,
            max_undelivered=1 << 30,
        )

    def submit(self, length: int, max_tokens: int) -> int:
        """A prompt that nobody had."""
        import torch

        from tests.support.driver import greedy

        prompt = torch.randint(self._vocab_size - 64, (length,), generator=self._generator).tolist()
        return self.driver.submit(prompt, greedy(max_tokens, ignore_eos=True))

    def step(self) -> None:
        """One step, without the checks of a test."""
        import torch

        with torch.inference_mode():
            self.driver.loop.handle_commands()
            self.driver.loop.step()

    def first_token(self) -> float:
        """Seconds to the first token of a prompt that has the machine to itself."""
        began, handle = time.perf_counter(), self.submit(PROMPT, 1)
        while not self.driver.outputs[handle]:
            self.step()
        return time.perf_counter() - began

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Sequences that decode."""
        handles = [self.submit(CONTEXT, 8192) for _ in range(STREAMS)]
        while not all(self.driver.outputs[handle] for handle in handles):
            self.step()
        yield
        for handle in handles:
            self.driver.abort(handle)
        self.step()

    def round(self, found: Found, num_prompts: int, apart: float) -> None:
        """Streams by themselves, then while prompts come."""
        with self.streams():
            last = time.perf_counter()
            for _ in range(20):
                self.step()
                now = time.perf_counter()
                found.alone.append(now - last)
                last = now
            due, end = [last + i * apart for i in range(num_prompts)], last + num_prompts * apart
            came: dict[int, float] = {}
            while due or came or last < end:
                if due and last >= due[0]:
                    came[self.submit(PROMPT, 1)] = due.pop(0)
                self.step()
                now = time.perf_counter()
                found.gaps.append(now - last)
                last = now
                for handle in [handle for handle in came if self.driver.outputs[handle]]:
                    found.firsts.append(now - came.pop(handle))


def run(folder: Path, vocab_size: int, rounds: int, num_prompts: int) -> None:
    """Both ways in turn."""
    load = Load(folder, vocab_size)
    load.first_token()
    gc.freeze()  # as a server does once it has started
    apart = (1 + IDLE) * load.first_token()
    print(f"a prompt of {PROMPT} tokens every {apart:.2f} s", flush=True)
    scheduler = load.driver.loop.scheduler
    ways = {"unpaced": (Unpaced(BUDGET), Found()), "paced": (scheduler.pace, Found())}
    for number in range(rounds):
        for name in sorted(ways, reverse=number % 2 == 0):
            scheduler.pace, found = ways[name]
            load.round(found, num_prompts, apart)
    for name, (_, found) in ways.items():
        print(f"{name:8} {found}")


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: none spins
    from engine import SIZES, write_random_model
    from engine.tiny import CHECKPOINT

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=["tiny", *SIZES], default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, vocab_size = CHECKPOINT, 3072
        if options.size != "tiny":
            folder, vocab_size = Path(temporary) / options.size, SIZES[options.size]["vocab_size"]
            write_random_model(options.size, folder)
        run(folder, vocab_size, options.rounds, options.prompts)


if __name__ == "__main__":
    main()
