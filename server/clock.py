"""The clock: one source of every time that is stored or shown.

Owns the unit, microseconds since the epoch. Time that is only measured (timeouts, durations) is the event
loop's and never comes from here, because this clock may jump.
"""

from __future__ import annotations

import time


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000
