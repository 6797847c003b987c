"""The reading threads: whom they read for, and when they are free again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from storage import open_storage
from storage.drivers.readers import THREADS
from tests.support.blocking import until
from tests.support.making import RUNNER, url

COUNT = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT {}) SELECT count(*) FROM n"


@pytest.mark.parametrize("steps", [10**12, 10_000])
async def test_a_read_that_nobody_waits_for_gives_its_thread_back(tmp_path: Path, steps: int) -> None:
    """Whether it is one statement without an end, or one after another."""
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    begun = 0
    statement = text(COUNT.format(steps))

    def read(conn: Connection) -> None:
        nonlocal begun
        begun += 1
        while True:
            conn.execute(statement).all()

    tasks = [asyncio.create_task(storage._read(read)) for _ in range(THREADS + 1)]
    await until(lambda: begun == THREADS)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    async with asyncio.timeout(30):
        await asyncio.gather(*(storage.ready() for _ in range(2 * THREADS)))
    assert begun == THREADS, "the last one has not begun"
    await storage.close()
