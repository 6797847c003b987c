"""Keeps the newest events of one live run in memory and wakes the readers that wait for more.

The memory is bounded (`TAIL_BYTES`). A reader that has fallen further behind reads the missing events from
the stored log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from server.errors import ApiError, to_api_error
from server.sse_frame import event_type
from storage import ECHO_MARK, TERMINAL_STATUSES, Record, RunGlance, StorageUnavailable

TAIL_BYTES = 1 << 20
"""How much a reader may lag behind the newest event before it has to go back to the log."""

TERMINAL_EVENTS = frozenset(f"response.{status}".encode() for status in TERMINAL_STATUSES)
"""The events that end a stream; exactly one does, last."""


@dataclass(frozen=True, slots=True)
class Events:
    """Consecutive events of one run. Whoever sends them frames them: this is the JSON, encoded once.

    bodies: one JSON object each, on one line, its `type` and `sequence_number` first.
    """

    first_seq: int
    bodies: tuple[bytes, ...]
    terminal: bool  # the last of them ends the stream

    @property
    def last_seq(self) -> int:
        """The sequence number of the last event."""
        return self.first_seq + len(self.bodies) - 1

    @property
    def size(self) -> int:
        """Bytes of all bodies."""
        return sum(map(len, self.bodies))

    @classmethod
    def of(cls, record: Record, echo: bytes) -> Events:
        """A record's events, with the response's echo in its place."""
        bodies = record.events.split(b"\n")
        if ECHO_MARK in record.events:
            bodies = [body.replace(ECHO_MARK, echo) for body in bodies]
        return cls(record.first_seq, tuple(bodies), event_type(bodies[-1]) in TERMINAL_EVENTS)

    def after(self, seq: int) -> Events:
        """Only the events with a sequence number above `seq`."""
        skip = seq + 1 - self.first_seq
        return self if skip <= 0 else Events(seq + 1, self.bodies[skip:], self.terminal)


class Channel:
    """Where one run's events appear; it lives while the run does or somebody reads.

    echo: the response's immutable fields, as the JSON members to splice into its events. next_seq: the number
    of the next event to appear, None while nobody here writes the run: then the log has its events, and
    `glance` tells how it stood when somebody last looked. over: it is in flight nowhere any more. num_rests:
    how often it was left to rest: ended, parked or given up. stalled: set while what it has written cannot be
    stored, so that nobody knows when its end will appear. mended: set while that is not so.
    """

    def __init__(self, response_id: str, echo: bytes, *, stored: bool, next_seq: int | None) -> None:
        self.response_id = response_id
        self.echo = echo
        self.stored = stored
        self.next_seq = next_seq
        self.glance: RunGlance | None = None
        self.over = False
        self.num_rests = 0
        self.stalled = asyncio.Event()
        self.mended = asyncio.Event()
        self.mended.set()
        self._why = StorageUnavailable()
        self.last: Events | None = None
        self.cut = False  # the streams stop without a terminal event; their readers may come back
        self.removed = False  # nothing is left of the response that they could come back to
        self.readers: set[asyncio.Event] = set()
        self._tail: deque[Events] = deque()
        self._tail_bytes = 0

    @property
    def ended(self) -> bool:
        """True once the terminal event has appeared."""
        return self.last is not None and self.last.terminal

    def publish(self, record: Record) -> None:
        """Show a record that is durable (or that never will be, with store=false)."""
        self.last = events = Events.of(record, self.echo)
        self.next_seq = events.last_seq + 1
        self._tail.append(events)
        self._tail_bytes += events.size
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            self._tail_bytes -= self._tail.popleft().size
        self._wake()

    def rest(self) -> None:
        """Nobody here writes the run for now: more than its events may have changed, and the log is where
        others may go on."""
        self.mend()
        if self.stored and not self.ended:
            self.next_seq = self.glance = None
            self._tail.clear()
            self._tail_bytes = 0
        self.num_rests += 1
        self._wake()

    def see(self, glance: RunGlance | None) -> None:
        """How the run stands elsewhere; None: it is in flight no more, so its log is whole, or erased."""
        if self.next_seq is not None:
            return  # by now it is written here
        before, self.glance = self.glance, glance
        if glance is None:
            self.over = True
        if glance is None or before is None or glance.state != before.state:
            self.num_rests += 1
        if glance is None or glance != before:
            self._wake()

    def stall(self, why: StorageUnavailable) -> None:
        """What was written has not been stored for a while, and `why` says that it may take longer."""
        self._why = why
        self.mended.clear()
        self.stalled.set()
        self._wake()

    def mend(self) -> None:
        """What was written is stored, or is not for this process to store any more."""
        self.stalled.clear()
        self.mended.set()

    def stall_error(self, *, begun: bool = True) -> ApiError:
        """503: what somebody waits for cannot be stored now. begun: that was begun, so it is not undone."""
        error = to_api_error(self._why)
        if begun:
            found = "a GET, or a repeat with its Idempotency-Key, finds it"
            then = found if self.stored else "its conversation gets it"
            error.message += f" Response '{self.response_id}' was begun, and goes on then: {then}."
        return error

    def stop(self) -> None:
        """End all streams without a terminal event."""
        self.cut = True
        self._wake()

    def _wake(self) -> None:
        for changed in self.readers:
            changed.set()

    def covers(self, after: int) -> bool:
        """True when everything above `after` that is known to have appeared is still in the tail."""
        oldest = self._tail[0].first_seq if self._tail else self.next_seq
        if oldest is None and self.glance is not None:
            oldest = self.glance.next_seq
        return oldest is not None and after + 1 >= oldest

    def read(self, after: int) -> Events | None:
        """Everything in the tail above `after`, joined; None when there is nothing."""
        if self.next_seq == after + 1:
            return None
        parts: list[Events] = []
        for events in reversed(self._tail):  # a reader wants the newest few of many
            if events.last_seq <= after:
                break
            parts.append(events.after(after))
            if events.first_seq <= after + 1:
                break
        parts.reverse()
        if len(parts) < 2:
            return parts[0] if parts else None
        bodies = tuple(body for part in parts for body in part.bodies)
        return Events(parts[0].first_seq, bodies, parts[-1].terminal)
