"""The folder on disk in which a process has those of its containers, and the removal of what others left.

A process holds a lock on its own as long as it lives, by which others know, in whatever namespace of
processes they are: the number of a process says nothing beyond its namespace. What cleans a machine of
temporary files may know by it, too: systemd-tmpfiles passes over a folder that is locked, and all in it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tools.sandbox.cells import SandboxError
from tools.sandbox.folder import remove

PREFIX = "antiphon-code-"
_MADE, _LOCKED = 0o700, 0o711
"""Modes of a folder: as it is made, and once it was locked; sessions of other users find theirs in it."""
_NEW_S = 60.0
"""Age of a folder in seconds, before which it may have no lock yet."""


class Ground:
    """Such a folder. held: a descriptor of it, which has the lock."""

    def __init__(self) -> None:
        self.root, self.held = _locked()

    @classmethod
    def claim(cls) -> Ground:
        """Make one, and remove those whose processes have ended."""
        _sweep()
        return cls()

    def folder(self) -> Path:
        """A new folder in it, or in its successor where somebody has removed it, locked as it is. Raises
        SandboxError."""
        try:
            if not self.root.is_dir():
                os.close(self.held)
                self.root, self.held = _locked()
            return Path(tempfile.mkdtemp(dir=self.root))
        except OSError as fault:
            raise SandboxError(f"no folder can be made for code: {fault.strerror}") from None

    def leave(self) -> None:
        """Remove it, with all that is in it."""
        remove(self.root)
        os.close(self.held)


def _locked() -> tuple[Path, int]:
    root = Path(tempfile.mkdtemp(prefix=PREFIX))
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_EX)
    root.chmod(_LOCKED)
    return root, held


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            told = folder.lstat()
            if told.st_uid == os.geteuid() and stat.S_ISDIR(told.st_mode) and not _in_use(folder, told):
                remove(folder)


def _in_use(folder: Path, told: os.stat_result) -> bool:
    if stat.S_IMODE(told.st_mode) == _MADE and time.time() - told.st_mtime < _NEW_S:
        return True
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(held)
    return False
