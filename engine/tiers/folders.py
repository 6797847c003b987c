"""Where saved blocks lie: a folder for each identity of model and layout, in it one for each owner.

    ROOT/secret                          32 random bytes: keys of digests, and of the names of folders
    ROOT/database                        the id of the database whose responses and conversations these are of
    ROOT/<identity>/<owner>/<id>.kv      blocks
    ROOT/<identity>/<owner>/names/<name> names, as digests

Several processes with one database may have the same root: each reads what the others have written. Whoever
has another database would take all that is there for deleted, and keeps out. Everything is private to the
user that the server runs as: folders 0700, files 0600.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from engine.tiers.files import SUFFIX, UNFINISHED, Damaged, Name, open_private, read_name, write_name

ABANDONED_S = 600.0
"""An unfinished file this old is nobody's any more: its process was killed."""

REMOVALS = 10
"""How often a folder is removed that others write to, or that the disk does not let go of."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that has no room."""

_DIGEST = re.compile(r"[0-9a-f]{32}")


class ForeignFolder(OSError):
    """A root belongs to another database; the message says what to do."""

    def __init__(self, root: Path) -> None:
        super().__init__(
            f"{root} has what servers of another database have computed, and is left alone: give this one a "
            "folder of its own (kv_disk_folder), or remove that one where nobody uses it any more"
        )


class Folder:
    """The saved blocks of one identity, by owner. Methods raise OSError where the disk does."""

    def __init__(self, root: Path, identity: bytes, database: str | None = None) -> None:
        """identity: 16 bytes that name model, arithmetic and layout. database: see `require_own`. Makes what
        is not there. ForeignFolder."""
        self.root = root
        self.identity = identity
        self._database = database
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(root, database)
        self.secret = _written_once(root / "secret", secrets.token_bytes(32))
        self.path = root / identity.hex()
        self.make()

    def make(self) -> None:
        """Make it where it is not there, as when it was taken for one that nobody uses, or when somebody has
        removed all of the root. ForeignFolder where that is another database's by now."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(self.root, self._database)
        if not (self.root / "secret").exists():  # what is known under it would not be found otherwise
            _written_once(self.root / "secret", self.secret)
        self.path.mkdir(mode=0o700, exist_ok=True)

    def touch(self) -> None:
        """Write down that it is in use: see `touched_at`."""
        self.make()
        with suppress(OSError):  # on a disk that is read-only nobody removes it either
            os.utime(self.path)

    def owner(self, owner: str) -> bytes:
        """16 bytes that stand for an owner; without the secret they tell nothing."""
        return self._digest(b"owner", owner)

    def of(self, owner: bytes) -> Path:
        """An owner's folder, made if it is not there."""
        path = self.path / owner.hex()
        if not self.path.is_dir():
            self.make()
        for each in (path, path / "names"):  # parents that are made on the way are open to others
            each.mkdir(mode=0o700, exist_ok=True)
        return path

    def owners(self) -> list[bytes]:
        """Those who have a folder."""
        return [bytes.fromhex(entry.name) for entry in _listed(self.path) if _DIGEST.fullmatch(entry.name)]

    def files(self, owner: bytes) -> Iterator[os.DirEntry[str]]:
        """An owner's files of blocks; what was abandoned unfinished is removed on the way."""
        for entry in _listed(self.path / owner.hex()):
            if entry.name.endswith(SUFFIX) and _DIGEST.fullmatch(entry.name.removesuffix(SUFFIX)):
                yield entry
            elif entry.name.endswith(UNFINISHED):
                _remove_abandoned(entry)

    def names(self, owner: bytes) -> dict[Path, int]:
        """An owner's names: where they are written down, and when they were, in nanoseconds."""
        found = {}
        for entry in _listed(self.path / owner.hex() / "names"):
            if entry.name.endswith(UNFINISHED):
                _remove_abandoned(entry)
                continue
            with suppress(FileNotFoundError):
                found[Path(entry.path)] = entry.stat().st_mtime_ns
        return found

    def read_name(self, owner: bytes, path: Path) -> Name | None:
        """A name that is written down there; None where it is gone, or cannot be read and is removed."""
        with suppress(OSError):
            try:
                name = read_name(path)
                if path == self.path_of(owner, name.name):
                    return name
            except Damaged:
                pass
            path.unlink()
        return None

    def path_of(self, owner: bytes, name: str) -> Path:
        """Where a name is written down."""
        return self.path / owner.hex() / "names" / self._digest(b"name", name).hex()

    def write_name(self, owner: bytes, name: Name) -> None:
        """Write a name down, in the place of what it stood for."""
        self.of(owner)
        write_name(self.path_of(owner, name.name), name)

    def remove_owner(self, owner: bytes) -> None:
        """Remove all that is an owner's."""
        path = self.path / owner.hex()
        for _ in range(REMOVALS):  # a file that was renamed meanwhile is found the next time
            if path.exists():
                shutil.rmtree(path, ignore_errors=True)

    def others(self) -> list[Folder]:
        """What other models, or this one under other settings, have left under the same root."""
        return [folder for folder in folders(self.root) if folder.identity != self.identity]

    def touched_at(self) -> float:
        """When it was last read, written or touched, unix seconds."""
        times = [self.path.stat().st_mtime]
        for owner in self.owners():
            times += [entry.stat().st_mtime for entry in self.files(owner)]
        return max(times)

    def num_bytes(self) -> int:
        """Of all files of blocks."""
        return sum(entry.stat().st_size for owner in self.owners() for entry in self.files(owner))

    def remove(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _digest(self, kind: bytes, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=16, key=self.secret, person=kind).digest()


def folders(root: Path) -> list[Folder]:
    """What all models and settings have left under a root; none where there is no such folder."""
    found = [entry.name for entry in _listed(root) if _DIGEST.fullmatch(entry.name)]
    return [Folder(root, bytes.fromhex(name)) for name in found]


def _listed(path: Path) -> list[os.DirEntry[str]]:
    """What a folder has; nothing where there is none."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _remove_abandoned(entry: os.DirEntry[str]) -> None:
    with suppress(OSError):
        if time.time() - entry.stat().st_mtime > ABANDONED_S:
            os.unlink(entry.path)


def require_own(root: Path, database: str | None) -> None:
    """ForeignFolder where a root is that of another database than this one, an id of 32 characters; what is
    nobody's yet becomes its, once the disk has room to write that down. None: whose it is does not matter.
    OSError."""
    if database is None:
        return
    try:
        found = _written_once(root / "database", database.encode())
    except OSError as error:
        if error.errno not in FULL:
            raise
        return
    if found != database.encode():
        raise ForeignFolder(root)


def database_of(root: Path) -> str | None:
    """The id of the database that a root belongs to; None where it is nobody's yet. OSError."""
    with suppress(FileNotFoundError), open_private(root / "database", os.O_RDONLY) as descriptor:
        return os.read(descriptor, 32).decode("ascii", "replace")
    return None


def _written_once(path: Path, content: bytes) -> bytes:
    """The 32 bytes that a file has, these where it is not there yet; of several processes that begin at once,
    all get the same."""
    draft = path.with_name(f"{secrets.token_hex(8)}{UNFINISHED}")
    for _ in range(2):
        with suppress(FileNotFoundError), open_private(path, os.O_RDONLY) as descriptor:
            if len(found := os.read(descriptor, 33)) == 32:
                return found
            path.unlink()  # cut by a crash of the machine: what was saved under that secret cannot be found
        try:
            with open_private(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                os.write(descriptor, content)
                os.fsync(descriptor)
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    with open_private(path, os.O_RDONLY) as descriptor:
        return os.read(descriptor, 32)
