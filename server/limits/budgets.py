"""Budgets: how much an owner or a key may use in all, of tokens or of money. What is used never comes back.

A budget is compared with the sums of usage, which are exact. They are read at most once a second for each
owner and key, and only the latest hours of them: what is older is read every few minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from server.clock import now_us
from server.errors import ApiError, insufficient_quota
from storage import Counts, UsageFilter

if TYPE_CHECKING:
    from storage import Storage

Cost = Callable[[str, Counts], Decimal]
"""From a model and what was used of it to what that costs."""

PAID_KINDS = ("completions", "embeddings")
"""Kinds of usage that count tokens: they are paid for, and budgets are spent on them."""

FRESH_S = 1.0
"""How long a reading is believed."""

BEFORE_S = 600.0
"""How long the reading of what lies more than an hour back is believed."""

HOUR = 3600 * 1_000_000

LATEST = 7 * 24 * HOUR
"""So long ago the answers may be that tell how long others become, in microseconds."""

ALL_TIME = 1 << 62
"""A width of buckets, in microseconds, of which one holds everything."""

MAX_READINGS = 10_000


@dataclass(frozen=True, slots=True)
class Used:
    """What was used in all. tokens: of prompts, without those that the engine had cached, and of answers."""

    tokens: int = 0
    cost: Decimal = Decimal(0)

    def __add__(self, other: Used) -> Used:
        return Used(self.tokens + other.tokens, self.cost + other.cost)

    def as_json(self) -> dict[str, int | float]:
        """By the names of the budgets."""
        return {"total_tokens": self.tokens, "total_cost": float(self.cost)}


async def used_by(
    storage: Storage,
    cost: Cost,
    owner: str,
    key_ids: tuple[str, ...] = (),
    *,
    since: int = 0,
    before: int = ALL_TIME,
) -> Used:
    """What an owner used, by these keys or by all, from `since` to before `before`, in microseconds."""
    found = Used()
    for kind in PAID_KINDS:
        wanted = UsageFilter(kind, since, before, owners=(owner,), key_ids=key_ids)
        for one in await storage.usage_sums(wanted, ("model",), ALL_TIME):
            counts = one.counts
            tokens = counts.input_tokens - counts.cached_tokens + counts.output_tokens
            found += Used(tokens, cost(str(one.by["model"]), counts))
    return found


@dataclass(slots=True)
class _Reading:
    """What was used by `border`, in microseconds, as it was known at `border_at`, and in all, as it was known
    at `at`; both in seconds of the monotonic clock."""

    key_ids: tuple[str, ...]
    border: int
    before: Used
    border_at: float
    total: Used
    at: float


class Budgets:
    """The budgets of all owners and keys, as this process applies them."""

    def __init__(self, storage: Storage, cost: Cost, currency: str) -> None:
        """currency: that of the costs, such as usd."""
        self._storage = storage
        self._currency = currency.upper()
        self._cost = cost
        self._readings: dict[tuple[str, str | None], _Reading] = {}
        self._reading: dict[tuple[str, str | None], asyncio.Task[_Reading]] = {}

    async def mean_answer(self, owner: str, least: int) -> int | None:
        """How many tokens the answers to an owner's requests of the last days had in the mean, rounded up;
        None where there were fewer than `least`. Raises StorageUnavailable."""
        wanted = UsageFilter("completions", now_us() - LATEST, ALL_TIME, owners=(owner,))
        counts = sum((each.counts for each in await self._storage.usage_sums(wanted, (), ALL_TIME)), Counts())
        return -(-counts.output_tokens // counts.requests) if counts.requests >= least else None

    async def require(
        self, owner: str, key_id: str | None, tokens: int | None, cost: float | None, whose: str
    ) -> tuple[str, ApiError] | None:
        """None while the budgets of an owner, or of one key of it, are not spent; else the limit's name and
        the error 403. tokens, cost: the budgets. whose: they are, for the message. Raises
        StorageUnavailable."""
        used = (await self._read(owner, key_id)).total
        has_used = f"{whose[:1].upper()}{whose[1:]} has used"
        if tokens is not None and used.tokens >= tokens:
            return "total_tokens", _spent(
                f"{has_used} {used.tokens} tokens of {tokens}, the limit total_tokens"
            )
        if cost is not None and used.cost >= Decimal(str(cost)):
            return "total_cost", _spent(
                f"{has_used} {used.cost:.4f} {self._currency} of {cost:g}, the limit total_cost"
            )
        return None

    async def _read(self, owner: str, key_id: str | None) -> _Reading:
        """A fresh reading. Requests that come while it is made wait for that one."""
        name = (owner, key_id)
        known = self._readings.get(name)
        if known is not None and time.monotonic() - known.at < FRESH_S:
            return known
        task = self._reading.get(name)
        if task is None:
            task = self._reading[name] = asyncio.create_task(self._make(owner, key_id, known))
            task.add_done_callback(lambda task: self._made(name, task))
        return await asyncio.shield(task)

    def _made(self, name: tuple[str, str | None], task: asyncio.Task[_Reading]) -> None:
        del self._reading[name]
        if not task.cancelled() and task.exception() is None:
            if len(self._readings) >= MAX_READINGS:
                self._readings.clear()
            self._readings[name] = task.result()

    async def _make(self, owner: str, key_id: str | None, known: _Reading | None) -> _Reading:
        at = time.monotonic()
        if known is None or at - known.border_at >= BEFORE_S:
            key_ids = () if key_id is None else await self._storage.key_family(key_id)
            now = now_us()
            # An hour back, so that what is counted late is not on the wrong side.
            border = now - now % HOUR - HOUR
            before = await used_by(self._storage, self._cost, owner, key_ids, before=border)
            known = _Reading(key_ids, border, before, at, before, at)
        latest = await used_by(self._storage, self._cost, owner, known.key_ids, since=known.border)
        return _Reading(known.key_ids, known.border, known.before, known.border_at, known.before + latest, at)


def _spent(told: str) -> ApiError:
    message = f"{told}. What is used of this budget does not come back: ask an administrator for more."
    return insufficient_quota(403, message)
