"""What fair shares cost a scheduler, and what they give: `python -m benchmarks.fairness`.

First without a model: 256 sequences decode while 256 wait, of as many owners as each line says. Prints the
processor time of a step's scheduling, the best median of three. Then one owner keeps 64 requests at a
scheduler of 8 places while another sends one at a time: how many steps the latter's take, against the same
alone.

Then the whole engine, with the shipped model: the same 192 requests in a batch of 32, of one owner and of
eight whose weights are 1 to 8, in turn. Prints the tokens a second of both, and the ratio of each pair.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import numpy as np

from engine import GenerateRequest, LocalEngine, ReaderParams, SamplingParams
from engine.tiny import CHECKPOINT
from tests.engine.core.test_fair_share import crowd
from tests.support.scheduling import Bench

ROWS = 256
STEPS = 300
REQUESTS, BATCH, TOKENS, OWNERS, ROUNDS = 192, 32, 64, 8, 5


def scheduling_s(num_owners: int) -> float:
    """Median seconds of processor time that a step's scheduling takes."""
    bench = Bench(num_blocks=ROWS * 100, budget=2048, max_seqs=ROWS, max_len=2048)
    for number in range(2 * ROWS):
        handle = bench.add(4, owner=f"o{number % num_owners}", max_tokens=2000)
        bench.sequence(handle).credit = 1 << 30
    scheduler, took = bench.scheduler, []
    for _ in range(STEPS):
        began = time.thread_time()
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.computed(batch)
        took.append(time.thread_time() - began)
        done = scheduler.rows.num_computed[batch.slots] == scheduler.rows.num_tokens[batch.slots]
        scheduler.rows.append(batch.slots[done], np.ones(int(done.sum()), np.int64))
    assert len(scheduler.running) == len(scheduler.waiting) == ROWS
    return statistics.median(took[STEPS // 10 :])


def quiet_steps(flood: int, output: int = 200, count: int = 50) -> list[int]:
    """Steps that each of the quiet owner's requests takes, beside so many of the other's."""
    load = crowd()
    steps = []
    for _ in range(count):
        while load.num("flood") < flood:
            load.add("flood", 50, output)
        steps.append(load.until_over(load.add("quiet", 30, 20)))
    return steps


async def throughput(engine: LocalEngine, name: str, num_owners: int) -> tuple[float, float]:
    """Tokens of all requests at once: a second, and a second of processor time, which other work on the
    machine changes less. name: no owner was asked for before, so nothing is cached."""
    sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    async def one(number: int) -> None:
        prompt = await engine.tokenize(f"{number} " * 20)
        owner = number % num_owners
        request = GenerateRequest(
            id=f"{name}-{number}",
            prompt_ids=prompt,
            sampling=sampling,
            reader=ReaderParams(dialect=False),
            owner=f"{name}-{owner}",
            weight=1.0 + owner,
        )
        async for _ in engine.generate(request):
            pass

    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(one, range(REQUESTS)))
    tokens = REQUESTS * TOKENS
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - spent)


async def engines() -> None:
    """Print the last table."""
    engine = LocalEngine(CHECKPOINT, max_num_seqs=BATCH)
    await engine.start()
    found: dict[int, list[tuple[float, float]]] = {1: [], OWNERS: []}
    for number in range(ROUNDS + 1):
        for num_owners in sorted(found, reverse=bool(number % 2)):
            speeds = await throughput(engine, f"{number}.{num_owners}", num_owners)
            if number:  # the first round is for warming up
                found[num_owners].append(speeds)
    preempted = engine.stats().preemptions_total
    await engine.close()
    print(f"{OWNERS} owners of weights 1 to {OWNERS}; {preempted} sequences made room for others:")
    for index, unit in enumerate(("second", "second of processor time")):
        ones, many = ([speeds[index] for speeds in found[num_owners]] for num_owners in (1, OWNERS))
        ratios = [theirs / own for own, theirs in zip(ones, many, strict=True)]
        print(
            f"{statistics.median(many):5.0f} tokens a {unit} of the whole engine, "
            f"{statistics.median(ratios):.2f} x of one owner's ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    """Print the tables."""
    found: dict[int, list[float]] = {1: [], 2: [], 16: [], ROWS: []}
    for _ in range(3):
        for num_owners, took in found.items():
            took.append(scheduling_s(num_owners))
    for num_owners, took in found.items():
        ratio = min(took) / min(found[1])
        print(f"{num_owners:4} owners: {min(took) * 1e6:5.0f} us a step, {ratio:.2f} x of one owner's")
    for flood in (0, 64):
        steps = quiet_steps(flood)
        print(f"beside {flood:2} requests: {statistics.median(steps)} steps, {max(steps)} at most")
    asyncio.run(engines())


if __name__ == "__main__":
    main()
