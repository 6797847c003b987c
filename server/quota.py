"""Checks, before a write, that its owner, and all owners together, stay within the limits on stored bytes.

Measuring takes a query, so a measurement is used for up to a minute and each process adds what it takes in
meanwhile. Writes by other processes on the same database are therefore noticed at most a minute late. What is
still coming in, such as a file, is in no measurement: it is reserved, which counts until it is stored or
refused.

There are two kinds of limits. `stored_bytes`, a limit of an owner or a key, refuses the write with a 429 and
deletes nothing. `max_bytes_per_owner` and `max_store_bytes`, by which an operator says what is kept, delete
the oldest responses of the owner who writes if that makes enough room, and refuse the write otherwise. Nobody
loses anything to what others store.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from server.clock import now_us
from server.errors import ApiError, insufficient_quota
from server.limits import Limiter, StoredBytes, owner_subject
from storage import Limits, Storage, Swept, Usage

FRESH_S = 60.0
"""How long what was measured is built upon."""

REFUSED_S = 1.0
"""How long an owner whose quota is used up is refused without another look."""


@dataclass(slots=True)
class _Known:
    """What an owner stores: as it was measured at `at` (monotonic seconds), what was taken in since, and what
    is reserved."""

    usage: Usage
    at: float
    reserved: Callable[[], int]
    taken_in: int = 0

    @property
    def total(self) -> int:
        return self.usage.total + self.taken_in + self.reserved()

    def fits(self, num_bytes: int, limit: int) -> bool:
        return self.total + num_bytes <= limit


async def stored_by(storage: Storage, owner: str) -> Usage:
    """What an owner stores, with what ended since the last sweep, which has no measure yet and would count
    nothing."""
    async for _ in storage.sweep(Limits(measured=True), now_us(), owner):
        pass  # nothing goes by this: only sizes are noted
    return await storage.usage(owner)


class Quota:
    """The bytes of all owners. max_bytes: of each of them; None: no limit but those of their own.
    max_store_bytes: of all of them together. made_room: told what went for a write, and of which owner.
    refused: told of each write that `stored_bytes` refuses, by this name."""

    def __init__(
        self,
        storage: Storage,
        max_bytes: int | None,
        max_store_bytes: int | None,
        made_room: Callable[[str, Swept], None],
        refused: Callable[[str], None],
    ) -> None:
        self._storage = storage
        self._made_room = made_room
        self._refused = refused
        self._limit = max_bytes
        self._store_limit = max_store_bytes
        self._reserved: Counter[str] = Counter()  # by owner
        self._reserved_of_all = 0
        self._known: dict[str, _Known] = {}
        self._store: _Known | None = None  # of all owners; what is held of it is not known
        self._full_for: str | None = None  # the owner who was refused last
        self._measuring = asyncio.Lock()  # one at a time: whoever waits for it finds what it asks for done

    async def require(self, owner: str, num_bytes: int, own: StoredBytes | None = None) -> None:
        """Count `num_bytes` that are about to be stored. Raises ApiError 429 `insufficient_quota` where there
        is no room for them: at once by `own`, the limit of the owner or the key, and by those of the operator
        once the owner's oldest responses have gone and that was not enough."""
        await self.reserve(owner, num_bytes, own)
        self.end_reservation(owner, num_bytes, num_bytes)

    def reservation(self, owner: str, own: StoredBytes | None = None) -> Reservation:
        """Room for what is about to come in, of which nothing is stored yet; `own` as for `require`."""
        return Reservation(self, owner, own)

    async def reserve(self, owner: str, num_bytes: int, own: StoredBytes | None = None) -> None:
        """Room for `num_bytes` more, until `end_reservation`. Raises ApiError as `require` does."""
        # Nothing is awaited between a look at what is free and the reservation of it.
        await self._require_of_owner(owner, num_bytes, own)
        self._reserved[owner] += num_bytes
        try:
            await self._require_of_store(owner, num_bytes)
        except BaseException:
            self._unreserve(owner, num_bytes)
            raise
        self._reserved_of_all += num_bytes

    def end_reservation(self, owner: str, num_bytes: int, num_stored: int) -> None:
        """Nothing more comes in of what was reserved, and so much of it is stored."""
        self._reserved_of_all -= num_bytes
        self._unreserve(owner, num_bytes)
        for known in (self._known.get(owner), self._store):
            if known is not None:
                known.taken_in += num_stored

    def _unreserve(self, owner: str, num_bytes: int) -> None:
        self._reserved[owner] -= num_bytes
        if not self._reserved[owner]:
            del self._reserved[owner]

    async def require_later(self, owner: str, num_bytes: int, limiter: Limiter) -> None:
        """The same long after the request that asked for it: by the limits of the owner alone."""
        subject = await owner_subject(self._storage, owner)
        await self.require(owner, num_bytes, limiter.stored_bytes((subject,)))

    async def _require_of_owner(self, owner: str, num_bytes: int, own: StoredBytes | None) -> None:
        if own is not None:
            known = await self._current(owner, num_bytes, own.limit, makes_room=False)
            self._require_own(known, num_bytes, own)
        if self._limit is not None:
            known = await self._current(owner, num_bytes, self._limit, makes_room=True)
            if own is not None:
                self._require_own(known, num_bytes, own)  # others may have been let in meanwhile
            if not known.fits(num_bytes, self._limit):
                raise _used_up(known, num_bytes, self._limit)

    def _require_own(self, known: _Known, num_bytes: int, own: StoredBytes) -> None:
        if not known.fits(num_bytes, own.limit):
            self._refused("stored_bytes")
            raise _beyond_own(known, num_bytes, own)

    async def _current(self, owner: str, num_bytes: int, limit: int, *, makes_room: bool) -> _Known:
        """What an owner stores, as exactly as it decides about so many bytes more."""
        known = self._known.get(owner)
        if known is None or not _settles(known, num_bytes, limit):
            async with self._measuring:
                known = self._known.get(owner)
                if known is None or not _settles(known, num_bytes, limit):
                    room_under = limit if makes_room else None
                    known = self._known[owner] = await self._measured(owner, num_bytes, room_under)
        return known

    async def _require_of_store(self, owner: str, num_bytes: int) -> None:
        limit = self._store_limit
        if limit is None:
            return
        store = self._store
        if store is None or not self._store_settles(store, owner, num_bytes, limit):
            async with self._measuring:
                store = self._store
                if store is None or not self._store_settles(store, owner, num_bytes, limit):
                    store = self._store = await self._measured_store(owner, num_bytes, limit)
        if not store.fits(num_bytes, limit):
            self._full_for = owner
            raise _store_full(store.total, num_bytes, limit)

    def _store_settles(self, store: _Known, owner: str, num_bytes: int, limit: int) -> bool:
        """The same of all owners: one for whom there is no room says nothing of another, who may have
        responses that can go."""
        if not store.fits(num_bytes, limit) and self._full_for != owner:
            return False
        return _settles(store, num_bytes, limit)

    async def _measured_store(self, owner: str, num_bytes: int, limit: int) -> _Known:
        """What all owners store, once the oldest responses of this one have gone where that makes room. Of
        the owner, `num_bytes` are reserved already."""
        if self._store is not None and not self._store.fits(num_bytes, limit):
            async for _ in self._storage.sweep(Limits(measured=True), now_us()):
                pass  # what was taken in since the last sweep counts as well
        total = await self._storage.num_bytes()
        if total + self._reserved_of_all + num_bytes > limit:
            own = (await self._storage.usage(owner)).total
            others = total - own + self._reserved_of_all + num_bytes - self._reserved[owner]
            await self._measured(owner, 0, limit - others)  # what others leave to this one
            self._known.pop(owner, None)
            total = await self._storage.num_bytes()
        return _Known(Usage(total, 0), time.monotonic(), lambda: self._reserved_of_all)

    async def _measured(self, owner: str, num_bytes: int, limit: int | None) -> _Known:
        """What an owner stores; with a limit, once the oldest responses have gone where that makes room."""
        usage = await stored_by(self._storage, owner)
        needed = num_bytes + self._reserved[owner]
        # Where more than the limit is held, nothing that could go would make enough room.
        if limit is not None and usage.total + needed > limit >= usage.held + needed:
            await self._sweep(owner, Limits(max_bytes=limit - needed))
            usage = await self._storage.usage(owner)
        return _Known(usage, time.monotonic(), lambda: self._reserved[owner])

    async def _sweep(self, owner: str, limits: Limits) -> None:
        async for went in self._storage.sweep(limits, now_us(), owner):
            if went.responses:
                self._made_room(owner, went)


class Reservation:
    """What is coming in of one request, by its owner."""

    def __init__(self, quota: Quota, owner: str, own: StoredBytes | None) -> None:
        self._quota, self._owner, self._own = quota, owner, own
        self._num_bytes = 0

    async def more(self, num_bytes: int) -> None:
        """Room for so many bytes more. ApiError 429 `insufficient_quota`."""
        await self._quota.reserve(self._owner, num_bytes, self._own)
        self._num_bytes += num_bytes

    def end(self, num_stored: int) -> None:
        """Nothing more comes in; so many of the bytes are stored."""
        self._quota.end_reservation(self._owner, self._num_bytes, num_stored)
        self._num_bytes = 0


def _settles(known: _Known, num_bytes: int, limit: int) -> bool:
    """Whether what is known decides about so many bytes more."""
    age_s = time.monotonic() - known.at
    if known.fits(num_bytes, limit):
        return age_s < FRESH_S
    # What came since it was measured may have made something old enough to go.
    return age_s < REFUSED_S and known.taken_in == 0


def _needed(num_bytes: int, total: int, limit: int) -> str:
    return f"This needs {num_bytes} bytes, and {max(0, limit - total)} of the {limit} bytes"


def _store_full(total: int, num_bytes: int, limit: int) -> ApiError:
    message = (
        f"{_needed(num_bytes, total, limit)} of all its users that this server may store are free. Delete "
        "what you no longer want, or ask its operator for room."
    )
    return insufficient_quota(429, message)


def _beyond_own(known: _Known, num_bytes: int, own: StoredBytes) -> ApiError:
    message = (
        f"{_needed(num_bytes, known.total, own.limit)} that may be stored are free: it is the limit "
        f"stored_bytes of {own.whose}. Delete what you no longer want, or ask an administrator for more."
    )
    return insufficient_quota(429, message)


def _used_up(known: _Known, num_bytes: int, limit: int) -> ApiError:
    message = (
        f"{_needed(num_bytes, known.total, limit)} that you may store are free. {known.usage.held} bytes are "
        "conversations, files, items that later responses need, and what is kept for repeats of requests: "
        "delete what you no longer want."
    )
    return insufficient_quota(429, message)
