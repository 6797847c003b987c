"""The ids of chunks: the number of the store, that of the file in it, and the position in the file, in one
integer of 63 bits.

So the chunks of a store, and those of a file, are a range of ids: of rows, of the index of words, and of what
a process holds in memory. Which file a chunk is of can be seen without looking it up, and a chunk that is
written a second time meets the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from storage.vector_stores.records import POSITION_BITS

FILE_BITS = 22

MAX_FILES = 1 << FILE_BITS
"""That a store takes in its life."""


def file_key(store: int, file: int) -> int:
    """A file among all files of all stores."""
    return store << FILE_BITS | file


def key_of(chunk: int) -> int:
    """The file of a chunk."""
    return chunk >> POSITION_BITS


def chunk_id(store: int, file: int, position: int) -> int:
    """A chunk among all chunks."""
    return file_key(store, file) << POSITION_BITS | position


def of_store(store: int) -> tuple[int, int]:
    """The first and the last id that chunks of a store can have."""
    return chunk_id(store, 0, 0), chunk_id(store + 1, 0, 0) - 1


def of_file(key: int) -> tuple[int, int]:
    """The first and the last id that chunks of a file can have."""
    return key << POSITION_BITS, ((key + 1) << POSITION_BITS) - 1


def by_store(stores: Sequence[int], files: Collection[int], *, only: bool) -> Iterator[tuple[int, list[int]]]:
    """Stores that are to be searched, each with the keys of its own files among some: those that are looked
    at where `only`, and otherwise those that are not. Where nothing of a store is looked at, it is left out.
    """
    of_each: dict[int, list[int]] = {store: [] for store in stores}
    for key in files:
        if (store := key >> FILE_BITS) in of_each:
            of_each[store].append(key)
    return ((store, keys) for store, keys in of_each.items() if keys or not only)
