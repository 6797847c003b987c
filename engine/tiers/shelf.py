"""The files of one folder together with their index: what is written, found, evicted and forgotten there.

Data goes before names: a block is on disk before a name stands for it, so whoever finds a file without a name
waits until it is no longer young before it is taken for what a crash has left.

Several processes may write to one folder. `refresh` finds what the others did; what they removed is found
missing at the latest when it is read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from engine.tiers.files import (
    Bytes,
    Damaged,
    FileWriter,
    Key,
    Name,
    Row,
    new_file,
    open_private,
    read_blocks,
    read_table,
)
from engine.tiers.folders import Folder, folders, require_own
from engine.tiers.index import MAX_BLOCKS, Index, SavedFile

YOUNG_S = 60.0
"""A file without a name, or a name without its block, may be work in progress of another process."""

TOUCH_S = 60.0
"""A use is written down no more often than this."""

STALE_S = 7 * 86400.0
"""What another model left under the same root is removed when nobody has used it for so long."""

log = logging.getLogger("antiphon.engine")


class Shelf:
    """One thread changes it; others may ask `index.groups_of`, and `place` and the counts under `lock`."""

    def __init__(self, folder: Folder, group_bytes: Sequence[int] | None) -> None:
        """group_bytes: see `read_table`."""
        self.folder = folder
        self.index = Index()
        self.lock = threading.Lock()
        self.evictions: Counter[str] = Counter()  # blocks, by cause
        self._group_bytes = group_bytes
        self._seen: dict[bytes, tuple[int, int]] = {}  # of an owner's two folders: when they last changed
        self._name_files: dict[Path, tuple[str, int]] = {}  # the name, and when it was written
        self._strange = set[Path]()  # what is no file that can be read, and was told
        self._left = set[Path]()  # files that are to be removed, and could not be

    # -- finding ---------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Find what is there, and remove what crashes have left, once it is no longer young."""
        self.refresh()
        now = time.time()
        # whoever removes a name writes the file anew at once, unless it is killed in between
        left = [f for f in self.index.files.values() if f.dead_since and now - f.dead_since > YOUNG_S]
        self.shrink(left, "forgotten")
        young = {file for file in self.index.files.values() if now - file.used_at < YOUNG_S}
        with self.lock:
            shrunk = self.index.orphans(young)
        self.shrink(shrunk, "forgotten")
        for name in self.index.nameless():
            with suppress(OSError):
                path = self.folder.path_of(self.index.names[name].owner, name)
                if now - path.stat().st_mtime > YOUNG_S:
                    self.forget([name])

    def refresh(self) -> None:
        """See what other processes have written and removed, and try again to remove what could not be."""
        for path in list(self._left):
            self._unlink(path)
        owners = set(self.folder.owners())
        for owner in owners | self._seen.keys() | set(self.index.bytes_of):
            seen = self._changed_at(owner)
            if self._seen.get(owner) != seen or owner not in owners:
                # a change within the clock's next tick would not show
                self._seen[owner] = seen if time.time_ns() - max(seen) > 1e9 else (0, 0)
                # Names are read before files are listed. Blocks are written before their name, so the files
                # have them then; a name that was read later could be ahead of the files, and blocks that it
                # alone stood for would be dead here while others use them.
                given, gone = self._find_names(owner)
                self._refresh_files(owner)
                self._refresh_names(owner, given, gone)
        for owner in self._seen.keys() - owners:
            del self._seen[owner]

    def _changed_at(self, owner: bytes) -> tuple[int, int]:
        path = self.folder.path / owner.hex()
        times = []
        for each in (path, path / "names"):
            try:
                times.append(each.stat().st_mtime_ns)
            except FileNotFoundError:
                times.append(0)
        return times[0], times[1]

    def _refresh_files(self, owner: bytes) -> None:
        found = {Path(entry.path): entry for entry in self.folder.files(owner)}
        for path, entry in found.items():
            if path in self.index.files or path in self._left:
                continue
            with suppress(FileNotFoundError):
                try:
                    stat = entry.stat(follow_symlinks=False)
                    with open_private(path, os.O_RDONLY) as descriptor:
                        rows = self._table(descriptor, owner)
                except Damaged as error:
                    log.warning("a file of saved KV is of no use, and is removed: %s: %s", path, error)
                    self.evictions["damaged"] += 1
                    self._unlink(path)
                    continue
                except FileNotFoundError:
                    raise
                except OSError as error:  # the others can be used all the same
                    if path not in self._strange:
                        log.warning("what looks like a file of saved KV cannot be read: %s", error)
                        self._strange.add(path)
                    continue
                file = SavedFile(path, owner, stat.st_size, stat.st_mtime)
                with self.lock:
                    self.index.add(file, rows)
        for file in self.index.files_of(owner):
            if file.path not in found:
                with self.lock:
                    moved = self.index.remove(file)
                for name in moved:  # to be read again: the blocks may be in a file that is found later
                    self._name_files[self.folder.path_of(owner, name)] = (name, 0)

    def _vanished(self, owner: bytes, there: Collection[Path]) -> list[Path]:
        folder = self.folder.path / owner.hex() / "names"
        return [path for path in self._name_files if path.parent == folder and path not in there]

    def _find_names(self, owner: bytes) -> tuple[list[tuple[Path, int, Name]], list[Path]]:
        """Names that are new here, with where and when they were written down, and where names were that are
        gone."""
        there = self.folder.names(owner)
        if gone := self._vanished(owner, there):
            # what took the place of one was written before that went, but the list may have missed both
            there = self.folder.names(owner)
            gone = self._vanished(owner, there)
        given = []
        for path, at in there.items():
            if path in self._left or (path in self._name_files and self._name_files[path][1] == at):
                continue
            if (name := self.folder.read_name(owner, path)) is not None:
                given.append((path, at, name))
        return given, gone

    def _refresh_names(
        self, owner: bytes, given: Sequence[tuple[Path, int, Name]], gone: Sequence[Path]
    ) -> None:
        """Take in what was found: new names first, for they may stand for what others stood for until now."""
        for path, at, name in given:
            self._name_files[path] = (name.name, at)
            with self.lock:
                self.index.give(name, owner)
        for path in gone:
            with self.lock:
                shrunk = self.index.take(self._name_files.pop(path)[0])
            for file in shrunk:
                file.dead_since = file.dead_since or time.time()

    def _table(self, descriptor: int, owner: bytes) -> list[Row]:
        return read_table(
            descriptor, identity=self.folder.identity, owner=owner, group_bytes=self._group_bytes
        )

    # -- reading ---------------------------------------------------------------------------------------------

    def place(self, digest: bytes, groups: int) -> SavedFile | None:
        """A file with a block and these layer groups; from any thread."""
        with self.lock:
            return self.index.place(digest, groups)

    def rows(self, descriptor: int, owner: bytes, keys: Iterable[Key]) -> list[Row]:
        """The rows of these blocks in an open file; raises Damaged unless all are there as they are asked
        for."""
        table = {row.key.digest: row for row in self._table(descriptor, owner)}
        rows = []
        for key in keys:
            row = table.get(key.digest)
            if row is None or row.key != key:
                raise Damaged("it does not have the block that it had")
            rows.append(row)
        return rows

    def used(self, files: Iterable[SavedFile]) -> None:
        """Files were of use now."""
        now = time.time()
        for file in files:
            if now - file.used_at > TOUCH_S:
                with suppress(OSError):
                    os.utime(file.path, (now, now))
            file.used_at = now

    # -- writing ---------------------------------------------------------------------------------------------

    def write(
        self, owner: bytes, keys: Sequence[tuple[Key, int, int]], fill: Callable[[FileWriter], None]
    ) -> SavedFile:
        """A new file of these blocks, each with its groups and depth; raises OSError."""
        with new_file(
            self.folder.of(owner),
            identity=self.folder.identity,
            owner=owner,
            block_size=len(keys[0][0].tokens) // 4,
            capacity=len(keys),
        ) as (path, writer):
            fill(writer)
        file = SavedFile(path, owner, writer.size, time.time())
        with self.lock:
            self.index.add(file, writer.rows)
        return file

    def give(self, name: Name, owner: bytes) -> None:
        """Let a name stand for a block that is there; raises OSError."""
        if not self.index.groups_of(name.tail):
            return
        self.folder.write_name(owner, name)
        path = self.folder.path_of(owner, name.name)
        self._name_files[path] = (name.name, path.stat().st_mtime_ns)
        with self.lock:
            shrunk = self.index.give(name, owner)
        self.shrink([file for file in shrunk if 2 * file.num_dead > len(file.digests)], "forgotten")

    # -- removing --------------------------------------------------------------------------------------------

    def make_room(
        self, needed: int, limit: int, seconds: Callable[[int], float], spared: Collection[SavedFile] = ()
    ) -> bool:
        """Evict what is worth least until so many bytes fit in; False where that cannot be. See
        `Index.least_worth`."""
        excess = self.index.num_bytes + needed - limit
        if len(self.index) > MAX_BLOCKS:
            excess = max(excess, self.index.num_bytes // 20)
        if excess <= 0:
            return True
        if self.index.num_bytes - sum(file.num_bytes for file in spared) < excess:
            return False
        for file, cause in self.index.least_worth(excess + limit // 20, limit, seconds, spared=spared):
            self.evict(file, cause)
        return self.index.num_bytes + needed <= limit

    def evict(self, file: SavedFile, cause: str) -> None:
        """Remove a file; names of its blocks stand for earlier ones then, if there are such."""
        with self.lock:
            self.evictions[cause] += len(file.digests) - file.num_dead
            moved = set(self.index.remove(file))
        self._unlink(file.path)
        for name in moved:
            path = self.folder.path_of(file.owner, name)
            named = self.index.names.get(name)
            if named is None:
                self._unlink(path)
                self._name_files.pop(path, None)
                continue
            with suppress(OSError):
                self.folder.write_name(file.owner, Name(name, named.tail, named.until))
                self._name_files[path] = (name, path.stat().st_mtime_ns)

    def forget(self, names: Iterable[str], cause: str = "forgotten") -> None:
        """Remove names, and the blocks that no other name stands for, from the disk."""
        for name in names:
            named = self.index.names.get(name)
            if named is None:
                continue
            path = self.folder.path_of(named.owner, name)
            self._unlink(path)
            self._name_files.pop(path, None)
            with self.lock:
                self.index.take(name)
            self.shrink([file for file in self.index.files_of(named.owner) if file.num_dead], cause)

    def forget_owner(self, owner: bytes) -> None:
        """Remove all that is an owner's."""
        self.folder.remove_owner(owner)
        folder = self.folder.path / owner.hex()
        names = folder / "names"
        self._left.update(path for path in (folder, names) for path in _files_in(path))
        with self.lock:
            for file in self.index.files_of(owner):
                self.evictions["forgotten"] += len(file.digests) - file.num_dead
                self.index.remove(file)
            for name in self.index.names_of(owner):
                self.index.take(name)
        self._name_files = {path: seen for path, seen in self._name_files.items() if path.parent != names}

    def _unlink(self, path: Path) -> None:
        """Remove a file; one that cannot be is tried again with each refresh."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if path not in self._left:
                log.warning("saved KV could not be removed, and is tried again: %s", error)
            self._left.add(path)
        else:
            self._left.discard(path)

    def shrink(self, files: Iterable[SavedFile], cause: str) -> None:
        """Take dead blocks off the disk: the file goes, or is written anew without them."""
        for file in files:
            if file.path not in self.index.files:
                continue
            self.evictions[cause] += file.num_dead
            alive = self.index.alive(file)
            if alive and not self._copy(file, alive):
                self.evict(file, cause)  # what was asked to go goes, if more has to go with it
                continue
            with self.lock:
                self.index.remove(file)
            self._unlink(file.path)

    def _copy(self, file: SavedFile, alive: set[bytes]) -> bool:
        """Write the blocks that are alive into a file of their own; False where that failed."""
        try:
            with open_private(file.path, os.O_RDONLY) as descriptor:
                rows = [row for row in self._table(descriptor, file.owner) if row.key.digest in alive]

                def fill(writer: FileWriter) -> None:
                    for row in rows:
                        block: Bytes = np.empty(row.length, np.uint8)
                        writer.add([(row.key, row.groups, row.depth)], read_blocks(descriptor, [row], block))

                copy = self.write(file.owner, [(row.key, row.groups, row.depth) for row in rows], fill)
            copy.used_at = file.used_at
            with suppress(OSError):
                os.utime(copy.path, (file.used_at, file.used_at))
        except (OSError, Damaged):
            return False
        return True


def remove_stale(folder: Folder) -> None:
    """Remove what other models have left and nobody has used for long."""
    for other in folder.others():
        with suppress(OSError):
            if time.time() - other.touched_at() > STALE_S:
                log.info("saved KV of another model is removed, unused for a week: %s", other.path)
                other.remove()


class SavedKV:
    """What models have saved under one root, be they loaded or not. For one thread at a time; methods raise
    OSError."""

    def __init__(self, root: Path, *, but: bytes | None = None, database: str | None = None) -> None:
        """but: the identity of one that others look after. database: whose it is to be; what is another's is
        a ForeignFolder, an OSError."""
        self._root = root
        self._database = database
        self._but = but
        self._shelves: dict[Path, Shelf] = {}

    def shelves(self) -> list[Shelf]:
        """Of each model and its settings, as it is now."""
        require_own(self._root, self._database)
        found = [folder for folder in folders(self._root) if folder.identity != self._but]
        self._shelves = {each.path: self._shelves.get(each.path) or Shelf(each, None) for each in found}
        for shelf in self._shelves.values():
            shelf.refresh()
            shelf.forget(shelf.index.expired(time.time()), "expired")
        return [*self._shelves.values()]

    def names(self) -> frozenset[str]:
        """All that is there under any name, when what crashes have left is swept."""
        shelves = self.shelves()
        for shelf in shelves:
            shelf.sweep()
        return frozenset(name for shelf in shelves for name in shelf.index.names)

    def forget(self, names: Collection[str]) -> None:
        """Remove names, and what they alone stood for."""
        for shelf in self.shelves():
            shelf.forget(names)

    def forget_owner(self, owner: str) -> bool:
        """Remove all that is an owner's; returns whether all of it could be."""
        whose = [(shelf, shelf.folder.owner(owner)) for shelf in self.shelves()]
        for shelf, of_owner in whose:
            shelf.forget_owner(of_owner)
        return not any(any(shelf.folder.files(of_owner)) for shelf, of_owner in whose)


def _files_in(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if not path.is_dir()]
    return []
