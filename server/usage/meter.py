"""Counts, in memory, what requests use of which the database holds nothing, and writes it down every second.

Stored responses are not counted here: the transaction that ends one counts it, so no crash can make it count
twice or not at all. What is counted here is lost when the process is killed: one second of it at most.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from server.clock import now_us
from storage import Account, Counts, Spent, Storage, StorageUnavailable

log = logging.getLogger("antiphon.usage")

EVERY_S = 1.0
"""Between two writes, which is also what a kill may lose. While nothing is counted, nothing is written."""

MINUTE = 60_000_000


class Meter:
    """The counter of one process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._counted: dict[tuple[int, Account], Counts] = {}  # by the minute's start and the account
        self._late = False  # what was counted was not taken the last time
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that writes, which is this object's until `close`."""
        self._task = asyncio.create_task(self._writes(), name="usage")

    async def close(self) -> None:
        """Write what was counted, and stop."""
        self._closing.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()
        if self._counted:
            log.error("what was used in the last seconds could not be written: %s", self._counted)

    def spend(self, account: Account, counts: Counts) -> None:
        """Count what a request used that ends now."""
        self.add(Spent(now_us(), account, counts))

    def add(self, spent: Spent) -> None:
        """Count what was used."""
        key = (spent.at - spent.at % MINUTE, spent.account)
        self._counted[key] = self._counted.get(key, Counts()) + spent.counts
        self._wake.set()

    async def flush(self) -> None:
        """Write what was counted until now. What the database does not take stays, for the next time."""
        async with self._writing:
            counted, self._counted = self._counted, {}
            if not counted:
                return
            try:
                await self._storage.add_usage(
                    [Spent(start, account, counts) for (start, account), counts in counted.items()]
                )
            except StorageUnavailable as error:
                if not self._late:  # the database may take nothing for hours
                    log.warning("usage is written later: %s", error)
                self._late = True
                for key, counts in counted.items():
                    self._counted[key] = counts + self._counted.get(key, Counts())
                self._wake.set()
            else:
                self._late = False

    async def _writes(self) -> None:
        while not self._closing.is_set():
            await self._wake.wait()
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await self._closing.wait()
            await self.flush()
