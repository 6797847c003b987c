"""Pauses between the tokens of a stream, and which part of them is the machine's and not the server's.

On a machine with other work a thread waits for a processor. Linux says how long each thread did. The longest
such waits within a pause are told apart from it: of the server's threads, of the processes in which it has
masks made (others that it started hold up no stream), and of the fuzzer, which reads the clock.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.report import percentile

MASKS = "memfd:masks"  # the memory that a process which makes masks shares with the server
LOOK_S = 0.02
LATE_S = 0.1  # a token that comes later than this is noted


class Pause(NamedTuple):
    """Between two tokens. waited_s: how long threads of the server had no processor in it. under_way: what
    was asked for meanwhile."""

    seconds: float
    waited_s: float
    under_way: list[Any]

    @property
    def own_s(self) -> float:
        """What the server itself took."""
        return self.seconds - self.waited_s


@dataclass(slots=True)
class Pauses:
    """All pauses of the streams of one server, which is the process `pid`."""

    pid: int
    seconds: list[float] = field(default_factory=list)
    late: list[Pause] = field(default_factory=list)
    num_streams: int = 0
    _then: float = 0.0
    _looked: float = 0.0  # when the waits had been read: what passed until then is the fuzzer's own
    _waits: dict[int, dict[str, float]] = field(default_factory=dict)
    _steppers: dict[int, bool] = field(default_factory=dict)

    def begin(self) -> None:
        """A stream begins: nothing came before its first token."""
        self._then = 0.0

    def token(self, under_way: list[Any]) -> None:
        """A token has come."""
        now, waits = time.monotonic(), self._waiting()
        if self._then:
            pause = now - self._then
            self.seconds.append(pause)
            if pause > LATE_S:
                waited = sum(_longest(self._waits.get(pid, {}), own) for pid, own in waits.items())
                waited += self._looked - self._then
                self.late.append(Pause(pause, min(waited, pause), under_way))
        self._then, self._waits, self._looked = now, waits, time.monotonic()

    def end(self) -> None:
        """A stream has ended as it should."""
        self.num_streams += 1

    def _waiting(self) -> dict[int, dict[str, float]]:
        """Seconds that each thread has waited for a processor so far, by process."""
        workers = _workers(self.pid)
        self._steppers = {pid: self._steppers.get(pid) or _makes_masks(pid) for pid in workers}
        steppers = [pid for pid, makes_masks in self._steppers.items() if makes_masks]
        return {pid: _waits(pid) for pid in {self.pid, *steppers, os.getpid()}}

    def told(self) -> str:
        """The figures, as one line."""
        if not self.seconds:
            return f"{self.num_streams} streams beside them"
        own = [each.own_s for each in self.late if each.own_s > LATE_S]
        p50, p99 = (percentile(self.seconds, part) * 1000 for part in (0.5, 0.99))
        return (
            f"{self.num_streams} streams beside them, {len(self.seconds)} pauses between tokens: "
            f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {max(self.seconds) * 1000:.0f} ms; "
            f"{len(self.late)} over {LATE_S * 1000:.0f} ms, {len(own)} of them also without the time that "
            f"the server waited for a processor (max {max(own, default=0.0) * 1000:.0f} ms)"
        )


@asynccontextmanager
async def waiting_of(pid: int) -> AsyncIterator[Callable[[], float]]:
    """Within it, seconds that the processes in which a server tries grammars, one after the other, have
    waited for a processor since, as far as was seen."""
    first: dict[int, dict[str, float]] = {}
    latest: dict[int, dict[str, float]] = {}

    def look() -> None:
        for each in _workers(pid):
            latest[each] = _waits(each) or latest.get(each, {})

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(LOOK_S)

    look()
    first.update(latest)
    watching = asyncio.create_task(watch())
    try:
        yield lambda: sum(_longest(first.get(each, {}), waits, 0.0) for each, waits in latest.items())
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _waits(pid: int) -> dict[str, float]:
    found = {}
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError, IndexError):
                found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def _workers(pid: int) -> list[int]:
    """The processes in which a server compiles and steps grammars."""
    return [worker for nursery in _children(pid) for worker in _children(nursery)]


def _makes_masks(pid: int) -> bool:
    with suppress(OSError):
        return MASKS in Path(f"/proc/{pid}/maps").read_text()
    return False


def _longest(before: dict[str, float], after: dict[str, float], new: float | None = None) -> float:
    """The longest wait of a thread in between. new: what a thread that was not there before had waited then;
    None: it does not count."""
    pairs = ((before.get(thread, own if new is None else new), own) for thread, own in after.items())
    return max((own - then for then, own in pairs), default=0.0)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found
