"""Vector stores in the database: what is found, who may write, and what goes."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, text

from storage import (
    FileClaim,
    FileClaimLost,
    FileCounts,
    Limits,
    NewChunk,
    NewStoreFile,
    NewVectorStore,
    NotFound,
    Storage,
    StoredFile,
    open_storage,
)
from storage.vector_stores import ingestion
from storage.vector_stores.chunk_ids import file_key, key_of
from storage.vector_stores.records import Due
from storage.vector_stores.words import INDEXES
from storage.vector_stores.words.interface import Wanted
from storage.vector_stores.words.searching import MAX_WORDS, words_of
from tests.support.making import OTHER, OWNER, RUNNER, instructions, now, put_bytes, query, rows, url

T = TypeVar("T")

TEXTS = (
    "The spring tide is highest two days after the full moon.",
    "Boats keep to the right and sound their horn at the second buoy.",
    "The harbour master collects the fee for boats before noon.",
)


def new_store(id: str = "vs_1", owner: str = OWNER, **fields: object) -> NewVectorStore:
    return NewVectorStore(id, owner, now(), "", None, b"{}", **fields)  # type: ignore[arg-type]


def new_file(id: str = "file-1", **fields: object) -> NewStoreFile:
    return NewStoreFile(id, f"{id}.txt", 800, 400, **fields)  # type: ignore[arg-type]


def pieces(texts: Sequence[str], start: int = 0) -> list[NewChunk]:
    return [NewChunk(place, 1, text, len(text) // 4) for place, text in enumerate(texts, start)]


async def claimed(storage: Storage) -> FileClaim:
    job = await storage.vector_stores.claim(now())
    assert job is not None
    return job


async def filled(storage: Storage, store: str = "vs_1", texts: Sequence[str] = TEXTS) -> None:
    """A store with one file of these chunks."""
    await storage.vector_stores.create(new_store(store), [new_file()])
    await read(storage, texts)


async def read(storage: Storage, texts: Sequence[str]) -> None:
    job = await claimed(storage)
    await storage.vector_stores.add_chunks(job, pieces(texts), b"d")
    await storage.vector_stores.finish(job)


async def found(storage: Storage, query: str, store: str = "vs_1", owner: str = OWNER) -> list[str]:
    """The texts that a search finds, the best first."""
    stores = await storage.vector_stores.searched(owner, [store], now())
    words = await storage.vector_stores.search(
        [stores[0].number], query, stores[0].hidden, only=False, most=10
    )
    chunks = await storage.vector_stores.chunks([id for id, _ in words.hits])
    return [chunks[id].text for id, _ in words.hits]


async def test_chunks_are_found_by_their_words_and_by_what_they_stem_from(storage: Storage) -> None:
    await filled(storage)
    assert await found(storage, "When are the tides highest?") == [TEXTS[0]]
    assert (await found(storage, "horns of a boat"))[0] == TEXTS[1]
    assert set(await found(storage, "boat")) == {TEXTS[1], TEXTS[2]}
    assert await found(storage, "submarine") == []
    assert await found(storage, "?! ") == []


async def test_files_never_set_the_last_use_of_a_store_back(storage: Storage) -> None:
    made = replace(new_store(), created_at=1, last_active_at=1000, expires_after=5)
    assert (await storage.vector_stores.create(made, [new_file()])).last_active_at == 1000
    for at, last in ((999, 1000), (1001, 1001)):
        await storage.vector_stores.add_files(OWNER, made.id, [new_file("file-2")], at)
        assert (await storage.vector_stores.get(OWNER, made.id)).last_active_at == last


async def test_chunks_are_ordered_by_bm25(storage: Storage) -> None:
    """More of a word adds less and less, long chunks count less, and a rare word outweighs a frequent one."""
    others = [f"w{n}" for n in range(400)]

    def scored(times: int, length: int) -> float:
        usual = sum(len(text.split()) for text in texts) / len(texts)
        return times / (times + 1.2 * (0.25 + 0.75 * length / usual))

    shapes = ((1, 40), (2, 40), (3, 40), (9, 40), (1, 160))
    texts = [" ".join(["heron"] * times + others[:length]) for times, length in shapes]
    texts += [" ".join(["eel", *others[n : n + 40]]) for n in range(0, 300, 10)]
    await filled(storage, texts=texts)
    stores = await storage.vector_stores.searched(OWNER, ["vs_1"], now())
    search = partial(storage.vector_stores.search, [stores[0].number], files=(), only=False, most=50)
    hits = (await search("heron")).hits
    place = {text: index for index, text in enumerate(texts)}
    chunks = await storage.vector_stores.chunks([id for id, _ in hits])
    scores = {shapes[place[chunks[id].text]]: score for id, score in hits}
    assert list(scores) == [(9, 40), (3, 40), (2, 40), (1, 40), (1, 160)]
    for shape, score in scores.items():
        expected = scored(*shape) / scored(1, 40)
        assert score / scores[1, 40] == pytest.approx(expected, rel=0.1), shape
    both = (await search("eel heron")).hits
    assert len(both) == len(texts)
    assert {id for id, _ in both[:5]} == {id for id, _ in hits}, "every heron stands before every eel"


async def test_merging_joins_what_transactions_added_and_changes_no_answer(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER)
    stores = storage.vector_stores
    await stores.create(new_store(), [new_file()])
    job = await claimed(storage)
    for start in range(40):  # as many transactions
        await stores.add_chunks(job, pieces([f"Buoy {start} of the channel, {'tide ' * start}"], start), b"d")
    await stores.finish(job)
    before = await found(storage, "buoys and tides")
    assert len(before) == 10
    while await stores.merge_words():
        pass
    assert await found(storage, "buoys and tides") == before
    if database_url.startswith("sqlite"):
        parts = text("SELECT count(DISTINCT segid) FROM vector_words_idx")
        assert await storage._read(lambda conn: conn.execute(parts).scalar_one()) == 1, "of 40"
    await storage.close()


@pytest.mark.parametrize(
    "query",
    [
        'tide" OR "boats',
        "tide AND (",
        "words:tide",
        "NEAR(tide boats)",
        "tide*",
        "-tide",
        "'tide' & !x",
        "^tide \\",
    ],
)
async def test_a_query_is_words_and_never_the_syntax_of_a_database(storage: Storage, query: str) -> None:
    await filled(storage)
    assert TEXTS[0] in await found(storage, query)


async def test_a_search_sees_the_chunks_of_its_store_and_of_its_owner_alone(storage: Storage) -> None:
    await filled(storage, "vs_1")
    await filled(storage, "vs_2", ["Another tide."])
    assert await found(storage, "tide", "vs_2") == ["Another tide."]
    with pytest.raises(NotFound) as unknown:
        await found(storage, "tide", "vs_2", OTHER)
    assert unknown.value.kind == "vector store"


async def test_scores_tell_nothing_of_what_others_store(storage: Storage) -> None:
    """How rare a word is counts within a store; what another owner writes about gulls is that owner's own."""
    texts = ["gull one two three", "tern one two three", *(f"auk {n} two three" for n in range(20))]
    await filled(storage, texts=texts)
    number = (await storage.vector_stores.searched(OWNER, ["vs_1"], now()))[0].number
    search = partial(storage.vector_stores.search, [number], "gull tern", files=(), only=False, most=10)
    before = await search()
    assert len(before.hits) == 2 and before.hits[0][1] == pytest.approx(before.hits[1][1])
    await storage.vector_stores.create(new_store("vs_2", OTHER), [new_file()])
    await read(storage, [f"gull {n} two three" for n in range(200)])
    after = await search()
    assert [id for id, _ in after.hits] == [id for id, _ in before.hits] and after.fit == before.fit
    assert [score for _, score in after.hits] == pytest.approx([score for _, score in before.hits])


async def test_files_can_be_chosen_and_left_out(storage: Storage) -> None:
    stores = storage.vector_stores
    await stores.create(new_store(), [new_file("file-1", attributes=b'{"n":1}'), new_file("file-2")])
    await read(storage, ["The first tide."])
    await read(storage, ["The second tide."])
    [store] = await stores.searched(OWNER, ["vs_1"], now(), shows=lambda told: told == b'{"n":1}')
    chosen = [*store.shown]
    for files, only, texts in ((chosen, True, ["The first tide."]), (chosen, False, ["The second tide."])):
        hits = (await stores.search([store.number], "tide", files, only=only, most=10)).hits
        chunks = await stores.chunks([id for id, _ in hits])
        assert [chunk.text for chunk in chunks.values()] == texts
    assert not (await stores.search([store.number], "tide", [], only=True, most=10)).hits


async def test_files_are_chosen_by_their_attributes_where_these_are_read(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few at a time, in the thread that reads: attributes of many files are more than memory holds."""
    monkeypatch.setattr("storage.vector_stores.stores.FILTERED", 2)
    stores = storage.vector_stores
    told = [None if n == 3 else b'{"n":%d}' % n for n in range(6)]
    await stores.create(new_store(), [new_file(f"file-{n}", attributes=each) for n, each in enumerate(told)])
    for _ in range(5):  # the last one is not read
        await read(storage, TEXTS)
    asked: list[bytes | None] = []

    def shows(attributes: bytes | None) -> bool:
        assert threading.current_thread().name.startswith("antiphon-reader")
        asked.append(attributes)
        return len(asked) != 2

    [store] = await stores.searched(OWNER, ["vs_1"], now(), shows=shows)
    assert asked == told[:5]
    assert store.shown == {file_key(store.number, n) for n in (0, 2, 3, 4)}
    assert store.hidden == {file_key(store.number, 5)}


async def test_each_store_is_searched_among_its_own_files(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of all the others say nothing of it, and there may be thousands of each."""
    stores, ids = storage.vector_stores, ["vs_1", "vs_2", "vs_3"]
    for id in ids:
        await stores.create(new_store(id), [new_file("file-1"), new_file("file-2")])
        for _ in range(2):
            await read(storage, TEXTS)
    first, second, third = (store.number for store in await stores.searched(OWNER, ids, now()))
    index = INDEXES["postgresql" if storage.shared else "sqlite"]
    rank, ranked = index.rank, dict[int, list[int]]()

    def noted(_: object, conn: Connection, wanted: Wanted, *rest: Any) -> list[tuple[int, float]]:
        ranked[wanted.store] = sorted(wanted.files)
        return rank(conn, wanted, *rest)

    monkeypatch.setattr(type(index), "rank", noted)
    mine = {first: [file_key(first, 0)], second: [file_key(second, 0), file_key(second, 1)]}
    files = [key for keys in mine.values() for key in keys]
    hits = (await stores.search([first, second, third], "tide", files, only=True, most=50)).hits
    assert sorted(key_of(id) for id, _ in hits) == files and ranked == mine
    hits = (await stores.search([first, second, third], "tide", files, only=False, most=50)).hits
    others = [file_key(first, 1), file_key(third, 0), file_key(third, 1)]
    assert sorted(key_of(id) for id, _ in hits) == others and ranked == {**mine, third: []}


async def test_chinese_words_are_found_without_spaces(storage: Storage) -> None:
    if storage.shared:
        return  # PostgreSQL's parser takes these characters for blanks or words, as the locale says
    await filled(storage, texts=["大潮在满月之后两天最高。", "船靠右行驶。"])
    assert await found(storage, "满月") == ["大潮在满月之后两天最高。"]
    assert await found(storage, "月满") == []
    # A sentence is no phrase of the text: what has most of its pairs is found.
    assert (await found(storage, "大潮在什么时候最高 船呢"))[0] == "大潮在满月之后两天最高。"


def test_a_run_without_spaces_is_looked_for_in_pieces_that_count_as_words() -> None:
    """A phrase is compared word by word with each chunk that has its words, so none is long."""
    assert words_of("满月之后 tide") == ["满 月 之 后", "tide"]
    assert words_of("满月之后是") == ["满 月", "月 之", "之 后", "后 是"]
    assert words_of("\u7684" * 9999) == ["\u7684 \u7684"]
    for first in (0x4E00, 0x0E01, 0x1000):
        pieces = words_of("".join(chr(first + n % 40) for n in range(9999)))
        assert len(pieces) == MAX_WORDS and all(len(piece.split()) == 2 for piece in pieces)


def test_a_word_of_a_query_is_one_word_of_the_index() -> None:
    """Python and FTS5 differ in what is a letter: a word with many separators in it would be a phrase."""
    known = sqlite3.connect(":memory:")
    known.execute("CREATE VIRTUAL TABLE words USING fts5 (word, tokenize='porter unicode61')")
    known.execute("CREATE VIRTUAL TABLE seen USING fts5vocab (words, instance)")
    # [measured] Of all planes, characters in these rows alone are letters to Python and separators to FTS5.
    words = [word for place in range(0x1100, 0x2000) for word in words_of(f"q{chr(place)}x")]
    known.executemany("INSERT INTO words (word) VALUES (?)", [(word,) for word in words])
    [(most,)] = known.execute("SELECT max(many) FROM (SELECT count(*) AS many FROM seen GROUP BY doc)")
    assert len(words) > 3000 and most == 1


async def test_nothing_is_found_before_a_file_is_read_whole(storage: Storage) -> None:
    stores = storage.vector_stores
    await stores.create(new_store(), [new_file()])
    job = await claimed(storage)
    await stores.add_chunks(job, pieces(TEXTS[:1]), b"d")
    assert await found(storage, "tide") == []
    assert (await stores.get(OWNER, "vs_1")).counts == FileCounts(in_progress=1)
    await stores.add_chunks(job, pieces(TEXTS[1:], 1), b"d")
    await stores.finish(job)
    assert await found(storage, "tide") == [TEXTS[0]]
    store = await stores.get(OWNER, "vs_1")
    assert store.counts == FileCounts(completed=1) and store.num_bytes == sum(map(len, TEXTS))
    assert (await storage.usage(OWNER)).held == store.num_bytes == await storage.num_bytes()


async def test_whoever_comes_later_goes_on_and_whoever_was_first_writes_nothing(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER)
    stores = storage.vector_stores
    await stores.create(new_store(), [new_file()])
    first = await claimed(storage)
    await stores.add_chunks(first, pieces(TEXTS[:1]), b"d")
    assert await stores.claim(now()) is None
    await stores.free_all()  # as the next process does
    second = await claimed(storage)
    assert (second.next_position, second.digest, second.attempt) == (1, b"d", 1)
    for write in (
        stores.add_chunks(first, pieces(TEXTS[1:], 1), b"d"),
        stores.finish(first),
        stores.begin_anew(first),
    ):
        with pytest.raises(FileClaimLost):
            await write
    await stores.add_chunks(second, pieces(TEXTS[1:], 1), b"d")
    await stores.finish(second)
    assert [c.text for c in await stores.file_chunks(OWNER, "vs_1", "file-1", limit=9)] == list(TEXTS)
    await storage.close()


async def test_a_clean_end_counts_no_attempt_and_a_new_beginning_leaves_nothing(storage: Storage) -> None:
    stores = storage.vector_stores
    await stores.create(new_store(), [new_file()])
    await stores.add_chunks(await claimed(storage), pieces(TEXTS), b"old")
    await stores.release()
    job = await claimed(storage)
    assert (job.attempt, job.digest) == (1, b"old")
    while await stores.begin_anew(job):
        pass
    await stores.add_chunks(job, pieces(["Another text."]), b"new")
    await stores.finish(job)
    assert [c.text for c in await stores.file_chunks(OWNER, "vs_1", "file-1", limit=9)] == ["Another text."]
    assert await found(storage, "tide") == []


async def test_a_new_beginning_that_was_cut_is_one_for_whoever_comes_next(storage: Storage) -> None:
    """Also for a process whose parser makes the chunks of which some are left."""
    stores = storage.vector_stores
    await stores.create(new_store(), [new_file()])
    job = await claimed(storage)
    await stores.add_chunks(job, pieces([f"tide {number}" for number in range(100)]), b"d")
    assert await stores.begin_anew(job), "some of it is left"
    stores.let_go(job)
    job = await claimed(storage)
    assert job.next_position and job.digest is None
    while await stores.begin_anew(job):
        pass
    stores.let_go(job)
    assert (await claimed(storage)).next_position == 0


async def test_what_was_of_a_store_that_is_gone_never_gets_into_another(storage: Storage) -> None:
    stores = storage.vector_stores
    await stores.create(new_store("vs_1"), [new_file("file-1")])
    slow = await claimed(storage)
    await stores.delete(OWNER, "vs_1", now())
    while await stores.erase():
        pass
    await stores.create(new_store("vs_2", OTHER), [new_file("file-2")])
    job = await claimed(storage)
    assert job.store_number > slow.store_number
    for other in (slow, replace(job, store_id="vs_1"), replace(job, file_id="file-1")):
        with pytest.raises(FileClaimLost):
            await stores.add_chunks(other, pieces(["A secret."]), b"s")
    await stores.add_chunks(job, pieces(TEXTS), b"d")
    await stores.finish(job)
    assert [c.text for c in await stores.file_chunks(OTHER, "vs_2", "file-2", limit=9)] == list(TEXTS)


async def test_owners_take_turns(storage: Storage) -> None:
    stores = storage.vector_stores
    await stores.create(new_store("vs_1"), [new_file("file-1"), new_file("file-2")])
    await stores.create(new_store("vs_2", OTHER), [new_file("file-3")])
    turns = []
    behind = ""
    while (job := await stores.claim(now(), behind)) is not None:
        turns.append(job.owner)
        behind = job.owner
    assert sorted(turns[:2]) == sorted([OWNER, OTHER]) and turns[2] == OWNER


async def test_others_wait_while_no_task_has_their_files(storage: Storage) -> None:
    stores = storage.vector_stores
    await stores.create(new_store("vs_1"), [new_file("file-1"), new_file("file-2")])
    job = await claimed(storage)
    assert not await stores.others_wait(job, now()), "only of the same owner"
    assert await stores.others_wait(replace(job, status="completed"), now()), "reading comes first"
    await stores.create(new_store("vs_2", OTHER), [new_file("file-3")])
    assert await stores.others_wait(job, now())
    other = await stores.claim(now(), OWNER)
    assert other is not None and other.owner == OTHER and not await stores.others_wait(job, now())


@pytest.mark.parametrize("what", ["file", "store", "batch"])
async def test_what_is_let_go_of_while_it_is_read_leaves_nothing(storage: Storage, what: str) -> None:
    stores = storage.vector_stores
    await stores.create(new_store())
    await stores.create_batch(OWNER, "vs_1", "vsfb_1", [new_file()], now())
    job = await claimed(storage)
    await stores.add_chunks(job, pieces([f"tide {number}" for number in range(100)]), b"d")
    if what == "file":
        await stores.remove_file(OWNER, "vs_1", "file-1", now())
    elif what == "store":
        await stores.delete(OWNER, "vs_1", now())
    else:
        batch = await stores.cancel_batch(OWNER, "vs_1", "vsfb_1", now())
        assert batch.cancelled_at is not None and batch.counts == FileCounts(cancelled=1)
    with pytest.raises(FileClaimLost):
        await stores.add_chunks(job, pieces(["more"], 100), b"d")
    while await stores.erase():
        pass
    left = await rows(storage)
    assert "vector_chunks" not in left
    if what == "store":
        assert not any(name.startswith("vector") for name in left)
    else:
        assert (await stores.get(OWNER, "vs_1")).num_bytes == 0


async def test_a_file_that_comes_again_is_read_again_only_if_that_changes_something(storage: Storage) -> None:
    stores = storage.vector_stores
    await filled(storage)
    [same] = await stores.add_files(OWNER, "vs_1", [new_file(attributes=b'{"a":1}')], now())
    assert (same.status, same.attributes) == ("completed", b'{"a":1}')
    [other] = await stores.add_files(OWNER, "vs_1", [NewStoreFile("file-1", "file-1.txt", 100, 0)], now())
    assert other.status == "in_progress" and await found(storage, "tide") == []
    await read(storage, ["tide anew"])
    assert await found(storage, "tide") == ["tide anew"]


async def test_pages_go_in_both_directions(storage: Storage) -> None:
    stores = storage.vector_stores
    for number in range(5):
        await stores.create(new_store(f"vs_{number}"))

    async def ids(**args: object) -> tuple[list[str], bool]:
        page = await stores.list(OWNER, **args)  # type: ignore[arg-type]
        return [store.id for store in page.data], page.has_more

    assert await ids(limit=2) == (["vs_4", "vs_3"], True)
    assert await ids(limit=2, after="vs_3") == (["vs_2", "vs_1"], True)
    assert await ids(limit=2, before="vs_1") == (["vs_3", "vs_2"], True)
    assert await ids(limit=2, before="vs_3") == (["vs_4"], False)
    assert await ids(limit=9, order="asc", after="vs_2") == (["vs_3", "vs_4"], False)
    with pytest.raises(NotFound):
        await ids(limit=2, after="vs_9")


async def test_an_unused_store_expires_and_a_purge_leaves_nothing(storage: Storage) -> None:
    stores = storage.vector_stores
    await stores.create(new_store(expires_after=1000), [new_file()])
    await read(storage, TEXTS)
    await filled(storage, "vs_2")
    assert await stores.expire(now() + 2000) == 1
    assert (await stores.get(OWNER, "vs_1")).counts.total == 0
    assert await found(storage, "tide", "vs_2") == [TEXTS[0]]
    async for _ in storage.purge(OWNER, now() + 1, entry=None):
        pass
    assert not any(name.startswith("vector") for name in await rows(storage))
    async for _ in storage.sweep(Limits(), now()):
        pass


async def test_a_purge_leaves_no_text_in_the_files_of_the_database(tmp_path: Path) -> None:
    storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path}/antiphon.db", runner=RUNNER)

    def holding() -> list[str]:
        return [file.name for file in tmp_path.iterdir() if b"anzibari" in file.read_bytes()]

    await storage.vector_stores.create(new_store("vs_2", OTHER), [new_file("file-2")])
    await read(storage, TEXTS)
    await filled(storage, texts=[f"The Zanzibarian keeper of buoy {n}. " * 20 for n in range(40)])
    assert holding()
    async for _ in storage.purge(OWNER, now() + 1, entry=None):
        pass
    async with asyncio.timeout(30):
        while holding():
            await asyncio.sleep(0.02)
    await storage.close()
    assert not holding()


async def test_frequent_words_do_not_keep_rare_ones_from_being_found(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.vector_stores.words.searching.RANKED", 5)
    await filled(storage, texts=[*(f"gull number {n}" for n in range(20)), "gull and albatross"])
    assert await found(storage, "gull albatross") == ["gull and albatross"]
    assert len(await found(storage, "gull")) == 5  # no more are ranked


async def test_of_many_chunks_those_with_most_rare_words_are_ranked(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.vector_stores.words.postgresql.RANKED", 5)
    monkeypatch.setattr("storage.vector_stores.words.postgresql.SAMPLE", 50)
    monkeypatch.setattr("storage.vector_stores.words.postgresql.FREQUENT", 10)
    stores, texts = storage.vector_stores, [f"Gull {n}." for n in range(300)]
    for n in (137, 250):
        texts[n] += " Albatross."
    for n in range(0, 300, 5):
        texts[n] += " Tern."
    files = (texts[:1], texts[1:3], texts[3:290], texts[290:])
    await stores.create(new_store(), [new_file(f"file-{n}") for n in range(len(files))])
    for texts_of_file in files:
        await read(storage, texts_of_file)
    assert await found(storage, "gull tern albatross") == await found(storage, "albatross tern gull")
    assert (await found(storage, "gull tern albatross"))[:2] == [texts[250], texts[137]]
    number = (await stores.get(OWNER, "vs_1")).number
    index = INDEXES["postgresql" if storage.shared else "sqlite"]
    words = ["gull", "tern", "albatross", "auk"]
    counted = await storage._read(partial(index.count, store=number, words=words, most=1000))
    assert counted.counts == [300, 60, 2, 0], "of the first two, every sixth chunk tells the same"


async def test_files_of_a_batch_come_in_slices_each_once(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.vector_stores.stores.SLICE", 2)
    stores = storage.vector_stores
    await stores.create(new_store(), [new_file("file-0")])

    class Cut(Exception):
        """The process ends here."""

    async def cut(*_: object) -> bool:
        raise Cut

    files = [new_file(f"file-{n}", attributes=b'{"n":%d}' % n) for n in range(7)]
    with monkeypatch.context() as patched, pytest.raises(Cut):
        patched.setattr(stores, "add_some", cut)
        await stores.create_batch(OWNER, "vs_1", "vsfb_1", files, now())
    assert (await stores.get_batch(OWNER, "vs_1", "vsfb_1")).counts == FileCounts(in_progress=7)
    assert (await stores.get(OWNER, "vs_1")).counts == FileCounts(in_progress=8)  # one is there already
    assert (await stores.due(now())).to_add
    assert [await stores.add_some(now()) for _ in range(5)] == [True] * 4 + [False]
    batch = await stores.get_batch(OWNER, "vs_1", "vsfb_1")
    assert batch.counts == FileCounts(in_progress=7) and not (await stores.due(now())).to_add
    page = await stores.list_files(OWNER, "vs_1", limit=20, order="asc", batch_id="vsfb_1")
    assert sorted((file.file_id, file.attributes) for file in page.data) == [
        (file.file_id, file.attributes) for file in files
    ]
    # Those that have not come yet are cancelled with the others; those of a store that has gone never come.
    for id in ("vsfb_2", "vsfb_3"):
        with monkeypatch.context() as patched, pytest.raises(Cut):
            patched.setattr(stores, "add_some", cut)
            await stores.create_batch(OWNER, "vs_1", id, [new_file(f"{id}-{n}") for n in range(3)], now())
    await stores.add_some(now(), "vsfb_2")
    cancelled = await stores.cancel_batch(OWNER, "vs_1", "vsfb_2", now())
    assert cancelled.counts == FileCounts(cancelled=3) and not await stores.add_some(now(), "vsfb_2")
    await stores.delete(OWNER, "vs_1", now())
    while await stores.add_some(now()):
        pass
    while await stores.erase():
        pass
    assert not any(name.startswith("vector") for name in await rows(storage))


async def test_what_is_said_once_of_a_batch_waits_once_and_counts_for_each_file(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, told = storage.vector_stores, b'{"a":"%s"}' % (b"x" * 9990)
    await stores.create(new_store())
    files = [new_file(f"file-{n}", attributes=told) for n in range(10)]

    async def nothing(*_: object) -> bool:
        return False

    with monkeypatch.context() as patched:
        patched.setattr(stores, "add_some", nothing)
        await stores.create_batch(OWNER, "vs_1", "vsfb_1", files, now())
    waiting = (await storage.usage(OWNER)).held
    assert len(told) < waiting < 2 * len(told)
    while await stores.add_some(now()):
        pass
    assert (await storage.usage(OWNER)).held == 10 * len(told)
    await stores.set_attributes(OWNER, "vs_1", "file-0", b"{}")
    await stores.add_files(OWNER, "vs_1", [new_file("file-1", attributes=b"{}")], now())
    assert (await storage.usage(OWNER)).held == 8 * len(told) + 4
    await stores.set_attributes(OWNER, "vs_1", "file-0", None)
    assert (await storage.usage(OWNER)).held == 8 * len(told) + 2
    # A transaction puts few files into a store where these are large.
    monkeypatch.setattr("storage.vector_stores.stores.SLICE_BYTES", 3 * len(told))
    with monkeypatch.context() as patched:
        patched.setattr(stores, "add_some", nothing)
        await stores.create_batch(OWNER, "vs_1", "vsfb_2", files, now())
    assert [await stores.add_some(now()) for _ in range(5)] == [True] * 4 + [False]


async def test_a_clock_that_is_ahead_lets_go_of_no_files_of_others(storage: Storage) -> None:
    """A store expires by the earlier one of the clocks of a server and of the database that others share."""
    hour, stores, at = 3_600_000_000, storage.vector_stores, time.time_ns() // 1000
    await stores.create(replace(new_store(expires_after=hour), created_at=at), [new_file()])
    went = not storage.shared  # a database of one process has no clock of its own
    assert (await stores.due(at + 2 * hour)).to_expire is went
    assert await stores.expire(at + 2 * hour) == went
    [store] = await stores.searched(OWNER, ["vs_1"], at)
    assert await storage.is_over(store.expires_at, at + 2 * hour) is went
    assert not await storage.is_over(store.expires_at, at) and not await storage.is_over(None, at)


async def test_what_goes_is_let_go_of_in_steps_and_seen_by_nobody_meanwhile(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.vector_stores.ingestion.FORGOTTEN", 2)
    stores = storage.vector_stores
    await stores.create(new_store(expires_after=1000), [new_file(f"file-{n}") for n in range(5)])
    assert [await stores.expire(now() + 2000) for _ in range(4)] == [2, 2, 1, 0]
    assert not (await stores.due(now() + 2000)).to_expire
    while await stores.erase():
        pass

    async def files_left() -> int:
        left = text("SELECT count(*) FROM vector_store_files WHERE deleted_at IS NULL")
        return await storage._read(lambda conn: conn.execute(left).scalar_one())

    await filled(storage, "vs_2")
    await stores.add_files(OWNER, "vs_2", [new_file(f"file-{n}") for n in range(2, 6)], now())
    [store] = await stores.searched(OWNER, ["vs_2"], now())
    [(chunk, _)] = (await stores.search([store.number], "tide", (), only=False, most=9)).hits
    job = await claimed(storage)
    await stores.delete(OWNER, "vs_2", now())
    assert await files_left() == 5, "they are many, and go later"
    assert not await stores.chunks([chunk])
    assert await stores.kept_bytes([OWNER], now(), 1) == []
    due = await stores.due(now())
    assert (due.to_read, due.to_erase) == (False, True) and await stores.claim(now()) is None
    with pytest.raises(FileClaimLost):
        await stores.finish(job)
    left = [await files_left()]
    while await stores.erase():
        left.append(await files_left())
    assert left[-1] == 0 and max(before - after for before, after in pairwise(left)) == 2
    assert not {"vector_chunks", "vector_store_files"} & set(await rows(storage))


async def test_a_file_leaves_many_stores_in_short_transactions(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.vector_stores.ingestion.FORGOTTEN", 2)
    stores, taken = storage.vector_stores, []
    blob = await put_bytes(storage.blobs, b"tide")
    await storage.files.create(StoredFile("file-1", OWNER, "a.txt", "assistants", 4, blob.digest, now()))
    for number in range(5):
        await stores.create(new_store(f"vs_{number}"), [new_file()])
    with pytest.raises(NotFound):
        await storage.files.delete(OTHER, "file-1", now())
    assert (await stores.get(OWNER, "vs_0")).counts.total == 1
    write = storage.files._write

    async def counted(job: Callable[[Connection], T]) -> T:
        before = text("SELECT count(*) FROM vector_store_files WHERE deleted_at IS NOT NULL")

        def both(conn: Connection) -> T:
            first = conn.execute(before).scalar_one()
            made = job(conn)
            taken.append(conn.execute(before).scalar_one() - first)
            return made

        return await write(both)

    monkeypatch.setattr(storage.files, "_write", counted)
    await storage.files.delete(OWNER, "file-1", now())
    assert taken == [2, 2, 1]
    while await stores.erase():
        pass
    assert not {"files", "vector_store_files"} & set(await rows(storage))


async def test_what_owners_keep_in_stores_is_told_by_the_time_when_it_came(storage: Storage) -> None:
    stores = storage.vector_stores
    await filled(storage)
    [(owner, start, size)] = await stores.kept_bytes([OWNER], now() + 60_000_000, 60_000_000)
    assert (owner, start % 60_000_000, size) == (OWNER, 0, sum(map(len, TEXTS)))
    assert await stores.kept_bytes([OTHER], now() + 60_000_000, 60_000_000) == []
    assert await stores.kept_bytes([], start, 60_000_000) == []


MANY = f"""
INSERT INTO vector_stores (id, owner, created_at, name, metadata, last_active_at, next_file)
WITH RECURSIVE ages (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM ages WHERE n < 3000)
SELECT 'vs' || n, '{OWNER}', n, '', x'7b7d', n, 0 FROM ages
"""


async def test_what_is_due_is_found_without_looking_through_all_stores(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    query(storage.url, MANY)
    await storage.vector_stores.create(new_store("expired", expires_after=1), [new_file()])

    def asked(conn: Connection) -> tuple[Due, int]:
        with instructions(conn) as ticks:
            due = ingestion.due(conn, ingestion.Claimant(RUNNER, False, frozenset(), now()))
            assert not ingestion.erase(conn) and not ingestion.erase(conn, OWNER)
        return due, len(ticks)

    due, ticks = await storage._write(asked)
    assert due.to_expire and not due.to_erase
    assert ticks < 30, "it is not one instruction for each store"
    await storage.close()
