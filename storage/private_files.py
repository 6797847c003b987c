"""Files and folders that only this user may read, from before anything is in them.

Texts, the keys that seal and the secrets that sign all stand in the database, so no mode is left to the
umask.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("antiphon.storage")

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OTHERS = 0o077  # the bits of a mode that let anybody but the owner in


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone; one that exists stays as it
    is. OSError."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        make_private_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def make_private_file(file: Path) -> None:
    """Make an empty file for this user alone, unless it exists. OSError."""
    with suppress(FileExistsError):
        # A link is followed to where it leads: an exclusive creation would only say that the link exists.
        os.close(os.open(os.path.realpath(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))


def keep_others_out(files: Iterable[Path]) -> None:
    """Take from everybody else what they may do with files that exist, and say so in one line of the log."""
    changed, refused = [], []
    for file in files:
        with suppress(FileNotFoundError):
            found = file.stat().st_mode
            mode = found & 0o777
            if not mode & OTHERS or not stat.S_ISREG(found):  # a folder in its place is not ours to change
                continue
            try:
                file.chmod(mode & ~OTHERS)
            except PermissionError:  # it belongs to another user
                refused.append(f"{file} ({mode:04o})")
            else:
                changed.append(f"{file} ({mode:04o})")
    if changed:
        log.warning("other users could open these files, and no longer can: %s", ", ".join(changed))
    if refused:
        log.warning(
            "other users can open these files, and their owner must change that: %s", ", ".join(refused)
        )
