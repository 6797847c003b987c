"""The vectors of stores in memory, and which of them are nearest to a query, exactly; on a PostgreSQL with
`pgvector` the database is asked instead, and nothing is loaded.

Vectors are unit vectors in float32, in groups of files whose numbers lie beside each other: a group is one
array, so that a store of many small files is searched as fast as one of few large ones. A group is loaded
when a search first asks for it. Files that have come since are loaded beside those that are there; files that
have gone leave it. The groups that were searched longest ago make room for others, and a search goes through
them one after the other: so no search holds more in memory than `MAX_BYTES` and a few groups, however large
its stores are. Products are computed in a thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage import POSITION_BITS

if TYPE_CHECKING:
    from storage import Storage

MAX_BYTES = 1 << 30
"""Of vectors in memory: 700,000 chunks of 384 dimensions."""

FILES = 64
"""Numbers of files whose vectors are one group; a file with more chunks than `LARGE` is one by itself."""

LARGE = 1024

MAX_STORES = 256
"""Stores of which it is kept which files have vectors."""

AT_ONCE = 64 << 20
"""Bytes of vectors that one call of a thread goes through."""


Groups = Sequence[tuple[int, dict[int, int]]]
"""Files in groups, each with its place: the keys of its files, and how many chunks each has."""


@dataclass(frozen=True, slots=True)
class _Group:
    """keys: of the files. ids: of the chunks, rising. vectors: one row for each of them."""

    keys: frozenset[int]
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
        self._groups: OrderedDict[int, _Group] = OrderedDict()  # by place; the one searched last at the end
        self._num_bytes = 0
        self._files: OrderedDict[int, tuple[Mapping[int, int], list[tuple[int, dict[int, int]]]]] = (
            OrderedDict()
        )

    async def nearest(
        self,
        model: str,
        stores: Sequence[int],
        queries: Sequence[Sequence[float]],
        files: Collection[int],
        *,
        only: bool,
        most: int,
    ) -> list[list[tuple[int, float]]]:
        """For each query the chunks that are nearest to it: ids and cosines, the highest first.

        model: of the vectors; a process asks for those of one model. stores: their numbers. files: keys of
        files: those that are looked at where `only`, and otherwise those that are not.
        """
        known = self._storage.vector_stores
        if await known.finds_nearest():
            return [
                list(await known.nearest(model, stores, as_bytes(each), files, only=only, most=most))
                for each in queries
            ]
        best = _Best(queries, most)
        some: list[tuple[_Group, Any]] = []
        num_bytes = 0
        for store in stores:
            for place, counts in await self._grouped(store, model):
                wanted = [key for key in counts if (key in files) == only] if files or only else [*counts]
                if not wanted:
                    continue
                group = await self._group(place, counts.keys())
                some.append((group, None if len(wanted) == len(counts) else wanted))
                num_bytes += group.num_bytes
                if num_bytes > AT_ONCE:
                    await asyncio.to_thread(best.take, some)
                    some, num_bytes = [], 0
        await asyncio.to_thread(best.take, some)
        return best.found()

    async def _grouped(self, store: int, model: str) -> Groups:
        """The files of a store that have vectors, in groups, which are made anew when there are others."""
        readable = await self._storage.vector_stores.embedded_files(store, model)
        known = self._files.get(store)
        if known is None or known[0] is not readable:
            known = self._files[store] = readable, list(_places(readable))
        self._files.move_to_end(store)
        if len(self._files) > MAX_STORES:
            self._files.popitem(last=False)
        return known[1]

    async def _group(self, place: int, keys: Collection[int]) -> _Group:
        known = self._groups.get(place)
        if known is None or known.keys != keys:
            new = sorted(set(keys) - (known.keys if known is not None else frozenset()))
            rows = await self._storage.vector_stores.vectors(new) if new else ()
            known = await asyncio.to_thread(_renewed, known, frozenset(keys), rows)
            before = self._groups.get(place)
            self._num_bytes += known.num_bytes - (0 if before is None else before.num_bytes)
            self._groups[place] = known
        self._groups.move_to_end(place)
        while self._num_bytes > self._max_bytes and self._groups:
            self._num_bytes -= self._groups.popitem(last=False)[1].num_bytes
        return known


def _places(readable: Mapping[int, int]) -> Iterator[tuple[int, dict[int, int]]]:
    """Files, by their keys and with their numbers of chunks, in groups; each has a place of its own."""
    groups: dict[int, dict[int, int]] = {}
    for key, count in readable.items():
        place = ~key if count > LARGE else key // FILES
        groups.setdefault(place, {})[key] = count
    yield from groups.items()


def as_bytes(vector: Sequence[float]) -> bytes:
    """A vector as storage takes it."""
    import numpy as np

    return np.asarray(vector, "<f4").tobytes()


def _renewed(known: _Group | None, keys: frozenset[int], rows: Sequence[tuple[int, bytes]]) -> _Group:
    """A group of these files: what is known of it, without what has gone, and with what was loaded."""
    import numpy as np

    ids, vectors = np.array([id for id, _ in rows], np.int64), np.zeros((0, 0), np.float32)
    if rows:
        vectors = np.frombuffer(b"".join(value for _, value in rows), "<f4").reshape(len(rows), -1)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32, copy=False)
    if known is not None and len(known.ids):
        stays = _of_files(known.ids, keys)
        old_ids, old = known.ids[stays], known.vectors[stays]
        ids = np.concatenate([old_ids, ids])
        vectors = np.concatenate([old, vectors]) if rows else old
        order = np.argsort(ids)
        ids, vectors = ids[order], vectors[order]
    return _Group(keys, ids, vectors)


def _of_files(ids: Any, keys: Collection[int]) -> Any:
    """Which chunks are of these files."""
    import numpy as np

    return np.isin(ids >> POSITION_BITS, np.fromiter(keys, np.int64, len(keys)))


class _Best:
    """The chunks that are nearest to some queries, of all that were taken so far."""

    def __init__(self, queries: Sequence[Sequence[float]], most: int) -> None:
        import numpy as np

        self._most = most
        wanted = np.asarray(queries, np.float32)
        lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
        self._wanted = wanted / np.where(lengths == 0, 1, lengths)
        self._ids = np.zeros((len(queries), 0), np.int64)
        self._scores = np.zeros((len(queries), 0), np.float32)

    def take(self, groups: Sequence[tuple[_Group, Collection[int] | None]]) -> None:
        """Look at groups; with each the keys of the files that are looked at, None for all."""
        import numpy as np

        ids, scores = [], []
        for group, keys in groups:
            if group.vectors.shape[1:] != self._wanted.shape[1:]:
                continue  # it has none
            products = self._wanted @ group.vectors.T
            chosen = slice(None) if keys is None else _of_files(group.ids, keys)
            ids.append(group.ids[chosen])
            scores.append(products[:, chosen])
        if not ids:
            return
        new = np.broadcast_to(np.concatenate(ids), (len(self._wanted), sum(map(len, ids))))
        all_ids = np.concatenate([self._ids, new], axis=1)
        all_scores = np.concatenate([self._scores, *scores], axis=1)
        if all_scores.shape[1] > self._most:
            best = np.argpartition(-all_scores, self._most - 1, axis=1)[:, : self._most]
            all_ids, all_scores = (np.take_along_axis(each, best, 1) for each in (all_ids, all_scores))
        self._ids, self._scores = all_ids, all_scores

    def found(self) -> list[list[tuple[int, float]]]:
        """For each query ids and cosines, the highest first."""
        import numpy as np

        found = []
        for ids, scores in zip(self._ids, self._scores, strict=True):
            order = np.lexsort((ids, -scores))
            found.append([(int(ids[place]), float(scores[place])) for place in order])
        return found
