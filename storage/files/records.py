"""The values of files, uploads and blobs.

Times are microseconds since the epoch; a digest is the SHA-256 of all bytes, as 64 hexadecimal digits.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.records import StorageError


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that are stored, by their digest."""

    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of an owner. Its content is the blob `digest`. expires_at: from then on it is unknown."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    digest: str
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class StoredUpload:
    """A file that comes in parts. num_bytes: as its client announced it. status: `pending`, `completed` or
    `cancelled`; a pending one whose `expires_at` has passed takes no parts. file_lifetime: microseconds from
    the creation of the file to its expiry; None: it does not expire. file_id: what it became."""

    id: str
    owner: str
    filename: str
    purpose: str
    mime_type: str
    num_bytes: int
    created_at: int
    expires_at: int
    file_lifetime: int | None = None
    status: str = "pending"
    file_id: str | None = None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One part of an upload; its bytes are the blob `digest`."""

    id: str
    upload_id: str
    owner: str
    num_bytes: int
    digest: str
    created_at: int


@dataclass(frozen=True, slots=True)
class SweptFiles:
    """What one step of a sweep removed: files and uploads that had expired, and blobs that no row named."""

    files: int = 0
    uploads: int = 0
    blobs: int = 0

    def __add__(self, other: SweptFiles) -> SweptFiles:
        return SweptFiles(self.files + other.files, self.uploads + other.uploads, self.blobs + other.blobs)


class BlobTooLarge(StorageError):
    """More bytes came in than the `limit` that the caller gave."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} bytes")
        self.limit = limit


class UploadEnded(StorageError):
    """An upload takes nothing any more: its status, or `expired`."""

    def __init__(self, id: str, status: str) -> None:
        super().__init__(id, status)
        self.id, self.status = id, status
