"""Blobs as files in a folder beside an SQLite database, each under its digest.

A blob comes in under another name, is synced, and then takes its own: what stands under a digest is whole.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from storage.private_files import FILE_MODE, make_private_folder

INCOMING = ".incoming-"
"""Begins the names of files that are not whole yet."""


def blob_folder(database: Path) -> Path:
    """The folder of the blobs that the rows of a database file name."""
    return database.with_name(database.name + ".blobs")


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk. OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BlobFolder:
    """See `interface.BlobStore`. Its verbs raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._naming = threading.Lock()  # a blob that is put again is not removed at that moment

    def begin(self) -> IncomingFile:
        if not self.folder.is_dir():
            make_private_folder(self.folder)
            sync_folder(self.folder.parent)
        return IncomingFile(self.folder, self._naming)

    def open(self, digest: str) -> BlobFile | None:
        try:
            return BlobFile(os.open(self.folder / digest, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None

    def touch(self, digest: str) -> bool:
        with self._naming:
            try:
                os.utime(self.folder / digest)
            except FileNotFoundError:
                return False
        return True

    def untouched(self, grace_s: float, after: str, limit: int) -> list[str]:
        names = sorted(name for name in self._names() if name > after and not name.startswith(INCOMING))
        return [name for name in names if self._is_old(name, grace_s)][:limit]

    def remove(self, digest: str, grace_s: float) -> bool:
        with self._naming:
            if not self._is_old(digest, grace_s):
                return False
            (self.folder / digest).unlink(missing_ok=True)
            return True

    def remove_unfinished(self, grace_s: float) -> int:
        stale = [name for name in self._names() if name.startswith(INCOMING) and self._is_old(name, grace_s)]
        for name in stale:
            (self.folder / name).unlink(missing_ok=True)
        return len(stale)

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            return []

    def _is_old(self, name: str, grace_s: float) -> bool:
        try:
            return (self.folder / name).stat().st_mtime <= time.time() - grace_s
        except FileNotFoundError:
            return False


class IncomingFile:
    """See `interface.IncomingBlob`."""

    def __init__(self, folder: Path, naming: threading.Lock) -> None:
        self._folder, self._naming = folder, naming
        self._path = folder / f"{INCOMING}{secrets.token_hex(16)}"
        self._file = os.fdopen(
            os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb", 0
        )

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def finish(self, digest: str) -> None:
        os.fsync(self._file.fileno())
        os.utime(self._file.fileno())  # nothing may have come in for a while
        self._file.close()
        with self._naming:
            self._path.rename(self._folder / digest)
        sync_folder(self._folder)

    def abandon(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            self._path.unlink()


class BlobFile:
    """See `interface.OpenBlob`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.num_bytes = os.fstat(descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, start)

    def close(self) -> None:
        os.close(self._descriptor)
