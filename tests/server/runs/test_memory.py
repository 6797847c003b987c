"""What a server holds does not grow with the responses that it has stored."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from engine import ScriptedEngine
from tests.server.runs.test_concurrency import idle
from tests.support.running import Running, http_client, running_app

ROOT = Path(__file__).parents[3]
WARM_UP, MEASURED, TIMES, AT_ONCE = 104, 120, 3, 8
SLACK = 100
"""Bytes a response by which what our code has allocated may differ by chance; an id and its place in a dict
are 200."""


@contextmanager
def traced() -> Iterator[None]:
    """Python's memory is traced: what is allocated from here on."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def store(client: httpx.AsyncClient, number: int) -> None:
    """So many small responses: whole, streamed, in the background, and with an `Idempotency-Key`."""

    async def one(at: int) -> None:
        body = {"input": f"say hello {at % 7}", "stream": at % 3 == 0, "background": at % 5 == 0}
        headers = {"idempotency-key": f"key-{number}-{at}"} if at % 4 == 0 else {}
        reply = await client.post("/v1/responses", json=body, headers=headers)
        assert reply.status_code == 200

    for begin in range(0, number, AT_ONCE):
        await asyncio.gather(*(one(at) for at in range(begin, begin + AT_ONCE)))


async def held(server: Running) -> int:
    """Bytes that our code has allocated and not freed, once all is still."""
    await idle(server)
    engine = server.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    engine.requests.clear()  # what it keeps for tests
    gc.collect()
    ours = [tracemalloc.Filter(True, f"{ROOT}/{room}/*") for room in ("engine", "server", "storage", "tools")]
    taken = tracemalloc.take_snapshot().filter_traces(ours)
    return sum(each.size for each in taken.statistics("filename"))


@pytest.mark.long
async def test_stored_responses_leave_nothing_in_memory(tmp_path: Path) -> None:
    async with running_app(tmp_path, watched=False) as server, http_client(server) as client:
        await store(client, WARM_UP)
        await idle(server)
        with traced():  # not before: a snapshot of all that was imported is ten times as large
            marks = [await held(server)]
            for _ in range(TIMES):
                await store(client, MEASURED)
                marks.append(await held(server))
    # A table of the process that happens to double grows once; what responses leave, each time.
    grown = [after - before for before, after in pairwise(marks)]
    assert min(grown) < SLACK * MEASURED, grown
