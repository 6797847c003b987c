"""Lets runs of earlier processes at the engine in an order that finds out a run which stops it.

A run is suspected after the processes that ran it have ended twice in a row before it made progress
(`PROGRESS_EVENTS` more events). Suspects go to the engine one at a time, those with the fewest strikes first;
the next one follows once the one before it has made progress, parked or ended. All other runs go at once.
Each attempt is counted in storage before the engine, or a tool in this process, is given the run.
"""

from __future__ import annotations

import asyncio
import logging
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from engine import EngineDead
from server.runs.events import RETRY_S
from server.runs.execution.run import Run
from storage import PROGRESS_EVENTS, StorageUnavailable

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon.runs")

SUSPECT_STRIKES = 2
MAX_STRIKES = 3
"""Of a run with so many strikes no engine is given another try."""


class Probation:
    """Lets runs at the engine."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._taken = False  # the one place of the suspects
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: strikes, arrival
        self._arrivals = count()
        self._on_trial: Run | None = None
        self._clear_at = 0  # the sequence number at which the run on trial has got somewhere
        self._over = False

    async def enter(self, run: Run) -> None:
        """Return when an engine or a tool of this process may be given the run, and the attempt is counted.

        Raises RunLost, and EngineDead where there is no engine any more.
        """
        if run.claim is None:
            return
        if run.claim.strikes >= SUSPECT_STRIKES:
            await self._turn(run.claim.strikes)
            self._on_trial, self._clear_at = run, run.entry.next_seq + PROGRESS_EVENTS
        while run.claim is not None:
            if self._over:
                raise EngineDead("the engine has stopped")
            try:
                await self._storage.admit(run.claim)
                run.claim = None
            except StorageUnavailable as error:
                log.warning("run %s waits: %s", run.plan.response_id, error)
                await asyncio.sleep(RETRY_S)

    async def _turn(self, strikes: int) -> None:
        if not self._taken:
            self._taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (strikes, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._taken = False
        while self._waiting and not self._taken:
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                self._taken = True

    def look(self, run: Run) -> None:
        """The run has written something: it may have got somewhere."""
        if run is self._on_trial and (run.entry.channel.next_seq or 0) >= self._clear_at:
            self.leave(run)

    def stop(self) -> None:
        """The engine has died: nobody else is let at it, lest it count against them."""
        self._over = True

    def leave(self, run: Run) -> None:
        """The run has ended, or parked; nothing if it is not on trial."""
        if run is self._on_trial:
            self._on_trial = None
            self._pass_on()
