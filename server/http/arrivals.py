"""How much of all request bodies together is in memory before it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from server.errors import ApiError

MIN_BODY_RATE = 32 * 1024
"""Bytes per second that a body must bring on average, beyond the time that every body has: a tenth of a slow
uplink, at which the largest body takes 17 minutes."""


class Arrivals:
    """The bytes of all bodies that are arriving or have not been read yet."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Held around one body; what it yields counts more bytes of it, or raises ApiError 503."""
        own = 0

        def count(num_bytes: int) -> None:
            nonlocal own
            if self.num_bytes + num_bytes > self._limit:
                message = "Too many request bodies are arriving at once. Try again shortly."
                raise ApiError(503, message, code="server_busy", headers={"retry-after": "1"})
            own += num_bytes
            self.num_bytes += num_bytes

        try:
            yield count
        finally:
            self.num_bytes -= own
