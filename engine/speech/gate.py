"""Lets so many sounds at once into memory, those of different owners in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Gate:
    """`places` for sounds, and one more for an owner who has none. At most half of the places are held by
    sounds beside an owner's first: an hour of sound holds its place for long, and so the first of another
    waits only while most of those inside are first ones. All methods are called on one asyncio loop."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._inside: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def enter(self, owner: str) -> AsyncGenerator[None]:
        """Wait for a place, and hold it. Cancelled before, it takes none."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._fill()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._leave(owner)
            else:
                self._forget(owner, turn)

    def _leave(self, owner: str) -> None:
        self._inside[owner] -= 1
        if not self._inside[owner]:
            del self._inside[owner]
        self._fill()

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[owner]

    def _fill(self) -> None:
        while (owner := self._next()) is not None:
            queue = self._waiting.pop(owner)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind the others
            if not turn.done():
                self._inside[owner] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        """Whose turn it is; None where nobody waits, or there is no place."""
        inside = self._inside.total()
        if inside > self._places:
            return None
        beside_first = inside - len(self._inside)
        more = inside < self._places and beside_first < self._places // 2
        return next((owner for owner in self._waiting if more or not self._inside[owner]), None)
