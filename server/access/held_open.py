"""Ends what is held open in the name of a key, such as streams and WebSockets, when that key is good no more.

A key is checked as a request comes in, and a stream may last for hours after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from server.errors import ApiError
from storage import StorageUnavailable

if TYPE_CHECKING:
    from server.access.keys import Keys
    from server.access.principal import Principal

LOOK_S = 2.0
"""Seconds between two looks at the keys of all that is held open."""

End = Callable[[ApiError], None]
"""Ends what a key holds open; told why: the 401 that its next request would get."""


class HeldOpen:
    """What is held open in this process, by the keys that it was opened with."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._ends: dict[tuple[str, str], dict[object, End]] = {}  # by owner and key
        self._looking: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None

    @contextmanager
    def by(self, principal: Principal, end: End) -> Iterator[None]:
        """Held while something of a principal's is open. `end` is called once, soon after its key has stopped
        being good; never for a principal without a key."""
        if principal.key_id is None:
            yield
            return
        key, mine = (principal.owner, principal.key_id), object()
        self._ends.setdefault(key, {})[mine] = end
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(LOOK_S, self._begin)
        try:
            yield
        finally:
            ends = self._ends[key]
            del ends[mine]
            if not ends:
                del self._ends[key]

    def _begin(self) -> None:
        self._due = None
        if self._ends:
            self._looking = asyncio.create_task(self._look(), name="held-open")

    async def _look(self) -> None:
        for owner, key_id in tuple(self._ends):
            try:
                await self._keys.of(owner, key_id)
            except StorageUnavailable:
                pass  # the next look tells
            except ApiError as error:
                for end in tuple(self._ends.get((owner, key_id), {}).values()):
                    end(error)
        if self._ends and self._due is None:
            self._due = asyncio.get_running_loop().call_later(LOOK_S, self._begin)
