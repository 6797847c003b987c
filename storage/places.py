"""Where runs stand in the queue, as whoever reads responses is told.

A place depends on the whole queue, and whoever waits asks for it again and again. So a process ranks the
queue once a second at most, and only while somebody asks. A run that has come since is put into that ranking
by what its own owner has in the queue, and what this process takes goes out of it. So a new response is told
its own place at once, and what others do is told a second later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from storage.drivers import Run
from storage.queries import queue
from storage.records import RunClaim, StoredResponse

FRESH_S = 1.0
"""How long a ranking is told from."""


class Places:
    """The places of queued runs, for one process. read: runs a job in a reading transaction."""

    def __init__(self, read: Run) -> None:
        self._read = read
        self._known: queue.Ranking | None = None
        self._ranking: asyncio.Task[queue.Ranking] | None = None

    async def placed(self, owner: str, read: Sequence[StoredResponse]) -> tuple[StoredResponse, ...]:
        """Responses of an owner as they were read; those that have not begun, with their places."""
        ids = [one.id for one in read if one.queued]
        if not ids:
            return tuple(read)
        ranking = await self._rank()
        if come := [id for id in ids if ranking.place(id) is None]:
            for turn in await self._read(partial(queue.turns, owner=owner, response_ids=come)):
                ranking.add(turn)
        return tuple(_placed(one, ranking) for one in read)

    def left(self, claims: Iterable[RunClaim]) -> None:
        """Runs were taken out of the queue by this process."""
        if self._known is not None:
            for claim in claims:
                self._known.drop(claim.response_id)

    async def _rank(self) -> queue.Ranking:
        """The latest ranking. Whoever asks while one is made waits for it."""
        if self._known is not None:
            return self._known
        if self._ranking is None:
            self._ranking = asyncio.create_task(self._rank_anew(), name="places in the queue")
        return await asyncio.shield(self._ranking)

    async def _rank_anew(self) -> queue.Ranking:
        try:
            self._known = ranking = await self._read(queue.ranking)
            asyncio.get_running_loop().call_later(FRESH_S, self._forget)
            return ranking
        finally:
            self._ranking = None

    def _forget(self) -> None:
        self._known = None


def _placed(one: StoredResponse, ranking: queue.Ranking) -> StoredResponse:
    if one.run is None or not one.queued:
        return one
    place = ranking.place(one.id) or 1  # one that is known nowhere was taken since it was read
    return replace(one, run=replace(one.run, place=place))
