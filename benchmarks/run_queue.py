"""What a full queue costs, 10,000 queued runs of 100 owners, on both databases.

`python -m benchmarks.run_queue` prints the best of some tries, in milliseconds by the clock, and for what
only reads of processor time of its thread: finding the next 32 runs, ranking all, finding the turn of one
that came later, and then, each a transaction, taking 16, ending a run, and queueing one of an owner that has
none in the queue.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage import Account, Counts, RunAppend, RunClaim, Spent, Storage, open_storage
from storage.queries import queue
from tests.support.making import RUNNER, finish, new, record, url
from tests.support.postgres import postgres_server

QUEUED, OWNERS, AT_WORK, TRIES, AT_ONCE = 10_000, 100, 64, 15, 500


async def fill(storage: Storage) -> list[RunClaim]:
    """Queue all, and take some; half of these end, so that there is something to count."""
    draw = random.Random(1)
    for start in range(0, QUEUED, AT_ONCE):
        runs = [
            new(f"r{number:05}", owner=f"o{number % OWNERS:03}", runner=None, status="queued")
            for number in range(start, start + AT_ONCE)
        ]
        await asyncio.gather(
            *(storage.start_response(replace(run, cost=draw.randint(50, 8000))) for run in runs)
        )
    claims = list(await storage.take(AT_WORK))
    for claim in claims[: AT_WORK // 2]:
        await end(storage, claim)
    return claims[AT_WORK // 2 :]


async def end(storage: Storage, claim: RunClaim) -> None:
    spent = Spent(1, Account(claim.owner, None, "m", "default"), Counts(1, 500), served=500.0)
    ending = replace(finish(), spent=spent)
    await storage.append([RunAppend(claim.response_id, claim.fence, records=(record(2),), finish=ending)])


def reading(work: Callable[[], Any]) -> str:
    """The best wall and processor time of a read."""
    took = []
    for _ in range(TRIES):
        began, thread = time.perf_counter(), time.thread_time()
        work()
        took.append((time.perf_counter() - began, time.thread_time() - thread))
    return "; ".join(f"{1e3 * min(times):.1f}" for times in zip(*took, strict=True))


async def writing(work: Callable[[int], Awaitable[Any]]) -> str:
    took = []
    for number in range(TRIES):
        began = time.perf_counter()
        await work(number)
        took.append(time.perf_counter() - began)
    return f"{1e3 * min(took):.1f}"


async def run(where: str) -> None:
    storage = await open_storage(where, runner=RUNNER)
    try:
        claims = await fill(storage)

        async def newcomer(number: int) -> None:
            queued = new(f"n{number}", owner=f"n{number}", runner=None, status="queued")
            await storage.start_response(queued)

        last = (f"o{(QUEUED - 1) % OWNERS:03}", [f"r{QUEUED - 1:05}"])
        print("next 32:", await storage._read(lambda conn: reading(lambda: queue.first(conn, 32))))
        print("all places:", await storage._read(lambda conn: reading(lambda: queue.ranking(conn))))
        print("a turn:", await storage._read(lambda conn: reading(lambda: queue.turns(conn, *last))))
        print("take 16:", await writing(lambda _: storage.take(16)))
        print("end:", await writing(lambda number: end(storage, claims[number])))
        print("a newcomer:", await writing(newcomer))
    finally:
        await storage.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("SQLite")
        asyncio.run(run(url(Path(folder))))
    with postgres_server(durable=True) as server:
        print("PostgreSQL")
        asyncio.run(run(asyncio.run(server.fresh())))


if __name__ == "__main__":
    main()
