"""The values of stored chat completions. Times are microseconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.records import StorageError


@dataclass(frozen=True, slots=True)
class NewChatCompletion:
    """A chat completion to be stored. created_at: when it was asked for, by which it is listed. body: the
    object that its client was given, without its metadata. messages: those of the request, a JSON array."""

    id: str
    owner: str
    created_at: int
    model: str
    metadata: Mapping[str, str]
    body: bytes
    messages: bytes


@dataclass(frozen=True, slots=True)
class StoredChatCompletion:
    """A chat completion as it stands. body: as in `NewChatCompletion`; metadata: a JSON object."""

    id: str
    created_at: int
    model: str
    metadata: bytes
    body: bytes


class ChatCompletionKnown(StorageError):
    """The owner has a chat completion of this id."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class OwnerPurged(StorageError):
    """The owner of what was to be stored was purged after it was asked for."""
