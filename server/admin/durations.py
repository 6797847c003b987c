"""Durations and days as an operator writes them: `90d`, `12h`, `30m`, `45s`, `2027-01-31`."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from server.admin.database_access import AdminError
from server.clock import now_us
from server.settings import UNITS_S

_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_DURATION = re.compile(r"([0-9]{1,9})([smhdw])")

MAX_S = 100 * 366 * 86400
"""The longest duration, in seconds: a hundred years."""


def seconds_of(duration: str) -> int:
    """A duration in seconds. Raises AdminError."""
    found = _DURATION.fullmatch(duration)
    if found is None or int(found[1]) * UNITS_S[found[2]] > MAX_S:
        raise AdminError(f"{duration!r} is no duration: write 90d, 12h, 30m or 45s")
    return int(found[1]) * UNITS_S[found[2]]


def seconds_until(written: str) -> int:
    """How far ahead a duration, or the beginning of a day of UTC, is, in seconds. Raises AdminError."""
    if _DAY.fullmatch(written) is None:
        if _DURATION.fullmatch(written) is None:
            raise AdminError(f"{written!r} is no time ahead: write 90d, 12h, 2027-01-31 or never")
        return seconds_of(written)
    try:
        at = datetime.fromisoformat(written).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise AdminError(f"{written!r} is no day of the calendar") from None
    ahead = int(at) - now_us() // 1_000_000
    if not 0 < ahead <= MAX_S:
        raise AdminError(f"{written!r} is not in the next hundred years")
    return ahead
