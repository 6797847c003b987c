"""The generic cell rate algorithm: a rate limit without windows, as arithmetic on one number.

The state of a limit is its *theoretical arrival time*: the moment at which everything that was taken will
have come back. It lies in the past where nothing is owed. All times are whole nanoseconds, so that counting
often loses nothing by rounding, and nothing here reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """`limit` units a period. All of them may be taken at once; they come back evenly, one after another.

    period: in nanoseconds.
    """

    limit: int
    period: int

    def wait(self, arrival: int, units: int, now: int) -> int | None:
        """How long until so many units can be taken: 0 at once, None never, because the limit is lower."""
        if units > self.limit:
            return None
        return max(0, max(arrival, now) + self._time(units) - now - self.period)

    def charge(self, arrival: int, units: int, now: int) -> int:
        """The state once so many units are taken, whether or not there were so many. Fewer than 0 are given
        back; what has come back already by itself is not given back again."""
        began = max(arrival, now)
        return began + self._time(units) if units >= 0 else began - self._time(-units)

    def remaining(self, arrival: int, now: int) -> int:
        """How many units can be taken at once."""
        owed = max(0, arrival - now)
        return max(0, (self.period - owed) * self.limit // self.period)

    def reset(self, arrival: int, now: int) -> int:
        """How long until all units can be taken at once."""
        return max(0, arrival - now)

    def _time(self, units: int) -> int:
        """In how much time so many units come back."""
        return units * self.period // self.limit
