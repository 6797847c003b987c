"""Fair shares of the work among owners: how much each was served, and which of its rows it only borrows.

Every owner has a virtual token counter: the tokens that were computed for it, divided by its weight. Whoever
has the lowest counter is next. Of owners that always have something to do, each gets tokens in proportion to
its weight; what one does not use goes to the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

MAX_KNOWN = 4096
"""Counters that are kept before those are dropped that no longer say anything."""


class FairShare:
    """The virtual token counters of the owners that compete with each other."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._held: dict[str, int] = {}  # how many sequences of each owner run, where any do,
        self._weights: dict[str, float] = {}  # and its weight
        self._num_held = 0
        self._total_weight = 0.0

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
        """Of these owners, who have all joined, the one that is next: of equals, the first."""
        return min(owners, key=self._served.__getitem__)

    # -- places in the batch ---------------------------------------------------------------------------------

    def begin(self, owner: str, weight: float) -> None:
        """One more sequence of an owner runs."""
        self._held[owner] = self._held.get(owner, 0) + 1
        self._change_weight(owner, weight)

    def end(self, owner: str) -> None:
        """One of them runs no more."""
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
            self._change_weight(owner, 0.0)

    def lender(self, newcomer: str, weight: float) -> str | None:
        """The owner that makes room for a newcomer's sequence, if any does.

        An owner's share of what runs goes by its weight, and is one at least. One that has less takes a place
        from the one that has most more than its share, if that one has been served more as well, until either
        has its share: so nobody waits until a crowd of another's has ended.
        """
        held = self._held.get(newcomer, 0)
        total = self._total_weight + (0.0 if held else weight)
        each = self._num_held / total
        if not self._held or held + 1 > max(1.0, each * weight):
            return None

        def spare(owner: str) -> float:
            return self._held[owner] - max(1.0, each * self._weights[owner])

        most = max(self._held, key=spare)
        return most if spare(most) >= 1 and self.served(most) > self.served(newcomer) else None

    def _change_weight(self, owner: str, weight: float) -> None:
        if weight:
            self._weights[owner] = weight
        else:
            del self._weights[owner]
        self._num_held = sum(self._held.values())
        self._total_weight = sum(self._weights.values())
