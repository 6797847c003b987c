"""What a server holds does not grow with the responses that it has stored; what is over is freed at once."""

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
from tests.support.lines import line
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import Api

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


ROOMS = ("engine", "server", "storage", "tools")


@contextmanager
def collected() -> Iterator[list[str]]:
    """The types of our objects that only the garbage collector could free, filled in at the end."""
    found: list[str] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(each) for each in gc.garbage]
        found += sorted({kind.__qualname__ for kind in kinds if kind.__module__.partition(".")[0] in ROOMS})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


async def test_what_is_over_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """An ended run has all of its events, and a refused request its body: a server that waits for the garbage
    collector to find them, once in a million objects, takes gigabytes."""
    async with live_app(tmp_path, watched=False) as server, http_client(server) as client:

        async def some() -> None:
            api = Api(client)
            for store in (True, False):
                await api.create("count 9", store=store)
                await client.post("/v1/responses", json={"input": "count 9", "stream": True, "store": store})
            await api.create("count 9", previous_response_id=(await api.create("say hi"))["id"])
            await api.cancel((await api.create("tick 20\ncount 9999", background=True))["id"])
            for body in (
                {"input": 5},
                {"input": "hi", "tools": [{"type": "none"}]},
                {"input": "hi", "model": "?"},
            ):
                assert (await client.post("/v1/responses", json=body)).status_code in (400, 404)
            for path in ("/nowhere", "/v1/responses/resp_1"):
                assert (await client.get(path)).status_code == 404
            messages = [{"role": "user", "content": "count 9"}]
            for stream in (True, False):
                await client.post("/v1/chat/completions", json={"messages": messages, "stream": stream})
            async with line(server.base_url) as socket:
                await socket.ask("count 9")
                await socket.answer()
            await idle(server)

        await some()
        with collected() as found:
            await some()
        assert found == []
