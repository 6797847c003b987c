"""How processes that share a data folder see at once that one of them is gone: by a locked file for each.

The kernel's lock on a process's file ends with the process, however it ends. Process ids would not do: they
are given out again, and mean nothing outside of their container. A lock means something within one kernel
only, so each file names the boot during which it was made. A file that another machine left in a shared
folder, or this machine before it was restarted, proves nothing.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from storage import make_private_folder

log = logging.getLogger("antiphon.fleet")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Presence:
    """One process among those whose files are in `folder`."""

    def __init__(self, folder: Path, runner: str) -> None:
        self._folder = folder
        self._name = quote(runner, safe="")
        self._boot = BOOT_ID.read_bytes() if BOOT_ID.exists() else b""
        self._fd: int | None = None
        self._gone: set[str] = set()

    def enter(self) -> None:
        """Show that this process lives, until `leave`; where that cannot be done, the others see nothing."""
        if not self._boot:
            return
        draft = self._folder / f".{self._name}"
        try:
            make_private_folder(self._folder)
            self._fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, self._boot)
            if _left(draft) is not None:
                raise OSError(f"a lock keeps nobody out of {self._folder}")
            draft.rename(self._folder / self._name)  # locked before anybody can look at it
        except OSError as error:
            log.warning("others will not see at once when this process ends: %s", error)
            if self._fd is not None:  # where its own lock means nothing, it believes nobody else's
                draft.unlink(missing_ok=True)
                self.leave()

    def leave(self) -> None:
        """This process carries nothing on any more, as if it had ended; who looks next removes its file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def gone(self, runners: Iterable[str]) -> set[str]:
        """Which of these are known to have ended; says nothing of the others. Reads the folder."""
        if self._fd is not None:
            with suppress(OSError):  # the beats tell it, only later
                self._look()
        return {runner for runner in runners if quote(runner, safe="") in self._gone}

    def _look(self) -> None:
        for file in self._folder.iterdir():
            if file.name == self._name or file.name.startswith("."):
                continue
            if (boot := _left(file)) is not None:
                if boot == self._boot:
                    self._gone.add(file.name)
                file.unlink(missing_ok=True)


def _left(file: Path) -> bytes | None:
    """What is in a file that nobody holds; None where somebody does, or where it cannot be told."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)  # NFS lets only those who may write lock
    except OSError:  # another process has removed it, or it is another user's
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(fd, 64)
    except OSError:
        return None
    finally:
        os.close(fd)
