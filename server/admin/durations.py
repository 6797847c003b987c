"""Durations as an operator writes them on the command line: `90d`, `12h`, `30m`, `45s`."""

from __future__ import annotations

import re

from server.admin.database_access import AdminError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"([0-9]{1,9})([smhdw])")

MAX_S = 100 * 366 * 86400
"""The longest duration, in seconds: a hundred years."""


def seconds_of(duration: str) -> int:
    """A duration in seconds. Raises AdminError."""
    found = _DURATION.fullmatch(duration)
    if found is None or int(found[1]) * _UNITS[found[2]] > MAX_S:
        raise AdminError(f"{duration!r} is no duration: write 90d, 12h, 30m or 45s")
    return int(found[1]) * _UNITS[found[2]]
