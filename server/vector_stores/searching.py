"""Searches: which chunks of which stores answer a query, by their words, their vectors, and a reranker.

Words say how good a hit is compared with the best one of its query. So do vectors, where there is an
embedder: the nearest chunk has 1, and the last of those that were looked at 0. The mean of both by their
weights orders the hits. A fusion of ranks would not do: the best hit by words is often far ahead of the
second one, and ranks forget it (BENCHMARKS.md). A score is that mean, times how well the query fits at all:
how much of its words one of the best hits has, and how near the nearest one is. With a reranker, the best of
these are ordered by it, and the scores are its own. All scores lie between 0 and 1.

What models do for a search counts as the work of whoever searches.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from server.clock import now_us
from server.errors import ApiError
from server.vector_stores.embedding import Embedder, Payer, Reranker
from server.vector_stores.filters import Filter, compiled
from server.vector_stores.vectors import Vectors
from storage import POSITION_BITS, WordHits

if TYPE_CHECKING:
    from storage import SearchedStore, Storage, StoredChunk

CANDIDATES = 4
"""Times as many chunks are looked at as are asked for, and at least 50: orders differ below the first."""

WEIGHTS = 0.5, 1.0
"""Of vectors and of words, where nobody says otherwise: vectors mislead more often."""

SEARCH_S = 15.0
"""How long a search may take."""

NOTED_US = 60_000_000
"""The last use of a store is written down once in so many microseconds."""

RERANKED = 50
"""Chunks that a reranker reads."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is searched for. weights: of vectors and of words, where both are there; what has none is not
    looked at. rerank: a reranker may order what is found."""

    store_ids: Sequence[str]
    queries: Sequence[str]
    most: int
    filter: Filter | None = None
    threshold: float = 0.0
    weights: tuple[float, float] = WEIGHTS
    rerank: bool = True


@dataclass(frozen=True, slots=True)
class Hit:
    """A piece of a file that was found. key: of the file as one store has it; another may have cut it
    otherwise. first, last: the positions of its first and its last chunk. page: where it begins. breaks:
    where in the text other pages begin, in characters, each with its number."""

    key: int
    file_id: str
    filename: str
    attributes: Mapping[str, Any]
    score: float
    text: str
    page: int | None
    first: int
    last: int
    breaks: tuple[tuple[int, int], ...] = ()


class Searcher:
    """Searches the stores of one database."""

    def __init__(
        self, storage: Storage, embedder: Embedder | None = None, reranker: Reranker | None = None
    ) -> None:
        self._storage = storage
        self._embedder = embedder
        self._reranker = reranker
        self._vectors = Vectors(storage)
        self._noted: dict[int, int] = {}  # when a use of each store was last written down

    async def search(self, payer: Payer, asked: Asked) -> list[Hit]:
        """The best hits, the best first. Raises NotFound for a store, ApiError 400 for an expired one, 503
        where the search takes too long, and what the models raise."""
        try:
            async with asyncio.timeout(SEARCH_S):
                return await self._search(payer, asked)
        except TimeoutError:
            message = f"The search took longer than {SEARCH_S:g} s. Search fewer stores, or for fewer words."
            raise ApiError(503, message, code="search_timeout", headers={"retry-after": "5"}) from None

    async def _search(self, payer: Payer, asked: Asked) -> list[Hit]:
        only = asked.filter is not None
        stores = await usable_stores(self._storage, payer.owner, asked.store_ids, asked.filter)
        files = frozenset[int]().union(*(store.shown if only else store.hidden for store in stores))
        most = max(CANDIDATES * asked.most, 50)
        ranked = await self._ranked(payer, stores, asked, files, only, most)
        best = sorted(ranked, key=lambda id: (-ranked[id], id))[:most]
        if self._reranker is not None and asked.rerank and best:
            chunks = await self._storage.vector_stores.chunks(best)
            best = [id for id in best if id in chunks][:RERANKED]
            texts = [chunks[id].text for id in best]
            scores = await self._reranker.rerank("\n".join(asked.queries), texts, payer=payer)
            ranked = dict(zip(best, scores, strict=True))
            best.sort(key=lambda id: (-ranked[id], id))
        else:
            chunks = await self._first_chunks(best, asked.most)
        await self._note_use(stores)
        hits = [_hit(chunks[id], ranked[id]) for id in best if id in chunks and ranked[id] >= asked.threshold]
        return hits[: asked.most]

    async def _first_chunks(self, ids: Sequence[int], most: int) -> dict[int, StoredChunk]:
        """So many of the first chunks that are still there."""
        chunks: dict[int, StoredChunk] = {}
        for start in range(0, len(ids), most):
            chunks |= await self._storage.vector_stores.chunks(ids[start : start + most])
            if len(chunks) >= most:
                break
        return chunks

    async def _note_use(self, stores: Sequence[SearchedStore]) -> None:
        now = now_us()
        due = [s.number for s in stores if now - self._noted.get(s.number, 0) > NOTED_US]
        if due:
            self._noted |= dict.fromkeys(due, now)
            await self._storage.vector_stores.touch(due, now)

    async def _ranked(
        self,
        payer: Payer,
        stores: Sequence[SearchedStore],
        asked: Asked,
        files: Collection[int],
        only: bool,
        most: int,
    ) -> dict[int, float]:
        """The scores of chunks, by their ids."""
        embedded = [store.number for store in stores if self._serves(store)]
        by_vectors, by_words = asked.weights if embedded else (0.0, 1.0)

        async def nearest() -> Sequence[Sequence[tuple[int, float]]]:
            if not by_vectors:
                return [()] * len(asked.queries)
            assert self._embedder is not None
            wanted = await self._embedder.embed(asked.queries, "query", payer=payer)
            identity = self._embedder.identity
            return await self._vectors.nearest(identity, embedded, wanted, files, only=only, most=most)

        async def matching() -> Sequence[WordHits]:
            if not by_words:
                return [WordHits((), 0.0)] * len(asked.queries)
            numbers = [store.number for store in stores]
            search = self._storage.vector_stores.search
            return [await search(numbers, query, files, only=only, most=most) for query in asked.queries]

        # At once: on PostgreSQL it is two processes that compute, on SQLite two threads.
        try:
            async with asyncio.TaskGroup() as group:  # where one fails, the other ends, too
                tasks = group.create_task(nearest()), group.create_task(matching())
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
            raise error from error.__cause__
        scores: dict[int, float] = defaultdict(float)
        for near, words in zip(tasks[0].result(), tasks[1].result(), strict=True):
            both: dict[int, float] = defaultdict(float)
            highest, fits = 0.0, []
            if known := _compared(near, most):
                highest += by_vectors
                fits.append(near[0][1])
                for id, score in known:
                    both[id] += by_vectors * score
            if words.hits:
                highest += by_words
                fits.append(words.fit)
                best = words.hits[0][1]
                for id, score in words.hits:
                    both[id] += by_words * (score / best if best > 0 else 1.0)
            for id, score in both.items():
                scores[id] = max(scores[id], score / highest * sum(fits) / len(fits))
        return dict(scores)

    def _serves(self, store: SearchedStore) -> bool:
        mine = self._embedder
        return mine is not None and (store.embedding, store.dimensions) == (mine.identity, mine.dimensions)


def _compared(near: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """The nearest chunks, the nearest first, with 1 for the best cosine. most: how many were looked for: the
    last of so many stands for what is not near, and has 0; where there are fewer, that is less sure."""
    if not near or near[0][1] <= 0:
        return []  # the model knows nothing of what is asked
    best = near[0][1]
    floor = max(0.0, near[-1][1]) * len(near) / most
    return [(id, max(0.0, cosine - floor) / (best - floor) if best > floor else 1.0) for id, cosine in near]


async def usable_stores(
    storage: Storage,
    owner: str,
    ids: Sequence[str],
    filter: Filter | None = None,
) -> tuple[SearchedStore, ...]:
    """Stores that can be searched, with the files that a filter lets through. Raises NotFound for a store,
    ApiError 400 for one that has expired."""
    now = now_us()
    shows = None if filter is None else _stored_test(filter)
    stores = await storage.vector_stores.searched(owner, ids, now, shows=shows)
    for store in stores:
        if await storage.is_over(store.expires_at, now):
            message = f"Vector store '{store.id}' has expired."
            raise ApiError(400, message, code="vector_store_expired", param="vector_store_id")
    return stores


def _stored_test(filter: Filter) -> Callable[[bytes | None], bool]:
    """A filter as a test of attributes as they are stored."""
    test = compiled(filter)
    return lambda told: test({} if told is None else orjson.loads(told))


def _hit(chunk: StoredChunk, score: float) -> Hit:
    return Hit(
        chunk.id >> POSITION_BITS,
        chunk.file_id,
        chunk.filename,
        {} if chunk.attributes is None else orjson.loads(chunk.attributes),
        min(1.0, max(0.0, score)),
        chunk.text,
        chunk.page,
        chunk.position,
        chunk.position,
        chunk.breaks,
    )


def merged(hits: Sequence[Hit]) -> list[Hit]:
    """The same hits, those together that lie beside each other in a file, in the place of their best."""
    groups: list[list[Hit]] = []
    for hit in hits:
        beside = [group for group in groups if any(_touch(hit, each) for each in group)]
        if not beside:
            groups.append([hit])
            continue
        beside[0].append(hit)
        for other in beside[1:]:
            beside[0].extend(other)
            groups.remove(other)
    return [_passage(group) for group in groups]


def _touch(one: Hit, other: Hit) -> bool:
    return one.key == other.key and one.first <= other.last + 1 and other.first <= one.last + 1


def _passage(hits: Sequence[Hit]) -> Hit:
    """Neighbours as one hit."""
    in_order = sorted(hits, key=lambda hit: hit.first)
    whole, begun = in_order[0].text, [*in_order[0].breaks]
    for hit in in_order[1:]:
        whole = _joined(whole, hit.text)
        start = len(whole) - len(hit.text)  # whatever the two share, the whole ends with the later one
        if hit.page is not None:
            begun += [(start, hit.page), *((start + at, page) for at, page in hit.breaks)]
    best, last = max(hit.score for hit in hits), max(hit.last for hit in hits)
    breaks = _changes(in_order[0].page, begun)
    return replace(in_order[0], score=best, text=whole, last=last, breaks=breaks)


def _changes(page: int | None, begun: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Of the places where a text is known to be on a page, those where this is another than before. page:
    where it begins."""
    breaks = []
    for at, other in sorted(begun):
        if other != page:
            breaks.append((at, other))
            page = other
    return tuple(breaks)


PROBE = 64
"""Characters by which a longer overlap of two texts is found, and how many places are tried for one."""


def _joined(front: str, back: str) -> str:
    """Two texts of which the second may begin with the end of the first, as one. Where texts repeat
    themselves again and again, an overlap may stay unseen: it takes time that grows with their length alone.
    """
    probe, start = back[:PROBE], max(0, len(front) - len(back))
    for _ in range(PROBE):
        start = front.find(probe, start)
        if start < 0:
            break
        if back.startswith(front[start:]):
            return front + back[len(front) - start :]
        start += 1
    for size in range(min(len(front), len(probe)), 0, -1):
        if front.endswith(probe[:size]):
            return front + back[size:]
    return f"{front}\n{back}"
