"""Hints: how processes on one database tell each other that something was committed.

`notifications` sends them over PostgreSQL. On SQLite there is no other process, so nothing is sent or heard.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Hints(Protocol):
    """What other processes let this one know. Hints get lost: whoever waits for one polls as well."""

    def tell(self) -> None:
        """Something was committed here. From any thread."""

    async def heard(self, seen: int, timeout_s: float) -> int:
        """The number of hints so far, as soon as it differs from `seen`, or after `timeout_s` seconds."""

    async def close(self) -> None: ...


class Silence:
    """The hints of a database that no other process writes to: there are none."""

    def tell(self) -> None:
        """Nobody is there."""

    async def heard(self, seen: int, timeout_s: float) -> int:
        await asyncio.sleep(timeout_s)
        return seen

    async def close(self) -> None:
        """Nothing to close."""
