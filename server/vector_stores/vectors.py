"""The vectors of stores in memory, and which of them are nearest to a query, exactly.

Vectors of a file are unit vectors in float16, loaded when a search first asks for them: a file that was read
changes no more. The files that were searched longest ago make room for others. Products are computed in
float32, block by block, in a thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage import SearchedStore, Storage

MAX_BYTES = 512 << 20
"""Of vectors in memory: a million and more chunks of 256 dimensions."""

BLOCK = 16_384
"""Vectors that become float32 at once."""


@dataclass(frozen=True, slots=True)
class _File:
    """ids: of the chunks. vectors: one row for each of them."""

    ids: Any
    vectors: Any

    @property
    def num_bytes(self) -> int:
        return int(self.ids.nbytes + self.vectors.nbytes)


class Vectors:
    """The vectors of all stores that are searched here. max_bytes: of those that are kept."""

    def __init__(self, storage: Storage, max_bytes: int = MAX_BYTES) -> None:
        self._storage = storage
        self._max_bytes = max_bytes
        self._files: OrderedDict[int, _File] = OrderedDict()  # by key; the one searched last at the end
        self._num_bytes = 0

    async def nearest(
        self,
        stores: Sequence[SearchedStore],
        query: Sequence[float],
        files: Collection[int],
        *,
        only: bool,
        most: int,
    ) -> list[tuple[int, float]]:
        """The chunks that are nearest to a query: ids and cosines, the highest first.

        files: keys of files: those that are looked at where `only`, and otherwise those that are not.
        """
        import numpy as np

        loaded = []
        for store in stores:
            for key in await self._storage.vector_stores.readable_files(store.number):
                if (key in files) == only:
                    loaded.append(await self._file(key))
        wanted = np.asarray(query, np.float32)
        wanted = wanted / (np.linalg.norm(wanted) or 1.0)
        return await asyncio.to_thread(_nearest, loaded, wanted, most)

    async def _file(self, key: int) -> _File:
        found = self._files.get(key)
        if found is None:
            rows = await self._storage.vector_stores.vectors(key)
            found = await asyncio.to_thread(_unit, rows)
            self._num_bytes += found.num_bytes - (self._files[key].num_bytes if key in self._files else 0)
            self._files[key] = found
        self._files.move_to_end(key)
        while self._num_bytes > self._max_bytes and len(self._files) > 1:
            self._num_bytes -= self._files.popitem(last=False)[1].num_bytes
        return found


def as_bytes(vector: Sequence[float]) -> bytes:
    """A vector as storage takes it."""
    import numpy as np

    return np.asarray(vector, "<f4").tobytes()


def _unit(rows: Sequence[tuple[int, bytes]]) -> _File:
    import numpy as np

    ids = np.array([id for id, _ in rows], np.int64)
    if not rows:
        return _File(ids, np.zeros((0, 0), np.float16))
    vectors = np.frombuffer(b"".join(value for _, value in rows), "<f4").reshape(len(rows), -1)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return _File(ids, (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float16))


def _nearest(files: Sequence[_File], query: Any, most: int) -> list[tuple[int, float]]:
    import numpy as np

    ids, scores = [], []
    for file in files:
        if file.vectors.shape[1:] != query.shape:
            continue  # it has none
        for start in range(0, len(file.ids), BLOCK):
            ids.append(file.ids[start : start + BLOCK])
            scores.append(file.vectors[start : start + BLOCK].astype(np.float32) @ query)
    if not ids:
        return []
    all_ids, all_scores = np.concatenate(ids), np.concatenate(scores)
    best = np.argpartition(-all_scores, min(most, len(all_scores) - 1))[:most]
    best = best[np.lexsort((all_ids[best], -all_scores[best]))]
    return [(int(all_ids[index]), float(all_scores[index])) for index in best]
