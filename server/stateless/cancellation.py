"""Ends a completion for somebody who is not its client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from server.errors import ApiError


@dataclass(slots=True, eq=False)
class Cancellation:
    """How one completion is cancelled by somebody who is not its client.

    Only a wait for the engine is cut short. While a part is on its way to the client, the reply is left
    alone, and the completion ends when it goes on.
    """

    over: asyncio.Event = field(default_factory=asyncio.Event)
    _wanted: bool = False
    _waiting: asyncio.Task[object] | None = None

    def cancel(self) -> bool:
        """End the completion. Returns whether it ends now; else it does once its client has taken a part."""
        if self._waiting is not None and not self._wanted:
            self._waiting.cancel()
        self._wanted = True
        return self._waiting is not None or self.over.is_set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Held while the completion is made. Raises ApiError 503 `response_interrupted` where it is cancelled
        in a wait for the engine."""
        self.wait()
        try:
            yield
        except asyncio.CancelledError:
            if not self._wanted:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            self._interrupt()
        finally:
            self._waiting = None
            self.over.set()

    def wait(self) -> None:
        """The engine is waited for from now on. ApiError 503 where the completion was cancelled meanwhile."""
        if self._wanted:
            self._interrupt()
        self._waiting = asyncio.current_task()

    def rest(self) -> None:
        """A part goes to the client."""
        self._waiting = None

    def _interrupt(self) -> NoReturn:
        message = "An administrator has cancelled this completion."
        headers = {"x-should-retry": "false"}
        raise ApiError(503, message, code="response_interrupted", headers=headers) from None
