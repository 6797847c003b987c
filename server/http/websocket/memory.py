"""What open WebSockets hold in memory: frames that wait for their turn, and pasts of unstored responses."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from server.errors import ApiError


class WaitingBytes:
    """The bytes of frames that wait for their turn, charged to everybody whose frames they are."""

    def __init__(self) -> None:
        self._of: Counter[object] = Counter()

    @contextmanager
    def frame(self, num_bytes: int, limits: Mapping[object, int]) -> Iterator[None]:
        """Held while one frame waits. limits: whom it is charged to, and the bytes that frames of each may
        have together. ApiError 429 `queue_full` beyond one of them."""
        for who, limit in limits.items():
            if self._of[who] + num_bytes > limit:
                message = f"Requests that wait would have more than {limit} bytes together."
                raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self._of.update(dict.fromkeys(limits, num_bytes))
        try:
            yield
        finally:
            self._of.subtract(dict.fromkeys(limits, num_bytes))
            for who in limits:
                if not self._of[who]:
                    del self._of[who]


class KeptBytes:
    """What owners keep in memory under a limit that they share. What has to go is of the owner who has the
    most, and of theirs what was used longest ago: nobody can have others lose theirs by keeping much."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[str, OrderedDict[object, tuple[int, Callable[[], None]]]] = {}
        self._num_bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Of all owners."""
        return self._num_bytes.total()

    def keep(self, owner: str, key: object, num_bytes: int, drop: Callable[[], None]) -> None:
        """Count what is kept for an owner. drop: called when it has to go for the sake of others."""
        self.let_go(owner, key)
        self._held.setdefault(owner, OrderedDict())[key] = num_bytes, drop
        self._num_bytes[owner] += num_bytes
        while self.num_bytes > self._limit:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            oldest, (_, drop_it) = next(iter(self._held[largest].items()))
            self.let_go(largest, oldest)
            drop_it()

    def used(self, owner: str, key: object) -> None:
        """What is kept for an owner was needed just now."""
        self._held[owner].move_to_end(key)

    def let_go(self, owner: str, key: object) -> None:
        """Nothing is kept for an owner under this key any more."""
        held = self._held.get(owner, OrderedDict())
        if key not in held:
            return
        self._num_bytes[owner] -= held.pop(key)[0]
        if not held:
            del self._held[owner], self._num_bytes[owner]
