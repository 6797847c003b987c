"""Ends a completion for somebody who is not its client: an administrator, or the server that stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from server.errors import ApiError


@dataclass(slots=True, eq=False)
class Cancellation:
    """How one completion is ended by somebody who is not its client.

    Only a wait for the engine is cut short. While a part is on its way to the client, the reply is left
    alone, and the completion ends when it goes on.
    """

    over: asyncio.Event = field(default_factory=asyncio.Event)
    _why: ApiError | None = None
    _waiting: asyncio.Task[object] | None = None

    def cancel(self) -> bool:
        """End the completion, as an administrator asks for. Returns whether it ends now; else it does once
        its client has taken a part."""
        message = "An administrator has cancelled this completion."
        return self._end(_interrupted(message, {"x-should-retry": "false"}))

    def stop(self) -> None:
        """End the completion, because the server stops; another one may well make it."""
        self._end(_interrupted("The server stopped before the completion was done.", {"retry-after": "5"}))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Held while the completion is made. Raises ApiError 503 `response_interrupted` where it is ended in
        a wait for the engine."""
        self.wait()
        try:
            yield
        except asyncio.CancelledError:
            if self._why is None:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            raise self._why from None
        finally:
            self._waiting = None
            self.over.set()

    def wait(self) -> None:
        """The engine is waited for from now on. ApiError 503 where the completion was ended meanwhile."""
        if self._why is not None:
            raise self._why
        self._waiting = asyncio.current_task()

    def rest(self) -> None:
        """A part goes to the client."""
        self._waiting = None

    def _end(self, why: ApiError) -> bool:
        if self._why is None:
            self._why = why
            if self._waiting is not None:
                self._waiting.cancel()
        return self._waiting is not None or self.over.is_set()


def _interrupted(message: str, headers: dict[str, str]) -> ApiError:
    return ApiError(503, message, code="response_interrupted", headers=headers)
