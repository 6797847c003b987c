"""Watches whether other clocks have come apart from this process's clock: the wall clock, at which it looked
once, and that of a database which several servers share."""

from __future__ import annotations

import logging

from server.clock import APART_S, ahead_s

log = logging.getLogger("antiphon.clock")


class ClockWatch:
    """Warns once each time that another clock tells another time than this process goes by."""

    def __init__(self) -> None:
        self._told = dict.fromkeys((_WALL, _DATABASE), 0.0)

    def look(self) -> None:
        """Look at the wall clock. To be called about once a minute."""
        self._compare(_WALL, ahead_s())

    def heard(self, behind_s: float) -> None:
        """Say by how much the database's clock is behind that of this process."""
        self._compare(_DATABASE, -behind_s)

    def _compare(self, clock: str, ahead: float) -> None:
        if abs(ahead - self._told[clock]) <= APART_S:
            return
        self._told[clock] = ahead
        if abs(ahead) <= APART_S:
            log.info("%s and the clock of this process agree again", clock)
            return
        way = "ahead of" if ahead > 0 else "behind"
        log.warning(f"%s is %.0f s %s the clock of this process, {_ADVICE[clock]}", clock, abs(ahead), way)


_WALL, _DATABASE = "the wall clock", "the database's clock"
_ADVICE = {
    _WALL: "which looked at it once, at its start. All times that are stored and shown, and all ages, go by "
    "the clock of the process: restart the server when the wall clock is right",
    _DATABASE: "by which this server stores and shows times. Nothing is removed for its age before both say "
    "that it is time. Set right the clock that is wrong, and restart the server if it was this machine's",
}
