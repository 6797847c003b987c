"""Lanes: what is asked of one is done in its order, one after another; lanes go on side by side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any

Job = Callable[[], Coroutine[Any, Any, None]]
"""One piece of work, which raises nothing but the cancellation."""


class Lane:
    """One lane of a connection. last_seq, response_id: of the event that was sent last, and its response.
    resumable: the stored response that is made now. sending: held by whoever sends events, or has them wait
    until something else was told."""

    def __init__(self, stream_id: str | None, rested: Callable[[], None]) -> None:
        """rested: told whenever nothing is left to be done."""
        self.stream_id = stream_id
        self.response_id: str | None = None
        self.resumable: str | None = None
        self.last_seq = 0
        self.sending = asyncio.Lock()
        self._rested = rested
        self._waiting: deque[tuple[Job, ExitStack]] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """How much waits for its turn."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether something is being done."""
        return self._task is not None

    def put(self, job: Job, held: ExitStack) -> None:
        """Do something once all before it is done; in a task of its own, as if it were a request's. held:
        what it gives back; given back here, where it is never begun."""
        self._waiting.append((job, held))
        self._next()

    def stop(self) -> list[asyncio.Task[None]]:
        """Do nothing more. Returns what has yet to end."""
        while self._waiting:
            self._waiting.popleft()[1].close()
        if self._task is None:
            return []
        self._task.cancel()
        return [self._task]

    def _next(self) -> None:
        if self._task is None and self._waiting:
            job, held = self._waiting.popleft()
            self._task = asyncio.create_task(job())
            self._task.add_done_callback(partial(self._done, held))

    def _done(self, held: ExitStack, task: asyncio.Task[None]) -> None:
        held.close()  # a task that is cancelled before its first step gives nothing back
        self._task = None
        self._next()
        if self._task is None:
            self._rested()
