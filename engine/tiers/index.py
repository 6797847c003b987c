"""Knows which blocks are on disk, which files hold them, and who still wants them.

Blocks are a tree: each knows the block before it. A name stands for a block and all before it. A block lives
while a name stands for it or a block behind it is there; so a response that is forgotten takes with it what
no other one shares. What is worth least goes first when there is no room, ends of sequences before their
beginnings: a prefix without its head is of no use.

The index is memory only. It is made from headers and names at start, and costs some 300 bytes a block.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.tiers.files import Name, Row

MAX_BLOCKS = 1 << 18
"""That are known, some 80 MB of memory: a quota of another kind, for blocks that are very small."""

MAX_NAMES = 1 << 16
"""That are known; those that were given first go first."""

HALF_LIFE_S = 6 * 3600.0
"""After so long without use a return is half as likely as at once."""


@dataclass(slots=True, eq=False)
class SavedFile:
    """One file: its blocks in order, its size, and when it was last written or read (unix seconds)."""

    path: Path
    owner: bytes
    num_bytes: int
    used_at: float
    digests: list[bytes] = field(default_factory=list)
    num_dead: int = 0  # blocks in it that nobody wants any more
    dead_since: float = 0.0  # unix seconds: since when another process is about to write it without them


@dataclass(slots=True, eq=False)
class Node:
    """A block that is on disk: in which files, with which layer groups in each, and with which at most."""

    parent: bytes
    depth: int
    groups: int
    places: list[tuple[SavedFile, int]]


@dataclass(slots=True, eq=False)
class Named:
    """What a name stands for, whose it is, and until when (unix seconds)."""

    owner: bytes
    tail: bytes
    until: float | None


class Index:
    """Not thread-safe, but for `groups_of`, which any thread may ask."""

    def __init__(self) -> None:
        self.files: dict[Path, SavedFile] = {}
        self.names: dict[str, Named] = {}
        self.bytes_of: Counter[bytes] = Counter()  # by owner
        self.num_bytes = 0
        self._nodes: dict[bytes, Node] = {}
        self._names: defaultdict[bytes, set[str]] = defaultdict(set)  # by the block, be it there or not
        self._children: Counter[bytes] = Counter()  # blocks that are there, by the block before them

    def __len__(self) -> int:
        return len(self._nodes)

    # -- what is there ---------------------------------------------------------------------------------------

    def groups_of(self, digest: bytes) -> int:
        """The layer groups that a block is there with, as bits; 0: it is not there."""
        node = self._nodes.get(digest)
        return 0 if node is None else node.groups

    def place(self, digest: bytes, groups: int) -> SavedFile | None:
        """A file that has a block with at least these layer groups."""
        node = self._nodes.get(digest)
        if node is None:
            return None
        return next((file for file, has in node.places if has & groups == groups), None)

    # -- files and names come --------------------------------------------------------------------------------

    def add(self, file: SavedFile, rows: Sequence[Row]) -> None:
        """A file is there."""
        self.files[file.path] = file
        self.bytes_of[file.owner] += file.num_bytes
        self.num_bytes += file.num_bytes
        file.digests = [row.key.digest for row in rows]
        for row in rows:
            node = self._nodes.get(row.key.digest)
            if node is None:
                node = self._nodes[row.key.digest] = Node(row.key.parent, row.depth, 0, [])
                self._children[node.parent] += 1
            node.places.append((file, row.groups))
            node.groups = max(node.groups, row.groups)

    def give(self, name: Name, owner: bytes) -> list[SavedFile]:
        """A name stands for a block from now on. Returns the files that have lost blocks by that, as `take`
        does."""
        before = self.names.pop(name.name, None)
        self.names[name.name] = Named(owner, name.tail, name.until)
        self._names[name.tail].add(name.name)
        if before is None or before.tail == name.tail:
            return []
        return self._unname(name.name, before.tail)

    # -- and go ----------------------------------------------------------------------------------------------

    def take(self, name: str) -> list[SavedFile]:
        """Nobody wants what is under this name. Returns the files in which blocks died: see `num_dead`."""
        before = self.names.pop(name, None)
        return [] if before is None else self._unname(name, before.tail)

    def remove(self, file: SavedFile) -> list[str]:
        """A file is gone. Returns the names that now stand for an earlier block, or for none: then they are
        no longer among `names`."""
        if self.files.pop(file.path, None) is None:
            return []
        self.bytes_of[file.owner] -= file.num_bytes
        self.num_bytes -= file.num_bytes
        if not self.bytes_of[file.owner]:
            del self.bytes_of[file.owner]
        moved: list[str] = []
        for digest in reversed(file.digests):
            node = self._nodes.get(digest)
            if node is None:  # it had died
                continue
            node.places = [place for place in node.places if place[0] is not file]
            node.groups = max((groups for _, groups in node.places), default=0)
            if not node.places:
                self._drop(digest, node)
                moved += self._move_names(digest, node.parent)
        return moved

    def orphans(self, young: Collection[SavedFile] = ()) -> list[SavedFile]:
        """Let blocks die that no name stands for, but for those of files so young that their names may be
        about to be written. Returns the files that have lost some."""
        shrunk: dict[SavedFile, None] = {}
        for digest, node in list(self._nodes.items()):
            if not any(file in young for file, _ in node.places):
                shrunk.update(dict.fromkeys(self._let_die(digest)))
        return list(shrunk)

    def nameless(self) -> list[str]:
        """Names whose blocks are not there."""
        return [name for name, named in self.names.items() if named.tail not in self._nodes]

    def behind(self, digest: bytes) -> set[SavedFile]:
        """The files of a block and of all before it."""
        files: set[SavedFile] = set()
        while (node := self._nodes.get(digest)) is not None:
            files.update(file for file, _ in node.places)
            digest = node.parent
        return files

    def expired(self, now: float) -> list[str]:
        """Names whose time is over, and the oldest of too many."""
        over = [name for name, named in self.names.items() if named.until is not None and named.until <= now]
        gone = set(over)
        excess = len(self.names) - len(over) - MAX_NAMES
        if excess > 0:
            over += [name for name in self.names if name not in gone][:excess]
        return over

    def names_of(self, owner: bytes) -> list[str]:
        """An owner's."""
        return [name for name, named in self.names.items() if named.owner == owner]

    def files_of(self, owner: bytes) -> list[SavedFile]:
        """An owner's."""
        return [file for file in self.files.values() if file.owner == owner]

    def alive(self, file: SavedFile) -> set[bytes]:
        """Those blocks of a file that somebody wants, and that this file is needed for."""
        return {digest for digest in file.digests if self._is_in(digest, file)}

    def least_worth(
        self,
        excess: int,
        limit: int,
        seconds: Callable[[int], float],
        *,
        spared: Collection[SavedFile] = (),
        now: float | None = None,
    ) -> Iterable[tuple[SavedFile, str]]:
        """Files to remove until `excess` bytes are gone, and the cause of each; the caller removes each one
        from the index before it asks for the next.

        limit: bytes that all may have. seconds: to compute a block with so many before it. spared: files that
        stay. Owners who have more than an equal share go first: then it is no use to one to save much.
        """
        now = time.time() if now is None else now
        while excess > 0:
            free = [file for file in self.files.values() if file not in spared]
            if not free:
                return
            share = limit / max(1, len(self.bytes_of))
            greedy = {owner for owner, num in self.bytes_of.items() if num > share}
            ends = [file for file in free if self._is_end(file)] or free
            among = [file for file in ends if file.owner in greedy]
            cause = "owner" if among and len(self.bytes_of) > 1 else "quota"
            ranked = sorted(among or ends, key=lambda file: self._worth(file, seconds, now))
            for file in ranked[: max(1, len(ranked) // 8)]:  # then others have become ends
                yield file, cause
                excess -= file.num_bytes
                if excess <= 0:
                    return

    # -- the tree --------------------------------------------------------------------------------------------

    def _worth(self, file: SavedFile, seconds: Callable[[int], float], now: float) -> float:
        """Seconds of computing that a file saves when its sequence returns, times how likely that is, a
        byte."""
        nodes = [self._nodes[digest] for digest in file.digests if self._is_in(digest, file)]
        if not nodes or (nodes[0].depth and nodes[0].parent not in self._nodes):
            return 0.0  # nothing leads to it
        likely: float = 0.5 ** (max(0.0, now - file.used_at) / HALF_LIFE_S)
        return likely * sum(seconds(node.depth) for node in nodes) / file.num_bytes

    def _is_end(self, file: SavedFile) -> bool:
        """Whether no block of another file needs one before it that this file alone has."""
        nodes = {digest: self._nodes[digest] for digest in file.digests if digest in self._nodes}
        own = Counter(node.parent for node in nodes.values())
        return all(
            self._children[digest] <= own[digest] or any(place[0] is not file for place in node.places)
            for digest, node in nodes.items()
        )

    def _is_in(self, digest: bytes, file: SavedFile) -> bool:
        node = self._nodes.get(digest)
        return node is not None and any(place[0] is file for place in node.places)

    def _unname(self, name: str, tail: bytes) -> list[SavedFile]:
        self._names[tail].discard(name)
        if not self._names[tail]:
            del self._names[tail]
        return self._let_die(tail)

    def _let_die(self, digest: bytes) -> list[SavedFile]:
        """Drop a block that nobody wants, and those before it that nobody wants then."""
        shrunk: dict[SavedFile, None] = {}
        while (node := self._nodes.get(digest)) is not None:
            if digest in self._names or self._children[digest]:
                break
            for file, _ in node.places:
                file.num_dead += 1
                shrunk[file] = None
            self._drop(digest, node)
            digest = node.parent
        return list(shrunk)

    def _drop(self, digest: bytes, node: Node) -> None:
        del self._nodes[digest]
        self._children[node.parent] -= 1
        if not self._children[node.parent]:
            del self._children[node.parent]

    def _move_names(self, digest: bytes, parent: bytes) -> set[str]:
        """The names of a block that is gone stand for the one before it, if that is there."""
        names = self._names.pop(digest, set())
        for name in names:
            if parent in self._nodes:
                self._names[parent].add(name)
                self.names[name].tail = parent
            else:
                del self.names[name]
        return names
