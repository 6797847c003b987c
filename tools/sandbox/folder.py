"""The files of a container, of which code in a sandbox may have made anything.

The folder is on disk, or is given as a descriptor, because it is in no namespace of mounts that can be seen
from here. Links are never followed, and nothing but regular files is read: a folder is walked by descriptors,
each opened from the one above it.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterable, Mapping
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
"""By what a file is known to be unchanged: size in bytes, time of the last change of its bytes or of what is
known of it, which code cannot set, and number of its inode. What is written through a mapping in memory may
change none of them."""

Folder = Path | int

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TooMuch(SandboxError):
    """There is more in a folder than may be; the message says of what."""


def scan(folder: Folder, unkept: list[str] | None = None) -> dict[str, Mark]:
    """The regular files below a folder, by their paths. unkept: is given the paths of those whose names no
    file of a container can have. TooMuch where nobody can say what is there."""
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
                elif entry.is_file(follow_symlinks=False) and not is_path(path):
                    if unkept is not None:
                        unkept.append(path)
                elif entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        told = entry.stat(follow_symlinks=False)
                        found[path] = (told.st_size, told.st_ctime_ns, told.st_ino)

    top = _open(folder)
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


def open_file(folder: Folder, path: str) -> int:
    """A descriptor of a regular file below a folder, for reading. Raises OSError for anything else."""
    *above, name = path.split("/")
    at = _open(folder)
    try:
        for part in above:
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        # Without waiting for whoever would write into a pipe of that name.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            found = os.open(name, flags, dir_fd=at)
        except PermissionError:  # code has made it so, as the server's own user
            _let_in(name, at, 0o600, stat.S_ISREG)
            found = os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(f"{path} is no regular file")
    return found


def create_file(folder: Folder, path: str) -> int:
    """A descriptor of a new file below a folder that no code has been in, for writing."""
    *above, name = path.split("/")
    at = _open(folder)
    try:
        for part in above:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=at)
            below = os.open(part, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=at)
    finally:
        os.close(at)


def replace_file(folder: Folder, path: str, uid: int | None) -> int:
    """Put a file at the top of a folder that code is at work in, in the place of one that may be there: a
    descriptor for writing, of a user's file where `uid` is not 0. None only removes. Raises OSError for
    anything that cannot simply be replaced."""
    at = _open(folder)
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


def give(folder: Folder, uid: int) -> None:
    """Make a folder and all in it a user's. Links are, and not what they lead to."""
    top = _open(folder)
    try:
        for _, folders, files, descriptor in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            for name in (*folders, *files):
                with suppress(FileNotFoundError):
                    os.chown(name, uid, uid, dir_fd=descriptor, follow_symlinks=False)
        os.fchown(top, uid, uid)
    finally:
        os.close(top)


def space_taken(folder: Folder, processes: Iterable[int]) -> tuple[int, int]:
    """Bytes and inodes that a folder takes. Of one that is a file system of its own, which a descriptor
    stands for, that is exact. Elsewhere everything below it counts, whatever its name is and whom it lets in,
    with what processes hold open of files that have no name any more."""
    if isinstance(folder, int):
        told = os.fstatvfs(folder)
        return (told.f_blocks - told.f_bfree) * told.f_frsize, told.f_files - told.f_ffree
    seen: dict[tuple[int, int], int] = {}

    def count(found: os.stat_result) -> None:
        seen[found.st_dev, found.st_ino] = found.st_blocks * 512
        if len(seen) > MAX_ENTRIES:
            raise TooMuch(f"There are more than {MAX_ENTRIES} files and folders.")

    def walk(at: int, depth: int) -> None:
        with os.scandir(at) as inside:
            for entry in inside:
                with suppress(FileNotFoundError):
                    count(entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        if depth >= MAX_DEPTH:
                            raise TooMuch(f"Folders are nested more than {MAX_DEPTH} deep.")
                        below = _open_shut(entry.name, at)
                        try:
                            walk(below, depth + 1)
                        finally:
                            os.close(below)

    top = _open(folder)
    try:
        device = os.fstat(top).st_dev
        walk(top, 1)
    finally:
        os.close(top)
    for process in processes:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    held = os.stat(f"/proc/{process}/fd/{name}")
                    if held.st_nlink == 0 and held.st_dev == device:
                        count(held)
    return sum(seen.values()), len(seen)


def _open(folder: Folder) -> int:
    """A descriptor of a folder, of one's own."""
    return os.open(".", _FOLDER, dir_fd=folder) if isinstance(folder, int) else os.open(folder, _FOLDER)


def _open_shut(name: str, at: int) -> int:
    """A descriptor of a folder below another, even of one that lets nobody in, where it is the server's."""
    try:
        return os.open(name, _FOLDER, dir_fd=at)
    except PermissionError:
        _let_in(name, at, 0o700, stat.S_ISDIR)
        return os.open(name, _FOLDER, dir_fd=at)


def _let_in(name: str, at: int, mode: int, is_kind: Callable[[int], bool]) -> None:
    """Give what is in a folder a mode, where it is of a kind: what a link leads to is not."""
    held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        if is_kind(os.fstat(held).st_mode):
            os.chmod(f"/proc/self/fd/{held}", mode)
    finally:
        os.close(held)


def remove(folder: Path) -> None:
    """Remove a folder, however deep it is and whatever it forbids."""
    if os.geteuid() != 0:
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(folder)], check=False, capture_output=True)
    subprocess.run(["rm", "-rf", "--", str(folder)], check=False, capture_output=True)


def differences(before: Mapping[str, Mark], now: Mapping[str, Mark]) -> tuple[list[str], list[str]]:
    """The paths that are new or changed, and those that are gone."""
    changed = [path for path, mark in now.items() if before.get(path) != mark]
    return changed, [path for path in before if path not in now]
