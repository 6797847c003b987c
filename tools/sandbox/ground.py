"""The folder on disk in which a process has those of its containers, and the removal of what others left.

A process holds a lock on its own as long as it lives, by which others know, in whatever namespace of
processes they are: the number of a process says nothing beyond its namespace.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.sandbox.folder import remove

PREFIX = "antiphon-cells-"
LOCK = "lock"
_UNLOCKED = "unlocked"
_NEW_S = 60.0
"""Age of a folder in seconds, before which it may have no lock yet."""


@dataclass(frozen=True, slots=True)
class Ground:
    """Such a folder. held: the descriptor of its lock."""

    root: Path
    held: int

    @classmethod
    def claim(cls) -> Ground:
        """Make one, and remove those whose processes have ended."""
        _sweep()
        root = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = os.open(root / _UNLOCKED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        (root / _UNLOCKED).rename(root / LOCK)  # so it is never there without being held
        root.chmod(0o711)  # sessions of other users find their folders in it
        return cls(root, held)

    def folder(self) -> Path:
        """A new folder in it."""
        return Path(tempfile.mkdtemp(dir=self.root))

    def leave(self) -> None:
        """Remove it, with all that is in it."""
        remove(self.root)
        os.close(self.held)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            told = folder.lstat()
            if told.st_uid == os.geteuid() and folder.is_dir() and not _in_use(folder, told.st_mtime):
                remove(folder)


def _in_use(folder: Path, changed_at: float) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - changed_at < _NEW_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
