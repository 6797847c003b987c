"""The channel of a live run: the newest frames in memory, and the readers that wait for more.

Owns the tail (bounded; what falls off is read from the log) and waking. Refuses to know who writes, what an
event means, and how a reader sends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from server.sse_frame import frame
from storage import ECHO_MARK, Record, RunGlance

TAIL_BYTES = 1 << 20
"""How much a reader may lag behind the newest frame before it has to go back to the log."""

TERMINAL_EVENTS = frozenset(
    f"response.{status}".encode() for status in ("completed", "incomplete", "failed", "cancelled")
)
"""The events that end a stream; exactly one does, last."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Consecutive events of one run as SSE bytes: `event: <type>`, `data: <json>`, a blank line, LF only."""

    first_seq: int
    num_events: int
    data: bytes
    terminal: bool  # the last of them ends the stream

    @property
    def last_seq(self) -> int:
        """The sequence number of the last event."""
        return self.first_seq + self.num_events - 1

    @classmethod
    def of(cls, record: Record, echo: bytes) -> Frames:
        """A record's events framed, with the response's echo in its place."""
        out = bytearray()
        name = b""
        for event in record.events.split(b"\n"):
            # Every stored event begins with {"type":"..." (see journal.stamp), so its name needs no parsing.
            name = event[9 : event.index(b'"', 9)]
            out += frame(name.decode(), event.replace(ECHO_MARK, echo) if ECHO_MARK in event else event)
        return cls(record.first_seq, record.num_events, bytes(out), name in TERMINAL_EVENTS)

    def after(self, seq: int) -> Frames:
        """Only the events with a sequence number above `seq`."""
        skip = seq + 1 - self.first_seq
        if skip <= 0:
            return self
        return Frames(seq + 1, self.num_events - skip, b"".join(self.split()[skip:]), self.terminal)

    def split(self) -> list[bytes]:
        """One SSE frame per event; JSON holds no raw line feed, so a blank line only ever ends a frame."""
        return [part + b"\n\n" for part in self.data.split(b"\n\n")[:-1]]


class Channel:
    """Where one run's events appear; it lives while the run does or somebody reads.

    echo: the response's immutable fields, as the JSON members to splice into its events. next_seq: the number
    of the next event to appear, None while nobody here writes the run: then the log has its events, and
    `glance` tells how it stood when somebody last looked. over: it is in flight nowhere any more. num_rests:
    how often it was left to rest: ended, parked or given up.
    """

    def __init__(self, response_id: str, echo: bytes, *, stored: bool, next_seq: int | None) -> None:
        self.response_id = response_id
        self.echo = echo
        self.stored = stored
        self.next_seq = next_seq
        self.glance: RunGlance | None = None
        self.over = False
        self.num_rests = 0
        self.last: Frames | None = None
        self.cut = False  # the streams stop without a terminal event; their readers may come back
        self.readers: set[asyncio.Event] = set()
        self._tail: deque[Frames] = deque()
        self._tail_bytes = 0

    @property
    def ended(self) -> bool:
        """True once the terminal event has appeared."""
        return self.last is not None and self.last.terminal

    def publish(self, record: Record) -> None:
        """Show a record that is durable (or that never will be, with store=false)."""
        self.last = frames = Frames.of(record, self.echo)
        self.next_seq = frames.last_seq + 1
        self._tail.append(frames)
        self._tail_bytes += len(frames.data)
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            self._tail_bytes -= len(self._tail.popleft().data)
        self._wake()

    def rest(self) -> None:
        """Nobody here writes the run for now: more than its events may have changed, and the log is where
        others may go on."""
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

    def read(self, after: int) -> Frames | None:
        """Everything in the tail above `after`, joined; None when there is nothing."""
        parts: list[Frames] = []
        for frames in reversed(self._tail):  # a reader wants the newest few of many
            if frames.last_seq <= after:
                break
            parts.append(frames.after(after))
        parts.reverse()
        if len(parts) < 2:
            return parts[0] if parts else None
        data = b"".join(part.data for part in parts)
        return Frames(parts[0].first_seq, sum(part.num_events for part in parts), data, parts[-1].terminal)
