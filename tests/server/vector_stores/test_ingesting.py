"""Reading files into stores: what a cut leaves is gone on with, wherever the cut was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from server.access import LOCAL_OWNER
from server.clock import now_us
from server.errors import ApiError
from server.vector_stores import Ingesting
from storage import (
    Ingestion,
    NewStoreFile,
    NewVectorStore,
    Storage,
    StorageUnavailable,
    StoredFile,
    StoredStoreFile,
    open_storage,
)
from tests.support.libraries import WordVectors
from tests.support.making import OWNER, RUNNER, url
from tests.support.postgres import Postgres
from tests.support.processes import server_process
from tools import Chunk, UnreadableDocument

TEXTS = [f"Note {number} of the bay, about tide {number * 7 % 13}." for number in range(21)]


def chunks(texts: Sequence[str] = TEXTS) -> list[Chunk]:
    return [Chunk(text, 1, 0, len(text), len(text) // 4) for text in texts]


async def reading(job: Ingestion) -> Sequence[Chunk]:
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


async def read_by(storage: Storage, ingesting: Ingesting) -> StoredStoreFile:
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
    monkeypatch.setattr("server.vector_stores.ingesting.BATCH", 2)
    monkeypatch.setattr("server.vector_stores.ingesting.MAX_ATTEMPTS", 99)
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
        job = await stores.claim()
        assert job is not None
        attempts.append(job.attempt)
        with pytest.raises(_Killed):
            await Ingesting(storage, reading, room)._take_in(job)
        await (stores.release() if clean else stores.free_all())
    assert written == ["add_chunks"] * 11 + ["finish"]
    assert attempts == [1] * 12 if clean else list(range(1, 13)), "what ends well is not held against a file"
    assert await stored_texts(storage) == TEXTS


async def test_a_newer_parser_begins_anew(storage: Storage) -> None:
    await store_with_a_file(storage)
    job = await storage.vector_stores.claim()
    assert job is not None
    old = Ingesting(storage, reading, room)
    await old._store(job, 0, chunks(["An older text."]), b"old", None)
    await storage.vector_stores.free_all()
    assert (await read_by(storage, Ingesting(storage, reading, room))).status == "completed"
    assert await stored_texts(storage) == TEXTS


async def test_two_processes_share_the_work(postgres: Postgres) -> None:
    fresh = await postgres.fresh()
    both = [await open_storage(fresh, runner=f"runner-{n}") for n in range(2)]
    for storage in both:
        await storage.beat()
    made: list[str] = []

    def reader(name: str) -> Ingesting:
        async def read(job: Ingestion) -> Sequence[Chunk]:
            made.append(name)
            await asyncio.sleep(0.05)
            return chunks()

        return Ingesting(both[int(name)], read, room)

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
        (RuntimeError("a fault of ours"), "server_error"),
    ],
)
async def test_what_is_wrong_with_a_file_is_told_and_others_are_read(
    storage: Storage, fault: Exception, code: str
) -> None:
    async def failing(job: Ingestion) -> Sequence[Chunk]:
        raise fault

    await store_with_a_file(storage)
    file = await read_by(storage, Ingesting(storage, failing, room))
    assert file.status == "failed" and file.error is not None and file.error[0] == code


async def test_a_file_that_ends_its_process_is_given_up(storage: Storage) -> None:
    await store_with_a_file(storage)
    for _ in range(3):
        await storage.vector_stores.claim()
        await storage.vector_stores.free_all()
    file = await read_by(storage, Ingesting(storage, reading, room))
    assert file.error == ("server_error", "Reading this file has ended the server 3 times.")


async def test_a_database_that_is_away_is_waited_for(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.vector_stores.ingesting.RETRY_S", 0.01)
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
    assert (await read_by(storage, Ingesting(storage, reading, room))).status == "completed"
    assert await stored_texts(storage) == TEXTS


async def test_vectors_are_those_of_the_model_of_the_store(storage: Storage) -> None:
    model = WordVectors(["tide"])
    await store_with_a_file(storage, embedding=model.identity, dimensions=model.dimensions)
    file = await read_by(storage, Ingesting(storage, reading, room))
    assert file.error is not None and "words-1" in file.error[1], "there is no such model here"
    [again] = await storage.vector_stores.add_files(
        OWNER, "vs_1", [NewStoreFile("file-1", "notes.txt", 800, 400)], now_us()
    )
    assert again.status == "in_progress"
    assert (await read_by(storage, Ingesting(storage, reading, room, model))).status == "completed"
    assert set(model.kinds) == {"document"}


async def test_a_killed_process_leaves_a_beginning_that_the_next_one_goes_on_with(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    storage = await open_storage(f"sqlite+aiosqlite:///{data}/antiphon.db", runner=RUNNER)
    told = "tells of the tide, the moon and the bay."
    words = "\n\n".join(" ".join([f"Paragraph {n} {told}"] * 6) for n in range(1500))
    blob = await storage.blobs.put_bytes(words.encode())
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
    storage = await open_storage(f"sqlite+aiosqlite:///{data}/antiphon.db", runner=RUNNER)
    kept = await storage.vector_stores.file_chunks(LOCAL_OWNER, "vs_1", "file-1", limit=10_000)
    assert "\n\n".join(chunk.text for chunk in kept) == words, "nothing twice, and nothing missing"
    await storage.close()
