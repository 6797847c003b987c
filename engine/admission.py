"""Decides which requests may wait for the engine, and tells the others when to come back.

A caller takes a place in the engine's queue before it promises its client anything, and gives the place back
in every case. The engine itself refuses nobody who holds a place. How soon another place becomes free is
estimated from the rate at which recent requests ended.

One owner cannot keep the others out: where as many wait as may, an owner whose requests hold less than its
share of the places still gets one, and those that hold their share are refused until it has become emptier.
The same holds for the tokens of the prompts that wait, which are known a little later than that there is one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.types import QueueFull

LONGEST_S = 120
"""The longest wait that is told, in seconds: the official SDKs give up where they are told more."""

HALF_LIFE_S = 20.0
"""After so many seconds of work, what was measured counts half."""


class Place:
    """A place among those that are generated for or wait; it is given back once, by `leave` or at the end of
    a `with`."""

    __slots__ = ("_admission", "_begun", "_left", "_on_begin", "num_tokens", "owner", "promised", "taken_at")

    def __init__(
        self,
        admission: Admission,
        owner: str,
        taken_at: float,
        *,
        promised: bool,
        on_begin: Callable[[], object] = lambda: None,
    ) -> None:
        self._admission = admission
        self._on_begin = on_begin
        self.owner = owner
        self.promised = promised
        self.num_tokens = 0  # of its prompt, once that is known
        self._begun = False
        self._left = False
        self.taken_at = taken_at

    def bring(self, num_tokens: int) -> None:
        """Count the prompt, once it is known how long it is; a second time does nothing. Raises QueueFull
        where more tokens would wait than may; the place is still to be given back."""
        if not (self._begun or self._left or self.num_tokens):
            self._admission._bring(self, num_tokens)

    def begin(self) -> None:
        """Note that the engine has begun with the request: its place no longer waits. Idempotent."""
        if not (self._begun or self._left):
            self._begun = True
            self._admission._begun(self)
            self._on_begin()

    @property
    def has_begun(self) -> bool:
        """Whether the engine had begun with the request before the place was given back."""
        return self._begun

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the place back; again it does nothing."""
        if not self._left:
            self._left = True
            self._admission._left(self, begun=self._begun)


class Admission:
    """The places of one engine. All methods are called on one asyncio loop.

    max_running: how many are generated for at once; 0 where that is unknown, and then those that wait are all
    that counts. max_waiting: how many more may wait; with those that owners get who hold less than their
    share of these, it may become twice as many. max_waiting_tokens: the same of the tokens of their prompts;
    None: as many as they have. A prompt that is longer may wait alone.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        max_waiting_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._num_elsewhere = 0  # that the engine runs for others, who have places of their own
        self._places: dict[Place, None] = {}  # oldest first
        self._num_running = 0
        self._waiting: dict[str, int] = {}  # how many of each owner's wait, where any do,
        self._weights: dict[str, float] = {}  # and its weight
        self._tokens: dict[str, int] = {}  # the tokens of its prompts that wait
        self._measured_at = clock()
        self._busy_s = 0.0  # seconds in which it was busy, older ones counting less,
        self._ended = 0.0  # and how many ended in them

    def enter(
        self,
        owner: str = "",
        weight: float = 1.0,
        *,
        promised: bool = False,
        on_begin: Callable[[], object] = lambda: None,
    ) -> Place:
        """Take a place. Raises QueueFull when as many wait as may, with the wait that is to be expected.

        owner, weight: as in `GenerateRequest`. promised: somebody was told already that this will be done, as
        with what goes on after a crash: it is never refused. on_begin: called when the engine begins with it.
        """
        if not promised:
            self.require_room(owner, weight)
        self._measure()
        place = Place(self, owner, self._clock(), promised=promised, on_begin=on_begin)
        self._places[place] = None
        self._waiting[owner] = self._waiting.get(owner, 0) + 1
        self._weights[owner] = weight
        return place

    def require_room(self, owner: str = "", weight: float = 1.0) -> None:
        """Raise QueueFull where the owner's next one would be refused, with the wait that is to be
        expected."""
        if self.is_full and not self._is_owed(owner, weight):
            raise QueueFull(f"{self.num_waiting} requests wait already", retry_after_s=self.wait_s())

    @property
    def max_running(self) -> int:
        """How many are generated for at once; 0 where that is unknown."""
        return self._max_running

    def note_elsewhere(self, number: int) -> None:
        """So many requests run that have places in the queues of other processes before the same engine."""
        self._measure()
        self._num_elsewhere = number

    @property
    def is_full(self) -> bool:
        """Whether as many wait as may: only owners that hold less than their share get another place."""
        return self._num_beyond >= self._max_waiting

    @property
    def num_places(self) -> int:
        """Places that are taken."""
        return len(self._places)

    @property
    def num_running(self) -> int:
        """Places that it has begun with."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Places that the engine has not begun with."""
        return len(self._places) - self._num_running

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts of these, as far as they are known."""
        return sum(self._tokens.values())

    def wait_s(self, num_ahead: int = 0) -> int:
        """Seconds, 1 to LONGEST_S, until those that wait now and `num_ahead` others have been begun with, at
        the rate at which requests end while the engine is busy."""
        self._measure()
        ahead = self.num_waiting + num_ahead
        if self._ended >= 1.0:
            seconds = ahead * self._busy_s / self._ended
        else:  # nothing has ended yet: each takes at least as long as the oldest has by now
            oldest = next(iter(self._places), None)
            elapsed = 0.0 if oldest is None else self._clock() - oldest.taken_at
            seconds = ahead * elapsed / max(1, self._num_running)
        return max(1, min(LONGEST_S, math.ceil(seconds)))

    # -- for places ------------------------------------------------------------------------------------------

    def _bring(self, place: Place, num_tokens: int) -> None:
        if not place.promised and not self._has_room_for(num_tokens, place.owner):
            message = f"{self.num_waiting_tokens} tokens of prompts wait already"
            raise QueueFull(message, retry_after_s=self.wait_s())
        place.num_tokens = num_tokens
        self._tokens[place.owner] = self._tokens.get(place.owner, 0) + num_tokens

    def _begun(self, place: Place) -> None:
        self._measure()
        self._num_running += 1
        self._waits_no_more(place)

    def _left(self, place: Place, *, begun: bool) -> None:
        self._measure()
        if begun and self._is_busy:
            self._ended += 1.0
        del self._places[place]
        self._num_running -= begun
        if not begun:
            self._waits_no_more(place)

    def _waits_no_more(self, place: Place) -> None:
        self._waiting[place.owner] -= 1
        if place.num_tokens:
            self._tokens[place.owner] -= place.num_tokens
        if not self._waiting[place.owner]:
            del self._waiting[place.owner], self._weights[place.owner]
            self._tokens.pop(place.owner, None)

    def _is_owed(self, owner: str, weight: float) -> bool:
        """Whether an owner holds less than its share of the places in which requests wait."""
        if self._num_beyond >= 2 * self._max_waiting:
            return False
        return self._waiting.get(owner, 0) < self._max_waiting * self._share(owner, weight)

    def _has_room_for(self, num_tokens: int, owner: str) -> bool:
        """Whether the prompt of an owner's place may wait, too: where nothing else does, within the bound, or
        within the owner's share of it."""
        most, there = self._max_waiting_tokens, self.num_waiting_tokens
        if most is None or self._num_beyond <= 0 or not there or there + num_tokens <= most:
            return True
        own = self._tokens.get(owner, 0) + num_tokens
        return there + num_tokens <= 2 * most and own <= most * self._share(owner, self._weights[owner])

    def _share(self, owner: str, weight: float) -> float:
        """An owner's share among those whose requests wait."""
        return weight / sum((self._weights | {owner: weight}).values())

    @property
    def _num_beyond(self) -> int:
        """How many wait that the engine has no room for at this moment."""
        return self.num_waiting - max(0, self._max_running - self._num_running - self._num_elsewhere)

    @property
    def _is_busy(self) -> bool:
        """Whether requests end as fast as they can: whoever comes now has to wait for one of them."""
        if not self._max_running:
            return self.num_waiting > 0
        return len(self._places) + self._num_elsewhere >= self._max_running

    def _measure(self) -> None:
        """Count the time since the last look, which comes before every change, if the engine was busy in
        it."""
        now = self._clock()
        if self._is_busy:
            passed = now - self._measured_at
            faded = 0.5 ** (passed / HALF_LIFE_S)
            self._ended *= faded
            self._busy_s = self._busy_s * faded + passed
        self._measured_at = now
