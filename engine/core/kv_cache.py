"""Keeps account of the paged KV cache: which block each sequence uses, and which can be found by its content.

It has block tables, reference counts, the prefix cache, eviction, and `check_integrity`. It sees slots,
tokens and salts only; the tensors belong to the runner.

Layers that keep their KV alike form a group with its own pool: full attention keeps all blocks of a sequence,
a sliding window only those it still reaches. A sequence has the same block boundaries in every group.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.step import LayerGroup


class BlockKey(NamedTuple):
    """What a full block holds: the digest names it, parent and tokens are compared on a hit."""

    digest: bytes
    parent: bytes
    tokens: bytes


PIECE = 64
"""Blocks whose keys are remembered together."""

MAX_PIECES = 1024
"""Pieces that are remembered: a million tokens in blocks of 16, some 20 MB."""


class BlockHasher:
    """Chained 128-bit keyed BLAKE2b over (parent, tokens, media); salts and adapter are in the chain's root.

    The key is drawn at random, so nobody can prepare a collision. The keys of long prompts are remembered
    piece by piece, because a turn of a conversation begins with all that the turn before it had.
    """

    def __init__(
        self,
        block_size: int,
        max_pieces: int = MAX_PIECES,
        *,
        secret: bytes | None = None,
        adapters: Mapping[str, bytes] | None = None,
    ) -> None:
        """secret: the key, where digests have to be the same after a restart. adapters: what each computes,
        by name: then another one may have its name."""
        self._block_size = block_size
        self._secret = os.urandom(32) if secret is None else secret
        self._adapters = adapters or {}
        self._max_pieces = max_pieces
        # By the digest in front of a piece and its tokens; those used last are last.
        self._pieces: OrderedDict[tuple[bytes, bytes], list[BlockKey]] = OrderedDict()

    def root(self, owner: str, cache_salt: str, adapter: str | None) -> bytes:
        """The parent of a sequence's first block: sequences of different roots never share one."""
        digest = hashlib.blake2b(digest_size=16, key=self._secret)
        parts = [part.encode("utf-8", "surrogatepass") for part in (owner, cache_salt, adapter or "")]
        for data in (*parts, self._adapters.get(adapter or "", b"")):
            digest.update(struct.pack("<Q", len(data)) + data)
        return digest.digest()

    def extend(
        self,
        chain: list[BlockKey],
        root: bytes,
        tokens: NDArray[np.int32],
        media: Sequence[tuple[int, int, bytes]] = (),
    ) -> None:
        """Append the keys of those full blocks that `chain` lacks; media: (offset, length, hash)."""
        num_full = len(tokens) // self._block_size
        while num_full - len(chain) >= PIECE and not len(chain) % PIECE and not media:
            self._extend_piece(chain, root, tokens)
        if num_full > len(chain):
            self._extend(chain, root, tokens[: num_full * self._block_size], media)

    def _extend_piece(self, chain: list[BlockKey], root: bytes, tokens: NDArray[np.int32]) -> None:
        """Append the keys of the next `PIECE` blocks, which are without media."""
        begin, end = len(chain) * self._block_size, (len(chain) + PIECE) * self._block_size
        name = (chain[-1].digest if chain else root, tokens[begin:end].tobytes())
        if (known := self._pieces.get(name)) is not None:
            self._pieces.move_to_end(name)
            chain.extend(known)
            return
        self._extend(chain, root, tokens[:end])
        self._pieces[name] = chain[-PIECE:]
        if len(self._pieces) > self._max_pieces:
            self._pieces.popitem(last=False)

    def _extend(
        self,
        chain: list[BlockKey],
        root: bytes,
        tokens: NDArray[np.int32],
        media: Sequence[tuple[int, int, bytes]] = (),
    ) -> None:
        """Append the keys of all full blocks that `chain` lacks."""
        size = self._block_size
        parent = chain[-1].digest if chain else root
        for start in range(len(chain) * size, len(tokens) - size + 1, size):
            data = tokens[start : start + size].tobytes()
            digest = hashlib.blake2b(parent + data, digest_size=16, key=self._secret)
            for offset, length, content in media:
                if offset < start + size and offset + length > start:
                    digest.update(struct.pack("<qQ", offset - start, length) + content)
            chain.append(BlockKey(digest.digest(), parent, data))
            parent = chain[-1].digest


class BlockPool:
    """The blocks of one group: each is free, cached (unreferenced but findable) or used.

    Cached blocks that somebody will come back for are evicted after all others (see `promise`).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached as well, and promised
        self._promises: Counter[bytes] = Counter()  # by digest
        self._by_digest: dict[bytes, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that an allocation could take."""
        return len(self._free) + self.num_cached

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._kept)

    def allocate(self, count: int) -> list[int]:
        """Take blocks, evicting the least recently used cached ones; `num_available` was checked before."""
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = (self._cached or self._kept).popitem(last=False)
                self._unpublish(block)
                self.num_evictions += 1
            self._references[block] = 1
            taken.append(block)
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks found by `find`."""
        references, cached, kept = self._references, self._cached, self._kept
        for block in blocks:  # as many as the history has: what is looked up once is not looked up again
            if references[block] == 0 and cached.pop(block, self) is self:
                del kept[block]
            references[block] += 1

    def release(self, blocks: Sequence[int], *, forget: bool = False) -> list[int]:
        """Drop a reference; the last block given is evicted first later on. Returns those without references
        now.

        `forget`: their content is bad, they must never be found again.
        """
        unreferenced = []
        references, keys, promises = self._references, self._keys, self._promises
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                continue
            unreferenced.append(block)
            if forget:
                self._unpublish(block)
            if (key := keys.get(block)) is None:
                self._free.append(block)
            else:
                (self._kept if promises and key.digest in promises else self._cached)[block] = None
        return unreferenced

    def publish(self, block: int, key: BlockKey) -> None:
        """Let a full, computed block be found; of two with the same content the first one stays."""
        if key.digest not in self._by_digest and block not in self._keys:
            self._by_digest[key.digest] = block
            self._keys[block] = key

    def find(self, key: BlockKey) -> int | None:
        """The block with this content, if there is one."""
        block = self._by_digest.get(key.digest)
        return block if block is not None and self._keys[block] == key else None

    def find_prefix(self, chain: Sequence[BlockKey], limit: int) -> list[int]:
        """The blocks of the first `limit` keys, up to the first that there is none for."""
        blocks: list[int] = []
        found, keys = self._by_digest, self._keys
        for key in chain[:limit]:
            block = found.get(key[0])
            # The key of a block that this process hashed before is mostly the same object.
            if block is None or ((known := keys[block]) is not key and known != key):
                break
            blocks.append(block)
        return blocks

    def is_cached(self, block: int) -> bool:
        """True when no sequence refers to the block."""
        return self._references[block] == 0

    def num_unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of the blocks no sequence refers to."""
        return sum(not self._references[block] for block in blocks)

    def promise(self, chain: Iterable[BlockKey]) -> list[bytes]:
        """Evict what there is of a chain after all that is not promised. Returns whose promises `withdraw`
        takes back: digests, of at most half of all blocks together with earlier promises.
        """
        promised: list[bytes] = []
        for key in chain:
            if self.find(key) is None:  # it has left its window, or was evicted
                continue
            if key.digest not in self._promises and len(self._promises) >= self.num_blocks // 2:
                break
            self._move(key.digest, 1)
            promised.append(key.digest)
        for digest in reversed(promised):  # the last one is evicted first
            if (block := self._by_digest[digest]) in self._kept:
                self._kept.move_to_end(block)
        return promised

    def withdraw(self, promised: Sequence[bytes]) -> None:
        """Take promises back: from now on these blocks are as those that were used last."""
        for digest in reversed(promised):
            self._move(digest, -1)

    def _move(self, digest: bytes, change: int) -> None:
        """Count promises of a block, and put it where it then belongs."""
        block = self._by_digest.get(digest)
        idle = block is not None and self.is_cached(block)
        if block is not None and idle:
            del self._unreferenced(block)[block]
        self._promises[digest] += change
        if not self._promises[digest]:
            del self._promises[digest]
        if block is not None and idle:
            self._unreferenced(block)[block] = None

    def _unreferenced(self, block: int) -> OrderedDict[int, None]:
        """Where a block that can be found is while nothing refers to it."""
        return self._kept if self._keys[block].digest in self._promises else self._cached

    def _unpublish(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_digest[key.digest]

    def check(self, used: dict[int, int]) -> None:
        """Raise AssertionError unless `used` (block: references) and the books agree."""
        # Tests ask before and after each step of a scheduler, so no loop here goes through all blocks.
        referenced = dict(compress(enumerate(self._references), self._references))
        assert referenced == used, f"references differ: books {referenced}, tables {used}"
        assert len(self._free) + self.num_cached + len(used) == self.num_blocks, (
            "free + cached + used != total"
        )
        cached = self._cached.keys() | self._kept.keys()
        assert len(cached.union(self._free, used)) == self.num_blocks, "a block is in two places"
        assert self._keys.keys().isdisjoint(self._free), "a free block can be found"
        assert cached <= self._keys.keys(), "a cached block cannot be found"
        digests = map(attrgetter("digest"), self._keys.values())
        assert [*map(self._by_digest.get, digests)] == [*self._keys], "a block is found by another's digest"
        assert len(self._by_digest) == len(self._keys), "a digest finds a block that has no key"
        promised = {self._by_digest[digest] for digest in self._promises.keys() & self._by_digest.keys()}
        assert cached & promised == self._kept.keys(), "a promise is not kept, or kept for nobody"


class Hit(NamedTuple):
    """A cached prefix of `num_blocks` blocks: for each group its first live block, and the blocks from there
    on.
    """

    num_blocks: int
    starts: tuple[int, ...]
    blocks: tuple[list[int], ...]


@dataclass(slots=True, eq=False)
class Hold:
    """Blocks that are referred to without being in a slot's table, by group."""

    blocks: list[list[int]]


class KVCache:
    """Block tables of all groups, by slot (a running sequence's place in the batch arrays)."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_blocks: Sequence[int],
        block_size: int,
        max_seqs: int,
        max_len: int,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        width = -(-max_len // block_size)
        self.tables: tuple[NDArray[np.int32], ...] = tuple(
            np.zeros((max_seqs, width), np.int32) for _ in groups
        )
        self.num_blocks = np.zeros(max_seqs, np.int64)  # blocks a slot has had; the live ones end here
        self.starts = np.zeros((len(groups), max_seqs), np.int64)  # and begin here
        self.num_releases = 0  # grows whenever blocks may have become available
        self._holds: set[Hold] = set()
        self._waits: dict[str, tuple[float, list[list[bytes]]]] = {}  # until when, and the pools' promises

    def match(self, chain: Sequence[BlockKey], limit: int) -> Hit:
        """The longest cached prefix of at most `limit` blocks that every group can go on from."""
        num_blocks = min(limit, len(chain))
        whole: list[list[int]] = []  # of each group that keeps all blocks
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                whole.append(pool.find_prefix(chain, num_blocks))
                num_blocks = len(whole[-1])
        while num_blocks:
            missing = self._missing_in_window(chain, num_blocks)
            if missing is None:
                break
            num_blocks = missing  # no prefix that ends after a missing block and still reaches it will do
        starts = tuple(self.first_live(group, num_blocks * self.block_size) for group in self.groups)
        blocks, prefixes = [], iter(whole)
        for group, pool, start in zip(self.groups, self.pools, starts, strict=True):
            if group.window is None:
                blocks.append(next(prefixes)[:num_blocks])
                continue
            found_blocks = [pool.find(key) for key in chain[start:num_blocks]]
            blocks.append([block for block in found_blocks if block is not None])
        return Hit(num_blocks, starts, tuple(blocks))

    def _missing_in_window(self, chain: Sequence[BlockKey], num_blocks: int) -> int | None:
        """The last block that a window group needs for this prefix and does not have."""
        for group, pool in zip(self.groups, self.pools, strict=True):
            if group.window is None:
                continue
            first = self.first_live(group, num_blocks * self.block_size)
            for i in range(num_blocks - 1, first - 1, -1):
                if pool.find(chain[i]) is None:
                    return i
        return None

    def first_live(self, group: LayerGroup, num_computed: int) -> int:
        """The first block that the token at position `num_computed` can still reach."""
        if group.window is None:
            return 0
        return max(0, num_computed - group.window + 1) // self.block_size

    def fits(self, hit: Hit, num_tokens: int, max_chunk: int) -> bool:
        """True when a sequence of `num_tokens` that starts from `hit` could be computed without taking from
        others.
        """
        total = -(-num_tokens // self.block_size)
        for group, pool, blocks in zip(self.groups, self.pools, hit.blocks, strict=True):
            needed = total - hit.num_blocks
            if group.window is not None:
                needed = min(needed, -(-(group.window + max_chunk) // self.block_size) + 2)
            revived = pool.num_unreferenced(blocks)
            if needed + revived > pool.num_available:
                return False
        return True

    def attach(self, slot: int, hit: Hit) -> None:
        """Begin a slot's tables with a hit's blocks."""
        for g, pool in enumerate(self.pools):
            pool.retain(hit.blocks[g])
            self.tables[g][slot, hit.starts[g] : hit.num_blocks] = hit.blocks[g]
            self.starts[g, slot] = hit.starts[g]
        self.num_blocks[slot] = hit.num_blocks

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Give a slot blocks for its first `num_tokens` tokens, or change nothing and return False."""
        held = int(self.num_blocks[slot])
        needed = -(-num_tokens // self.block_size) - held
        if needed <= 0:
            return True
        if any(pool.num_available < needed for pool in self.pools):
            return False
        for pool, table in zip(self.pools, self.tables, strict=True):
            table[slot, held : held + needed] = pool.allocate(needed)
        self.num_blocks[slot] = held + needed
        return True

    def publish(self, slot: int, chain: Sequence[BlockKey], first: int, last: int) -> None:
        """Let the slot's blocks `first..last-1`, full and computed, be found."""
        for g, pool in enumerate(self.pools):
            start = max(first, int(self.starts[g, slot]))
            for i, block in enumerate(self.tables[g][slot, start:last].tolist(), start):
                pool.publish(block, chain[i])

    def trim(self, slot: int, num_computed: int) -> None:
        """Release blocks that have left their group's window."""
        for g, group in enumerate(self.groups):
            start, live = int(self.starts[g, slot]), self.first_live(group, num_computed)
            if live > start:
                self.num_releases += 1
                self.pools[g].release(self.tables[g][slot, start:live].tolist())
                self.starts[g, slot] = live

    def release(self, slot: int, *, forget: bool = False) -> list[list[int]]:
        """Give a slot's blocks back; returns, by group, those without references now (see
        `BlockPool.release`).
        """
        self.num_releases += 1
        count = int(self.num_blocks[slot])
        unreferenced = []
        for g, pool in enumerate(self.pools):
            blocks = self.tables[g][slot, int(self.starts[g, slot]) : count].tolist()
            unreferenced.append(pool.release(blocks, forget=forget))
            self.starts[g, slot] = 0
        self.num_blocks[slot] = 0
        return unreferenced

    def hold(self, blocks: Sequence[Sequence[int]]) -> Hold:
        """Refer to blocks that were found, by group, until they are dropped."""
        hold = Hold([list(own) for own in blocks])
        for pool, own in zip(self.pools, hold.blocks, strict=True):
            pool.retain(own)
        self._holds.add(hold)
        return hold

    def reserve(self, counts: Sequence[int]) -> Hold | None:
        """Take so many blocks of each group; None where they are not to be had."""
        if any(pool.num_available < count for pool, count in zip(self.pools, counts, strict=True)):
            return None
        hold = Hold([pool.allocate(count) for pool, count in zip(self.pools, counts, strict=True)])
        self._holds.add(hold)
        return hold

    def drop(self, hold: Hold, *, but: Sequence[Sequence[int]] | None = None) -> None:
        """Let go of what is held; but: blocks by group that stay held."""
        self.num_releases += 1
        kept = [set(own) for own in but] if but is not None else [set[int]() for _ in self.pools]
        for g, pool in enumerate(self.pools):
            pool.release([block for block in hold.blocks[g] if block not in kept[g]])
            hold.blocks[g] = [block for block in hold.blocks[g] if block in kept[g]]
        if not any(hold.blocks):
            self._holds.discard(hold)

    def keep(self, name: str, chain: Sequence[BlockKey], until: float) -> None:
        """Evict what there is of a chain after what nobody waits for: until this time (time.monotonic
        seconds), until `let_go`, or until something else is kept under the same name.
        """
        now = time.monotonic()
        for each in [each for each, (end, _) in self._waits.items() if end <= now]:
            self.let_go(each)
        self.let_go(name)
        self._waits[name] = (until, [pool.promise(chain) for pool in self.pools])

    def let_go(self, name: str) -> None:
        """Nobody comes back for what was kept under this name, if anything was."""
        _, kept = self._waits.pop(name, (0.0, []))
        for pool, promised in zip(self.pools, kept, strict=False):
            pool.withdraw(promised)

    @property
    def has_windows(self) -> bool:
        return any(group.window is not None for group in self.groups)

    def check_integrity(self, slots: Iterable[int]) -> None:
        """Raise AssertionError unless every block is free, cached, held, or in the tables of just these
        slots."""
        slots = list(slots)
        for g, pool in enumerate(self.pools):
            used = dict(Counter(block for hold in self._holds for block in hold.blocks[g]))
            for slot in slots:
                for block in self.tables[g][
                    slot, int(self.starts[g, slot]) : int(self.num_blocks[slot])
                ].tolist():
                    used[block] = used.get(block, 0) + 1
            pool.check(used)
        idle = np.delete(self.num_blocks, slots) if slots else self.num_blocks
        assert not idle.any(), "a slot without a sequence holds blocks"
