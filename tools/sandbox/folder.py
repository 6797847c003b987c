"""The files of a container on disk, of which code in a sandbox may have made anything.

Links are never followed, and nothing but regular files is read: a folder is walked by descriptors, each
opened from the one above it.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tools.sandbox.cells import SandboxError

MAX_DEPTH = 16
"""Of folders in each other."""
MAX_ENTRIES = 20_000
"""Of a folder and all below it, whatever they are."""
MAX_PATH = 512
MAX_NAME = 255
"""Bytes of one name in a path, as file systems have it."""

Mark = tuple[int, int, int]
"""By what a file is known to be unchanged: size in bytes, time of its last change, number of its inode."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooMuch(SandboxError):
    """There is more in a folder than may be; the message says of what."""


def scan(folder: Path) -> dict[str, Mark]:
    """The regular files below a folder, by their paths. TooMuch where nobody can say what is there."""
    found: dict[str, Mark] = {}
    entries = 0

    def walk(descriptor: int, before: str, depth: int) -> None:
        nonlocal entries
        with os.scandir(descriptor) as inside:
            for entry in inside:
                entries += 1
                if entries > MAX_ENTRIES:
                    raise TooMuch(f"There are more than {MAX_ENTRIES} files and folders.")
                path = before + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if depth >= MAX_DEPTH:
                        raise TooMuch(f"Folders are nested more than {MAX_DEPTH} deep.")
                    with suppress(OSError):  # it went, or became something else, or lets nobody in
                        below = os.open(entry.name, _FOLDER, dir_fd=descriptor)
                        try:
                            walk(below, f"{path}/", depth + 1)
                        finally:
                            os.close(below)
                elif entry.is_file(follow_symlinks=False) and is_path(path):
                    with suppress(OSError):
                        told = entry.stat(follow_symlinks=False)
                        found[path] = (told.st_size, told.st_mtime_ns, told.st_ino)

    top = os.open(folder, _FOLDER)
    try:
        walk(top, "", 1)
    finally:
        os.close(top)
    return found


def is_path(path: str) -> bool:
    """Whether a path below the folder can be one of a container's files: text, in no way out of it."""
    parts = path.split("/")
    return (
        path.isprintable()  # so it has no halves of surrogate pairs, and can be encoded
        and len(path.encode()) <= MAX_PATH
        and len(parts) <= MAX_DEPTH
        and all(0 < len(part.encode()) <= MAX_NAME and part not in (".", "..") for part in parts)
    )


def open_file(folder: Path, path: str) -> int:
    """A descriptor of a regular file below a folder, for reading. Raises OSError for anything else."""
    *above, name = path.split("/")
    at = os.open(folder, _FOLDER)
    try:
        for part in above:
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        # Without waiting for whoever would write into a pipe of that name.
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(f"{path} is no regular file")
    return found


def create_file(folder: Path, path: str) -> int:
    """A descriptor of a new file below a folder that no code has been in, for writing."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def replace_file(folder: Path, path: str, uid: int | None) -> int:
    """Put a file at the top of a folder that code is at work in, in the place of one that may be there: a
    descriptor for writing, of a user's file where `uid` is not 0. None only removes. Raises OSError for
    anything that cannot simply be replaced."""
    at = os.open(folder, _FOLDER)
    try:
        if "/" in path:
            raise OSError(f"{path} is not at the top")
        with suppress(FileNotFoundError):
            os.unlink(path, dir_fd=at)
        if uid is None:
            return -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        found = os.open(path, flags, 0o600, dir_fd=at)
    finally:
        os.close(at)
    if uid:
        os.fchown(found, uid, uid)
    return found


def give(folder: Path, uid: int) -> None:
    """Make a folder and all in it a user's. Links are, and not what they lead to."""
    for at, folders, files, descriptor in os.fwalk(folder, follow_symlinks=False):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                os.chown(name, uid, uid, dir_fd=descriptor, follow_symlinks=False)
        if at == str(folder):
            os.fchown(descriptor, uid, uid)


def remove(folder: Path) -> None:
    """Remove a folder, however deep it is and whatever it forbids."""
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(folder)], check=False, capture_output=True)
    subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True)


def differences(before: Mapping[str, Mark], now: Mapping[str, Mark]) -> tuple[list[str], list[str]]:
    """The paths that are new or changed, and those that are gone."""
    changed = [path for path, mark in now.items() if before.get(path) != mark]
    return changed, [path for path in before if path not in now]
