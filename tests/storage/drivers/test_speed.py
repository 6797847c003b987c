"""Speed: what a commit costs. It prints its figures (`pytest -s`) and sets no limits: machines differ."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from server.process.process_ends import SWITCH_S
from storage import Record, RunAppend, Storage
from tests.support.making import OWNER, message, new, turn

STREAMS = 64
STEPS = 400


def figures(seconds: Sequence[float]) -> str:
    ranked = sorted(seconds)
    p50, p95, p99 = (1e3 * ranked[int(len(ranked) * share)] for share in (0.5, 0.95, 0.99))
    return f"p50 {p50:.3f}  p95 {p95:.3f}  p99 {p99:.3f} ms"


@pytest.mark.long
async def test_sixty_four_streams(storage: Storage) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)  # as the server does
    try:
        await measure(storage)
    finally:
        sys.setswitchinterval(before)


async def measure(storage: Storage) -> None:
    ids = [f"resp_{secrets.token_hex(24)}" for _ in range(STREAMS)]
    for id in ids:
        await storage.start_response(new(id))
    await _commits(storage, ids, 2, "alone")
    with computing():
        await _commits(storage, ids, 2 + STEPS, "beside a thread that computes in Python")
    stats = storage.commit_stats()
    print(f"WAL {stats.wal_bytes / 1e6:.1f} MB, {stats.checkpoints} checkpoints, {stats.synced} syncs")

    began = time.perf_counter()
    log = await storage.records(ids[0], after=-1)
    print(f"a log of {len(log)} records:  {1e3 * (time.perf_counter() - began):.1f} ms")

    await turn(storage, "first", message("m"))
    verbs: dict[str, Callable[[int], Awaitable[object]]] = {
        "start": lambda n: storage.start_response(new(f"s{n}", message(f"m{n}"), previous="first")),
        "get": lambda n: storage.get_response(OWNER, "first"),
        "history": lambda n: storage.history(OWNER, previous_response_id="first"),
    }
    for name, verb in verbs.items():
        seen = []
        for number in range(60):
            began = time.perf_counter()
            await verb(number)
            seen.append(time.perf_counter() - began)
        print(f"{name:8} {figures(seen)}")


async def _commits(storage: Storage, ids: Sequence[str], first: int, how: str) -> None:
    event = b"x" * 260
    before, seen = storage.commit_stats(), []
    for step in range(first, first + STEPS):
        batch = [RunAppend(id, 1, records=(Record(step, 1, event, 0, step, (step,)),)) for id in ids]
        began = time.perf_counter()
        assert not await storage.append(batch)
        seen.append(time.perf_counter() - began)
    after = storage.commit_stats()
    each = (after.seconds_sum - before.seconds_sum) / (after.commits - before.commits)
    print(
        f"\n{STREAMS} rows a commit, {how}: mean {1e3 * each:.3f} ms in the writer, "
        f"to the loop {figures(seen)}"
    )


@contextmanager
def computing() -> Iterator[None]:
    """Held while a thread wants the interpreter's lock all the time."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(number * number for number in range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
