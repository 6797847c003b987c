"""What a server holds while it works, sampled from outside, and whether it grows.

Memory, descriptors and threads come from `/proc`, the size of the database from its files.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.database import FILES
from tests.chaos.driver import Server


@dataclass(slots=True)
class Samples:
    """One quantity over time. at: monotonic seconds."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def note(self, value: float) -> None:
        """One more, now."""
        self.at.append(time.monotonic())
        self.values.append(value)

    def since(self, share: float) -> Samples:
        """Those behind the first `share` of the time: what comes before is the warm-up."""
        if not self.at:
            return Samples()
        begin = self.at[0] + share * (self.at[-1] - self.at[0])
        first = next(n for n, at in enumerate(self.at) if at >= begin)
        return Samples(self.at[first:], self.values[first:])

    def growth(self) -> float:
        """How much a straight line through them (least squares) rises from the first to the last."""
        if len(self.at) < 3:
            return 0.0
        return statistics.linear_regression(self.at, self.values).slope * (self.at[-1] - self.at[0])

    def begin(self) -> float:
        """Where that line begins."""
        return statistics.fmean(self.values) - self.growth() / 2

    def is_level(self, share: float, least: float) -> bool:
        """Whether the line rises by no more than a share of where it begins, or than `least`, in all of the
        time. A leak rises with every request and so without an end; caches and pools fill once."""
        return self.growth() <= max(share * self.begin(), least)


MEMORY, DESCRIPTORS, THREADS, DATABASE, WAL = "memory", "descriptors", "threads", "database", "WAL"


def held(server: Server) -> dict[str, float]:
    """What a server holds now: bytes of memory, descriptors, threads, bytes of its SQLite files, and
    of the write-ahead log among them."""
    files = [server.folder / name for name in FILES if (server.folder / name).exists()]
    sizes = {file.name: file.stat().st_size for file in files}
    return {
        MEMORY: server.rss(),
        DESCRIPTORS: len(os.listdir(f"/proc/{server.pid}/fd")),
        THREADS: len(os.listdir(f"/proc/{server.pid}/task")),
        DATABASE: sum(sizes.values()),
        WAL: sum(size for name, size in sizes.items() if name.endswith("-wal")),
    }


@asynccontextmanager
async def sampled(
    server: Server, every_s: float, more: Callable[[], Awaitable[dict[str, float]]] | None = None
) -> AsyncIterator[dict[str, Samples]]:
    """Samples of what a server holds, and of what `more` measures, for as long as the block lasts."""
    found: dict[str, Samples] = {}

    async def look() -> None:
        while True:
            for name, value in {**held(server), **(await more() if more else {})}.items():
                found.setdefault(name, Samples()).note(value)
            await asyncio.sleep(every_s)

    looking = asyncio.create_task(look())
    try:
        yield found
    finally:
        looking.cancel()
        [ended] = await asyncio.gather(looking, return_exceptions=True)
    if not isinstance(ended, asyncio.CancelledError):
        raise ended if isinstance(ended, BaseException) else AssertionError("it looked no more")


def processor_s(server: Server) -> tuple[float, float]:
    """Seconds for which a server's main thread, its loop, has run, and has waited for a processor."""
    ran, waited, _ = Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def in_words(samples: Samples, unit: float, name: str) -> str:
    """The line's beginning and its rise, such as `152 +1.3 MiB`. unit: what one of `name` is."""
    return f"{samples.begin() / unit:.1f} {samples.growth() / unit:+.1f} {name}".rstrip()


def medians(values: Sequence[float], parts: int = 4) -> tuple[float, float]:
    """The medians of the first and of the last of so many equal parts."""
    size = max(1, len(values) // parts)
    return statistics.median(values[:size]), statistics.median(values[-size:])
