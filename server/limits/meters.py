"""Counts what is used of rate limits, in memory, and keeps the counts in the database.

A process that is alone with its database counts by itself, and writes down every second what has changed: a
kill loses that second. Where several servers share a database, each takes *allotments* out of it, a hundredth
of a limit at a time, and spends those without asking. What it has not spent within two seconds it gives back.
So all servers together never let more through than the limit, and what one of them holds and does not use
keeps the others at most a hundredth of the limit below it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from server.clock import now_ns
from server.limits.gcra import SECOND, Rate
from storage import StorageUnavailable

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon")

States = Mapping[str, int]
"""Arrivals of limits by their ids."""

SLICE = 100
"""Into how many allotments a limit is divided."""

FLUSH_S = 1.0
"""How often counts are written down, and what was not spent is given back."""

SWEEP_EVERY = 3600
"""Rows of which nothing is used are removed after so many flushes."""

MAX_METERS = 50_000
"""More meters than this are not kept in memory while nothing is used of them."""


class Meter:
    """What is used of one rate limit.

    arrival: the state in the database, as it was last seen; in a process that is alone, the state itself,
    once it is `known`. held: units that were taken out of the database and not spent; below 0 they are spent
    and not taken out yet. asked: when the database was last asked, in nanoseconds.
    """

    __slots__ = ("arrival", "asked", "changed", "held", "id", "known", "rate", "used")

    def __init__(self, id: str, rate: Rate) -> None:
        self.id = id
        self.rate = rate
        self.arrival = 0
        self.held = 0
        self.known = False
        self.asked = 0
        self.used = False  # since the last flush
        self.changed = False  # what the database has is out of date

    def remaining(self, now: int) -> int:
        """How many units can be taken now, as far as this process knows."""
        return max(0, min(self.rate.limit, self.rate.remaining(self.arrival, now) + self.held))

    def reset(self, now: int) -> int:
        """In how many nanoseconds nothing will be used any more."""
        return self.rate.reset(self.arrival, now)


class Meters:
    """All meters of this process, by id."""

    def __init__(self, storage: Storage, clock: Callable[[], int] = now_ns) -> None:
        """clock: nanoseconds since the epoch, as the server's: one that is set forward or back while the
        process runs would refuse for as long, or hand a whole limit out anew."""
        self._storage = storage
        self._shared = storage.shared
        self._clock = clock
        self._ahead = 0  # the database's clock before ours, in nanoseconds
        self._meters: dict[str, Meter] = {}
        self._touched: set[Meter] = set()
        self._asking = asyncio.Lock()
        self._waiting: dict[Meter, int] = {}  # units that requests wait for
        self._flushing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Write down counts every second from now on."""
        self._flushing = asyncio.create_task(self._flush_forever(), name="rate limits")

    async def close(self) -> None:
        """Write down the last counts."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
            await self._flush(everything=True)

    def now(self) -> int:
        """The time by the database's clock, in nanoseconds."""
        return self._clock() + self._ahead

    def meter(self, id: str, rate: Rate) -> Meter:
        """The meter of a limit. Where the limit has changed, the same share of it is used as before."""
        meter = self._meters.get(id)
        if meter is None:
            meter = self._meters[id] = Meter(id, rate)
        elif meter.rate != rate:
            meter.rate = rate
        return meter

    # -- taking ----------------------------------------------------------------------------------------------

    async def take(self, wanted: Sequence[tuple[Meter, int]]) -> tuple[Meter, int, int | None] | None:
        """Take units of several limits, all or none; 0 of one asks only whether there is any left.

        Returns None, or the limit that is in the way longest, with the units that it lacks, and for how many
        nanoseconds: None for ever. Raises StorageUnavailable.
        """
        if self._could_do_without_asking(wanted):
            return self._taken(wanted)
        waited = [(meter, units) for meter, units in wanted if units]
        for meter, units in waited:
            self._waiting[meter] = self._waiting.get(meter, 0) + units
        try:
            async with self._asking:
                if not self._could_do_without_asking(wanted):
                    await self._ask([(meter, max(1, units)) for meter, units in wanted])
                return self._taken(wanted)
        finally:
            for meter, units in waited:
                self._waiting[meter] -= units
                if not self._waiting[meter]:
                    del self._waiting[meter]

    def charge(self, meter: Meter, units: int) -> None:
        """Count units that were used, whether or not there were so many; below 0 they are given back."""
        meter = self._meters.setdefault(meter.id, meter)
        meter.used = True
        if self._shared or not meter.known:
            meter.held -= units
        else:
            meter.arrival = meter.rate.charge(meter.arrival, units, self.now())
            meter.changed = True
        self._touched.add(meter)

    def _taken(self, wanted: Sequence[tuple[Meter, int]]) -> tuple[Meter, int, int | None] | None:
        now = self.now()
        worst: tuple[Meter, int, int | None] | None = None
        for meter, units in wanted:
            wait = self._wait(meter, max(1, units), now)
            if wait is None:
                return meter, units, None
            if wait and (worst is None or worst[2] is None or wait > worst[2]):
                worst = meter, units, wait
        if worst is None:
            for meter, units in wanted:
                if units:
                    self.charge(meter, units)
        return worst

    def _wait(self, meter: Meter, units: int, now: int) -> int | None:
        if units > meter.rate.limit:
            return None
        if not self._shared:
            return meter.rate.wait(meter.arrival, units, now)
        if meter.held >= units:
            return 0
        return max(1, meter.rate.wait(meter.arrival, min(units - meter.held, meter.rate.limit), now) or 0)

    def _could_do_without_asking(self, wanted: Sequence[tuple[Meter, int]]) -> bool:
        """Whether everything is known here that decides. A refusal is believed for a second."""
        if not self._shared:
            return all(meter.known for meter, _ in wanted)
        now = self.now()
        refused = False
        for meter, units in wanted:
            if meter.held < max(1, units):
                if not meter.known:
                    return False
                lacking = min(max(1, units) - meter.held, meter.rate.limit)
                still = meter.rate.wait(meter.arrival, lacking, now)
                if not still or now - meter.asked > SECOND:
                    return False
                refused = True
        return refused or all(meter.held >= max(1, units) for meter, units in wanted)

    # -- the database ----------------------------------------------------------------------------------------

    async def _ask(self, wanted: Sequence[tuple[Meter, int]]) -> None:
        """Learn what is used, and, where the database is shared, take out what is needed of it."""
        lacking = {
            meter.id: (meter, units)
            for meter, units in wanted
            if (meter.held < units if self._shared else not meter.known)
        }

        def move(states: States, now: int) -> tuple[States, tuple[States, dict[str, int], int]]:
            granted, written = {}, {}
            for id, (meter, units) in lacking.items() if self._shared else ():
                granted[id] = self._grant(meter, units, states[id], now)
                written[id] = meter.rate.charge(states[id], granted[id], now)
            return written, ({**states, **written}, granted, now)

        states, granted, now = await self._storage.move_quotas(list(lacking), move, self._clock())
        self._ahead = now - self._clock() if self._shared else 0
        for id, (meter, _) in lacking.items():
            meter.arrival, meter.asked, meter.known = self._believed(meter, states[id], now), self.now(), True
            if self._shared:
                meter.held += granted[id]
                meter.used = True
                self._touched.add(meter)
            else:
                self._pay(meter)

    def _believed(self, meter: Meter, state: int, now: int) -> int:
        """A state as it was read. A process that is alone finds what an earlier one wrote by a clock that may
        have been ahead of its own: more than a whole limit is not held against anybody."""
        return state if self._shared else min(state, now + meter.rate.period)

    def _pay(self, meter: Meter) -> None:
        """Count what was used before it was known what had been used."""
        owed, meter.held = -meter.held, 0
        if owed:
            self.charge(meter, owed)

    def _grant(self, meter: Meter, units: int, state: int, now: int) -> int:
        """How many units to take out: what is needed and a slice, or as much as there is, or nothing where
        that is not enough."""
        least = units - meter.held
        wish = max(least, self._waiting.get(meter, 0) - meter.held, meter.rate.limit // SLICE)
        there = meter.rate.remaining(state, now)
        return min(wish, there) if there >= least else 0

    async def _flush_forever(self) -> None:
        flushes = 0
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self._flush()
                flushes += 1
                if flushes % SWEEP_EVERY == 1:
                    await self._storage.sweep_quotas(self._clock())
            except StorageUnavailable as error:
                log.info("what is used of limits could not be written: %s", error)

    async def _flush(self, *, everything: bool = False) -> None:
        """Write down what has changed; in a shared database, give back what was not spent since the last
        time, and pay what was spent beyond."""
        async with self._asking:
            due = [meter for meter in self._touched if meter.changed or not meter.known]
            if self._shared:
                due = [meter for meter in self._touched if self._surplus(meter, everything)]
            if due:
                await self._write(due, everything)
            for meter in list(self._touched):
                meter.used = False
                if not meter.changed and not meter.held:
                    self._touched.discard(meter)
        if len(self._meters) > MAX_METERS:
            now = self.now()
            kept = {m.id: m for m in self._meters.values() if m in self._touched or m.arrival > now}
            self._meters = kept

    def _surplus(self, meter: Meter, everything: bool) -> int:
        """How many of the units that are held to give back; below 0 to pay. One slice stays where the limit
        was used since the last flush."""
        if not self._shared or meter.held < 0 or everything or not meter.used:
            return meter.held
        return max(0, meter.held - max(1, meter.rate.limit // SLICE))

    async def _write(self, due: Sequence[Meter], everything: bool) -> None:
        moved = {meter.id: (meter, self._surplus(meter, everything), meter.arrival) for meter in due}

        def move(states: States, now: int) -> tuple[States, States]:
            written = {}
            for id, (meter, held, arrival) in moved.items():
                if self._shared or not meter.known:
                    state = self._believed(meter, states[id], now)
                    written[id] = meter.rate.charge(state, -held, now)
                else:
                    written[id] = arrival
            return written, written

        written = await self._storage.move_quotas(list(moved), move, self._clock())
        for id, (meter, held, arrival) in moved.items():
            if self._shared or not meter.known:
                meter.held -= held
                meter.arrival = written[id]
                meter.known = True
                if not self._shared:
                    self._pay(meter)
            elif meter.arrival == arrival:
                meter.changed = False
