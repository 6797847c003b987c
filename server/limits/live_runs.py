"""Bounds how many responses of all owners are under way: queued, at work, or waiting for their client.

The database is asked once a second how many it has, never on the way of a request. In between this process
adds what it begins and takes off what it ends itself; what other servers begin counts a second later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from server.errors import ApiError
from storage import StorageUnavailable

if TYPE_CHECKING:
    from storage import Storage

EVERY_S = 1.0
"""Pause between two looks into the database."""


class Entrance:
    """The way of one response from its request to its beginning."""

    def __init__(self, over: Callable[[bool | None], None]) -> None:
        """over: told once whether the database knows of the response; None where it does not begin."""
        self._over: Callable[[bool | None], None] | None = over

    def begun(self, *, in_database: bool) -> None:
        """The response has begun."""
        self._end(in_database)

    def leave(self) -> None:
        """It does not begin; nothing if it has."""
        self._end(None)

    def _end(self, how: bool | None) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(how)


class LiveRuns:
    """How many responses have not ended, as far as this process knows, and how many may be under way.

    Each that is to begin goes through `enter`, and through `ended` at the server that ends it. in_database:
    whether the database knows of it, which it does not of an unstored response.
    """

    def __init__(self, storage: Storage, most: int | None, refused: Callable[[str], None]) -> None:
        """most: None is no limit, and then nothing is counted. refused: told the limit's name."""
        self._storage = storage
        self._most = most
        self._refused = refused
        self._found = 0  # in the database, when it was last asked
        self._begun = 0  # in the database since then, as far as it is this process's doing
        self._ended = 0
        self._unstored = 0
        self._starting = 0

    @property
    def num(self) -> int:
        """How many there are; rather too many than too few, where this process alone begins them."""
        return max(0, self._found + self._begun - self._ended) + self._unstored + self._starting

    def enter(self, retry_after_s: int) -> Entrance:
        """Count a response that is about to begin. ApiError 429 `queue_full` where it is one too many."""
        if self._most is not None and self.num >= self._most:
            self._refused("max_live_runs")
            message = (
                f"{self._most} responses are under way at this server, which takes no more at once. Try "
                "again once some of them have ended."
            )
            raise ApiError(429, message, code="queue_full", headers={"retry-after": str(retry_after_s)})
        self._starting += 1
        return Entrance(self._entered)

    def _entered(self, in_database: bool | None) -> None:
        self._starting -= 1
        if in_database:
            self._begun += 1
        elif in_database is not None:
            self._unstored += 1

    def ended(self, *, in_database: bool) -> None:
        """One has ended, whoever began it."""
        if in_database:
            self._ended += 1
        else:
            self._unstored -= 1

    async def look(self) -> None:
        """Ask the database, where anything is limited. Raises StorageUnavailable."""
        if self._most is None:
            return
        begun = self._begun
        self._found = await self._storage.num_live_runs()
        self._begun -= begun  # what began meanwhile may be in both: rather one too many
        self._ended = 0

    async def run(self) -> None:
        """Look once a second, for ever; not at all where nothing is limited."""
        while self._most is not None:
            await asyncio.sleep(EVERY_S)
            with suppress(StorageUnavailable):  # what was known before is the best there is
                await self.look()
