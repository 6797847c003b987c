"""Why this user cannot use the files of a database, in words for an operator: SQLite's own name no file."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path

_EFFECTIVE = os.access in os.supports_effective_ids


def why_barred(files: Iterable[Path]) -> str | None:
    """Why one of these files, of those that are there, cannot be read and written; None where all can be."""
    return next((why for file in files if (why := _why_file(file)) is not None), None)


def why_folder_barred(folder: Path) -> str | None:
    """Why no file can be made in a folder; None where that can be, or where it is not there."""
    there = next((each for each in reversed((folder, *folder.parents)) if not _may(each, os.X_OK)), folder)
    if not _may(there, os.X_OK):
        return _told(there, "enter the folder")
    return None if _may(folder, os.W_OK) else _told(folder, "write in the folder")


def _why_file(file: Path) -> str | None:
    try:
        mode = file.stat().st_mode
    except PermissionError:
        return why_folder_barred(file.parent)
    except OSError:
        return None
    if not stat.S_ISREG(mode):
        return f"{file} is {'a folder' if stat.S_ISDIR(mode) else 'no file'}, and a file is needed"
    for right, does in ((os.R_OK, "read"), (os.W_OK, "write")):
        if not _may(file, right):
            return _told(file, does)
    return None


def _may(path: Path, right: int) -> bool:
    """Whether this user may do this with what is there; True where nothing is. The kernel is asked, because
    modes alone do not tell what root may, or what a file system that is read-only allows."""
    return not os.path.lexists(path) or os.access(path, right, effective_ids=_EFFECTIVE)


def _told(path: Path, does: str) -> str:
    try:
        found = path.stat()
        if os.statvfs(path).f_flag & os.ST_RDONLY and "write" in does:
            return f"{path} lies on a file system that is read-only"
    except OSError:
        return f"the user {_name(os.geteuid())} cannot {does} {path}"
    mode = stat.S_IMODE(found.st_mode)
    return (
        f"the user {_name(os.geteuid())} cannot {does} {path}, which belongs to the user "
        f"{_name(found.st_uid)} and has the mode {mode:04o}"
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a container often knows no name of its user
        return str(uid)
