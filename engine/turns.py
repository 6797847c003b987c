"""Threads that do pieces of work for several owners, who take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """Pieces of work on the threads of a pool, `places` at a time. All methods are called on one asyncio
    loop."""

    def __init__(self, threads: Executor, places: int = 1) -> None:
        self._threads = threads
        self._free = places
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()

    async def do(self, owner: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises, when its owner's turn has come. Cancelled before, it is not done;
        later, it has its place to its end."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((work, done))
        self._next()
        return await done

    def _next(self) -> None:
        while self._waiting and self._free:
            owner, pieces = self._waiting.popitem(last=False)
            work, done = pieces.popleft()
            if pieces:
                self._waiting[owner] = pieces  # behind all others
            if done.done():
                continue
            try:
                running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            except RuntimeError as error:  # they were shut down
                done.set_exception(error)
                continue
            self._free -= 1
            running.add_done_callback(partial(self._ended, done))

    def _ended(self, done: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._free += 1
        error = running.exception()
        if done.done():
            pass  # nobody waits for it any more
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(running.result())
        self._next()

    def close(self, error: Exception) -> None:
        """End whatever waits with this."""
        while self._waiting:
            for _, done in self._waiting.popitem()[1]:
                if not done.done():
                    done.set_exception(error)
