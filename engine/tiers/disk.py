"""Moves blocks between the pool and the disk, on threads of its own.

Three threads: one copies blocks out of the pool, so that the pool has them back soon however slow the disk
is; one writes, evicts and forgets, in the order in which it is asked to; one reads. Queues are bounded, and
what finds no place is refused: it is a cache. Nothing here raises into a request.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np

from engine.tiers.files import Bytes, Damaged, FileWriter, Key, Name, Row, aligned, open_private, read_blocks
from engine.tiers.folders import FULL, Folder, ForeignFolder
from engine.tiers.index import SavedFile
from engine.tiers.rates import Rates
from engine.tiers.shelf import SavedKV, Shelf, remove_stale
from engine.types import TierState, TierStats, readable_size

PIECE = 16 << 20
"""Bytes that are copied, written or read in one go."""

STAGED = 256 << 20
"""Bytes of memory that hold copies of blocks until they are written; one save may go beyond."""

MAX_SAVING = 256
"""Saves that wait; more are refused."""

REFRESH_S = 5.0
"""What other processes did is looked for as often as this, where there is nothing to write."""

RETRY_S = 60.0
"""A disk that is left alone is tried again after so long; one that seems too slow is measured again."""

MOST_RETRY_S = 3600.0
"""One that stays slow is measured this seldom in the end: it is written to each time."""

HOUSEKEEPING_S = 3600.0
"""The folder is said to be in use as often as this, and those that others have left are looked through."""

PROBE = 8 << 20
"""Bytes that are written and read to know how quick the disk is."""

LEAST_PROBE = 1 << 16
"""The same of a disk that has next to nothing left."""

log = logging.getLogger("antiphon.engine")


class BlockMemory(Protocol):
    """The bytes of the pool's blocks, by layer group.

    `mark` is called on the engine thread: what it returns stands for all that the device was asked until
    then. `read` is called on one thread and `write` on another; blocks that they are given are theirs.
    """

    @property
    def group_bytes(self) -> Sequence[int]:
        """Of one block of each group, as it is saved."""
        ...

    def mark(self) -> object:
        """What the device has been asked so far."""
        ...

    def read(self, group: int, blocks: Sequence[int], into: Bytes, mark: object) -> None:
        """Copy blocks of a group into rows of memory [blocks, bytes], once the mark is reached."""
        ...

    def write(self, group: int, blocks: Sequence[int], data: Bytes, mark: object) -> None:
        """Copy rows of memory [blocks, bytes] into blocks of a group, once the mark is reached; they are
        there when it returns."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """A block on its way. depth: how many are before it. places: of each layer group that moves, its block
    in the pool."""

    key: Key
    depth: int
    places: tuple[tuple[int, int], ...]

    @property
    def groups(self) -> int:
        """Its layer groups, as bits."""
        return sum(1 << group for group, _ in self.places)


@dataclass(slots=True, eq=False)
class Save:
    """Blocks to write, and a name for them and those before them, which are on disk already.

    copied: called from a thread, once, when the pool may have the blocks back.
    """

    name: Name
    owner: str
    blocks: list[Block]
    mark: object
    copied: Callable[[], None]
    _token: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """Be the one who decides on it: whoever comes first copies it, or takes its blocks back."""
        return self._token.acquire(blocking=False)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks to read, in order. done: called from a thread, once; then the first `num_read` are in place, and
    where that is not all of them `failure` says why."""

    owner: str
    blocks: list[Block]
    mark: object
    done: Callable[[Load], None]
    cancelled: bool = False
    filling: threading.Lock = field(default_factory=threading.Lock)  # held while blocks are written to
    num_read: int = 0
    seconds: float = 0.0
    failure: str | None = None

    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more; it may change at any time."""
        return self.cancelled

    def revoke(self) -> bool:
        """Write to no block of it any more; False: it is written to right now."""
        self.cancelled = True
        if not self.filling.acquire(blocking=False):
            return False
        self.filling.release()
        return True


@dataclass(slots=True)
class Counts:
    """Totals since the start; see `TierStats`."""

    blocks_saved: int = 0
    bytes_saved: int = 0
    save_s: float = 0.0
    bytes_read: int = 0
    read_s: float = 0.0
    saves_refused: Counter[str] = field(default_factory=Counter)


class DiskTier:
    """Saved KV on disk. Its methods are called on the engine thread, unless they say otherwise."""

    def __init__(
        self, folder: Folder, memory: BlockMemory, rates: Rates, *, limit: int, block_size: int
    ) -> None:
        """limit: bytes that all files may have. Opens the folder on a thread: see `opened`."""
        self.rates = rates
        self.memory = memory
        self.opened = threading.Event()
        self.counts = Counts()
        self.limit = limit
        self.room = limit  # bytes that may be used now: the limit, or what the disk has for it
        self._block_size = block_size
        self._shelf = Shelf(folder, memory.group_bytes)
        self._elsewhere = SavedKV(folder.root, but=folder.identity)  # of other models and settings
        self._is_open = False  # what is there was found
        self._housekeeping_at = 0.0  # time.monotonic seconds, as is the next one
        self._measure_at = time.monotonic() + RETRY_S
        self._measure_s = RETRY_S  # between two measurements
        self._is_doubted = False  # somebody did without the disk because it seemed too slow
        self._state: TierState = "on"
        self._why = ""
        self._until = 0.0  # time.monotonic seconds: then a disk that is left alone is tried again
        self._needed = 0  # bytes that the latest save began with: a disk is full until it has room for them
        self._lacks_room = False  # a save found no room, which was told
        self._closing = threading.Event()
        self._written = threading.Event()
        self._pending: set[bytes] = set()  # digests of blocks that are on their way to the disk
        self._num_saving = 0
        self._reading_s = 0.0  # what the reads that wait are expected to take
        self._staged = 0
        self._space = threading.Condition()
        self._copies: SimpleQueue[Save | Callable[[], None] | None] = SimpleQueue()
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._reads: SimpleQueue[Load | None] = SimpleQueue()
        for name, run in (("copy", self._copy_all), ("write", self._write_all), ("read", self._read_all)):
            threading.Thread(target=run, name=f"kv-{name}", daemon=True).start()

    # -- what it is asked ------------------------------------------------------------------------------------

    @property
    def state(self) -> TierState:
        """Whether it reads ("on", "full") and writes ("on")."""
        return self._state

    def groups_of(self, digest: bytes) -> int:
        """The layer groups that a block is on disk with, as bits."""
        return self._shelf.index.groups_of(digest)

    def is_pending(self, digest: bytes) -> bool:
        """Whether a block is on its way to the disk."""
        return digest in self._pending

    def bytes_of(self, groups: int) -> int:
        """Of a block with these layer groups."""
        return sum(num for bit, num in enumerate(self.memory.group_bytes) if groups >> bit & 1)

    def wait_s(self) -> float:
        """What the reads that are asked for already are expected to take."""
        return self._reading_s

    def save(self, save: Save) -> bool:
        """Write blocks; False: it cannot be, and `copied` is not called."""
        if self.state != "on" or self._closing.is_set():
            self.refused("state")
            return False
        if self._num_saving >= MAX_SAVING:
            self.refused("busy")
            return False
        self._num_saving += 1
        self._pending.update(block.key.digest for block in save.blocks)
        self._copies.put(save)
        return True

    def refused(self, cause: str) -> None:
        """Count an end of which nothing is saved."""
        self.counts.saves_refused[cause] += 1

    def doubt(self) -> None:
        """The disk was not asked because reading it takes too long, as far as is known. Only a read can tell
        otherwise, so it is measured again before long."""
        self._is_doubted = True

    def load(self, load: Load) -> None:
        """Read blocks."""
        self._reading_s += self._expected(load)
        self._reads.put(load)

    def forget(self, names: Iterable[str]) -> None:
        """Remove names, and what they alone stood for; after all saves that were asked for before."""
        self._copies.put(partial(self._writes.put, partial(self._forget, list(names))))

    def forget_owner(self, owner: str) -> None:
        """The same with all that is an owner's."""
        self._copies.put(partial(self._writes.put, partial(self._forget_owner, owner)))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the writing thread, after all that was asked for before; from any thread."""
        self._copies.put(partial(self._writes.put, function))

    def names(self) -> frozenset[str]:
        """What is on disk under any name, also of other models and settings, when what crashes have left is
        swept; on the writing thread."""
        try:
            self._shelf.folder.make()
        except ForeignFolder as error:  # nothing of ours is there, and nothing there is ours to compare
            self._disk_failed(error)
            return frozenset()
        self._shelf.sweep()
        found = set[str]()
        for shelf in (self._shelf, *self._elsewhere.shelves()):
            found.update(shelf.index.names)
        return frozenset(found)

    def slow(self, why: str) -> None:
        """Leave the disk alone for a while."""
        self._leave("slow", why)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for no longer than this; a disk that hangs is left to it. From any thread."""
        self._closing.set()
        self._copies.put(None)
        self._reads.put(None)
        if not self._written.wait(timeout_s):
            log.warning("KV that was to be saved was not, within %g s", timeout_s)

    def stats(self) -> TierStats:
        """Its part of `TierStats`; from any thread."""
        counts, index = self.counts, self._shelf.index
        return TierStats(
            state=self.state,
            why=self._why,
            disk_bytes=index.num_bytes,
            disk_bytes_limit=self.limit,
            files=len(index.files),
            names=len(index.names),
            blocks=len(index),
            saving=self._num_saving,
            saved_blocks_total=counts.blocks_saved,
            saved_bytes_total=counts.bytes_saved,
            save_seconds_total=counts.save_s,
            restored_bytes_total=counts.bytes_read,
            restore_seconds_total=counts.read_s,
            saves_refused=dict(counts.saves_refused),
            evictions=dict(self._shelf.evictions),
        )

    def _leave(self, state: TierState, why: str) -> None:
        if self._state != state:  # once, until it works again
            log.warning("saved KV on disk is left alone: %s", why)
        self._state, self._why, self._until = state, why, time.monotonic() + RETRY_S

    # -- copying ---------------------------------------------------------------------------------------------

    def _copy_all(self) -> None:
        """The thread that copies blocks out of the pool."""
        while (job := self._copies.get()) is not None:
            if not isinstance(job, Save):
                job()
                continue
            num_bytes = sum(self.bytes_of(block.groups) for block in job.blocks)
            self._stage(num_bytes)
            copies: list[Bytes] | None = None
            if job.claim():
                try:
                    copies = self._copy(job)
                except Exception:
                    self.refused("state")
                    log.exception("KV could not be copied to be saved")
                finally:
                    job.copied()
            self._writes.put(partial(self._store, job, copies, num_bytes))
        self._writes.put(None)

    def _stage(self, num_bytes: int) -> None:
        """Wait until there is memory for copies of so many bytes."""
        with self._space:
            self._space.wait_for(lambda: not self._staged or self._staged + num_bytes <= STAGED)
            self._staged += num_bytes

    def _copy(self, save: Save) -> list[Bytes]:
        """The bytes of a save's blocks."""
        copies: list[Bytes] = []
        for groups, run in groupby(save.blocks, key=lambda block: block.groups):
            blocks, size = list(run), self.bytes_of(groups)
            step = max(1, PIECE // size)
            for begin in range(0, len(blocks), step):
                piece = blocks[begin : begin + step]
                into: Bytes = np.empty((len(piece), size), np.uint8)
                for group, columns in self._columns(groups):
                    at = _in_pool(piece, group)
                    self.memory.read(group, at, into[:, columns], save.mark)
                copies += list(into)
        return copies

    def _columns(self, groups: int) -> list[tuple[int, slice]]:
        """Where each layer group lies in the bytes of a block."""
        columns, begin = [], 0
        for group, size in enumerate(self.memory.group_bytes):
            if groups >> group & 1:
                columns.append((group, slice(begin, begin + size)))
                begin += size
        return columns

    # -- writing ---------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """The thread that writes, and that alone changes the folder and its index."""
        try:
            self._upkeep()
        except OSError as error:
            self._disk_failed(error)
        except Exception as error:
            self._leave("failed", f"its folder cannot be used: {error}")
        self.opened.set()
        due = time.monotonic() + REFRESH_S
        while True:
            job: Callable[[], None] | None = self._upkeep
            with suppress(Empty):
                job = self._writes.get(timeout=max(0.0, due - time.monotonic()))
            if job is None:
                break
            try:
                job()
            except OSError as error:
                self._disk_failed(error)
            except Exception:
                log.exception("saved KV on disk could not be kept in order")
            if job == self._upkeep:
                due = time.monotonic() + REFRESH_S
        self._written.set()

    def _measure(self) -> None:
        """See how quick the disk is now: data that it has written, and that is in no cache any more. Where
        it has little left it is less data, which others do not miss."""
        self._is_doubted = False
        path = self._shelf.folder.path / f"probe-{os.getpid()}-{time.monotonic_ns()}.tmp"
        try:
            size = max(LEAST_PROBE, min(PROBE, self._free() // 4))
            data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
            with open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
                path.unlink()  # at once, so that no kill leaves it
                os.pwrite(descriptor, data.data, 0)
                os.fdatasync(descriptor)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                began = time.perf_counter()
                num = os.preadv(descriptor, [data.data], 0)
                self.rates.read(num, time.perf_counter() - began, anew=True)
        except OSError as error:
            self._disk_failed(error)

    def _try_again(self) -> None:
        """See whether a disk that was left alone can be used."""
        until = self._until
        if self._state == "full" and self._free() < self._needed:
            raise _full()
        self._measure()
        if self._until == until:  # nothing has failed meanwhile
            self._state, self._why = "on", ""
            log.info("saved KV on disk is on again")

    def _measure_again(self) -> None:
        """Measure a disk that may have had a slow spell, or may be slow."""
        before = self.rates.bytes_per_s
        self._measure()
        is_quicker = self.rates.bytes_per_s > 2 * before
        self._measure_s = RETRY_S if is_quicker else min(2 * self._measure_s, MOST_RETRY_S)
        self._measure_at = time.monotonic() + self._measure_s

    def _upkeep(self) -> None:
        """What is due from time to time: others' files are found, and names end. Until it has been done once,
        nothing of what is there is known."""
        self._shelf.folder.make()  # first: to whom it belongs by now decides on all the rest
        if time.monotonic() >= self._housekeeping_at:
            self._shelf.folder.touch()
            remove_stale(self._shelf.folder)
            self._housekeeping_at = time.monotonic() + HOUSEKEEPING_S
        if not self._is_open:
            self._shelf.sweep()
        self._shelf.refresh()
        self._shelf.forget(self._shelf.index.expired(time.time()), "expired")
        self._elsewhere.shelves()  # whose names end, too
        self._shelf.make_room(0, self._room(), self._block_s)
        if not self._is_open:
            self._measure()
            self._is_open = True
        elif self._state != "on":
            if time.monotonic() >= self._until:
                self._try_again()
        elif self._is_doubted and time.monotonic() >= self._measure_at:
            self._measure_again()

    def _room(self) -> int:
        """Bytes that may be used: the limit, and never more than half of what the disk has left, which others
        need as well."""
        self.room = min(self.limit, self._shelf.index.num_bytes + self._free() // 2)
        return self.room

    def _free(self) -> int:
        """Bytes that the disk has left."""
        self._shelf.folder.make()  # one that was removed under a model that is served is only empty
        status = os.statvfs(self._shelf.folder.path)
        return status.f_bavail * status.f_frsize

    def _block_s(self, depth: int) -> float:
        """Seconds to compute a block with so many before it."""
        return self.rates.compute_s(depth * self._block_size, (depth + 1) * self._block_size)

    def _store(self, save: Save, copies: list[Bytes] | None, num_staged: int) -> None:
        """Write what was copied, and its name."""
        try:
            if copies is None:  # which was counted
                return
            if self._state != "on":
                self.refused("state")
                return
            try:
                self._write_blocks(save, copies)
                self._shelf.give(save.name, self._shelf.folder.owner(save.owner))
            except OSError as error:
                self._disk_failed(error)
                self.refused("state")
        finally:
            self._pending.difference_update(block.key.digest for block in save.blocks)
            self._num_saving -= 1
            with self._space:
                self._staged -= num_staged
                self._space.notify_all()

    def _write_blocks(self, save: Save, copies: list[Bytes]) -> None:
        if not save.blocks:
            return
        shelf, owner = self._shelf, self._shelf.folder.owner(save.owner)
        with shelf.lock:
            before = shelf.index.behind(save.blocks[0].key.parent)
        shelf.used(before)
        needed = sum(aligned(len(copy)) for copy in copies) + aligned(len(copies) * 256)
        free = self._free()
        self._needed = min(needed, PIECE)  # a disk that has room for others is not full for the largest
        if free < self._needed:  # evicting would help, and take from others what they can use now
            raise _full()
        if free < needed or not shelf.make_room(needed, self._room(), self._block_s, before):
            self._refuse_for_room(needed)
            return
        began = time.perf_counter()

        def fill(writer: FileWriter) -> None:
            for begin, end in _pieces(copies):
                keys = [(block.key, block.groups, block.depth) for block in save.blocks[begin:end]]
                writer.add(keys, copies[begin:end])

        file = shelf.write(owner, [(block.key, block.groups, block.depth) for block in save.blocks], fill)
        self._lacks_room = False
        self.counts.blocks_saved += len(copies)
        self.counts.bytes_saved += file.num_bytes
        self.counts.save_s += time.perf_counter() - began

    def _refuse_for_room(self, needed: int) -> None:
        """Do without a save; one line tells of it, until there is room for another one."""
        self.refused("room")
        if not self._lacks_room:
            log.warning(
                "saved KV on disk has no room for %s: of the %s that kv_disk_bytes allows, %s may be used",
                *map(readable_size, (needed, self.limit, self.room)),
            )
        self._lacks_room = True

    def _disk_failed(self, error: OSError) -> None:
        if error.errno in FULL:
            self._leave("full", "the disk is full")
        elif isinstance(error, ForeignFolder):
            self._leave("foreign", str(error))
        else:
            self._leave("failed", f"the disk fails: {error}")

    def _forget(self, names: list[str]) -> None:
        self._shelf.folder.make()
        self._shelf.refresh()
        self._shelf.forget(names)
        self._elsewhere.forget(names)

    def _forget_owner(self, owner: str) -> None:
        self._shelf.folder.make()
        self._shelf.forget_owner(self._shelf.folder.owner(owner))
        self._elsewhere.forget_owner(owner)

    # -- reading ---------------------------------------------------------------------------------------------

    def _expected(self, load: Load) -> float:
        return self.rates.read_s(sum(self.bytes_of(block.groups) for block in load.blocks))

    def _read_all(self) -> None:
        """The thread that reads blocks into the pool."""
        into: Bytes = np.empty(PIECE + aligned(sum(self.memory.group_bytes)), np.uint8)
        while (load := self._reads.get()) is not None:
            began, expected = time.perf_counter(), self._expected(load)
            try:
                self._read(load, into)
            except (Damaged, OSError) as error:
                load.failure = load.failure or f"{type(error).__name__}: {error}"
            except Exception as error:
                load.failure = f"{type(error).__name__}: {error}"
                log.exception("saved KV could not be read")
            load.seconds = time.perf_counter() - began
            num_bytes = sum(self.bytes_of(block.groups) for block in load.blocks[: load.num_read])
            self.counts.bytes_read += num_bytes
            self.counts.read_s += load.seconds
            self.rates.read(num_bytes, load.seconds)
            self._reading_s = max(0.0, self._reading_s - expected) if not self._reads.empty() else 0.0
            load.done(load)

    def _read(self, load: Load, into: Bytes) -> None:
        owner = self._shelf.folder.owner(load.owner)

        def file_of(block: Block) -> SavedFile | None:
            return self._shelf.place(block.key.digest, block.groups)

        used = []
        for file, run in groupby(load.blocks, key=file_of):
            blocks = list(run)
            if file is None or file.owner != owner:
                raise Damaged("a block is no longer on disk")
            try:
                self._read_file(load, file.path, owner, blocks, into)
            except Damaged as error:
                log.warning("a file of saved KV is of no use, and is removed: %s: %s", file.path, error)
                self._writes.put(partial(self._shelf.evict, file, "damaged"))
                raise
            except FileNotFoundError:
                self._writes.put(self._shelf.refresh)
                raise
            if load.is_cancelled():
                raise Damaged("nobody waits for it any more")
            used.append(file)
        self._writes.put(partial(self._shelf.used, used))

    def _read_file(self, load: Load, path: Path, owner: bytes, blocks: list[Block], into: Bytes) -> None:
        """Read blocks of one file into the pool, those that lie behind each other in one go."""
        with open_private(path, os.O_RDONLY) as descriptor:
            rows = self._shelf.rows(descriptor, owner, [block.key for block in blocks])
            if hasattr(os, "posix_fadvise"):
                size = rows[-1].offset + rows[-1].length - rows[0].offset
                os.posix_fadvise(descriptor, rows[0].offset, max(size, 0), os.POSIX_FADV_WILLNEED)
            for begin, end in _runs(rows, [block.groups for block in blocks]):
                if load.is_cancelled():
                    return
                found = read_blocks(descriptor, rows[begin:end], into)
                with load.filling:
                    if load.is_cancelled():
                        return
                    self._put(load, blocks[begin:end], rows[begin:end], found)
                load.num_read += end - begin

    def _put(self, load: Load, blocks: list[Block], rows: list[Row], found: list[Bytes]) -> None:
        """Copy what was read into the pool."""
        stride = rows[1].offset - rows[0].offset if len(rows) > 1 else len(found[0])
        whole = np.lib.stride_tricks.as_strided(found[0], (len(found), len(found[0])), (stride, 1))
        wanted = blocks[0].groups
        for group, columns in self._columns(rows[0].groups):
            if wanted >> group & 1:
                self.memory.write(group, _in_pool(blocks, group), whole[:, columns], load.mark)


def _full() -> OSError:
    return OSError(errno.ENOSPC, "the disk is full")


def _in_pool(blocks: Sequence[Block], group: int) -> list[int]:
    """The blocks of a layer group that these are in the pool."""
    return [at for block in blocks for own, at in block.places if own == group]


def _pieces(copies: Sequence[Bytes]) -> list[tuple[int, int]]:
    """Where to cut copies, so that each piece is written in one go."""
    pieces, begin, size = [], 0, 0
    for i, copy in enumerate(copies):
        if size and size + len(copy) > PIECE:
            pieces.append((begin, i))
            begin, size = i, 0
        size += len(copy)
    return [*pieces, (begin, len(copies))]


def _runs(rows: Sequence[Row], wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Where to cut rows, so that those of each run are alike, are wanted with the same layer groups, and lie
    one behind the other."""
    runs, begin = [], 0
    for i in range(1, len(rows) + 1):
        first = rows[begin]
        if i < len(rows):
            row, stride = rows[i], aligned(first.length)
            follows = row.offset == first.offset + (i - begin) * stride
            alike = (row.groups, wanted[i]) == (first.groups, wanted[begin])
            if follows and alike and (i - begin + 1) * stride <= PIECE:
                continue
        runs.append((begin, i))
        begin = i
    return runs
