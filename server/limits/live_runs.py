"""Bounds how many responses of all owners are under way: queued, at work, or waiting for their client.

The database is asked once a second how many it has, never on the way of a request. In between this process
adds what it begins and takes off what it ends itself; what other servers begin counts a second later. Where
nothing is limited, the database is asked less often, for what an operator sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from server.errors import ApiError
from storage import StorageUnavailable

if TYPE_CHECKING:
    from storage import Storage

EVERY_S = 1.0
"""Pause between two looks into the database."""

UNLIMITED_EVERY_S = 5.0
"""The same where nothing is limited."""

STATES = ("queued", "running", "waiting")


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
        """most: None is no limit. refused: told the limit's name."""
        self._storage = storage
        self._most = most
        self._refused = refused
        self._states: Mapping[str, int] = {}  # in the database, when it was last asked
        self._begun = 0  # in the database since then, as far as it is this process's doing
        self._ended = 0
        self._unstored = 0
        self._starting = 0

    @property
    def num(self) -> int:
        """How many there are; rather too many than too few, where this process alone begins them."""
        found = sum(self._states.values())
        return max(0, found + self._begun - self._ended) + self._unstored + self._starting

    def readings(self) -> dict[str, int]:
        """How many responses the database had in each state when it was last asked, for metrics."""
        return {state: self._states.get(state, 0) for state in STATES}

    def enter(self, wait_s: Callable[[], int]) -> Entrance:
        """Count a response that is about to begin. wait_s: the seconds after which a client may try
        again, asked for only at a refusal. ApiError 429 `queue_full` where it is one too many."""
        if self._most is not None and self.num >= self._most:
            self._refused("max_live_runs")
            message = (
                f"{self._most} responses are under way at this server, which takes no more at once. Try "
                "again once some of them have ended."
            )
            raise ApiError(429, message, code="queue_full", headers={"retry-after": str(wait_s())})
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
        """Ask the database. Raises StorageUnavailable."""
        begun = self._begun
        self._states = await self._storage.num_live_runs()
        self._begun -= begun  # what began meanwhile may be in both: rather one too many
        self._ended = 0

    async def run(self) -> None:
        """Look at intervals, for ever."""
        while True:
            await asyncio.sleep(UNLIMITED_EVERY_S if self._most is None else EVERY_S)
            with suppress(StorageUnavailable):  # what was known before is the best there is
                await self.look()
