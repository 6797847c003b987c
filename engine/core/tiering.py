"""Saves KV on disk when requests end, and has prompts wait for it where reading is cheaper than computing.

Sequences whose beginnings are on disk leave the queue until those are read into blocks of the pool, while
others run; no step waits for it. Then the blocks are published as if they had been computed, and stay pinned
until their sequence is admitted. What ends is copied out of the pool before its blocks can be evicted.

Whoever runs comes first: pins are given up when a running sequence needs their blocks, and so are saves that
a slow disk keeps waiting.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from engine.core.kv_cache import BlockKey, Hit, Hold, KVCache
from engine.core.messages import Forget
from engine.core.sequences import Sequence
from engine.tiers import Block, DiskTier, Key, Load, Name, Save
from engine.types import TierStats

LEAST_S = 0.01
"""What computes in less than this is not worth a file."""

PATIENCE_S = 0.25
"""A running sequence waits no longer than this for blocks that are being copied; and a prompt for the disk no
longer than computing it would take, and this."""

MOST_HELD = 0.5
"""Of a pool, by ends that are being copied."""


Room = Literal["again", "wait", "none"]
"""Where blocks are lacking: some are free now, will be in a moment, or are not to be had."""


class Owned(NamedTuple):
    """A name that KV is saved under, whose it is, and until when (unix seconds)."""

    name: str
    owner: str
    until: float | None


@dataclass(slots=True, eq=False)
class Loading:
    """A sequence whose beginning is being read, and others that begin alike and wait for the same blocks.

    found: blocks that the pool had. room: those that are being filled, for the keys from `first` on.
    """

    sequence: Sequence
    load: Load
    found: Hold
    room: Hold
    first: int
    num_blocks: int
    deadline: float  # time.monotonic seconds
    followers: list[Sequence] = field(default_factory=list)
    over: bool = False  # nobody waits any more
    revoked: bool = False  # its blocks are others' already


@dataclass(slots=True, eq=False)
class Saving:
    """An end that is being copied: its blocks, and since when (time.monotonic seconds)."""

    save: Save
    hold: Hold
    since: float


class Tiering:
    """The engine thread owns it. `tell` runs a function there, from any thread."""

    def __init__(
        self,
        kv: KVCache,
        disk: DiskTier,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        self.disk = disk
        self.go_on: Callable[[Sequence], None] = lambda _: None  # puts a sequence back in the queue
        self._kv = kv
        self._tell = tell
        self._loading: dict[int, Loading] = {}  # by the handles of all that wait
        self._coming: dict[bytes, Loading] = {}  # by digest
        self._pins: dict[int, Hold] = {}  # by handle
        self._saving: dict[Save, Saving] = {}
        self._refused: Counter[str] = Counter()
        self._num_restored = 0
        self._seconds_saved = 0.0

    def stats(self) -> TierStats:
        """Its counters and the disk's; from any thread."""
        return replace(
            self.disk.stats(),
            loading=self.num_loading,
            restored_tokens_total=self._num_restored,
            saved_seconds_total=self._seconds_saved,
            restores_refused=dict(self._refused),
        )

    def computed(self, spans: list[tuple[int, int]], seconds: float) -> None:
        """A step computed prompt tokens from one position to another, in so long."""
        self.disk.rates.computed(spans, seconds)

    # -- saving ----------------------------------------------------------------------------------------------

    def save(self, owned: Owned, chain: Seq[BlockKey]) -> None:
        """Save what the pool has of a chain and the disk lacks, and name it."""
        disk = self.disk
        if disk.state != "on":
            disk.refused("state")
            return
        blocks, count = self._missing(chain)
        if blocks and (cause := self._not_worth_it(blocks, count)) is not None:
            disk.refused(cause)
            blocks, count = [], blocks[0].depth
        if len(blocks) > (most := self._most_held()):
            blocks, count = blocks[:most], blocks[most].depth
        if not count:
            return
        hold = self._kv.hold([[at for b in blocks for own, at in b.places if own == g] for g in self._groups])
        name = Name(owned.name, chain[count - 1].digest, owned.until)
        save = Save(name, owned.owner, blocks, disk.memory.mark(), lambda: self._tell(copied))

        def copied() -> None:
            self._copied(save)

        if disk.save(save):
            self._saving[save] = Saving(save, hold, time.monotonic())
        else:
            self._kv.drop(hold)

    def _copied(self, save: Save) -> None:
        """The pool may have a save's blocks back."""
        saving = self._saving.pop(save, None)
        if saving is not None:
            self._kv.drop(saving.hold)

    def forget(self, forget: Forget) -> None:
        """Remove names, or all that is an owner's."""
        if forget.names:
            self.disk.forget(forget.names)
        if forget.owner is not None:
            self.disk.forget_owner(forget.owner)

    @property
    def _groups(self) -> range:
        return range(len(self._kv.pools))

    def _missing(self, chain: Seq[BlockKey]) -> tuple[list[Block], int]:
        """The blocks of a chain to save, and how long the prefix is that is on disk then."""
        kv, whole, missing = self._kv, self._whole_groups, []
        on_disk = [
            -1 if self.disk.is_pending(key.digest) else self.disk.groups_of(key.digest) for key in chain
        ]
        count = len(chain)
        for i, has in enumerate(on_disk):
            if has & whole != whole and any(
                pool.find(chain[i]) is None for g, pool in enumerate(kv.pools) if whole >> g & 1
            ):
                count = i
                break
        starts = [kv.first_live(group, count * kv.block_size) for group in kv.groups]
        for i in range(count):
            wanted = sum(1 << g for g, start in enumerate(starts) if i >= start)
            if on_disk[i] & wanted == wanted:
                continue
            found = [(g, pool.find(chain[i])) for g, pool in enumerate(kv.pools) if wanted >> g & 1]
            places = tuple((g, at) for g, at in found if at is not None)
            # what has left the pool in part cannot be saved whole
            if places and (len(places) == len(found) or on_disk[i] & whole != whole):
                missing.append(Block(Key(*chain[i]), i, places))
        if not count or not (on_disk[count - 1] or (missing and missing[-1].depth == count - 1)):
            return [], 0  # the end is nowhere, as where a window has left the pool
        return missing, count

    @property
    def _whole_groups(self) -> int:
        """The layer groups that keep all blocks of a sequence, as bits."""
        return sum(1 << g for g, group in enumerate(self._kv.groups) if group.window is None)

    def _not_worth_it(self, blocks: Seq[Block], count: int) -> str | None:
        """Why it is no use to save: computing what is missing takes a moment, or reading the whole takes
        longer than computing it."""
        rates, size = self.disk.rates, self._kv.block_size
        if rates.compute_s(blocks[0].depth * size, count * size) < LEAST_S:
            return "small"
        if rates.read_s(count * self.disk.bytes_of(blocks[0].groups)) >= rates.compute_s(0, count * size):
            self.disk.doubt()
            return "slower"
        return None

    def _most_held(self) -> int:
        """How many more blocks the pools can do without for a moment."""
        left = (
            int(MOST_HELD * pool.num_blocks)
            - sum(len(saving.hold.blocks[g]) for saving in self._saving.values())
            for g, pool in enumerate(self._kv.pools)
        )
        return max(0, min(left))

    # -- restoring -------------------------------------------------------------------------------------------

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def next_deadline(self) -> float | None:
        """time.monotonic seconds at which something is given up."""
        now = time.monotonic()
        ends = (saving.since + PATIENCE_S for saving in self._saving.values())
        due = [end for end in ends if end > now]  # later nobody waits for them
        return min([*due, *(loading.deadline for loading in self._loading.values())], default=None)

    def is_loading(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for the disk."""
        return sequence.handle in self._loading

    def restore(self, sequence: Sequence, hit: Hit, limit: int) -> bool:
        """Have a sequence wait for what is on disk beyond a hit, up to `limit` blocks; False: it is to go on
        with the hit."""
        chain = sequence.chain
        if hit.num_blocks >= limit or not sequence.num_restores:
            return False
        coming = self._coming.get(chain[hit.num_blocks].digest)
        if coming is not None and not coming.over:
            coming.followers.append(sequence)
            self._loading[sequence.handle] = coming
            return True
        num_blocks = self._num_restorable(chain, hit.num_blocks, limit)
        if num_blocks <= hit.num_blocks:
            return False
        refusal = self._begin(sequence, hit.num_blocks, num_blocks)
        if refusal is not None:
            self._refused[refusal] += 1
        return refusal is None

    def _begin(self, sequence: Sequence, num_hit: int, num_blocks: int) -> str | None:
        """Begin to read; or why not."""
        disk, kv, chain = self.disk, self._kv, sequence.chain
        if disk.state not in ("on", "full"):
            return "state"
        found: list[list[int]] = [[] for _ in self._groups]
        wanted: list[tuple[int, list[int]]] = []  # blocks to read, and their groups
        for i in range(num_blocks):
            own = []
            for g, group in enumerate(kv.groups):
                if i < kv.first_live(group, num_blocks * kv.block_size):
                    continue
                if (at := kv.pools[g].find(chain[i])) is not None:
                    found[g].append(at)
                else:
                    own.append(g)
            if own:
                wanted.append((i, own))
        num_bytes = sum(disk.bytes_of(disk.groups_of(chain[i].digest)) for i, _ in wanted)
        compute_s = disk.rates.compute_s(num_hit * kv.block_size, num_blocks * kv.block_size)
        read_s = disk.rates.read_s(num_bytes)
        if read_s >= compute_s:
            disk.doubt()
            return "slower"
        if disk.wait_s() + read_s >= compute_s:
            return "busy"
        pins = kv.hold(found)
        room = kv.reserve([sum(g in own for _, own in wanted) for g in self._groups])
        if room is None:
            kv.drop(pins)
            return "room"
        taken = [iter(own) for own in room.blocks]
        blocks = [Block(Key(*chain[i]), i, tuple((g, next(taken[g])) for g in own)) for i, own in wanted]
        load = Load(
            sequence.request.owner,
            blocks,
            disk.memory.mark(),
            lambda _: self._tell(lambda: self._loaded(loading)),
        )
        loading = Loading(
            sequence,
            load,
            pins,
            room,
            num_hit,
            num_blocks,
            deadline=time.monotonic() + disk.wait_s() + compute_s + PATIENCE_S,
        )
        self._loading[sequence.handle] = loading
        self._coming.update((block.key.digest, loading) for block in blocks)
        sequence.num_restores -= 1
        disk.load(load)
        return None

    def _num_restorable(self, chain: Seq[BlockKey], num_hit: int, limit: int) -> int:
        """The longest prefix of at most `limit` blocks that pool and disk together have."""
        kv, whole, count = self._kv, self._whole_groups, min(limit, len(chain))

        def lacks(i: int, g: int) -> bool:
            return not self.disk.groups_of(chain[i].digest) >> g & 1 and kv.pools[g].find(chain[i]) is None

        for i in range(num_hit, count):
            if any(lacks(i, g) for g in self._groups if whole >> g & 1):
                count = i
                break
        windows = [(g, group) for g, group in enumerate(kv.groups) if group.window is not None]
        for i in range(count - 1, -1, -1):  # each block once: a context may have ten thousand
            reaching = [g for g, group in windows if i >= kv.first_live(group, count * kv.block_size)]
            if count <= num_hit or not reaching:
                break
            if any(lacks(i, g) for g in reaching):
                count = i  # no prefix that ends behind it and reaches it will do
        return count

    def _loaded(self, loading: Loading) -> None:
        """The reading thread is done with a load: what it has brought is published."""
        load, kv = loading.load, self._kv
        for block in load.blocks:
            if self._coming.get(block.key.digest) is loading:
                del self._coming[block.key.digest]
        if loading.revoked:
            return
        good: list[list[int]] = [[] for _ in self._groups]
        for block in load.blocks[: load.num_read]:
            for g, at in block.places:
                kv.pools[g].publish(at, BlockKey(*block.key))
                good[g].append(at)
        kv.drop(loading.room, but=good)
        first = load.blocks[0].depth
        end = load.blocks[load.num_read].depth if load.num_read < len(load.blocks) else loading.num_blocks
        size = kv.block_size
        num_tokens = (end - first) * size if load.num_read else 0
        if num_tokens:
            self._num_restored += num_tokens
            self._seconds_saved += max(
                0.0, self.disk.rates.compute_s(first * size, end * size) - load.seconds
            )
        if loading.over:
            kv.drop(loading.found)
            kv.drop(loading.room)
            return
        if load.failure is not None:
            loading.sequence.num_restores = 0
            self._refused["damaged"] += 1
        loading.sequence.num_restored += num_tokens
        self._pin(loading)
        self._release(loading)

    def _pin(self, loading: Loading) -> None:
        """Hold what was found and read until the sequence that it is for is admitted."""
        handle = loading.sequence.handle
        if handle not in self._loading:  # it has ended, or computes its prompt
            self._kv.drop(loading.found)
            self._kv.drop(loading.room)
            return
        self._pins[handle] = self._kv.hold(
            [[*found, *room] for found, room in zip(loading.found.blocks, loading.room.blocks, strict=True)]
        )
        self._kv.drop(loading.found)
        self._kv.drop(loading.room)

    def _release(self, loading: Loading) -> None:
        """Put all that wait for a load back in the queue, the one that it is for first."""
        loading.over = True
        for sequence in reversed([loading.sequence, *loading.followers]):
            if self._loading.pop(sequence.handle, None) is not None:
                self.go_on(sequence)

    def give_up_late(self, now: float) -> None:
        """Let sequences compute what the disk has not brought in time, and leave the disk alone."""
        for loading in list(dict.fromkeys(self._loading.values())):
            if loading.deadline <= now:
                self._refused["late"] += 1
                self.disk.slow("it is slower than computing anew")
                self._revoke(loading)
                for sequence in (loading.sequence, *loading.followers):
                    sequence.num_restores = 0
                self._release(loading)

    # -- giving way ------------------------------------------------------------------------------------------

    def unpin(self, sequence: Sequence) -> None:
        """A sequence is admitted: its blocks are in its table."""
        hold = self._pins.pop(sequence.handle, None)
        if hold is not None:
            self._kv.drop(hold)

    def unpin_other(self, sequence: Sequence | None) -> bool:
        """Give up the newest pin but for a sequence's own; False: there is none."""
        for handle in reversed(self._pins):
            if sequence is None or handle != sequence.handle:
                self._kv.drop(self._pins.pop(handle))
                return True
        return False

    def make_room(self) -> Room:
        """A running sequence lacks blocks: give up pins, wait a moment for copies, or give them up."""
        if self.unpin_other(None):
            return "again"
        if not self._saving:
            return "none"
        now = time.monotonic()
        if any(now - saving.since < PATIENCE_S for saving in self._saving.values()):
            return "wait"
        given_up = False
        for saving in list(self._saving.values()):
            if saving.save.claim():  # nobody copies it yet
                self._copied(saving.save)
                self.disk.refused("busy")
                given_up = True
        return "again" if given_up else "none"

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it was."""
        self.unpin(sequence)
        loading = self._loading.pop(sequence.handle, None)
        if loading is not None and loading not in self._loading.values():
            loading.over = True
            self._revoke(loading)

    def _revoke(self, loading: Loading) -> None:
        """Take the blocks back that a load was to fill, unless it does so right now; then it is soon done."""
        if loading.load.revoke():
            loading.revoked = True
            self._kv.drop(loading.found)
            self._kv.drop(loading.room)
