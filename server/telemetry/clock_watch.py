"""Watches whether the wall clock has come apart from this process's clock, which looked at it once."""

from __future__ import annotations

import logging

from server.clock import ahead_s

log = logging.getLogger("antiphon.clock")

APART_S = 30.0
"""Seconds between the two clocks that are told, and seconds of change since."""


class ClockWatch:
    """Warns once each time that the wall clock was set to another time than this process goes by."""

    def __init__(self) -> None:
        self._told = 0.0

    def look(self) -> None:
        """Look at both clocks. To be called about once a minute."""
        ahead = ahead_s()
        if abs(ahead - self._told) <= APART_S:
            return
        self._told = ahead
        if abs(ahead) <= APART_S:
            log.info("the wall clock and the clock of this process agree again")
            return
        log.warning(
            "the wall clock is %.0f s %s the clock of this process, which looked at it once, at its start. "
            "All times that are stored and shown, and all ages, go by the clock of the process: restart the "
            "server when the wall clock is right",
            *(abs(ahead), "ahead of" if ahead > 0 else "behind"),
        )
