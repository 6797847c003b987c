"""Fair shares of the work among owners: how much each was served, and which of its rows it only borrows.

Every owner has a virtual token counter: the tokens that were computed for it, divided by its weight. Whoever
has the lowest counter is next. Of owners that always have something to do, each gets tokens in proportion to
its weight; what one does not use goes to the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from engine.types import GenerateRequest

CACHED_TOKEN = 0.05
"""What a prompt token counts that was found in the prefix cache; one that is computed counts 1."""

MAX_KNOWN = 4096
"""Counters that are kept before those are dropped that no longer say anything."""


class Row(Protocol):
    """What is read of a running sequence."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def late(self) -> bool: ...


AnyRow = TypeVar("AnyRow", bound=Row)


class FairShare:
    """The virtual token counters of the owners that compete with each other."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    @property
    def is_contested(self) -> bool:
        """Whether there is more than one owner: otherwise nothing needs to be counted."""
        return len(self._served) > 1

    def served(self, owner: str) -> float:
        """An owner's counter: tokens divided by its weight."""
        return self._served.get(owner, 0.0)

    def join(self, owner: str, waiting: Collection[str]) -> None:
        """An owner that had nothing waiting has now; `waiting`: the owners that had.

        It starts no lower than the lowest of them, so that nobody saves up for later what it did not use.
        Where nobody waited, nobody was held up by another: it starts level with whoever was served most.
        """
        highest = max(self._served.values(), default=0.0)
        floor = min(map(self.served, waiting), default=highest)
        if len(self._served) >= MAX_KNOWN:
            # Those would be lifted to the floor anyway when they come back.
            self._served = {
                each: served for each, served in self._served.items() if served > floor or each in waiting
            }
        self._served[owner] = max(self.served(owner), floor)

    def charge(self, owner: str, cost: float, weight: float) -> None:
        """An owner was served: `cost` in tokens."""
        self._served[owner] = self.served(owner) + cost / weight

    def least(self, owners: Iterable[str]) -> str:
        """Of these owners, at least one, the one that is next: of equals, the first."""
        return min(owners, key=self.served)


def lender(running: Sequence[AnyRow], newcomer: GenerateRequest, share: FairShare) -> AnyRow | None:
    """The running sequence that makes room for a newcomer of the same service class, if any.

    An owner's share of what runs goes by its weight, and is one at least. One that has less takes a sequence
    from one that has more, until either has its share: so nobody waits until a crowd of another's has ended.
    running: the whole batch, in the order of admission.
    """
    held: dict[str, int] = {newcomer.owner: 0}
    weights: dict[str, float] = {newcomer.owner: newcomer.weight}
    for row in running:
        if row.request.priority == newcomer.priority:
            owner = row.request.owner
            held[owner] = held.get(owner, 0) + 1
            weights.setdefault(owner, row.request.weight)
    each = sum(held.values()) / sum(weights.values())

    def spare(owner: str) -> float:
        """How many more it has than its share."""
        return held[owner] - max(1.0, each * weights[owner])

    most = max(held, key=spare)
    if spare(newcomer.owner) > -1 or spare(most) < 1:
        return None
    if share.served(most) <= share.served(newcomer.owner):
        return None
    return next(
        (
            row
            for row in reversed(running)
            if row.request.owner == most and row.request.priority == newcomer.priority and not row.late
        ),
        None,
    )
