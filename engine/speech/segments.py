"""What the times among a window's tokens say: where its segments are, and where the next window begins.

A Whisper model writes a time before and after each stretch of text. Two times in a row end one stretch and
begin the next. A window whose last stretch has a beginning and no end is read again from that beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

TIME_STEP_S = 0.02
"""Between two tokens of time."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens from index `first` up to `stop`, times left out by whoever shows them; seconds from the window's
    beginning."""

    first: int
    stop: int
    start: float
    end: float

    def within(self, duration: float) -> Stretch:
        """The same, cut where the sound ends."""
        return replace(self, start=min(self.start, duration), end=min(self.end, duration))


def stretches(ids: Sequence[int], first_time: int, duration: float) -> tuple[list[Stretch], float]:
    """The stretches of a window's tokens, and the second at which the next window begins.

    ids: what was decoded, without the end. first_time: the token of the time 0. duration: of the window's
    sound, in seconds.
    """
    cuts = [at for at in range(1, len(ids)) if ids[at - 1] >= first_time and ids[at] >= first_time]
    if not cuts:
        return _whole(ids, first_time, duration)
    # A lone time at the end says that nothing is spoken behind it.
    complete = len(ids) >= 2 and ids[-1] >= first_time and ids[-2] < first_time
    found, at = [], 0
    for stop in [*cuts, len(ids)] if complete else cuts:
        start, end = ids[at], ids[stop - 1]
        found.append(Stretch(at, stop, _seconds(start, first_time), _seconds(end, first_time)))
        at = stop
    return found, duration if complete else min(duration, _seconds(ids[cuts[-1] - 1], first_time))


def _whole(ids: Sequence[int], first_time: int, duration: float) -> tuple[list[Stretch], float]:
    """The window as one stretch, which ends where its last time says so."""
    times = [each for each in ids if each >= first_time]
    start = _seconds(times[0], first_time) if len(times) > 1 else 0.0
    end = _seconds(times[-1], first_time) if times and times[-1] > first_time else duration
    return [Stretch(0, len(ids), min(start, end), end)], duration


def _seconds(token: int, first_time: int) -> float:
    return max(0, token - first_time) * TIME_STEP_S
