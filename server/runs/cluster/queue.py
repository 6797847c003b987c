"""Takes runs from the queue for as long as this process has room for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from server.runs.events import RETRY_S
from storage import StorageUnavailable

log = logging.getLogger("antiphon.runs")

TAKE_AT_ONCE = 16
"""Runs of one bite: others may have room, too."""


class Queue:
    """Takes runs. busy: some may be waiting for room, so new ones stand in line behind them."""

    def __init__(self, room: Callable[[], int], take: Callable[[int], Awaitable[int]]) -> None:
        """room: how many more runs this process can carry on. take: takes up to so many; how many it took."""
        self._room, self._take = room, take
        self._stirred = asyncio.Event()
        self.busy = False

    def want(self) -> None:
        """There may be runs to take."""
        self._stirred.set()

    def has_room(self) -> None:
        """A run has ended; it costs nothing where none waits."""
        if self.busy:
            self._stirred.set()

    async def run(self) -> None:
        """For as long as the process carries runs on."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            if (room := self._room()) <= 0:
                self.busy = True
                # Not every end is told of here: the engine has other requests, too.
                asyncio.get_running_loop().call_later(RETRY_S, self.want)
                continue
            wanted = min(room, TAKE_AT_ONCE)
            try:
                self.busy = await self._take(wanted) == wanted
                if self.busy:
                    self._stirred.set()
            except StorageUnavailable as error:
                log.warning("queued runs wait: %s", error)
                asyncio.get_running_loop().call_later(RETRY_S, self.want)
