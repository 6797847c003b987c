"""Reading files into stores: what a cut leaves is gone on with, wherever the cut was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import QueueFull
from server.access import LOCAL_OWNER
from server.clock import now_us
from server.errors import ApiError
from server.vector_stores import Asked, Ingester, Kind, Payer, Searcher
from server.vector_stores.ingester import MOST_CHUNKS_A_S, Flow, Pace
from storage import (
    FileClaim,
    FileClaimLost,
    NewStoreFile,
    NewVectorStore,
    Storage,
    StorageUnavailable,
    StoredFile,
    StoredStoreFile,
    open_storage,
)
from tests.support.libraries import WordVectors
from tests.support.making import OWNER, RUNNER, put_bytes, url
from tests.support.postgres import Postgres
from tests.support.processes import server_process
from tests.support.running import database_url
from tools import Chunk, ReadersBusy, UnreadableDocument

TEXTS = [f"Note {number} of the bay, about tide {number * 7 % 13}." for number in range(21)]


def chunks(texts: Sequence[str] = TEXTS) -> list[Chunk]:
    return [Chunk(text, 1, 0, len(text), len(text) // 4) for text in texts]


async def reading(job: FileClaim) -> Sequence[Chunk]:
    return chunks()


async def room(owner: str, num_bytes: int) -> None:
    """There is always room."""


async def store_with_a_file(storage: Storage, **fields: object) -> None:
    new = NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}", **fields)  # type: ignore[arg-type]
    await storage.vector_stores.create(new, [NewStoreFile("file-1", "notes.txt", 800, 400)])


async def settled(storage: Storage) -> StoredStoreFile:
    """The file once it is read, or refused."""
    async with asyncio.timeout(30):
        while True:
            file = await storage.vector_stores.get_file(OWNER, "vs_1", "file-1")
            if file.status != "in_progress":
                return file
            await asyncio.sleep(0.005)


async def read_by(storage: Storage, ingesting: Ingester) -> StoredStoreFile:
    await ingesting.start()
    try:
        return await settled(storage)
    finally:
        await ingesting.close()


async def stored_texts(storage: Storage) -> list[str]:
    found = await storage.vector_stores.file_chunks(OWNER, "vs_1", "file-1", limit=1000)
    assert [chunk.position for chunk in found] == list(range(len(found)))
    return [chunk.text for chunk in found]


class _Killed(BaseException):
    """The process ends here."""


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    opened = await open_storage(url(tmp_path), runner=RUNNER)
    yield opened
    await opened.close()


@pytest.mark.parametrize("clean", [True, False])
async def test_a_cut_at_any_write_is_gone_on_with(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, clean: bool
) -> None:
    """Each life of a process writes one thing more than the one before it, and ends: well, or not."""
    monkeypatch.setattr("server.vector_stores.ingester.BATCH", 2)
    stores, written = storage.vector_stores, list[str]()
    real = {"add_chunks": stores.add_chunks, "finish": stores.finish}

    async def cut(verb: str, *args: object) -> None:
        await real[verb](*args)  # type: ignore[operator]
        written.append(verb)
        raise _Killed

    for verb in real:
        monkeypatch.setattr(stores, verb, partial(cut, verb))
    await store_with_a_file(storage)
    attempts = []
    while "finish" not in written:
        job = await stores.claim(now_us())
        assert job is not None
        attempts.append(job.attempt)
        with pytest.raises(_Killed):
            await Ingester(storage, reading, room)._take_in(job, Pace(lambda: False))
        await (stores.release() if clean else stores.free_all())
    assert written == ["add_chunks"] * 11 + ["finish"]
    assert attempts == [1] * 12, "what gets somewhere is not held against a file, however it ends"
    assert await stored_texts(storage) == TEXTS


async def test_a_long_file_gives_way_to_those_of_others_and_is_gone_on_with(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BATCH", 2), ("WORKERS", 1), ("TURN_S", 0.0)):
        monkeypatch.setattr(f"server.vector_stores.ingester.{name}", value)
    stores, ended, read = storage.vector_stores, list[tuple[str, int]](), list[str]()
    finish = stores.finish

    async def noted(job: FileClaim, error: tuple[str, str] | None = None) -> None:
        ended.append((job.file_id, job.attempt))
        await finish(job, error)

    async def some(job: FileClaim) -> Sequence[Chunk]:
        read.append(job.file_id)
        return chunks() if job.file_id == "file-1" else chunks(TEXTS[:2])

    monkeypatch.setattr(stores, "finish", noted)
    await store_with_a_file(storage)
    for owner, file in (("tenant-b", "file-2"), ("tenant-c", "file-3")):
        new = NewVectorStore(f"vs_of_{owner}", owner, now_us(), "", None, b"{}")
        await stores.create(new, [NewStoreFile(file, "notes.txt", 800, 400)])
    assert (await read_by(storage, Ingester(storage, some, room))).status == "completed"
    assert ended == [("file-2", 1), ("file-3", 1), ("file-1", 1)]
    assert read == ["file-1", "file-2", "file-3", "file-1"], "nobody waits any more"
    assert await stored_texts(storage) == TEXTS


async def test_embedding_anew_gives_way_to_files_that_are_to_be_read(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BATCH", 2), ("WORKERS", 1), ("TURN_S", 0.0)):
        monkeypatch.setattr(f"server.vector_stores.ingester.{name}", value)
    model = WordVectors(["tide"])
    await store_with_a_file(storage)
    await read_by(storage, Ingester(storage, reading, room))
    stores, set_vectors, done = storage.vector_stores, storage.vector_stores.set_vectors, list[str]()
    ends = asyncio.Event()

    async def embedded(job: FileClaim, start: int, vectors: Sequence[bytes]) -> None:
        await set_vectors(job, start, vectors)
        if not start:  # here another file comes
            await stores.add_files(OWNER, "vs_1", [NewStoreFile("file-2", "more.txt", 800, 400)], now_us())
        done.append(f"{job.file_id} from {start}")
        if job.file_id == "file-1" and start + len(vectors) == len(TEXTS):
            ends.set()

    async def some(job: FileClaim) -> Sequence[Chunk]:
        done.append(f"{job.file_id} is read")
        return chunks(TEXTS[:2])

    monkeypatch.setattr(stores, "set_vectors", embedded)
    ingesting = Ingester(storage, some, room, model)
    await ingesting.start()
    try:
        async with asyncio.timeout(30):
            await ends.wait()
    finally:
        await ingesting.close()
    assert done[:3] == ["file-1 from 0", "file-2 is read", "file-1 from 2"]


async def test_a_newer_parser_begins_anew(storage: Storage) -> None:
    await store_with_a_file(storage)
    job = await storage.vector_stores.claim(now_us())
    assert job is not None
    old = Ingester(storage, reading, room)
    await old._store(job, 0, chunks(["An older text."]), b"old", None, Pace(lambda: False))
    await storage.vector_stores.free_all()
    assert (await read_by(storage, Ingester(storage, reading, room))).status == "completed"
    assert await stored_texts(storage) == TEXTS


@pytest.mark.parametrize(
    ("generates", "took_s", "rest_s"),
    [(False, 0.01, 0.01), (True, 0.01, 0.10), (True, 0.5, 1.0), (False, 3.0, 3.0), (True, 3.0, 3.0)],
)
async def test_a_file_rests_longer_while_a_model_generates(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, generates: bool, took_s: float, rest_s: float
) -> None:
    """By a clock that each transaction moves; how long the file took to be read does not count."""
    now, rests = 0.0, list[float]()
    stores = storage.vector_stores
    real = {"add_chunks": stores.add_chunks, "finish": stores.finish}

    async def taking(verb: str, *args: object) -> None:
        nonlocal now
        await real[verb](*args)  # type: ignore[operator]
        now += took_s

    async def slowly(job: FileClaim) -> Sequence[Chunk]:
        nonlocal now
        now += 100
        return await reading(job)

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr("server.vector_stores.ingester.BATCH", 7)
    monkeypatch.setattr("server.vector_stores.ingester.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        "server.vector_stores.ingester.asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread)
    )
    for verb in real:
        monkeypatch.setattr(stores, verb, partial(taking, verb))
    await store_with_a_file(storage)
    assert await Ingester(storage, slowly, room, generates=lambda: generates)._next()
    assert rests == pytest.approx([rest_s] * 4), "after three transactions with chunks, and the end"


async def test_tasks_together_store_so_many_chunks_a_second_while_a_model_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, rests, generates = 0.0, list[float](), True

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr("server.vector_stores.ingester.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("server.vector_stores.ingester.asyncio", SimpleNamespace(sleep=sleep))
    flow = Flow()
    one, other = Pace(lambda: generates, flow), Pace(lambda: generates, flow)
    await one.rest(MOST_CHUNKS_A_S // 4)
    await other.rest(MOST_CHUNKS_A_S // 2)
    now = 2.0
    await one.rest(0)  # it has worked since
    generates = False
    await other.rest(MOST_CHUNKS_A_S)
    assert rests == pytest.approx([0.25, 0.75, 2.0, 2.0])


async def test_words_are_merged_where_nobody_is_in_the_way_or_where_too_many_lie_apart(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.vector_stores.ingester.BATCH", 1)
    monkeypatch.setattr("server.vector_stores.ingester.MOST_APART", 30)
    merged, generates = 0, True
    real = storage.vector_stores.merge_words

    async def merge() -> bool:
        nonlocal merged
        merged += 1
        return await real()

    monkeypatch.setattr(storage.vector_stores, "merge_words", merge)
    ingester = Ingester(storage, reading, room, generates=lambda: generates)
    await store_with_a_file(storage)
    assert not await ingester._tidy(), "there is a file to be read, and a model generates"
    assert await ingester._next()  # 21 transactions
    assert not await ingester._tidy() and merged == 0
    generates = False
    while await ingester._tidy():
        pass
    assert merged > 1 and not await real(), "until nothing is left"
    merged, generates = 0, True
    more = [NewStoreFile(f"file-{number}", "n.txt", 800, 400) for number in (2, 3)]
    await storage.vector_stores.add_files(OWNER, "vs_1", more, now_us())
    assert await ingester._next() and not await ingester._tidy() and merged == 0
    assert await ingester._next()
    while await ingester._tidy():
        pass
    assert merged > 1 and not await real(), "42 are too many, whatever generates"


async def test_two_processes_share_the_work(postgres: Postgres) -> None:
    fresh = await postgres.fresh()
    both = [await open_storage(fresh, runner=f"runner-{n}") for n in range(2)]
    for storage in both:
        await storage.beat()
    made: list[str] = []

    def reader(name: str) -> Ingester:
        async def read(job: FileClaim) -> Sequence[Chunk]:
            made.append(name)
            await asyncio.sleep(0.05)
            return chunks()

        return Ingester(both[int(name)], read, room)

    await both[0].vector_stores.create(
        NewVectorStore("vs_1", OWNER, now_us(), "", None, b"{}"),
        [NewStoreFile(f"file-{number}", "n.txt", 800, 400) for number in range(12)],
    )
    readers = [reader("0"), reader("1")]
    for each in readers:
        await each.start()
    async with asyncio.timeout(30):
        while (await both[0].vector_stores.get(OWNER, "vs_1")).counts.completed < 12:
            await asyncio.sleep(0.02)
    for each in readers:
        await each.close()
    assert len(made) == 12 and set(made) == {"0", "1"}
    for storage in both:
        await storage.close()
    await postgres.give_back(fresh)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (UnreadableDocument("unsupported_file", "No text."), "unsupported_file"),
        (UnreadableDocument("too_large", "Too long."), "invalid_file"),
        (ApiError(429, "There is no room."), "server_error"),
        (UnreadableDocument("server_error", "The process was lost."), "server_error"),
        (RuntimeError("a fault of ours"), "server_error"),
    ],
)
async def test_what_is_wrong_with_a_file_is_told_and_others_are_read(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, fault: Exception, code: str
) -> None:
    at_once(monkeypatch)
    reads = []

    async def failing(job: FileClaim) -> Sequence[Chunk]:
        reads.append(job.attempt)
        raise fault

    await store_with_a_file(storage)
    file = await read_by(storage, Ingester(storage, failing, room))
    assert file.status == "failed" and file.error is not None and file.error[0] == code
    ours = isinstance(fault, RuntimeError) or getattr(fault, "message", "") == "The process was lost."
    assert reads == ([1, 2, 3] if ours else [1]), "a fault of ours may pass"


async def test_a_file_waits_for_as_long_as_others_are_read(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch)
    busy = [ReadersBusy(own=own) for own in (True, False) * 3]

    async def sometimes(job: FileClaim) -> Sequence[Chunk]:
        if busy:
            raise busy.pop()
        return chunks()

    await store_with_a_file(storage)
    assert (await read_by(storage, Ingester(storage, sometimes, room))).status == "completed"
    assert not busy


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing rest that is to be tried again."""
    for name, value in (("RETRY_S", 0.01), ("BACKOFF_S", (0.0, 0.0)), ("LOOK_S", 0.01)):
        monkeypatch.setattr(f"server.vector_stores.ingester.{name}", value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["claim", "add_chunks", "finish"])
@pytest.mark.parametrize("error", [StorageUnavailable("away"), RuntimeError("a fault of the database")])
@pytest.mark.parametrize("written", [True, False])
async def test_a_file_ends_whatever_the_database_says_of_a_write(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, verb: str, error: Exception, written: bool
) -> None:
    """A write fails, whether or not it was made: no file is left to a process that does not know of it."""
    at_once(monkeypatch)
    monkeypatch.setattr("server.vector_stores.ingester.BATCH", 16)  # there are two transactions with chunks
    real, failures = storage.vector_stores._write, [error, error]
    late = storage.vector_stores._write_late

    async def sometimes(run: Any, job: Any) -> Any:
        if getattr(job, "func", job).__name__ != verb or not failures:
            return await run(job)
        failure = failures.pop()  # before the job: once that is written, the test may look
        if written:
            with suppress(FileClaimLost):
                await run(job)
        raise failure

    monkeypatch.setattr(storage.vector_stores, "_write", partial(sometimes, real))
    monkeypatch.setattr(storage.vector_stores, "_write_late", partial(sometimes, late))
    await store_with_a_file(storage)
    file = await read_by(storage, Ingester(storage, reading, room))
    # An end that was written is the end: nobody tries a second time.
    assert len(failures) == (verb == "finish" and written) and file.status == "completed"
    assert await stored_texts(storage) == TEXTS


async def test_a_file_waits_for_limits_and_for_room_in_the_queue_of_a_model(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch)
    busy = [
        ApiError(429, "A limit is reached.", code="rate_limit_exceeded", headers={"retry-after": "0"}),
        QueueFull(retry_after_s=0),
    ] * 3

    class Busy(WordVectors):
        async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> list[list[float]]:
            if busy:
                raise busy.pop()
            return await super().embed(texts, kind, payer=payer)

    model = Busy(["tide"])
    await store_with_a_file(storage, embedding=model.identity, dimensions=model.dimensions)
    assert (await read_by(storage, Ingester(storage, reading, room, model))).status == "completed"
    assert not busy and model.payers[0].counted


async def test_a_file_that_ends_its_process_is_given_up(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    await store_with_a_file(storage)
    for _ in range(3):
        await storage.vector_stores.claim(now_us())
        await storage.vector_stores.free_all()
    file = await read_by(storage, Ingester(storage, reading, room))
    assert file.error is not None and file.error[0] == "server_error"
    assert file.error[1].startswith("The server ended 3 times while it read this file")
    assert f"file {file.file_id} was begun 3 times without an end" in caplog.text


async def test_a_database_that_is_away_is_waited_for(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.vector_stores.ingester.RETRY_S", 0.01)
    await store_with_a_file(storage)
    real, refusals = (
        storage.vector_stores.add_chunks,
        [StorageUnavailable("away"), StorageUnavailable("away")],
    )

    async def sometimes(*args: object) -> None:
        if refusals:
            raise refusals.pop()
        await real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(storage.vector_stores, "add_chunks", sometimes)
    assert (await read_by(storage, Ingester(storage, reading, room))).status == "completed"
    assert await stored_texts(storage) == TEXTS


class Renewed(WordVectors):
    """The same words, and another model. It fails behind so many calls, as a process does that is killed."""

    identity = "words-2"
    dimensions = 12

    def __init__(self, fails_behind: int | None = None) -> None:
        super().__init__(["moon"])
        self._left = fails_behind

    async def embed(self, texts: Sequence[str], kind: Kind, *, payer: Payer) -> list[list[float]]:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise _Killed
        return await super().embed(texts, kind, payer=payer)


async def embedded(storage: Storage) -> tuple[str | None, int]:
    store = await storage.vector_stores.get(OWNER, "vs_1")
    return store.embedding, store.num_embedded


async def until_embedded(storage: Storage, ingester: Ingester) -> None:
    await ingester.start()
    async with asyncio.timeout(30):
        while (await embedded(storage))[1] == 0:
            await asyncio.sleep(0.005)
    await ingester.close()


async def found_by_vectors(storage: Storage, model: WordVectors) -> list[str]:
    """What a search finds for a word that no text has."""
    searcher = Searcher(storage, model)
    return [hit.text for hit in await searcher.search(Payer(OWNER), Asked(["vs_1"], ["lunar"], 3))]


async def test_a_store_whose_model_is_not_here_is_read_without_vectors_until_it_is(storage: Storage) -> None:
    model = WordVectors(["tide"])
    await store_with_a_file(storage, embedding=model.identity, dimensions=model.dimensions)
    assert (await read_by(storage, Ingester(storage, reading, room))).status == "completed"
    assert await found_by_vectors(storage, model) == [] and await embedded(storage) == (model.identity, 0)
    await until_embedded(storage, Ingester(storage, reading, room, model))
    assert set(model.kinds) == {"document", "query"} and not any(
        payer.counted for payer, kind in zip(model.payers, model.kinds, strict=True) if kind == "document"
    )
    assert len(await found_by_vectors(storage, model)) == 3


@pytest.mark.parametrize("done", [0, 1, 2])
async def test_files_get_vectors_of_a_new_model_also_after_a_cut(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    monkeypatch.setattr("server.vector_stores.ingester.BATCH", 8)
    old = WordVectors(["tide"])
    await store_with_a_file(storage, embedding=old.identity, dimensions=old.dimensions)
    assert (await read_by(storage, Ingester(storage, reading, room, old))).status == "completed"
    before = await storage.vector_stores.get(OWNER, "vs_1")
    assert before.num_embedded == 1

    cut = Renewed(fails_behind=done)
    assert await storage.vector_stores.adopt(cut.identity, cut.dimensions)
    assert not await storage.vector_stores.adopt(cut.identity, cut.dimensions)
    job = await storage.vector_stores.claim_to_embed(now_us(), cut.identity)
    assert job is not None
    with pytest.raises(_Killed):
        await Ingester(storage, reading, room, cut)._work_on(job, Pace(lambda: False))
    await storage.vector_stores.free_all()
    for model in (old, cut):  # what there is of either is left alone
        model.kinds.clear()
        left = await storage.vector_stores.embedded_files(1, model.identity)
        assert left == ({1 << 22: 21} if (model is old and not done) else {})
        same = await storage.vector_stores.embedded_files(1, model.identity)
        assert same is left, "nothing has changed: it is not read anew"
    assert await embedded(storage) == ("words-2", 0)
    searched = await Searcher(storage, old).search(Payer(OWNER), Asked(["vs_1"], ["tide note"], 3))
    assert len(searched) == 3 and old.kinds == [], "words go on to be found"

    new = Renewed()
    await until_embedded(storage, Ingester(storage, reading, room, new))
    assert new.kinds == ["document"] * (3 - done), "what was done is not done again"
    assert len(await found_by_vectors(storage, new)) == 3
    after = await storage.vector_stores.get(OWNER, "vs_1")
    assert after.num_bytes - before.num_bytes == 21 * 4 * (new.dimensions - old.dimensions)
    due = await storage.vector_stores.due(now_us(), new.identity)
    assert due.to_embed is False or await storage.vector_stores.claim_to_embed(now_us(), new.identity) is None


async def test_a_killed_process_leaves_a_beginning_that_the_next_one_goes_on_with(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    storage = await open_storage(await database_url(data), runner=RUNNER)
    told = "tells of the tide, the moon and the bay."
    words = "\n\n".join(" ".join([f"Paragraph {n} {told}"] * 6) for n in range(1500))
    blob = await put_bytes(storage.blobs, words.encode())
    await storage.files.create(
        StoredFile("file-1", LOCAL_OWNER, "long.txt", "assistants", len(words), blob.digest, now_us())
    )
    await storage.vector_stores.create(
        NewVectorStore("vs_1", LOCAL_OWNER, now_us(), "", None, b"{}"),
        [NewStoreFile("file-1", "long.txt", 100, 0)],
    )
    await storage.close()

    async with server_process(data) as server, server.client() as client:
        begun = 0
        while not begun:
            file = (await client.get("/v1/vector_stores/vs_1/files/file-1")).json()
            assert file["status"] == "in_progress", "it is killed in the midst of it"
            begun = file["usage_bytes"]
        server.child.kill()
    async with server_process(data) as server, server.client() as client:
        left = (await client.get("/v1/vector_stores/vs_1/files/file-1")).json()
        assert left["usage_bytes"] >= begun
        async with asyncio.timeout(60):
            while (await client.get("/v1/vector_stores/vs_1")).json()["status"] == "in_progress":
                await asyncio.sleep(0.05)
        found = await client.post("/v1/vector_stores/vs_1/search", json={"query": "paragraph 1499"})
        assert "Paragraph 1499" in found.json()["data"][0]["content"][0]["text"]
    storage = await open_storage(await database_url(data), runner=RUNNER)
    kept = await storage.vector_stores.file_chunks(LOCAL_OWNER, "vs_1", "file-1", limit=10_000)
    assert "\n\n".join(chunk.text for chunk in kept) == words, "nothing twice, and nothing missing"
    await storage.close()
