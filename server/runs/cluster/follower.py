"""Watches runs of other processes for readers who are connected to this one.

It also watches this process's own runs, which another process may cancel or take over. One query looks at all
of them. On a database that no other process shares there is nothing to watch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from server.runs.events import Feed
from server.runs.execution import TELLS
from storage import RunGlance, RunLost, StorageUnavailable

if TYPE_CHECKING:
    from server.runs.execution import Run, RunTasks
    from storage import Storage

log = logging.getLogger("antiphon.runs")

FOLLOWING_S = 0.25
"""How often followed runs are looked at; and how soon after a look a hint may bring one at our own."""

OWN_S = 1.0
"""How often this process's own runs are, while it follows none."""

HINTED_S = 0.05
"""How soon after a look a hint may bring the next one at followed runs."""


class Follower:
    """Looks at the runs of others, and at what others ask of ours."""

    def __init__(self, storage: Storage, feed: Feed, tasks: RunTasks, resume_grace_s: float) -> None:
        self._storage = storage
        self._feed = feed
        self._tasks = tasks
        self._tell_s = resume_grace_s / TELLS
        self._told_at: dict[str, float] = {}

    async def run(self) -> None:
        """For as long as the process carries runs on."""
        hints = 0
        while self._storage.shared:
            if not (following := bool(self._feed.elsewhere())) and not len(self._tasks):
                self._feed.stirred.clear()
                await self._feed.stirred.wait()
                continue
            hints = await self._storage.hinted(hints, FOLLOWING_S if following else OWN_S)
            try:
                await self.look()
            except StorageUnavailable as error:
                log.warning("the runs of others could not be looked at: %s", error)
            await asyncio.sleep(HINTED_S if following else FOLLOWING_S)

    async def look(self) -> None:
        """Look once."""
        channels, own_runs = self._feed.elsewhere(), self._tasks.stored()
        if not channels and not own_runs:
            return
        glances = await self._storage.run_status([channel.response_id for channel in channels])
        for channel in channels:
            channel.see(glances.get(channel.response_id))
        for run in own_runs:
            self._look_at_own(run, glances.get(run.plan.response_id))
        await self._tell([channel.response_id for channel in channels], glances)

    def _look_at_own(self, run: Run, glance: RunGlance | None) -> None:
        """Abort what is ours no more, and end what somebody cancelled elsewhere."""
        if self._tasks.get(run.plan.response_id) is not run or not run.stepping:
            return  # it ended or parked meanwhile
        if glance is None or glance.runner != self._storage.runner:
            run.entry.lose(RunLost(run.plan.response_id))
        elif glance.cancel_requested:
            self._tasks.cancel(run)

    async def _tell(self, followed: Sequence[str], glances: Mapping[str, RunGlance]) -> None:
        """Tell whoever carries on what is followed here that it is being read: its grace does not begin."""
        now = asyncio.get_running_loop().time()
        self._told_at = {id: at for id, at in self._told_at.items() if id in followed}
        late = [
            id
            for id in followed
            if id in glances and glances[id].runner is not None
            if id not in self._told_at or now - self._told_at[id] >= self._tell_s
        ]
        if late:
            self._told_at |= dict.fromkeys(await self._storage.mark_watched(late), now)
