"""The values of batches. Times are microseconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.records import Notice, StorageError

OPEN, COMPLETED, FAILED = "open", "completed", "failed"
"""The states of a line: without a result, or with one that goes to the output or to the error file."""

RESTS_S = (1, 10, 60, 300, 900)
"""How long a batch rests after its first claim that came to nothing, after the second, and so on."""
MAX_BATCH_ATTEMPTS = len(RESTS_S) + 1
"""Claims in a row that may come to nothing: without a line that was finished."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch as its client asks for it. metadata: a JSON object. The rest is as in the table."""

    id: str
    owner: str
    key_id: str | None
    endpoint: str
    input_file_id: str
    digest: str
    metadata: bytes
    created_at: int
    expires_at: int
    output_lifetime: int | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch as it stands. digest: None once it has ended. errors: why it cannot be carried out, a JSON
    list. total, completed, failed: its lines so far. usage: a JSON object, once it has ended. attempts:
    claims since the last one under which it got on."""

    id: str
    owner: str
    key_id: str | None
    endpoint: str
    input_file_id: str
    digest: str | None
    metadata: bytes
    status: str
    created_at: int
    expires_at: int
    in_progress_at: int | None
    cancelling_at: int | None
    finalizing_at: int | None
    ended_at: int | None
    output_lifetime: int | None
    errors: bytes | None
    output_file_id: str | None
    error_file_id: str | None
    model: str | None
    usage: bytes | None
    total: int
    completed: int
    failed: int
    fence: int
    attempts: int


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch. start, stop: its bytes in the input."""

    position: int
    custom_id: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a batch ends: `completed`, `failed`, `expired` or `cancelled`. notice: what the webhooks of its
    owner are told of it."""

    status: str
    at: int
    errors: bytes | None = None
    usage: bytes | None = None
    model: str | None = None
    notice: Notice | None = None


@dataclass(frozen=True, slots=True)
class OwnerShare:
    """What an owner has going: batches that processes carry on, and those that could be claimed now."""

    owner: str
    carried: int
    waiting: int


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Batches that have not ended, by status, and their lines that have no result."""

    by_status: Mapping[str, int]
    lines_waiting: int


class BatchLost(StorageError):
    """This process does not carry the batch on any more: another one does, or it has ended or gone."""


class BatchEnded(StorageError):
    """A batch that has ended cannot be cancelled."""

    def __init__(self, id: str, status: str) -> None:
        super().__init__(id, status)
        self.id, self.status = id, status


class TooManyBatches(StorageError):
    """The owner has `limit` batches that have not ended."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} batches")
        self.limit = limit
