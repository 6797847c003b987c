"""Work that would hold up the event loop, done beside it or in parts.

What a request costs grows with its body, so whoever reads a large body says so once, and everything that goes
through the whole of it from then on asks here. Of many small requests that come at once a few begin in each
turn of the event loop (`LoopTurns`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

THREADED_PARTS = 256
"""Items and parts of items above this are gone through in the thread pool; each takes some 20 us."""

THREADED_TOKENS = 32 * 1024
"""Prompts of more tokens are gone through in the thread pool; a look at each token takes some 0.05 us."""

_large: ContextVar[bool] = ContextVar("large", default=False)


def begin_large_request() -> None:
    """Say that the request of this task has a large body, or goes on from much. The tasks that it begins know
    it, too."""
    _large.set(True)


def in_large_request() -> bool:
    """Whether this task works for a request with a large body."""
    return _large.get()


async def aside(much: bool, work: Callable[..., T], *args: Any) -> T:
    """work(*args), beside the event loop when it is much."""
    return await asyncio.to_thread(work, *args) if much else work(*args)


class LoopTurns:
    """Lets a few tasks begin their work in each turn of the event loop, in the order in which they come.

    Of a hundred requests that arrive together, each would otherwise go on to where it waits for the first
    time before any of them goes on from there, and before anything else does: streams at work would stand
    still meanwhile. No turn is held, so one that waits for long is in nobody's way.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._taken = 0  # in this turn of the loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait until it is one's turn; returns at once where few have begun in this one."""
        loop = asyncio.get_running_loop()
        if self._taken < self._at_once:
            if not self._taken:
                loop.call_soon(self._next)
            self._taken += 1
        else:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn

    def _next(self) -> None:
        self._taken = 0
        while self._waiting and self._taken < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._taken += 1
        if self._taken:
            asyncio.get_running_loop().call_soon(self._next)
