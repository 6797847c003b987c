"""Blobs as files in a folder beside an SQLite database, each under its digest.

A blob comes in under another name, is synced, and then takes its own: what stands under a digest is whole.
One process alone writes to the folder, so what it holds is known in its memory.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.private_files import FILE_MODE, make_private_folder

INCOMING = ".incoming-"
"""Begins the names of files that are not whole yet."""

_ALONE = fcntl.LOCK_EX | fcntl.LOCK_NB


def blob_folder(database: Path) -> Path:
    """The folder of the blobs that the rows of a database file name."""
    return database.with_name(database.name + ".blobs")


def sync(path: Path) -> None:
    """Puts a file, or the names in a folder, on the disk. OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def copied(folder: Path) -> Iterator[None]:
    """Held while a backup copies a folder: no blob goes before it is old. OSError."""
    with _locked(folder, fcntl.LOCK_SH):
        yield


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


class BlobFolder:
    """See `interface.BlobStore`. Its verbs raise OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._naming = threading.Lock()  # a blob that is put again is not removed at that moment
        self._held: Counter[str] = Counter()
        self._condemned: dict[str, object] = {}

    def begin(self) -> IncomingFile:
        if not self.folder.is_dir():
            make_private_folder(self.folder)
            sync(self.folder.parent)
        return IncomingFile(self)

    def open(self, digest: str) -> BlobFile | None:
        try:
            return BlobFile(os.open(self.folder / digest, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None

    def name(self, incoming: Path, digest: str) -> None:
        """Gives a file that has come in its name, and holds it."""
        with self._naming:
            incoming.rename(self.folder / digest)
            self._hold(digest)

    def touch(self, digest: str) -> bool:
        with self._naming:
            try:
                os.utime(self.folder / digest)
            except FileNotFoundError:
                return False
            self._hold(digest)
        return True

    def release(self, digests: Sequence[str]) -> None:
        with self._naming:
            for digest in digests:
                self._held[digest] -= 1
                if self._held[digest] <= 0:
                    del self._held[digest]

    def condemn(self, digests: Sequence[str]) -> Mapping[str, object]:
        with self._naming:
            marks = {digest: object() for digest in digests if digest not in self._held}
            self._condemned.update(marks)
            return marks

    def remove_condemned(self, marks: Mapping[str, object], named: AbstractSet[str]) -> int:
        num = 0
        with self._naming:
            valid = [digest for digest, mark in marks.items() if self._condemned.get(digest) is mark]
            for digest in valid:
                del self._condemned[digest]
            # While a backup copies the folder, nothing goes that its copy of the database may name.
            with suppress(BlockingIOError, FileNotFoundError), _locked(self.folder, _ALONE):
                for digest in valid:
                    if digest not in named:
                        (self.folder / digest).unlink(missing_ok=True)
                        num += 1
        return num

    def untouched(self, grace_s: float, limit: int) -> Iterator[list[str]]:
        names = [name for name in self._names() if not name.startswith(INCOMING)]
        for start in range(0, len(names), limit):
            if page := [name for name in names[start : start + limit] if self._is_old(name, grace_s)]:
                yield page

    def remove(self, digests: Sequence[str], grace_s: float) -> int:
        num = 0
        for digest in digests:
            with self._naming:
                if self._is_old(digest, grace_s):
                    (self.folder / digest).unlink(missing_ok=True)
                    self._held.pop(digest, None)  # whoever put it never said what became of it
                    num += 1
        return num

    def remove_unfinished(self, grace_s: float) -> int:
        stale = [name for name in self._names() if name.startswith(INCOMING) and self._is_old(name, grace_s)]
        for name in stale:
            (self.folder / name).unlink(missing_ok=True)
        return len(stale)

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _hold(self, digest: str) -> None:
        self._held[digest] += 1
        self._condemned.pop(digest, None)

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

    def __init__(self, blobs: BlobFolder) -> None:
        self._blobs = blobs
        self._path = blobs.folder / f"{INCOMING}{secrets.token_hex(16)}"
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
        self._blobs.name(self._path, digest)
        sync(self._blobs.folder)

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
