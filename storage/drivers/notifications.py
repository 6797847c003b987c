"""Hints between processes over PostgreSQL's NOTIFY, on a connection and a thread of their own.

A NOTIFY takes a lock that all commits of the server share, so there is at most one per INTERVAL_S and
process, apart from the connection that writes (https://www.postgresql.org/docs/current/sql-notify.html).
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import asyncpg

CHANNEL = "antiphon"
INTERVAL_S = 0.020
RETRY_S = 0.2


class Notifications:
    """LISTEN and NOTIFY, by a connection that is made with `arguments`, asyncpg's own; see `hints.Hints`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._num_heard = 0
        self._news = asyncio.Event()  # replaced at each hint
        self._home = asyncio.get_running_loop()
        self._loop = asyncio.SelectorEventLoop()
        self._wake = asyncio.Event()
        self._untold = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="antiphon-hints", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        if not self._untold:
            self._untold = True
            self._loop.call_soon_threadsafe(self._wake.set)

    async def heard(self, seen: int, timeout_s: float) -> int:
        if self._num_heard == seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        return self._num_heard

    async def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon_threadsafe(self._wake.set)
        await asyncio.to_thread(self._thread.join)

    def _count(self) -> None:
        self._num_heard += 1
        self._news.set()
        self._news = asyncio.Event()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        # Whatever goes wrong here, nothing but hints is lost, and the next attempt begins with one.
        while not self._closing:
            with suppress(Exception):
                connection = await asyncpg.connect(**self._arguments)
                try:
                    await self._talk(connection)
                finally:
                    connection.terminate()
            if not self._closing:
                await asyncio.sleep(RETRY_S)
        await asyncio.sleep(0)  # the transport's farewell

    async def _talk(self, connection: asyncpg.Connection) -> None:
        connection.add_termination_listener(lambda _: self._wake.set())
        await connection.add_listener(CHANNEL, self._on_notification)
        self._call_home()  # for what nobody heard while there was no connection
        while not (self._closing or connection.is_closed()):
            await self._wake.wait()
            self._wake.clear()
            if self._untold:
                self._untold = False
                await connection.execute(f"NOTIFY {CHANNEL}")
                await asyncio.sleep(INTERVAL_S)

    def _on_notification(self, connection: Any, sender: int, _channel: str, _payload: object) -> None:
        if sender != connection.get_server_pid():
            self._call_home()

    def _call_home(self) -> None:
        with suppress(RuntimeError):  # the server's loop is closed: nobody waits any more
            self._home.call_soon_threadsafe(self._count)
