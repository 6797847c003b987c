"""Checks, before a write, that its owner, and all owners together, stay within the limits on stored bytes.

Measuring takes a query, so a measurement is used for up to a minute and each process adds what it takes in
meanwhile. Writes by other processes on the same database are therefore noticed at most a minute late. When
a limit would be exceeded, the oldest responses of the owner who writes are deleted if that makes enough room;
otherwise the write is refused with a 429. Nobody loses anything to what others store.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from server.clock import now_us
from server.errors import ApiError, insufficient_quota
from storage import Limits, Storage, Usage

FRESH_S = 60.0
"""How long what was measured is built upon."""

REFUSED_S = 1.0
"""How long an owner whose quota is used up is refused without another look."""


@dataclass(slots=True)
class _Known:
    """What an owner stores: as it was measured at `at` (monotonic seconds), and what was taken in since."""

    usage: Usage
    at: float
    taken_in: int = 0

    def fits(self, num_bytes: int, limit: int) -> bool:
        return self.usage.total + self.taken_in + num_bytes <= limit


class Quota:
    """The bytes of all owners. max_bytes: of each of them; None: no limit but those of their own.
    max_store_bytes: of all of them together."""

    def __init__(self, storage: Storage, max_bytes: int | None, max_store_bytes: int | None = None) -> None:
        self._storage = storage
        self._limit = max_bytes
        self._store_limit = max_store_bytes
        self._known: dict[str, _Known] = {}
        self._store: _Known | None = None  # of all owners; what is held of it is not known
        self._full_for: str | None = None  # the owner who was refused last
        self._measuring = asyncio.Lock()  # one at a time: whoever waits for it finds what it asks for done

    async def require(self, owner: str, num_bytes: int, own_limit: int | None = None) -> None:
        """Count `num_bytes` that are about to be stored. The owner's oldest responses go where that makes
        room for them; where it does not, raises ApiError 429 `insufficient_quota`. own_limit: of the owner or
        the key, in bytes, which holds where it is the lower one."""
        await self._require_of_owner(owner, num_bytes, own_limit)
        await self._require_of_store(owner, num_bytes)

    async def _require_of_owner(self, owner: str, num_bytes: int, own_limit: int | None) -> None:
        limit = min((each for each in (self._limit, own_limit) if each is not None), default=None)
        if limit is None:
            return
        known = self._known.get(owner)
        if known is None or not _settles(known, num_bytes, limit):
            async with self._measuring:
                known = self._known.get(owner)
                if known is None or not _settles(known, num_bytes, limit):
                    known = self._known[owner] = await self._measured(owner, num_bytes, limit)
        if not known.fits(num_bytes, limit):
            raise _used_up(known.usage, limit)
        known.taken_in += num_bytes

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
            raise _store_full(store.usage.total, limit)
        store.taken_in += num_bytes

    def _store_settles(self, store: _Known, owner: str, num_bytes: int, limit: int) -> bool:
        """The same of all owners: one for whom there is no room says nothing of another, who may have
        responses that can go."""
        if not store.fits(num_bytes, limit) and self._full_for != owner:
            return False
        return _settles(store, num_bytes, limit)

    async def _measured_store(self, owner: str, num_bytes: int, limit: int) -> _Known:
        """What all owners store, once the oldest responses of this one have gone where that makes room."""
        if self._store is not None and not self._store.fits(num_bytes, limit):
            async for _ in self._storage.sweep(Limits(measured=True), now_us()):
                pass  # what was taken in since the last sweep counts as well
        total = await self._storage.num_bytes()
        if total + num_bytes > limit:
            own = (await self._storage.usage(owner)).total
            await self._measured(owner, num_bytes, limit - (total - own))  # what others leave to this one
            self._known.pop(owner, None)
            total = await self._storage.num_bytes()
        return _Known(Usage(total, 0), time.monotonic())

    async def _measured(self, owner: str, num_bytes: int, limit: int) -> _Known:
        """What an owner stores, once the oldest responses have gone where that makes room."""
        usage = await self._storage.usage(owner)
        if usage.held + num_bytes <= limit:  # else nothing that could go would make enough room
            async for _ in self._storage.sweep(Limits(max_bytes=limit - num_bytes), now_us(), owner):
                pass
            usage = await self._storage.usage(owner)
        return _Known(usage, time.monotonic())


def _settles(known: _Known, num_bytes: int, limit: int) -> bool:
    """Whether what is known decides about so many bytes more."""
    age_s = time.monotonic() - known.at
    if known.fits(num_bytes, limit):
        return age_s < FRESH_S
    # What came since it was measured may have made something old enough to go.
    return age_s < REFUSED_S and known.taken_in == 0


def _store_full(total: int, limit: int) -> ApiError:
    message = (
        f"This server stores {total} bytes of all its users, and may store {limit}. Delete what you no "
        "longer want, or ask its operator for room."
    )
    return insufficient_quota(429, message)


def _used_up(usage: Usage, limit: int) -> ApiError:
    message = (
        f"You store {usage.total} bytes, and may store {limit}. {usage.held} of them are conversations and "
        "items that later responses need: delete what you no longer want."
    )
    return insufficient_quota(429, message)
