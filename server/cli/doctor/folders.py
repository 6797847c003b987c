"""What this process may do in a folder, and who else may."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def unwritable(folder: Path) -> str | None:
    """Why nothing can be made in a folder or, where it is not there, in the nearest one above it; None where
    that can be. A try tells more than permissions: root does without them, and /proc only shows some."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as exc:
        missing = f"{folder} does not exist, and " if there != folder else ""
        return f"{missing}{there} cannot be written: {exc.strerror or exc}"


def permissions(path: Path, kind: int = stat.S_IFREG) -> int:
    """Who may do what with a file, or with a folder (S_IFDIR); 0 where there is none, or where this user may
    not look it up."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return 0
    return stat.S_IMODE(mode) if stat.S_IFMT(mode) == kind else 0
