"""What fair shares cost a scheduler, and what they give: `python -m benchmarks.fairness`.

No model: 256 sequences decode while 256 wait, of as many owners as each line says. Prints the processor time
of a step's scheduling, the best median of three. Then one owner keeps 64 requests at a scheduler of 8 places
while another sends one at a time: how many steps the latter's take, against the same alone.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from tests.engine.core.test_fair_share import crowd
from tests.support.scheduling import Bench

ROWS = 256
STEPS = 300


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


def main() -> None:
    """Print both tables."""
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


if __name__ == "__main__":
    main()
