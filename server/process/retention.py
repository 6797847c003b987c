"""Sweeps the database at intervals, at an easy pace: has storage remove what the limits no longer cover, and
files that have expired, put old usage together in hours, forget what persons used long ago, forget who was
served what by an empty queue, and measure what owners store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import islice

from server.clock import ahead_of_s, now_us
from server.config import Config
from server.telemetry import ClockWatch, Reading
from storage import Limits, Storage, StorageUnavailable, Swept, SweptFiles

log = logging.getLogger("antiphon.retention")

EVERY_S = 60.0
"""Seconds from the begin of a sweep to that of the next, which is also how late a limit may be kept."""
USAGE_MINUTES_S = 8 * 86400.0
"""Usage is kept by the minute for this long, which is a week and a day; what is older, by the hour."""
REST = 4.0
"""After each step the writer is left alone for this many times as long as the step took, at first."""
DAY_S = 86400.0
AHEAD_S = 7 * DAY_S
"""Where the clock is further than this ahead of what is stored, it may be wrong."""
LARGEST = 20
"""Owners that the metric of stored bytes names; what the rest of them store is one number."""
OTHERS = "others"


def seconds_ahead(newest: int | None, now: int) -> float:
    """How far the clock is ahead of the newest thing that is stored, where that is so far that it may be
    wrong; 0.0 elsewhere. newest: of what is older than a day, because one request by a wrong clock would hide
    from the next start that it is wrong."""
    ahead = 0.0 if newest is None else (now - newest) / 1e6
    return ahead if ahead > AHEAD_S else 0.0


class Pace:
    """The rests of one sweep. The longer it lasts, the shorter they are: under a load that makes each step
    wait for its turn, long rests would let more gather than goes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._step_began = clock()

    @property
    def lasted_s(self) -> float:
        """Seconds since the sweep began."""
        return self._clock() - self._began

    async def rest(self) -> None:
        """Rest after a step; the next one begins with the end of this."""
        took = self._clock() - self._step_began
        await asyncio.sleep(REST * took / max(1.0, self.lasted_s / EVERY_S))
        self._step_began = self._clock()


class Retention:
    """The sweeper of one server. Several on one database do each other no harm.

    ahead_of_database_s: by how much the clock of this process is ahead of that of a database which others
    write to as well, by the latest look.
    """

    def __init__(self, storage: Storage, config: Config) -> None:
        self._storage = storage
        self._limits = limits(config)
        self._person_usage_age = _us(config.identifier_usage_s)
        self._total = Swept()
        self._files = SweptFiles()
        self._num_completions = 0
        self._made_room: Counter[str] = Counter()  # responses that went for new ones, by owner
        self._forget: Callable[[], Awaitable[None]] = _nothing_to_forget
        self._stored: Mapping[str, int] = {}
        self._ahead, self._ahead_until = 0, 0
        self.ahead_of_database_s = 0.0
        self._clock_watch = ClockWatch()
        self._task: asyncio.Task[None] | None = None

    async def start(self, forget: Callable[[], Awaitable[None]]) -> None:
        """Start the task, which is this object's until `close`. forget: lets go, at the end of each sweep, of
        what this process remembers of responses that are gone; raises StorageUnavailable. So does this."""
        self._forget = forget
        await self._look_at_database()
        await self._look_at_clock()
        self._task = asyncio.create_task(self._sweeps(), name="retention")

    async def close(self) -> None:
        """Stop, in the middle of a sweep if need be."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def readings(self) -> Iterator[Reading]:
        """What went since the start, and what owners stored at the end of the last sweep, for metrics."""
        total = self._total
        went = {
            "responses_total": total.responses,
            "logs_total": total.logs,
            "requests_total": total.requests,
            "conversations_total": total.conversations,
            "files_total": self._files.files,
            "chat_completions_total": self._num_completions,
        }
        yield Reading("retention", went)
        for owner, num_bytes in self._stored.items():
            yield Reading("stored", {"bytes": num_bytes}, {"owner": owner})

    def made_room(self, owner: str, went: Swept) -> None:
        """Count what went of an owner for what it was about to write; the next sweep logs it."""
        self._total += went
        self._made_room[owner] += went.responses

    async def _sweeps(self) -> None:
        lasted_s = 0.0
        while True:
            await asyncio.sleep(max(0.0, EVERY_S - lasted_s))
            self._clock_watch.look()
            pace = Pace()
            try:
                await self._look_at_database()
                await self.sweep(pace)
            except StorageUnavailable as error:
                log.warning("the sweep stops here for now: %s", error)
            except Exception:  # a sweeper that dies would be missed only when the disk is full
                log.exception("the sweep failed; the next one tries again")
            lasted_s = pace.lasted_s

    async def _look_at_database(self) -> None:
        """Compare this process's clock with that of a database which others write to as well."""
        if self._storage.shared:
            asked = now_us()
            other = await self._storage.shared_now(asked)
            self.ahead_of_database_s = ahead_of_s(other, asked, now_us())
            self._clock_watch.heard(self.ahead_of_database_s)

    async def _look_at_clock(self) -> None:
        """A clock that is far ahead makes all history look old. Where it may be so, ages are judged for a day
        as if the time since the newest thing that is stored had not passed, so that the warning is seen."""
        now = now_us()
        newest = await self._storage.newest(now - _us(DAY_S))
        ahead_s = seconds_ahead(newest, now)
        if newest is None or not ahead_s:
            return
        self._ahead, self._ahead_until = _us(ahead_s), now + _us(DAY_S)
        log.warning(
            "the clock is %.0f days ahead of the newest thing that is stored, which is of %s: the database "
            "was not used for so long, or the clock is wrong. Nothing is removed for the time between before "
            "%s; from then on, what is older than the settings allow goes. If the clock is wrong, stop the "
            "server, set the clock right, and start the server again",
            *(ahead_s / DAY_S, _shown(newest), _shown(self._ahead_until)),
        )

    def _now(self) -> int:
        """The time by which ages are judged: what others have stored does not go early by this one clock."""
        now = now_us()
        ahead = self._ahead if now < self._ahead_until else 0
        return now - max(ahead, _us(self.ahead_of_database_s))

    async def sweep(self, pace: Pace | None = None) -> Swept:
        """One whole sweep; returns what went. Raises StorageUnavailable."""
        self._tell_of_room()
        went, files, pace = Swept(), SweptFiles(), pace or Pace()
        num_containers = num_completions = 0
        async with aclosing(self._storage.sweep(self._limits, self._now())) as steps:
            async for step in steps:
                went += step
                self._total += step
                await pace.rest()
        async with aclosing(self._storage.containers.sweep(self._now())) as gone:
            async for num in gone:
                num_containers += num
                await pace.rest()
        limits = self._limits
        before = None if limits.age is None else self._now() - limits.age
        completions = self._storage.chat_completions.sweep(before=before, most=limits.max_responses)
        async with aclosing(completions) as swept:
            async for num in swept:
                num_completions += num
                self._num_completions += num
                await pace.rest()
        async with aclosing(self._storage.files.sweep(self._now())) as removals:
            async for removed in removals:
                files += removed
                self._files += removed
                await pace.rest()
        while await self._storage.fold_usage(self._now() - _us(USAGE_MINUTES_S)):
            await pace.rest()
        if self._person_usage_age:
            while await self._storage.forget_person_usage(self._now() - self._person_usage_age):
                await pace.rest()
        while await self._storage.forget_shares():
            await pace.rest()
        await self._forget()
        self._stored = _largest(await self._storage.num_bytes_by_owner())
        if files != SweptFiles():
            log.info(
                "%d files and %d uploads had expired; removed %d contents that nothing used any more",
                *(files.files, files.uploads, files.blobs),
            )
        if went != Swept() or num_completions or num_containers:
            log.info(
                "let go of %d responses, %d logs, %d idempotent requests, %d conversations, "
                "%d chat completions, %d containers",
                *(went.responses, went.logs, went.requests, went.conversations),
                *(num_completions, num_containers),
            )
        return went

    def _tell_of_room(self) -> None:
        made, self._made_room = self._made_room, Counter()
        if made:
            owner, most = made.most_common(1)[0]
            log.warning(
                "max_bytes_per_owner or max_store_bytes is reached: %d of the oldest responses of %d owners "
                "were deleted to make room for new ones, %d of them of %s",
                *(made.total(), len(made), most, owner),
            )


async def _nothing_to_forget() -> None:
    """What there is to forget before the server has begun."""


def _largest(stored: Mapping[str, int]) -> Mapping[str, int]:
    """Bytes of the owners who store most, and of the others together. stored: of all, the largest first."""
    named = dict(islice(stored.items(), LARGEST))
    rest = sum(stored.values()) - sum(named.values())
    return {**named, OTHERS: rest} if len(stored) > LARGEST else named


def limits(config: Config) -> Limits:
    """The settings as storage takes them; 0 seconds stand for no limit."""
    return Limits(
        age=_us(config.retention_s) or None,
        log_age=_us(config.event_retention_s) or None,
        request_age=_us(config.idempotency_ttl_s),
        max_responses=config.max_responses_per_owner,
        max_bytes=config.max_bytes_per_owner,
        conversation_age=_us(config.conversation_retention_s) or None,
        measured=True,  # operators are shown what owners store, whatever limits there are
    )


def _shown(at: int) -> str:
    return datetime.fromtimestamp(at / 1e6, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
