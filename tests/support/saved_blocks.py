"""Chains of KV blocks as they are saved, and files of them, without a model."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine.tiers.files import Bytes, FileWriter, Key, Name, Row, new_file, open_private, read_table
from engine.tiers.shelf import Shelf

IDENTITY, OWNER = b"i" * 16, b"o" * 16
BLOCK_SIZE = 4
GROUP_BYTES = (100, 5000)


def chain(text: str) -> list[Key]:
    """Keys of a sequence with a block for each letter."""
    keys: list[Key] = []
    for letter in text:
        parent = keys[-1].digest if keys else bytes(16)
        tokens = np.full(BLOCK_SIZE, ord(letter), np.int32).tobytes()
        keys.append(Key(blake2b(parent + tokens, digest_size=16).digest(), parent, tokens))
    return keys


def content(key: Key, groups: int = 0b11) -> Bytes:
    """The bytes of a block, which follow from its key."""
    size = sum(num for bit, num in enumerate(GROUP_BYTES) if groups >> bit & 1)
    return np.random.default_rng(list(key.digest)).integers(0, 256, size).astype(np.uint8)


def write(folder: Path, keys: Sequence[Key], *, first: int = 0, groups: int = 0b11) -> Path:
    """A file of these blocks, in two pieces; `first`: the place of the first in its sequence."""
    with new_file(folder, identity=IDENTITY, owner=OWNER, block_size=BLOCK_SIZE, capacity=len(keys)) as (
        path,
        writer,
    ):
        for begin, end in ((0, len(keys) // 2), (len(keys) // 2, len(keys))):
            rows = [(key, groups, first + i) for i, key in enumerate(keys[begin:end], begin)]
            writer.add(rows, [content(key, groups) for key in keys[begin:end]])
    return path


def table(path: Path) -> list[Row]:
    """The rows of a file."""
    with open_private(path, os.O_RDONLY) as descriptor:
        return read_table(descriptor, identity=IDENTITY, owner=OWNER, group_bytes=GROUP_BYTES)


def save(shelf: Shelf, name: str, text: str, *, first: int = 0, owner: str = "a") -> bytes:
    """Save a sequence with a block for each letter from the first one on, those before are on disk; returns
    what stands for its owner."""
    keys = [(key, 0b11, depth) for depth, key in enumerate(chain(text))][first:]
    whose = shelf.folder.owner(owner)

    def fill(writer: FileWriter) -> None:
        writer.add(keys, [content(key) for key, _, _ in keys])

    shelf.write(whose, keys, fill)
    shelf.give(Name(name, keys[-1][0].digest, None), whose)
    return whose


class Pool:
    """Blocks of two layer groups in memory, as `BlockMemory`."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.group_bytes = GROUP_BYTES
        self.groups = [np.zeros((num_blocks, size), np.uint8) for size in GROUP_BYTES]
        self.gate = threading.Event()  # what moves blocks waits for it
        self.gate.set()

    def mark(self) -> object:
        """Nothing is under way."""
        return None

    def read(self, group: int, blocks: Sequence[int], into: Bytes, mark: object) -> None:
        """See `BlockMemory.read`."""
        assert self.gate.wait(30)
        into[:] = self.groups[group][list(blocks)]

    def write(self, group: int, blocks: Sequence[int], data: Bytes, mark: object) -> None:
        """See `BlockMemory.write`."""
        assert self.gate.wait(30)
        self.groups[group][list(blocks)] = data

    def fill(self, keys: Sequence[Key], at: int) -> None:
        """Compute these blocks, from a place in the pool on."""
        for i, key in enumerate(keys, at):
            whole = content(key)
            for group, begin in ((0, 0), (1, GROUP_BYTES[0])):
                self.groups[group][i] = whole[begin : begin + GROUP_BYTES[group]]

    def holds(self, keys: Sequence[Key], at: int) -> bool:
        """Whether these blocks are there."""
        return all(
            np.array_equal(np.concatenate([group[i] for group in self.groups]), content(key))
            for i, key in enumerate(keys, at)
        )
