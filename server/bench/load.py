"""When the requests of a measurement are sent: so many at once, or so many a second; and their prompts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from server.bench.figures import Sample

Ask = Callable[[Sequence[int], float], Awaitable[Sample]]
"""Send one prompt, due at that time, and read the reply to its end. Never raises: a failure is a sample."""


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency`: as many requests at once, each followed by the next (closed loop); or `rate`: as many a
    second at random times, however long they take (open loop, Poisson)."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} at once"

    def requests(self, asked: int | None) -> int:
        """How many make a round, unless a number is asked for: enough for all places to be filled twice, or
        for ten seconds."""
        return asked or (max(10, round(10 * self.rate)) if self.rate else max(8, 2 * self.concurrency))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as numbers, which whoever asks turns into words or token ids.

    num_tokens: of each, the first `prefix` of which are the same in `share` of them (0 to 1). No two prompts
    have the rest in common, whatever round and run they are of.
    """

    num_tokens: int
    prefix: int = 0
    share: float = 1.0
    seed: int = 0

    def make(self, count: int, nonce: str) -> list[list[int]]:
        """So many; `nonce` names the round."""
        common = _numbers(random.Random(f"{self.seed}"), self.prefix)
        draw = random.Random(f"{self.seed} {nonce}")
        made = []
        for _ in range(count):
            shared = common if self.prefix and draw.random() < self.share else []
            made.append(shared + _numbers(draw, self.num_tokens - len(shared)))
        return made


def _numbers(draw: random.Random, count: int) -> list[int]:
    return [draw.getrandbits(30) for _ in range(count)]


async def drive(
    ask: Ask, prompts: Sequence[Sequence[int]], load: Load, *, seed: int, done: Callable[[Sample], None]
) -> tuple[list[Sample], float]:
    """Send all prompts by a load; the samples in order, and the seconds from the first due to the last end.

    `done` is told of each as it ends. The same seed gives an open loop the same times.
    """
    began = time.perf_counter()
    if load.rate:
        samples = await _open_loop(ask, prompts, load.rate, random.Random(seed), began, done)
    else:
        samples = await _closed_loop(ask, prompts, load.concurrency, done)
    return samples, max(sample.ended for sample in samples) - began


async def _closed_loop(
    ask: Ask, prompts: Sequence[Sequence[int]], concurrency: int, done: Callable[[Sample], None]
) -> list[Sample]:
    places = asyncio.Semaphore(concurrency)

    async def one(prompt: Sequence[int]) -> Sample:
        async with places:
            sample = await ask(prompt, time.perf_counter())
        done(sample)
        return sample

    return await asyncio.gather(*map(one, prompts))


async def _open_loop(
    ask: Ask,
    prompts: Sequence[Sequence[int]],
    rate: float,
    draw: random.Random,
    began: float,
    done: Callable[[Sample], None],
) -> list[Sample]:
    async def one(prompt: Sequence[int], due: float) -> Sample:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        sample = await ask(prompt, due)
        done(sample)
        return sample

    due, tasks = began, []
    for prompt in prompts:
        tasks.append(one(prompt, due))
        due += draw.expovariate(rate)
    return await asyncio.gather(*tasks)
