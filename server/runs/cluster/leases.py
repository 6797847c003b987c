"""The processes that share a database: this one says that it lives, and takes over the runs of dead ones.

No wall clock decides who owns a run. Another process is dead when its beat has stood still for most of the
lease, by this process's own monotonic clock and in looks that followed each other closely: after a pause of
its own, or of the database, it begins to watch anew. Or at once, where `presence` knows. A process that was
taken for dead and is not loses its runs by their fence, and goes on with new ones.

A lease has to hold the beat before a death, the look that sees it last, the time that it must stand still,
and taking over. Beats and looks that are far apart would leave little of it for a process that is alive and
slow, so they follow each other closely while there are runs to be taken over, and only then. In shares of the
lease: a death is noticed 0.80 (STILL - 1 / BUSY) to 0.90 (STILL + 1 / BUSY) after it, and nobody who stands
still for less than 0.80 loses anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import orjson

from server.clock import now_us
from server.runs.cluster.presence import Presence
from storage import FleetView, StorageUnavailable

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon.fleet")

BUSY = 20
"""Beats a lease of a process that carries runs on, and looks a lease at one that does."""

IDLE = 5
"""The same where there is nothing to take over."""

STILL = 0.85
"""The share of the lease for which the beat of a process that carries runs on has to stand still."""

ROUND_S = 1.0
"""How often a process that is alone looks for waiting runs whose time is up."""

HINTED_S = 0.25
"""How soon after a look a hint may bring the next one, and after one that found runs out of time it comes."""


State = tuple[int | None, bool]
"""The beat of a process, and whether it owns runs."""


class Watch:
    """Tells from beats who is dead. Times are seconds of one monotonic clock."""

    def __init__(self, runner: str, lease_s: float) -> None:
        self._runner = runner
        self._lease_s = lease_s
        self._since: dict[str, tuple[State, float]] = {}  # by runner: its state, and since when it was seen
        self._looked_at = 0.0

    def dead(self, view: FleetView, asked: float, answered: float) -> dict[str, int | None]:
        """Take in a look that began and ended at these times; those that are dead, with the beat that they
        ended at."""
        if answered - self._looked_at > self._lease_s / 2:
            self._since = {}  # nobody watched them meanwhile
        self._looked_at = asked
        before, self._since = self._since, {}
        for id, beat in view.beats.items():
            state = (beat, id in view.owners)
            if id != self._runner:
                seen = before.get(id)
                self._since[id] = seen if seen is not None and seen[0] == state else (state, answered)
        return {
            id: state[0]
            for id, (state, since) in self._since.items()
            if asked >= since + self._still_s(state)
        }

    def pause_s(self, now: float) -> float:
        """How long after `now` the next look is due: no later than it can show a death."""
        busy = [since + self._still_s(state) - now for state, since in self._since.values() if state[1]]
        if not busy:
            return self._lease_s / IDLE
        return min([self._lease_s / BUSY, *(left for left in busy if left > 0)])

    def _still_s(self, state: State) -> float:
        return self._lease_s * (STILL if state[1] else 1.0)


class _Outage:
    """A row of failures, of which the log tells the first. What storage tells by itself, because only an
    operator can mend it, is none: reading goes on."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._since: float | None = None

    def go_on(self, error: StorageUnavailable) -> None:
        """One more failure."""
        if self._since is None and not (error.full or error.moved or error.read_only):
            self._since = asyncio.get_running_loop().time()
            log.warning(self._words, error)

    def end(self) -> float | None:
        """A success: how long the outage lasted, None where there was none."""
        since, self._since = self._since, None
        return None if since is None else asyncio.get_running_loop().time() - since


class Fleet:
    """Beats, watches the others, and has what nobody carries on taken up."""

    def __init__(
        self,
        storage: Storage,
        lease_s: float,
        presence: Presence,
        *,
        serves: Callable[[], Mapping[str, str]],
        at_work: Callable[[], bool],
        free: Callable[[], None],
        due: Callable[[], Awaitable[None]],
    ) -> None:
        """serves: `Models.serves`; what others serve under the same names has to be the same, because what
        one begins another may go on with. at_work: whether this process carries stored runs on. free: told
        when there are runs that nobody owns. due: awaited when waiting runs have run out of time; it may end
        some of them, and is awaited again soon where there are more."""
        self._storage = storage
        self._lease_s = lease_s
        self._presence = presence
        self._serves = serves
        self._at_work, self._free, self._due = at_work, free, due
        self._watch = Watch(storage.runner, lease_s)
        self._beats: Mapping[str, int | None] = {}
        self._told: set[str] = set()  # the others that serve something else
        self.elsewhere: frozenset[str] = frozenset()
        """Names of models that living processes serve, this one aside."""

    async def beat(self) -> None:
        """Beat, for as long as the process carries runs on; apart from the looks, which may take long."""
        clock = asyncio.get_running_loop().time
        due = 0.0
        outage = _Outage("the others may take this process for dead: %s")
        while self._storage.shared:
            if self._at_work() or clock() >= due:
                try:
                    await self._storage.beat(
                        orjson.dumps(self._serves(), option=orjson.OPT_SORT_KEYS).decode()
                    )
                    due = clock() + self._lease_s / IDLE
                    outage.end()
                except StorageUnavailable as error:
                    outage.go_on(error)
            await asyncio.sleep(self._lease_s / BUSY)

    async def watch(self) -> None:
        """Look at the others, and for what nobody carries on, for as long."""
        clock = asyncio.get_running_loop().time
        hints = 0
        outage = _Outage("the other processes could not be looked at: %s")
        while True:
            hurries = False
            try:
                hurries = await self.look()
                # Many parts tell of a database that is away; its return is told once, here.
                if (away_s := outage.end()) is not None:
                    log.warning("the database answers again, after %.0f s", away_s)
            except StorageUnavailable as error:
                outage.go_on(error)
            pause_s = self._watch.pause_s(clock()) if self._storage.shared else ROUND_S
            if hurries:
                pause_s = min(pause_s, HINTED_S)
            until = clock() + pause_s
            await asyncio.sleep(min(HINTED_S, pause_s))
            hints = await self._storage.hinted(hints, max(0.0, until - clock()))

    async def look(self) -> bool:
        """Look once; what a dead process owned is nobody's afterwards. Returns whether runs were out of time:
        more of them may be."""
        clock = asyncio.get_running_loop().time
        asked = clock()
        view = await self._storage.list_processes(now_us())
        has_free = view.has_free
        if self._storage.shared:
            self._compare(view)
            dead = self._watch.dead(view, asked, clock())
            gone = await asyncio.to_thread(self._presence.gone, view.beats)
            for runner, beat in (dead | {id: view.beats[id] for id in gone}).items():
                if num_runs := await self._storage.release_runs(runner, beat):
                    log.warning("%s is dead: %d of its runs go on elsewhere", runner, num_runs)
                    has_free = True
        if has_free:
            self._free()
        if view.has_due:
            await self._due()
        return view.has_due

    def _compare(self, view: FleetView) -> None:
        """Warn of others that serve something else, once of each that has beaten since the last look."""
        before, self._beats = self._beats, view.beats
        mine = self._serves()
        elsewhere: set[str] = set()
        for other, said in view.serves.items():
            if other == self._storage.runner:
                continue
            theirs = _read(said)
            elsewhere |= theirs.keys()
            alive = before.get(other) not in (None, view.beats[other])
            if not alive or other in self._told or theirs == mine:
                continue
            self._told.add(other)
            if unlike := [name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]]:
                log.warning(
                    "%s, on the same database, serves another model as %s: a run that one of them has begun "
                    "fails at the other",
                    other,
                    ", ".join(sorted(unlike)),
                )
            if apart := mine.keys() ^ theirs.keys():
                log.warning(
                    "%s, on the same database, serves other models: %s. Each process goes on only with runs "
                    "of models that it serves.",
                    other,
                    ", ".join(f"{name} ({'here' if name in mine else 'there'})" for name in sorted(apart)),
                )
        self.elsewhere = frozenset(elsewhere)


def _read(said: str) -> dict[str, str]:
    """What a process says that it serves; nothing of one of an older version."""
    with suppress(ValueError):
        told = orjson.loads(said)
        if isinstance(told, dict):
            return told
    return {}
