"""The chat and text completions that this process makes now, for administrators who look or cancel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import ApiError
from server.stateless.choices import MAX_SCORES, Completion
from storage import ChatCompletionKnown


class LiveCompletions:
    """The completions that are being made, by id, oldest first."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Completion] = {}  # by owner and id, which a client may choose
        self._num_scores = 0

    def __iter__(self) -> Iterator[Completion]:
        return iter(tuple(self._found.values()))

    def get(self, owner: str, id: str) -> Completion | None:
        """An owner's completion of an id, if it is being made here."""
        return self._found.get((owner, id))

    def owners_of(self, id: str) -> list[str]:
        """Who has a completion of this id made here: several may, because clients choose ids."""
        return [owner for owner, known in self._found if known == id]

    def cancel_all(self, owner: str) -> None:
        """End an owner's completions, each as `Cancellation.cancel` does."""
        for completion in self:
            if completion.account.owner == owner:
                completion.cancellation.cancel()

    def stop(self) -> None:
        """End all of them, because the server stops."""
        for completion in self:
            completion.cancellation.stop()

    @contextmanager
    def enter(self, completion: Completion) -> Iterator[None]:
        """Held from when a completion is asked of the engine until its reply has ended.
        ChatCompletionKnown where its owner has one of this id at work, and ApiError 429 where all together
        would have more scores of prompts than one may have."""
        place = (completion.account.owner, completion.head["id"])
        if place in self._found:
            raise ChatCompletionKnown(completion.head["id"])
        if completion.num_scores and self._num_scores + completion.num_scores > MAX_SCORES:
            message = "Too many log probabilities of prompts are asked for at once. Try again shortly."
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"})
        self._found[place] = completion
        self._num_scores += completion.num_scores
        try:
            yield
        finally:
            self._num_scores -= completion.num_scores
            del self._found[place]
