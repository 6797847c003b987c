"""The clock: one source of every time that is stored or shown.

Owns the unit, microseconds since the epoch; rates of limits count nanoseconds. Time that is only measured
(timeouts, durations) is the event loop's and never comes from here.
"""

from __future__ import annotations

import time

# The wall clock is looked at once: one that is set forward or back while the server runs must end no deadline
# early, and must not put what comes later in front of what came before. A suspended machine's time counts.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_START_NS = time.time_ns() - time.clock_gettime_ns(_STEADY)


APART_S = 30.0
"""Seconds between two clocks that are told, and seconds of change since."""


def now_us() -> int:
    """Microseconds since the epoch; never goes back."""
    return now_ns() // 1000


def ahead_s() -> float:
    """By how many seconds the wall clock, as it is now, is ahead of this one; negative where it is behind."""
    return (time.time_ns() - now_ns()) / 1e9


def ahead_of_s(other: int, asked: int, heard: int) -> float:
    """By how many seconds at least this clock is ahead of another, which said `other` between `asked` and
    `heard` by this one; negative where it is behind, 0.0 where they may agree."""
    return (max(asked - other, 0) - max(other - heard, 0)) / 1e6


def has_come(at: int) -> bool:
    """Whether it is that time by this clock or by the wall clock: for ends that a wrong clock must not put
    off."""
    return max(now_us(), time.time_ns() // 1000) >= at


def now_ns() -> int:
    """Nanoseconds since the epoch; never goes back."""
    return _START_NS + time.clock_gettime_ns(_STEADY)
