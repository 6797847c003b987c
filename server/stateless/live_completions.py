"""The chat and text completions that this process makes now, for administrators who look or cancel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.stateless.choices import Completion
from storage import ChatCompletionKnown


class LiveCompletions:
    """The completions that are being made, by id, oldest first."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Completion] = {}  # by owner and id, which a client may choose

    def __iter__(self) -> Iterator[Completion]:
        return iter(tuple(self._found.values()))

    def get(self, owner: str, id: str) -> Completion | None:
        """An owner's completion of an id, if it is being made here."""
        return self._found.get((owner, id))

    def owners_of(self, id: str) -> list[str]:
        """Who has a completion of this id made here: several may, because clients choose ids."""
        return [owner for owner, known in self._found if known == id]

    @contextmanager
    def enter(self, completion: Completion) -> Iterator[None]:
        """Held from when a completion is asked of the engine until its reply has ended.
        ChatCompletionKnown where its owner has one of this id at work."""
        place = (completion.account.owner, completion.head["id"])
        if place in self._found:
            raise ChatCompletionKnown(completion.head["id"])
        self._found[place] = completion
        try:
            yield
        finally:
            del self._found[place]
