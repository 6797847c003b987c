"""Invariant 7: free + cached + used blocks == total; the prefix cache finds what it may, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.kv_cache import PIECE, BlockHasher, BlockKey, BlockPool, KVCache
from engine.step import LayerGroup

FULL = LayerGroup((0, 1), 2, 16)
WINDOW = LayerGroup((2,), 2, 16, window=10)


def chain(hasher: BlockHasher, tokens: list[int], root: bytes = b"r", **media: object) -> list[BlockKey]:
    keys: list[BlockKey] = []
    hasher.extend(keys, root, np.array(tokens, np.int32), **media)  # type: ignore[arg-type]
    return keys


def test_keys_chain_over_parent_tokens_salt_adapter_and_media() -> None:
    hasher = BlockHasher(4)
    tokens = list(range(12))
    keys = chain(hasher, tokens)
    assert len(keys) == 3 and keys[1].parent == keys[0].digest
    assert chain(hasher, [*tokens, 9, 9]) == keys  # a partial block has no key
    assert (
        chain(hasher, [99, *tokens[1:]])[2].digest != keys[2].digest
    )  # an early change is in all that follow
    roots = [
        ("a", "", None),
        ("", "a", None),
        ("", "", "a"),
        ("a", "", ""),
        ("ab", "c", None),
        ("a", "bc", None),
    ]
    digests = {hasher.root(*root) for root in roots}
    assert len(digests) == 5  # no adapter and an empty name are the same, nothing else is
    assert chain(hasher, tokens, b"q")[0].digest != keys[0].digest
    with_media = chain(hasher, tokens, media=[(5, 2, b"image")])
    assert [a.digest == b.digest for a, b in zip(keys, with_media, strict=True)] == [True, False, False]


def test_keys_are_secret_to_the_process() -> None:
    assert chain(BlockHasher(4), [1, 2, 3, 4])[0].digest != chain(BlockHasher(4), [1, 2, 3, 4])[0].digest


@pytest.mark.parametrize("max_pieces", [1, 8])
def test_pieces_that_are_remembered_have_the_keys_of_their_blocks(max_pieces: int) -> None:
    """Prompts that grow, part ways in the middle of a piece, have media, or another root."""
    drawn = random.Random(max_pieces)
    hasher, plain = BlockHasher(4, max_pieces), BlockHasher(4, max_pieces)
    plain._secret = hasher._secret
    prompts = [[drawn.randrange(3) for _ in range(4 * PIECE * 3 + 9)]]
    for _ in range(30):
        prompt = list(drawn.choice(prompts))
        prompt[drawn.randrange(len(prompt))] = drawn.randrange(3)
        prompts.append(prompt + [drawn.randrange(3) for _ in range(drawn.randrange(4 * PIECE))])
    for prompt in prompts * 2:
        root = drawn.choice([b"r", b"q"])
        media = drawn.choice([[], [(700, 5, b"image")]])
        expected: list[BlockKey] = []
        for count in range(4, len(prompt) + 1, 4):  # block by block, so that no piece is whole
            plain._extend(expected, root, np.array(prompt[:count], np.int32), media)
        keys = chain(hasher, prompt[: drawn.randrange(len(prompt))], root, media=media)
        hasher.extend(keys, root, np.array(prompt, np.int32), media)
        assert keys == expected
        assert len(hasher._pieces) <= max_pieces


def test_the_keys_of_a_long_prompt_are_made_once() -> None:
    hasher = BlockHasher(4)
    first = chain(hasher, list(range(4 * PIECE)))
    again = chain(hasher, list(range(4 * PIECE + 8)))
    assert len(again) == PIECE + 2 and all(old is new for old, new in zip(first, again, strict=False))


def test_a_key_is_extended_as_tokens_come() -> None:
    hasher = BlockHasher(4)
    keys: list[BlockKey] = []
    for count in range(17):
        hasher.extend(keys, b"r", np.arange(count, dtype=np.int32))
        assert len(keys) == count // 4
    assert keys == chain(hasher, list(range(16)))


def test_a_hit_compares_tokens() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    key = BlockKey(b"digest", b"parent", b"tokens")
    pool.publish(block, key)
    assert pool.find(key) == block
    assert pool.find(key._replace(tokens=b"others")) is None
    assert pool.find(key._replace(parent=b"others")) is None


def test_the_least_recently_used_cached_block_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    keys = [BlockKey(bytes([i]), b"", bytes([i])) for i in range(4)]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks[:2])  # a sequence's blocks are given in order; its tail is worth least
    pool.release(blocks[2:])
    pool.retain([blocks[1]])
    pool.release([blocks[1]])
    assert pool.num_available == pool.num_cached == 4
    evicted = []
    for _ in range(4):
        pool.allocate(1)
        evicted += [i for i, key in enumerate(keys) if i not in evicted and pool.find(key) is None]
    assert evicted == [0, 3, 2, 1]


def published(pool: BlockPool, first: int, count: int) -> list[BlockKey]:
    """The keys of blocks that were used in this order, and are cached now."""
    keys = [BlockKey(bytes([i]), b"", bytes([i])) for i in range(first, first + count)]
    blocks = pool.allocate(count)
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    return keys


def test_what_is_promised_is_evicted_last_and_its_tail_first() -> None:
    pool = BlockPool(8)
    keys = published(pool, 0, 8)
    promised = pool.promise(keys[:3])
    left: list[list[int]] = []
    taken: list[int] = []
    for _ in range(8):
        pool.check(dict.fromkeys(taken, 1))
        left.append([i for i, key in enumerate(keys) if pool.find(key) is not None])
        taken += pool.allocate(1)
    assert left[0] == list(range(8)) and left[5:] == [[0, 1, 2], [0, 1], [0]]
    pool.withdraw(promised)  # of what is gone as well
    assert not pool._promises and not pool._kept


def test_promises_are_counted_and_taken_back() -> None:
    pool = BlockPool(8)
    keys = published(pool, 0, 4)
    pool.retain([block for key in keys[:1] if (block := pool.find(key)) is not None])
    first, second = pool.promise(keys[:2]), pool.promise(keys[1:3])
    assert set(pool._kept) == {pool.find(keys[1]), pool.find(keys[2])}  # the one in use is not evicted anyway
    pool.withdraw(first)
    assert set(pool._kept) == {pool.find(keys[1]), pool.find(keys[2])}
    pool.withdraw(second)
    assert not pool._kept and pool.num_cached == 3


def test_a_promised_block_in_use_is_kept_once_it_is_not() -> None:
    pool = BlockPool(8)
    keys = published(pool, 0, 2)
    used = [block for key in keys if (block := pool.find(key)) is not None]
    pool.retain(used)
    pool.promise(keys)
    pool.release(used)
    assert set(pool._kept) == set(used) and not pool._cached


def test_half_of_the_blocks_can_be_promised() -> None:
    pool = BlockPool(8)
    keys = published(pool, 0, 8)
    assert pool.promise(keys) == [key.digest for key in keys[:4]]
    assert pool.promise(keys[2:]) == [key.digest for key in keys[2:4]]  # promised already


def test_what_is_kept_under_a_name_is_let_go_by_time_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.core.kv_cache.time.monotonic", lambda: now[0])
    kv = KVCache([FULL], [20], 4, max_seqs=2, max_len=64)
    keys = chain(BlockHasher(4), list(range(32)))
    assert kv.grow(0, 32)
    kv.publish(0, keys, 0, 8)
    kv.release(0)
    pool = kv.pools[0]
    kv.keep("a", keys[:2], until=110.0)
    kv.keep("a", keys[:3], until=110.0)  # it has grown
    kv.keep("b", keys[:4], until=200.0)
    assert len(pool._kept) == 4
    kv.let_go("b")
    kv.let_go("b")
    assert len(pool._kept) == 3
    now[0] = 110.0
    kv.keep("c", keys[:1], until=200.0)
    assert len(pool._kept) == 1
    kv.check_integrity([])


def test_forgotten_blocks_are_never_found_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    keys = [BlockKey(bytes([i]), b"", bytes([i])) for i in range(2)]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    pool.retain([blocks[0]])  # another sequence reads this one
    assert pool.release(blocks, forget=True) == [blocks[1]]
    assert pool.find(keys[1]) is None and pool.find(keys[0]) == blocks[0]
    pool.check({blocks[0]: 1})


def test_grow_is_all_or_nothing() -> None:
    kv = KVCache([FULL, WINDOW], [6, 3], 4, max_seqs=2, max_len=64)
    assert kv.grow(0, 9) and kv.num_blocks[0] == 3
    assert not kv.grow(1, 1)
    assert kv.num_blocks[1] == 0
    kv.check_integrity([0])
    kv.trim(0, 13)  # the token at 13 reaches back to 4: the window group's first block is free again
    assert kv.grow(1, 1)
    assert not kv.grow(1, 5)
    kv.check_integrity([0, 1])
    kv.release(0)
    kv.release(1)
    kv.check_integrity([])


def test_a_window_group_needs_only_the_blocks_that_it_reaches() -> None:
    kv = KVCache([FULL, WINDOW], [20, 20], 4, max_seqs=2, max_len=64)
    keys = chain(BlockHasher(4), list(range(40)))
    assert kv.grow(0, 40)
    kv.publish(0, keys, 0, 10)
    kv.trim(0, 40)
    kv.release(0)
    window = kv.pools[1]
    hit = kv.match(keys, 10)
    # at position 40 the window reaches back to 31, in block 7
    assert hit.num_blocks == 10 and hit.starts == (0, 7) and [len(b) for b in hit.blocks] == [10, 3]
    # without block 8 nothing behind it can be reached; a prefix that ends before it needs 5, 6 and 7
    block = window.find(keys[8])
    assert block is not None
    window.retain([block])
    window.release([block], forget=True)
    hit = kv.match(keys, 10)
    assert hit.num_blocks == 8 and hit.starts == (0, 5)
    kv.check_integrity([])


def test_match_stops_at_the_first_missing_block() -> None:
    kv = KVCache([FULL], [10], 4, max_seqs=2, max_len=40)
    keys = chain(BlockHasher(4), list(range(24)))
    assert kv.grow(0, 24)
    kv.publish(0, keys, 0, 2)
    kv.publish(0, keys, 3, 6)
    assert kv.match(keys, 6).num_blocks == 2
    assert kv.match(keys, 1).num_blocks == 1
    assert kv.match([], 6).num_blocks == 0


def test_check_integrity_sees_a_lost_block() -> None:
    kv = KVCache([FULL], [10], 4, max_seqs=2, max_len=40)
    assert kv.grow(0, 8)
    with pytest.raises(AssertionError):
        kv.check_integrity([])
    with pytest.raises(AssertionError):
        kv.check_integrity([0, 1, 1, 0])
    kv.check_integrity([0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(FULL,), (WINDOW,), (FULL, WINDOW)]))
def test_random_use_keeps_the_books(seed: int, groups: tuple[LayerGroup, ...]) -> None:
    """Sequences begin from hits, grow, publish, lose their window and leave; their tables always hold their
    content.
    """
    rng = random.Random(seed)
    size, max_seqs = 4, 4
    kv = KVCache(groups, [rng.randrange(18, 26) for _ in groups], size, max_seqs, 64)
    hasher = BlockHasher(size)
    content: list[dict[int, bytes]] = [{} for _ in groups]  # what was written into each block
    live: dict[int, tuple[list[int], list[BlockKey], int]] = {}
    for _ in range(60):
        free = [slot for slot in range(max_seqs) if slot not in live]
        if free and rng.random() < 0.4:
            tokens = [rng.randrange(2) for _ in range(8)] + [
                rng.randrange(3) for _ in range(rng.randrange(1, 40))
            ]
            keys = chain(hasher, tokens)
            hit = kv.match(keys, (len(tokens) - 1) // size)
            kv.attach(free[0], hit)
            for g, blocks in enumerate(hit.blocks):
                for i, block in enumerate(blocks, hit.starts[g]):
                    assert content[g][block] == keys[i].digest
            live[free[0]] = (tokens, keys, hit.num_blocks * size)
            if rng.random() < 0.5:
                kv.keep(rng.choice("abc"), keys, until=rng.choice([0.0, 1e12]))
            else:
                kv.let_go(rng.choice("abc"))
        elif live:
            slot = rng.choice(list(live))
            tokens, keys, done = live[slot]
            goal = min(len(tokens), done + rng.randrange(1, 12))
            if rng.random() < 0.2 or not kv.grow(slot, goal):
                kv.release(slot)
                del live[slot]
            else:
                for g in range(len(groups)):
                    for i in range(done // size, goal // size):
                        content[g][int(kv.tables[g][slot, i])] = keys[i].digest
                kv.publish(slot, keys, done // size, goal // size)
                kv.trim(slot, goal)
                live[slot] = (tokens, keys, goal)
                for g, group in enumerate(groups):
                    reach = 0 if group.window is None else max(0, goal - group.window + 1)
                    for i in range(reach // size, goal // size):
                        assert content[g][int(kv.tables[g][slot, i])] == keys[i].digest
        kv.check_integrity(live)
    for slot in list(live):
        kv.release(slot)
    kv.check_integrity([])
