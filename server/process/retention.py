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
from itertools import islice

from server.clock import now_us
from server.config import Config
from server.telemetry import Reading
from storage import Limits, Storage, StorageUnavailable, Swept, SweptFiles

log = logging.getLogger("antiphon.retention")

EVERY_S = 60.0
"""Seconds from the begin of a sweep to that of the next, which is also how late a limit may be kept."""
USAGE_MINUTES_S = 8 * 86400.0
"""Usage is kept by the minute for this long, which is a week and a day; what is older, by the hour."""
REST = 4.0
"""After each step the writer is left alone for this many times as long as the step took, at first."""
LARGEST = 20
"""Owners that the metric of stored bytes names; what the rest of them store is one number."""
OTHERS = "others"


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
    """The sweeper of one server. Several on one database do each other no harm."""

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
        self._task: asyncio.Task[None] | None = None

    def start(self, forget: Callable[[], Awaitable[None]]) -> None:
        """Start the task, which is this object's until `close`. forget: lets go, at the end of each sweep, of
        what this process remembers of responses that are gone; raises StorageUnavailable."""
        self._forget = forget
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
            pace = Pace()
            try:
                await self.sweep(pace)
            except StorageUnavailable as error:
                log.warning("the sweep stops here for now: %s", error)
            except Exception:  # a sweeper that dies would be missed only when the disk is full
                log.exception("the sweep failed; the next one tries again")
            lasted_s = pace.lasted_s

    async def sweep(self, pace: Pace | None = None) -> Swept:
        """One whole sweep; returns what went. Raises StorageUnavailable."""
        self._tell_of_room()
        went, files, pace = Swept(), SweptFiles(), pace or Pace()
        async with aclosing(self._storage.sweep(self._limits, now_us())) as steps:
            async for step in steps:
                went += step
                self._total += step
                await pace.rest()
        async with aclosing(self._storage.containers.sweep(now_us())) as gone:
            async for _ in gone:
                await pace.rest()
        limits = self._limits
        before = None if limits.age is None else now_us() - limits.age
        completions = self._storage.chat_completions.sweep(before=before, most=limits.max_responses)
        async with aclosing(completions) as swept:
            async for num in swept:
                self._num_completions += num
                await pace.rest()
        async with aclosing(self._storage.files.sweep(now_us())) as removals:
            async for removed in removals:
                files += removed
                self._files += removed
                await pace.rest()
        while await self._storage.fold_usage(now_us() - _us(USAGE_MINUTES_S)):
            await pace.rest()
        if self._person_usage_age:
            while await self._storage.forget_person_usage(now_us() - self._person_usage_age):
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
        if went != Swept():
            log.info(
                "let go of %d responses, %d logs, %d idempotent requests, %d conversations",
                *(went.responses, went.logs, went.requests, went.conversations),
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


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
