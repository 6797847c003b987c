"""Values of prompt templates, and their error. Times are microseconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass

from storage.records import StorageError


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt template. metadata: a JSON object. default_version: what a request gets that names none.
    latest_version: the highest number that was given; numbers count from 1 and are never given twice."""

    id: str
    owner: str
    created_at: int
    name: str | None
    metadata: bytes
    default_version: int = 1
    latest_version: int = 1


@dataclass(frozen=True, slots=True)
class StoredPromptVersion:
    """One version of a template. body: the template, a JSON object, as its client wrote it."""

    prompt_id: str
    version: int
    created_at: int
    body: bytes


@dataclass(frozen=True, slots=True)
class PromptChange:
    """What is to change of a prompt; None leaves it as it is. name: empty takes it away. body: of a new
    version, which becomes the default unless default_version names another."""

    name: str | None = None
    metadata: bytes | None = None
    body: bytes | None = None
    default_version: int | None = None


class DefaultVersion(StorageError):
    """The default version of a prompt cannot be deleted."""

    def __init__(self, prompt_id: str, version: int) -> None:
        super().__init__(prompt_id, version)
        self.prompt_id, self.version = prompt_id, version
