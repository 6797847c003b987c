"""When a container may be built for an owner: so many at once, then so many a second.

What a cell does is bounded, and its process stands back behind the server. To build a container is the
server's own work, which code that ends its session again and again would have it do without a pause.
"""

from __future__ import annotations

import asyncio

AT_ONCE = 10
"""Containers that an owner may have built before any of them waits."""
A_SECOND = 5.0
"""Containers that an owner may have built later on."""


class Starts:
    """The owners' turns."""

    def __init__(self) -> None:
        self._free = dict[str, float]()  # by owner: when, by the loop's clock, nothing of its share is used

    async def turn(self, owner: str) -> None:
        """Wait until it is the owner's turn."""
        now = asyncio.get_running_loop().time()
        free = self._free[owner] = max(self._free.get(owner, now), now) + 1 / A_SECOND
        await asyncio.sleep(max(free - AT_ONCE / A_SECOND - now, 0))

    def tidy(self) -> None:
        """Forget the owners of whose share nothing is used."""
        now = asyncio.get_running_loop().time()
        self._free = {owner: free for owner, free in self._free.items() if free > now}
