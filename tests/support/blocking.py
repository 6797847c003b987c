"""Hold a database from outside, so that a test can decide which jobs share one commit.

Each kind of database is held in its own way; the helpers also wait until the writing thread has reached a
given state.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from sqlalchemy import Connection, insert

from storage import Storage, StorageUnavailable
from storage.tables import api_keys
from tests.support.making import is_sqlite


async def until(state: Callable[[], object], limit_s: float = 10.0) -> None:
    """Waits for a state that has no awaitable, such as one of the writer's thread."""
    async with asyncio.timeout(limit_s):
        while not state():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def locked(storage: Storage) -> AsyncIterator[None]:
    """Somebody else at work on the database: nobody else can write, everybody can read."""
    if is_sqlite(storage.url):
        other = sqlite3.connect(storage.url.removeprefix("sqlite+aiosqlite:///"), isolation_level=None)
        other.execute("PRAGMA wal_autocheckpoint=0")
        other.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")
            other.close()
        return
    holder = await asyncpg.connect(storage.url.replace("+asyncpg", ""))
    try:
        async with holder.transaction():
            await holder.execute("LOCK TABLE commits IN EXCLUSIVE MODE")
            yield
    finally:
        await holder.close()


def is_unready(storage: Storage) -> bool:
    try:
        storage._writer.check()
    except StorageUnavailable:
        return True
    return False


def note(conn: Connection, name: str) -> str:
    """A job that leaves a trace: one row in api_keys."""
    conn.execute(
        insert(api_keys).values(id=name, owner="", name="", hash=name.encode(), hint="", created_at=0)
    )
    return name


async def notes(storage: Storage) -> list[str]:
    return sorted(key.id for key in await storage.list_keys())


async def gathered(storage: Storage, *jobs: Callable[[Connection], Any]) -> list[Any]:
    """Jobs that are sure to meet in one batch: they wait behind one that is held up."""
    async with locked(storage):
        first = storage._writer.submit(lambda conn: None, durable=False, retry_until_available=True)
        await until(lambda: storage._writer._blocked_since is not None)
        futures = [storage._writer.submit(job, durable=False) for job in jobs]
    results = await asyncio.gather(first, *futures, return_exceptions=True)
    return results[1:]
