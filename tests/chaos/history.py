"""The record of a test: what clients received and what servers acknowledged, in the order in which it
happened."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

_ID = re.compile(rb'"id":"(resp_[0-9a-f]+)"')


def frames(data: bytes | bytearray) -> list[bytes]:
    """The whole SSE frames of a stream, each with its blank line; comments are dropped."""
    return [part + b"\n\n" for part in bytes(data).split(b"\n\n")[:-1] if not part.startswith(b":")]


@dataclass(slots=True)
class Read:
    """What one connection brought of one stream. after: the number that it was asked to start behind."""

    after: int = -1
    data: bytearray = field(default_factory=bytearray)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # monotonic seconds, bytes by then

    def take(self, data: bytes) -> None:
        """Bytes have come."""
        self.data += data
        self.arrivals.append((time.monotonic(), len(self.data)))

    @property
    def num_frames(self) -> int:
        """Whole events, comments not counted."""
        return self.data.count(b"\n\n") - self.data.count(b": keep-alive\n\n")

    @property
    def last(self) -> int:
        """The number of the last event that is whole; a client comes back with it."""
        return self.after + self.num_frames

    @property
    def response_id(self) -> str | None:
        """The id that the first event names, once it is there."""
        found = _ID.search(self.data)
        return found.group(1).decode() if found else None

    def timed_frames(self) -> Iterator[tuple[int, float, bytes]]:
        """(number, when it was whole, frame) of every event."""
        moments, at, number = iter(self.arrivals), 0, self.after
        moment, reached = next(moments, (0.0, 0))
        for part in bytes(self.data).split(b"\n\n")[:-1]:
            at += len(part) + 2
            while reached < at:
                moment, reached = next(moments)
            if not part.startswith(b":"):
                number += 1
                yield number, moment, part + b"\n\n"


@dataclass(frozen=True, slots=True)
class Ack:
    """Something that a server answered for: created, output (call_id and text), cancelled, ended."""

    what: str
    detail: Any = None
    at: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Seen:
    """One response as its clients saw it. stored: False once no read is to show it (or ever was)."""

    id: str
    stored: bool = True
    reads: list[Read] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The highest number that any client has whole."""
        return max((read.last for read in self.reads), default=-1)

    def acknowledge(self, what: str, detail: Any = None) -> None:
        """Note an answer."""
        self.acks.append(Ack(what, detail))


@dataclass(slots=True)
class History:
    """Everything that a group of clients saw, by response."""

    seen: dict[str, Seen] = field(default_factory=dict)

    def of(self, response_id: str) -> Seen:
        """The record of a response, begun here if it is new."""
        return self.seen.setdefault(response_id, Seen(response_id))

    @property
    def num_bytes(self) -> int:
        """Bytes of all streams."""
        return sum(len(read.data) for seen in self.seen.values() for read in seen.reads)
