"""What storing costs, beside not storing, in one run: `python -m benchmarks.overhead`.

64 streams of a scripted engine with no model behind it, as fast as they go, `store=true` and `store=false` in
short rounds by turns; which of the two goes first changes from pair to pair. Prints the throughput of stored
streams as a share of that of unstored ones, pair by pair, and the processor time per event: of the event
loop's thread (it carries the scripted engine, the run loop, the assembler, the journal, the feed and the
sending), and of the whole process.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.crowd import read, run, serving

STREAMS = 64
COUNT = 150
PAIRS = 8

Round = tuple[float, float, float]
"""Microseconds of the loop's thread and of the process per event; events a second."""


async def measure(url: str, *, store: bool) -> Round:
    """One round."""
    thread, process = time.thread_time(), time.process_time()
    crowd = await read(url, STREAMS, f"count {COUNT}", store=store)
    thread, process = time.thread_time() - thread, time.process_time() - process
    assert crowd.events == STREAMS * COUNT, f"{crowd.events} events came"
    return thread / crowd.events * 1e6, process / crowd.events * 1e6, crowd.events / crowd.seconds


async def main() -> None:
    """Pairs of rounds; medians, and how far they lie apart."""
    rounds: dict[bool, list[Round]] = {True: [], False: []}
    async with serving() as running:
        for pair in range(PAIRS + 1):
            for store in (pair % 2 == 0, pair % 2 == 1):
                found = await measure(running.base_url, store=store)
                if pair:  # the first one is for warming up
                    rounds[store].append(found)
    for store, found in rounds.items():
        loop, process, rate = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"store={str(store).lower():5} {loop:5.1f} us of the loop's thread per event, "
            f"{process:5.1f} us of the process, {rate:6.0f} events/s"
        )
    shares = sorted(a[2] / b[2] for a, b in zip(rounds[True], rounds[False], strict=True))
    low, middle, high = statistics.quantiles(shares, n=4)
    print(
        f"stored streams run at {middle:.0%} of unstored ones "
        f"({PAIRS} pairs: half {low:.0%} to {high:.0%}, all {shares[0]:.0%} to {shares[-1]:.0%})"
    )


if __name__ == "__main__":
    run(main())
