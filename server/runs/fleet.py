"""The fleet: this process among those that share its database.

Owns the beat by which the others know that this process lives, the judgement that another one is dead, and
the regular look at what nobody carries on. Refuses to know how a run is carried on and how it is stored.

No wall clock decides who owns a run. Another process is dead when its beat has stood still for the lease, by
this process's own monotonic clock and in looks that followed each other closely: after a pause of its own, or
of the database, it begins to watch anew. A process that was taken for dead and is not loses its runs by their
fence, and goes on with new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from server.clock import now_us
from storage import StorageUnavailable

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon.fleet")

BEATS_A_LEASE = 5
"""A process may miss some beats before it is taken for dead."""

ROUND_S = 1.0
"""How often a process that is alone looks for waiting runs whose time is up."""

HINTED_S = 0.25
"""How soon after a look a hint may bring the next one."""


class Watch:
    """Tells from beats who is dead. Times are seconds of one monotonic clock."""

    def __init__(self, runner: str, lease_s: float) -> None:
        self._runner = runner
        self._lease_s = lease_s
        self._since: dict[str, tuple[int | None, float]] = {}
        self._looked_at = 0.0

    def dead(self, beats: Mapping[str, int | None], now: float) -> dict[str, int | None]:
        """Take in what a look showed at `now`; those that are dead, with the beat that they ended at."""
        if now - self._looked_at > self._lease_s / 2:
            self._since = {}  # nobody watched them meanwhile
        self._looked_at = now
        seen = self._since
        self._since = {
            id: seen[id] if id in seen and seen[id][0] == beat else (beat, now)
            for id, beat in beats.items()
            if id != self._runner
        }
        return {id: beat for id, (beat, since) in self._since.items() if now - since >= self._lease_s}


class Fleet:
    """Beats, watches the others, and has what nobody carries on taken up."""

    def __init__(
        self,
        storage: Storage,
        lease_s: float,
        *,
        free: Callable[[], None],
        due: Callable[[], Awaitable[None]],
    ) -> None:
        """free: told when there are runs that nobody owns. due: awaited when waiting runs have run out of
        time."""
        self._storage = storage
        self._free, self._due = free, due
        self._every_s = lease_s / BEATS_A_LEASE if storage.shared else ROUND_S
        self._watch = Watch(storage.runner, lease_s)

    async def beat(self) -> None:
        """Beat, for as long as the process carries runs on; apart from the looks, which may take long."""
        while self._storage.shared:
            try:
                await self._storage.beat()
            except StorageUnavailable as error:
                log.warning("the others may take this process for dead: %s", error)
            await asyncio.sleep(self._every_s)

    async def watch(self) -> None:
        """Look at the others, and for what nobody carries on, for as long."""
        clock = asyncio.get_running_loop().time
        hints = 0
        while True:
            until = clock() + self._every_s
            try:
                await self.look(clock())
            except StorageUnavailable as error:
                log.warning("the other processes could not be looked at: %s", error)
            await asyncio.sleep(min(HINTED_S, self._every_s))
            hints = await self._storage.hinted(hints, max(0.0, until - clock()))

    async def look(self, now: float) -> None:
        """Look once, at `now` by the monotonic clock; what a dead process owned is nobody's afterwards."""
        view = await self._storage.look(now_us())
        has_free = view.has_free
        if self._storage.shared:
            for runner, beat in self._watch.dead(view.beats, now).items():
                if num_runs := await self._storage.free(runner, beat):
                    log.warning("%s is dead: %d of its runs go on elsewhere", runner, num_runs)
                    has_free = True
        if has_free:
            self._free()
        if view.has_due:
            await self._due()
