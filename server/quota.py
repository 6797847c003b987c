"""Checks, before a write, that its owner stays within the limit on stored bytes.

Measuring takes a query, so a measurement is used for up to a minute and each process adds what it takes in
meanwhile. Writes by other processes on the same database are therefore noticed at most a minute late. When
the limit would be exceeded, the owner's oldest responses are deleted if that makes enough room; otherwise the
write is refused with a 429.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from server.clock import now_us
from server.errors import ApiError
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
    """The bytes of all owners. max_bytes: of each of them; None: no limit but those of their own."""

    def __init__(self, storage: Storage, max_bytes: int | None) -> None:
        self._storage = storage
        self._limit = max_bytes
        self._known: dict[str, _Known] = {}
        self._measuring = asyncio.Lock()  # one at a time: whoever waits for it finds what it asks for done

    async def require(self, owner: str, num_bytes: int, own_limit: int | None = None) -> None:
        """Count `num_bytes` that are about to be stored. The owner's oldest responses go where that makes
        room for them; where it does not, raises ApiError 429 `insufficient_quota`. own_limit: of the owner or
        the key, in bytes, which holds where it is the lower one."""
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

    async def _measured(self, owner: str, num_bytes: int, limit: int) -> _Known:
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


def _used_up(usage: Usage, limit: int) -> ApiError:
    message = (
        f"You store {usage.total} bytes, and may store {limit}. {usage.held} of them are conversations and "
        "items that later responses need: delete what you no longer want."
    )
    headers = {"x-should-retry": "false"}  # it does not get better by waiting
    return ApiError(429, message, code="insufficient_quota", type="insufficient_quota", headers=headers)
