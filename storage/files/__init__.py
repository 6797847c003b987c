"""Files: contents as blobs, the files that name them, and uploads that become files part by part.

The values are here at once; the verbs, which need SQLAlchemy, are in the module `verbs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.files.records import (
    Blob,
    BlobTooLarge,
    StoredFile,
    StoredPart,
    StoredUpload,
    SweptFiles,
    UploadEnded,
)

if TYPE_CHECKING:
    from storage.files.blobs import Blobs, blob_columns
    from storage.files.verbs import Files

__all__ = [
    "Blob",
    "BlobTooLarge",
    "Blobs",
    "Files",
    "StoredFile",
    "StoredPart",
    "StoredUpload",
    "SweptFiles",
    "UploadEnded",
    "blob_columns",
]


def __getattr__(name: str) -> Any:
    if name in ("Blobs", "blob_columns"):
        from storage.files import blobs

        return getattr(blobs, name)
    if name == "Files":
        from storage.files.verbs import Files

        return Files
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
