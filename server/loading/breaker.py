"""Whether a model is asked at all: one that fails again and again is left alone for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES = 3
"""In a row, after which a model is left alone."""

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 120.0
"""For how long, twice as long every time."""


class Breaker:
    """Counts how a model answers. While it is open nobody is to ask; after the pause one request may try, and
    its end closes the breaker, or opens it for longer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until: float | None = None
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether it is to be left alone now. Whoever asks and is told that it is not may try it; where it
        was open, nobody else does within the next pause."""
        if self._until is None:
            return False
        if self._clock() < self._until:
            return True
        self._until = self._clock() + self._pause_s
        return False

    @property
    def shown_open(self) -> bool:
        """The same for whoever only looks."""
        return self._until is not None

    @property
    def retry_after_s(self) -> int:
        """Seconds until somebody may try."""
        return 1 if self._until is None else max(1, round(self._until - self._clock()))

    def succeeded(self) -> None:
        """It has answered."""
        self._failures, self._until, self._pause_s = 0, None, FIRST_PAUSE_S

    def failed(self) -> None:
        """It has not, and that was no fault of the request."""
        self._failures += 1
        if self._until is not None:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        elif self._failures < FAILURES:
            return
        self._until = self._clock() + self._pause_s
        self.num_opened += 1
