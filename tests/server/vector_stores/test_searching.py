"""Searches: words and vectors fused, reranked, merged; and who notes that a store is used."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from server.clock import now_us
from server.errors import ApiError
from server.vector_stores import Asked, Embedder, Hit, Kind, Payer, Reranker, Searcher, merged
from server.vector_stores.vectors import Vectors, as_bytes
from storage import (
    NewChunk,
    NewStoreFile,
    NewVectorStore,
    Storage,
    StoredFile,
    WordHits,
    open_storage,
)
from storage.vector_stores import nearest
from storage.vector_stores.chunk_ids import chunk_id, file_key
from tests.support.libraries import WordVectors
from tests.support.making import OWNER, RUNNER, put_bytes, query, url
from tests.support.postgres import Postgres

TEXTS = (
    "The automobile must be parked behind the house.",
    "A car needs oil.",
    "Tides follow the moon.",
    "Gulls eat fish.",
)
PAYER = Payer(OWNER)
MODEL = WordVectors(["car", "automobile", "vehicle"], ["tide", "moon"])


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    opened = await open_storage(url(tmp_path), runner=RUNNER)
    yield opened
    await opened.close()


async def fill(storage: Storage, id: str, model: Embedder | None, texts: Sequence[str] = TEXTS) -> None:
    """A store with one file, whose chunks are these texts."""
    stores = storage.vector_stores
    pinned = (None, None) if model is None else (model.identity, model.dimensions)
    await stores.create(
        NewVectorStore(id, OWNER, now_us(), "", None, b"{}", None, *pinned),
        [NewStoreFile("file-1", "a.txt", 800, 400)],
    )
    job = await stores.claim(now_us())
    assert job is not None
    vectors = [None] * len(texts) if model is None else await model.embed(texts, "document", payer=PAYER)
    await stores.add_chunks(
        job,
        [
            NewChunk(place, 1, text, 9, None if vector is None else as_bytes(vector))
            for place, (text, vector) in enumerate(zip(texts, vectors, strict=True))
        ],
        b"d",
        None if model is None else model.identity,
    )
    await stores.finish(job)


async def found(
    storage: Storage,
    query: str,
    model: Embedder | None = None,
    reranker: Reranker | None = None,
    store: str = "vs_1",
    **asked: object,
) -> list[Hit]:
    searcher = Searcher(storage, model, reranker)
    return await searcher.search(PAYER, Asked([store], [query], 10, **asked))  # type: ignore[arg-type]


async def test_vectors_find_what_words_do_not_and_both_count(storage: Storage) -> None:
    await fill(storage, "vs_1", MODEL)
    assert [hit.text for hit in await found(storage, "vehicle")] == [], "no text has the word"
    near = await found(storage, "vehicle", MODEL)
    assert {hit.text for hit in near[:2]} == set(TEXTS[:2])
    both = await found(storage, "car", MODEL)
    assert both[0].text == TEXTS[1], "it has the word, and its vector is near"
    assert 1 >= both[0].score > both[1].score > 0
    only_words = await found(storage, "fish automobile", MODEL, weights=(0.0, 1.0))
    assert {hit.text for hit in only_words} == {TEXTS[0], TEXTS[3]}, "what vectors alone find is not there"
    assert only_words[0].score == pytest.approx(0.5), "it has one of two words that are as rare"
    only_vectors = await found(storage, "fish vehicle", MODEL, weights=(1.0, 0.0))
    assert TEXTS[3] not in [hit.text for hit in only_vectors[:2]]
    assert MODEL.kinds[-1] == "query"


class Told(WordVectors):
    """An embedder that gives every text the vector that it is told, and all others one of zeros."""

    def __init__(self, **vectors: tuple[float, float]) -> None:
        super().__init__()
        self._told = vectors

    def _vector(self, text: str) -> list[float]:
        return [*self._told.get(text.partition(" ")[0], (0.0, 0.0)), *[0.0] * 6]


async def test_a_hit_that_is_far_ahead_by_its_words_stays_ahead(storage: Storage) -> None:
    """Vectors that have another order do not put behind the rest what alone has the rare word."""
    texts = ("red quince tart", "blue apple tart", "green apple tart", "white apple tart")
    near = {"red": (0.7, 0.7), "blue": (1.0, 0.1), "green": (1.0, 0.2), "white": (1.0, 0.3)}
    model = Told(**near, quince=(1.0, 0.0))
    await fill(storage, "vs_1", model, texts)
    hits = await found(storage, "quince tart", model)
    assert hits[0].text == texts[0] and hits[1].text == texts[1]
    assert hits[0].score > hits[1].score + 0.05
    assert (await found(storage, "quince tart", model, weights=(1.0, 0.0)))[0].text == texts[1]


async def test_a_query_of_which_the_model_knows_nothing_goes_by_words_alone(storage: Storage) -> None:
    model = Told(red=(1.0, 0.0), blue=(0.0, 1.0))
    await fill(storage, "vs_1", model, ("red apple", "blue pear"))
    [hit] = await found(storage, "pear", model)
    assert (hit.text, hit.score) == ("blue pear", 1.0)
    assert await found(storage, "plum", model) == []
    assert await found(storage, "pear", model, weights=(1.0, 0.0)) == []


async def test_a_single_near_chunk_is_as_near_as_can_be(storage: Storage) -> None:
    model = Told(red=(1.0, 0.0), crimson=(0.9, 0.1))
    await fill(storage, "vs_1", model, ("red apple",))
    [hit] = await found(storage, "crimson fruit", model)
    assert hit.score == pytest.approx(0.9 / math.hypot(0.9, 0.1)), "the cosine"


async def test_what_words_alone_find_has_no_place_where_they_have_no_weight(storage: Storage) -> None:
    await fill(storage, "vs_1", MODEL)  # with vectors
    await storage.vector_stores.add_files(
        OWNER, "vs_1", [NewStoreFile("file-2", "b.txt", 800, 400)], now_us()
    )
    job = await storage.vector_stores.claim(now_us())
    assert job is not None
    await storage.vector_stores.add_chunks(job, [NewChunk(0, None, "A heron eats eels.", 9)], b"e")
    await storage.vector_stores.finish(job)  # without
    assert "A heron eats eels." in [hit.text for hit in await found(storage, "heron", MODEL)]
    near = await found(storage, "heron", MODEL, weights=(1.0, 0.0))
    assert len(near) == len(TEXTS) and "A heron eats eels." not in [hit.text for hit in near]
    assert len(await found(storage, "heron", None, weights=(1.0, 0.0))) == 1, "words are all that there is"


async def test_a_file_is_found_until_it_expires_and_no_longer(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a sweep has come to: the file is in its stores until then."""
    await fill(storage, "vs_1", MODEL)
    blob, end = await put_bytes(storage.blobs, b"x"), now_us() + 60_000_000
    file = StoredFile("file-1", OWNER, "a.txt", "assistants", 1, blob.digest, now_us(), end)
    await storage.files.create(file)
    like = {"type": "ne", "key": "year", "value": 1}
    for now, count in ((end - 1, len(TEXTS)), (end, 0)):
        monkeypatch.setattr("server.vector_stores.searching.now_us", lambda now=now: now)
        for model in (MODEL, None):
            assert len(await found(storage, "car oil house moon gulls", model)) == count
            assert len(await found(storage, "car oil house moon gulls", model, filter=like)) == count


async def test_vectors_of_another_model_never_meet(storage: Storage) -> None:
    class Other(WordVectors):
        identity = "words-2"

    await fill(storage, "vs_1", MODEL)
    other = Other(["car", "vehicle"])
    assert await found(storage, "vehicle", other) == [], "words alone are searched"
    assert other.kinds == []


async def test_a_file_that_goes_is_found_no_more_by_its_vectors(storage: Storage) -> None:
    await fill(storage, "vs_1", MODEL)
    searcher, asked = Searcher(storage, MODEL), Asked(["vs_1"], ["vehicle"], 3)
    assert len(await searcher.search(PAYER, asked)) == 3
    await storage.vector_stores.remove_file(OWNER, "vs_1", "file-1", now_us())
    assert await searcher.search(PAYER, asked) == []


async def test_a_reranker_has_the_last_word_unless_it_is_not_wanted(storage: Storage) -> None:
    class Longest:
        async def rerank(self, query: str, documents: Sequence[str], *, payer: Payer) -> list[float]:
            return [len(text) / 100 for text in documents]

    await fill(storage, "vs_1", None)
    first = await found(storage, "car automobile gulls oil", None, Longest())
    assert [hit.text for hit in first] == [TEXTS[0], TEXTS[1], TEXTS[3]]
    assert first[0].score == len(TEXTS[0]) / 100
    plain = await found(storage, "car automobile gulls oil", None, Longest(), rerank=False)
    assert plain[0].text == TEXTS[1], "it has two of the words"


async def test_scores_are_shares_of_the_best_and_a_threshold_cuts(storage: Storage) -> None:
    await fill(storage, "vs_1", None)
    hits = await found(storage, "car oil gulls")
    assert 0 < hits[1].score < hits[0].score < 1, "the best has two of the three words"
    assert len(await found(storage, "car oil gulls", threshold=hits[1].score + 0.01)) == 1


async def test_a_score_says_how_well_a_query_fits_at_all(storage: Storage) -> None:
    texts = ("red quince tart", "blue apple tart", "green apple tart", "white apple tart")
    model = Told(red=(1.0, 0.0), blue=(0.0, 1.0), quince=(1.0, 0.0), spanner=(0.6, 0.8))
    await fill(storage, "vs_1", model, texts)

    async def best(query: str, model: Embedder | None = None) -> float:
        return (await found(storage, query, model))[0].score

    assert await best("red quince tart") == pytest.approx(1.0), "it is all there"
    rare, unknown = math.log1p(3.5 / 1.5), math.log1p(4.5 / 0.5)
    assert await best("quince spanner valve") == pytest.approx(rare / (rare + 2 * unknown))
    frequent = math.log1p(0.5 / 4.5)
    assert await best("tart spanner") == pytest.approx(frequent / (frequent + unknown))
    assert await best("quince tart", model) == pytest.approx(1.0), "and nearest"
    of_words = frequent / (frequent + unknown)
    assert await best("spanner tart", model) == pytest.approx((of_words + 0.8) / 2)
    assert await found(storage, "tart spanner", model, threshold=0.5) == [], "nothing fits"


async def test_a_search_is_a_use_that_is_noted_once_a_minute(storage: Storage) -> None:
    await fill(storage, "vs_1", None)
    before = (await storage.vector_stores.get(OWNER, "vs_1")).last_active_at
    searcher, asked = Searcher(storage), Asked(["vs_1"], ["car"], 3)
    await searcher.search(PAYER, asked)
    used = (await storage.vector_stores.get(OWNER, "vs_1")).last_active_at
    await searcher.search(PAYER, asked)
    assert used > before
    assert (await storage.vector_stores.get(OWNER, "vs_1")).last_active_at == used


def hit(file: str, position: int, text: str, score: float) -> Hit:
    return Hit(ord(file), file, f"{file}.txt", {}, score, text, position + 1, position, position)


def test_neighbours_become_one_passage_in_the_place_of_the_best() -> None:
    hits = [
        hit("a", 4, "four five", 1.0),
        hit("b", 5, "other", 0.9),
        hit("a", 6, "six seven", 0.8),
        hit("a", 5, "five six", 0.7),
        hit("a", 9, "nine", 0.6),
    ]
    passages = merged(hits)
    assert [(each.file_id, each.text, each.first, each.last, each.page) for each in passages] == [
        ("a", "four five six seven", 4, 6, 5),
        ("b", "other", 5, 5, 6),
        ("a", "nine", 9, 9, 10),
    ]
    assert [each.score for each in passages] == [1.0, 0.9, 0.6]


def test_a_file_that_two_stores_cut_differently_has_passages_of_each() -> None:
    hits = [hit("a", 3, "as one has it", 1.0), replace(hit("a", 4, "as the other has it", 0.9), key=2)]
    assert merged(hits) == hits


def test_a_passage_knows_where_its_pages_begin() -> None:
    def piece(position: int, text: str, page: int, *breaks: tuple[int, int]) -> Hit:
        return Hit(1, "a", "a.pdf", {}, 1.0, text, page, position, position, breaks)

    def begins(hits: list[Hit]) -> list[tuple[int | None, str]]:
        [whole] = merged(hits)
        starts = [(0, whole.page), *whole.breaks]
        return [(page, whole.text[at:].split()[0]) for at, page in starts]

    first = piece(0, "one p1\n\ntwo p2\n\nthree", 1, (8, 2), (16, 3))
    shared = piece(1, "p2\n\nthree p3\n\nfour p4", 2, (4, 3), (14, 4))
    apart = piece(2, "five p5", 5)
    expected = [(1, "one"), (2, "two"), (3, "three"), (4, "four"), (5, "five")]
    assert begins([apart, first, shared]) == expected
    # Chunks that were stored before such places were: at least what each begins with is known.
    assert begins([piece(0, "one p1", 1), piece(1, "two p2", 2)]) == [(1, "one"), (2, "two")]
    assert begins([piece(0, "one p1", 1), piece(1, "p1 again", 1)]) == [(1, "one")]


def test_overlaps_are_found_in_a_time_that_grows_with_the_texts_alone() -> None:
    front, back = "a" * 100_000 + "b", "a" * 100_000 + "c"
    began = time.process_time()
    [whole] = merged([hit("a", 0, front, 1.0), hit("a", 1, back, 0.9)])
    assert time.process_time() - began < 0.5 and whole.text in (f"{front}\n{back}", front + back)
    told = " ".join(f"word {n}" for n in range(400))
    [whole] = merged([hit("a", 0, told[:2000], 1.0), hit("a", 1, told[900:], 0.9)])
    assert whole.text == told


async def test_vectors_that_have_no_room_are_loaded_and_dropped(storage: Storage) -> None:
    stores = storage.vector_stores
    pinned = (MODEL.identity, MODEL.dimensions)
    files = [NewStoreFile(f"file-{n}", "a.txt", 800, 400) for n in range(150)]
    await stores.create(NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}", None, *pinned), files)
    for n in range(149):  # one is not read
        job = await stores.claim(now_us())
        assert job is not None
        text = TEXTS[0] if n == 77 else f"Text {n}."
        [vector] = await MODEL.embed([text], "document", payer=PAYER)
        chunk = NewChunk(0, 1, text, 9, as_bytes(vector))
        await stores.add_chunks(job, [chunk], b"d", MODEL.identity)
        await stores.finish(job)
    wanted = await MODEL.embed(["vehicle", "moon"], "query", payer=PAYER)

    async def nearest(vectors: Vectors, files: Sequence[int] = (), *, only: bool = False) -> list[list[int]]:
        found = await vectors.nearest(MODEL.identity, [1], wanted, files, only=only, most=5)
        assert all(
            scores == sorted(scores, reverse=True) for scores in [[s for _, s in one] for one in found]
        )
        return [[id for id, _ in one] for one in found]

    roomy, tight = Vectors(storage), Vectors(storage, max_bytes=64 * MODEL.dimensions * 4)
    first = await nearest(roomy)
    assert first[0][0] == chunk_id(1, 77, 0) and all(len(one) == 5 for one in first)
    assert await nearest(tight) == first == await nearest(roomy)
    assert tight._num_bytes <= tight._max_bytes < roomy._num_bytes
    assert len(roomy._groups) == 3, "files have arrays together"
    chosen = [file_key(1, n) for n in (3, 77, 140)]
    assert {id >> 15 for id in (await nearest(roomy, chosen, only=True))[0]} == set(chosen)
    assert chosen[1] not in {id >> 15 for id in (await nearest(roomy, chosen[1:2]))[0]}
    # What goes and what comes is seen, and the rest is not loaded again.
    loads: list[Sequence[int]] = []
    real = stores.vectors

    async def counted(keys: Sequence[int]) -> Sequence[tuple[int, bytes]]:
        loads.append(keys)
        return await real(keys)

    stores.vectors = counted  # type: ignore[method-assign]
    await stores.remove_file(OWNER, "vs_1", "file-77", now_us())
    assert chosen[1] not in {id >> 15 for id in (await nearest(roomy))[0]} and not loads
    job = await stores.claim(now_us())
    assert job is not None
    [vector] = await MODEL.embed([TEXTS[0]], "document", payer=PAYER)
    chunk = NewChunk(0, 1, TEXTS[0], 9, as_bytes(vector))
    await stores.add_chunks(job, [chunk], b"d", MODEL.identity)
    await stores.finish(job)
    assert (await nearest(roomy))[0][0] == chunk_id(1, 149, 0)
    assert loads == [[file_key(1, 149)]]


async def test_a_search_that_takes_too_long_is_ended(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.vector_stores.searching.SEARCH_S", 0.3)
    ended = asyncio.Event()

    class Slow(WordVectors):
        async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> list[list[float]]:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

    await fill(storage, "vs_1", MODEL)
    with pytest.raises(ApiError) as refused:
        await found(storage, "vehicle", Slow(["car"]))
    assert (refused.value.status, refused.value.code) == (503, "search_timeout") and ended.is_set()


async def test_a_search_whose_model_fails_ends_whole(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has the error of the model, and nothing is looked for any more."""
    searching, ended = asyncio.Event(), asyncio.Event()

    async def search(*_: object, **__: object) -> WordHits:
        searching.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    class Failing(WordVectors):
        async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> list[list[float]]:
            await searching.wait()
            raise ApiError(429, "Too much.")

    await fill(storage, "vs_1", MODEL)
    monkeypatch.setattr(storage.vector_stores, "search", search)
    with pytest.raises(ApiError, match=r"Too much\."):
        await found(storage, "vehicle", Failing(["car"]))
    assert ended.is_set()


async def test_pgvector_finds_what_is_found_in_memory(postgres: Postgres) -> None:
    place = await postgres.fresh()
    storage = await open_storage(place, runner=RUNNER)
    stores, draw = storage.vector_stores, np.random.default_rng(3)

    async def add(file: str, dimensions: int = 16, model: str = "m") -> None:
        await stores.add_files(OWNER, "vs_1", [NewStoreFile(file, "a.txt", 800, 400)], now_us())
        job = await stores.claim(now_us())
        assert job is not None
        vectors = draw.standard_normal((9, dimensions), np.float32)
        chunks = [NewChunk(n, 1, f"Text {n}.", 9, as_bytes(vector)) for n, vector in enumerate(vectors)]
        await stores.add_chunks(job, chunks, b"d", model)
        await stores.finish(job)

    await stores.create(NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}", None, "m", 16))
    number = (await stores.get(OWNER, "vs_1")).number
    await add("before")
    assert not await stores.finds_nearest() and await stores.make_nearest()
    await add("behind")
    await add("other", 24, "old")
    await add("gone")
    while await stores.take_over():
        pass
    await stores.remove_file(OWNER, "vs_1", "gone", now_us())
    wanted = draw.standard_normal((2, 16), np.float32)
    in_memory = Vectors(storage)
    first = await in_memory.nearest("m", [number], wanted, (), only=False, most=7)
    for files, only in (
        ((), False),
        ((file_key(number, 0),), True),
        ((file_key(number, 1),), False),
        ((), True),
    ):
        told = await in_memory.nearest("m", [number], wanted, files, only=only, most=7)
        assert told[0] or only, "the database is asked"
        stores._nearest, shared = False, stores._shared
        stores._shared = False
        expected = await in_memory.nearest("m", [number], wanted, files, only=only, most=7)
        stores._shared = shared
        assert in_memory._groups or only
        assert [[id for id, _ in one] for one in told] == [[id for id, _ in one] for one in expected]
        for one, other in zip(told, expected, strict=True):
            assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-3), (
                "of 16 bits"
            )
    while await stores.erase():
        pass
    assert query(place, "SELECT count(*) FROM vector_nearest") == [(27,)]
    assert await stores.make_nearest(), "it is there"
    query(place, "ALTER TABLE vector_nearest ALTER COLUMN embedding TYPE vector")  # as releases before had it
    assert await stores.make_nearest()
    assert query(place, "SELECT count(*) FROM vector_nearest") == [(0,)], "not converted at once"
    assert not await storage._read(nearest.is_complete)
    while await stores.take_over():
        pass
    assert await storage._read(nearest.is_complete)
    assert query(place, "SELECT count(*) FROM vector_nearest") == [(27,)]
    assert await in_memory.nearest("m", [number], wanted, (), only=False, most=7) == first
    await storage.close()
    await postgres.give_back(place)
