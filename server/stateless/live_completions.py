"""The chat and text completions that this process makes now, for administrators who look or cancel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.stateless.choices import Completion


class LiveCompletions:
    """The completions that are being made, by id, oldest first."""

    def __init__(self) -> None:
        self._found: dict[str, Completion] = {}

    def __iter__(self) -> Iterator[Completion]:
        return iter(tuple(self._found.values()))

    def get(self, id: str) -> Completion | None:
        """The completion of an id, if it is being made here."""
        return self._found.get(id)

    @contextmanager
    def enter(self, completion: Completion) -> Iterator[None]:
        """Held from when a completion is asked of the engine until its reply has ended."""
        id = completion.head["id"]
        self._found[id] = completion
        try:
            yield
        finally:
            del self._found[id]
