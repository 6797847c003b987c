"""The reading threads: each of them runs one job at a time, on one snapshot of the database.

A job is the same callable `(Connection) -> T` that the writer takes, and crosses to a thread and back once.
Through aiosqlite every statement is a crossing, BEGIN and COMMIT included: a stored response (two statements
on one snapshot) took 2.3 times as long on a loop that is busy for 1 ms of every tick, as
`python -m benchmarks.reads` shows.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import LifoQueue
from threading import Lock
from typing import Any, TypeVar

from storage.drivers.interface import Database, ErrorKind, Reading, Work, unavailable
from storage.patience import patience_s
from storage.records import StorageUnavailable

T = TypeVar("T")

THREADS = 4
RETRY_S = 0.1
INTERRUPT_S = 0.1  # a read that nobody waits for is interrupted so often: between two statements it is deaf


class _Away(Exception):
    """The database cannot be reached: it may be soon. told: what a caller is told otherwise."""

    def __init__(self, told: StorageUnavailable) -> None:
        super().__init__(str(told))
        self.told = told


@dataclass(slots=True)
class _Asked:
    """A read that was asked for. by: what it has been given to read by."""

    by: Reading | None = None


class Readers:
    """Reads of one database. A read sees every write that returned before the read was asked for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="antiphon-reader")
        self._idle: LifoQueue[Reading] = LifoQueue()  # as many as threads; the one used last first
        for _ in range(THREADS):
            self._idle.put(database.reading())
        self._handing = Lock()  # held while a reading changes hands, so that no other read is interrupted
        self._closed = False

    async def run(self, job: Work[T]) -> T:
        """What `job` returns or raises. StorageUnavailable if the database cannot be read now, or is away for
        longer than `patience_s`. Whoever is cancelled leaves no thread behind that reads for long."""
        until = time.monotonic() + patience_s.get()
        while True:
            if self._closed:
                raise StorageUnavailable("storage is closed")
            asked = _Asked()
            future = self._threads.submit(self._read, job, asked)
            try:
                return await asyncio.wrap_future(future)
            except asyncio.CancelledError:
                self._interrupt(future, asked, asyncio.get_running_loop())
                raise
            except _Away as away:
                if time.monotonic() > until:
                    raise away.told from away.told.__cause__
            finally:
                del future  # whose exception holds this frame
            await asyncio.sleep(RETRY_S)  # meanwhile no thread is held: others may be less patient

    def _interrupt(self, future: Future[Any], asked: _Asked, loop: asyncio.AbstractEventLoop) -> None:
        if future.done():
            return
        with self._handing:
            if asked.by is not None:
                asked.by.interrupt()
        loop.call_later(INTERRUPT_S, self._interrupt, future, asked, loop)

    def _read(self, job: Work[T], asked: _Asked) -> T:
        reading = asked.by = self._idle.get_nowait()
        try:
            return reading.read(job)
        except Exception as error:
            trouble = self._database.trouble(error)
            if trouble is None:
                raise self._database.meaning(error) from error.__cause__
            told = unavailable("the database could not be read", error, self._database.cause(error))
            raise (_Away(told) if trouble is ErrorKind.LOST else told) from error
        finally:
            with self._handing:
                asked.by = None
            self._idle.put(reading)

    async def close(self) -> None:
        """Ends the reads in flight, then the connections."""
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown()
        while not self._idle.empty():
            self._idle.get_nowait().close()
