"""A read of a stored response, by the reading threads and by aiosqlite: `python -m benchmarks.reads`.

Both run the statements that SQLAlchemy compiles for `Storage.get_response`, on one snapshot, on an idle event
loop and on one that is busy for 1 ms of every tick, as it is while it carries streams. aiosqlite is asked by
`execute_fetchall`, one crossing to its thread a statement; the reading threads are asked once for the whole
job. The two are measured in turn; medians of milliseconds a read are printed.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import aiosqlite
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql import Select

from benchmarks.crowd import run
from storage.queries import responses
from storage.queries.items import COLUMNS, joined
from storage.tables import items, response_items
from storage.tables import responses as stored
from tests.support.running import http_client, live_app
from tests.support.talk import Api

READS = 100
ROUNDS = 5
BUSY_S = 0.001


def compiled(query: Select[*tuple[object, ...]]) -> tuple[str, tuple[object, ...]]:
    """A statement as SQLite takes it, with its values in order."""
    ready = query.compile(dialect=sqlite.dialect(), compile_kwargs={"render_postcompile": True})
    return str(ready), tuple(ready.params[name] for name in ready.positiontup or ())


async def median_ms(read: Callable[[], Awaitable[object]]) -> float:
    """The median time of a read."""
    took = []
    for _ in range(READS):
        began = time.perf_counter()
        await read()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


async def keep_busy() -> None:
    """Take the loop for `BUSY_S` of every tick."""
    while True:
        until = time.perf_counter() + BUSY_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)


async def main() -> None:
    """Measure both, idle and busy."""
    with tempfile.TemporaryDirectory() as folder:
        async with live_app(Path(folder)) as running, http_client(running) as client:
            id = (await Api(client).create("say one two three"))["id"]
            storage = running.context.storage
            path = running.life.config.db.partition("///")[2]
            statements = [
                compiled(responses._SELECT.where(stored.c.id == id, *responses.visible("local"))),
                compiled(
                    Select(*COLUMNS, response_items.c.response_id)
                    .join_from(response_items, items, joined(response_items))
                    .where(response_items.c.response_id == id, response_items.c.direction == "out")
                ),
            ]
            uri = f"file:{quote(path)}?mode=ro"
            async with aiosqlite.connect(uri, uri=True, isolation_level=None) as connection:

                async def snapshot() -> None:
                    await connection.execute("BEGIN")
                    for sql, values in statements:
                        assert await connection.execute_fetchall(sql, values)
                    await connection.execute("COMMIT")

                async def single() -> None:
                    assert await connection.execute_fetchall(*statements[0])

                ways: dict[str, Callable[[], Awaitable[object]]] = {
                    "reading threads, the whole job": lambda: storage.get_response("local", id),
                    "aiosqlite, one snapshot": snapshot,
                    "aiosqlite, one statement of the two": single,
                }
                for busy in (False, True):
                    load = asyncio.create_task(keep_busy()) if busy else None
                    rounds = [
                        {name: await median_ms(read) for name, read in ways.items()} for _ in range(ROUNDS)
                    ]
                    if load is not None:
                        load.cancel()
                    for name in ways:
                        middle = statistics.median(found[name] for found in rounds)
                        print(f"{'busy' if busy else 'idle'} loop: {middle:6.2f} ms a read by {name}")


if __name__ == "__main__":
    run(main())
