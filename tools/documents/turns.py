"""Work on threads, in which owners take turns: who brings much does not hold up who brings little."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tools.documents.document import ReadersBusy

T = TypeVar("T")


class Turns:
    """Places for pieces of work. Thread-safe. places: how many are carried out at a time; one more is, of an
    owner of whom none is. At most half of the places have work beside an owner's first piece: so the first
    of another waits only while most of the pieces at work are first ones. waiting, of_owner: how many wait at
    most, of all owners and of one."""

    def __init__(self, places: int, *, waiting: int = 128, of_owner: int = 16) -> None:
        self._places = places
        self._most, self._most_of_owner = waiting, of_owner
        self._threads = ThreadPoolExecutor(places + 1, thread_name_prefix="documents")
        self._lock = threading.RLock()  # work may be done before it is known to have begun
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """What `work` is to return or raise, once it has had its turn; until then it can be cancelled. Raises
        ReadersBusy where too much waits."""
        future: Future[T] = Future()
        with self._lock:
            if len(self._waiting.get(owner, ())) >= self._most_of_owner:
                raise ReadersBusy(own=True)
            if self.num_waiting >= self._most:
                raise ReadersBusy(own=False)
            self._waiting.setdefault(owner, deque()).append((future, work))
            self._fill()
        future.add_done_callback(partial(self._leave, owner))
        return future

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not had their turn."""
        return sum(map(len, self._waiting.values()))

    def close(self) -> None:
        """Cancels what waits; what is carried out goes on to its end."""
        with self._lock:
            waiting, self._waiting = self._waiting, OrderedDict()
        for queue in waiting.values():
            for future, _ in queue:
                future.cancel()
        self._threads.shutdown(wait=False)

    def _leave(self, owner: str, future: Future[Any]) -> None:
        """What was cancelled waits no more, and holds nothing that it was to work on."""
        if not future.cancelled():
            return
        with self._lock:
            queue = self._waiting.get(owner, deque())
            left = [each for each in queue if each[0] is not future]
            queue.clear()
            queue.extend(left)
            if not queue:
                self._waiting.pop(owner, None)

    def _fill(self) -> None:
        while (owner := self._next()) is not None:
            queue = self._waiting.pop(owner)
            future, work = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind the others
            if future.set_running_or_notify_cancel():
                self._running[owner] += 1
                self._threads.submit(work).add_done_callback(partial(self._done, owner, future))

    def _next(self) -> str | None:
        """Whose turn it is; None where nobody waits, or there is no place."""
        running = self._running.total()
        if running > self._places:
            return None
        beside_first = running - len(self._running)
        more = running < self._places and beside_first < self._places // 2
        return next((owner for owner in self._waiting if more or not self._running[owner]), None)

    def _done(self, owner: str, future: Future[T], done: Future[T]) -> None:
        with self._lock:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
            self._fill()
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
