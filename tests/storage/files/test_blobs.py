"""Blobs: whole or not at all, once for the same bytes, alive while a row names them, gone afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import subprocess
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from storage import Blob, BlobTooLarge, NotFound, Storage, StoredFile, StoredPart, StoredUpload, open_storage
from storage.drivers import PART_BYTES, copied
from storage.drivers.blob_folder import BlobFolder
from storage.files import blob_columns
from tests.support.forking import READY
from tests.support.making import OWNER, is_sqlite, now, put_bytes, query

LARGE = os.urandom(2 * PART_BYTES + 12_345)


async def pieces(data: bytes, size: int = 70_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def opened(storage: Storage, digest: str, start: int = 0, stop: int | None = None) -> bytes:
    return b"".join([data async for data in storage.blobs.open(digest, start, stop)])


def file_of(blob: Blob, id: str, expires_at: int | None = None) -> StoredFile:
    return StoredFile(id, OWNER, "a.txt", "user_data", blob.num_bytes, blob.digest, now(), expires_at)


async def sweep(storage: Storage) -> int:
    """Sweeps as if everything had been put long ago; returns how many blobs went."""
    storage.blobs.let_go()
    return sum([swept.blobs async for swept in storage.files.sweep(now(), grace_s=0)])


async def test_what_is_put_can_be_read_whole_and_in_ranges_and_is_stored_once(storage: Storage) -> None:
    blob = await storage.blobs.put(pieces(LARGE))
    assert blob == Blob(sha256(LARGE).hexdigest(), len(LARGE))
    assert await storage.blobs.put(pieces(LARGE, 333_333)) == blob
    assert await opened(storage, blob.digest) == LARGE
    for start, stop in (
        (0, 10),
        (PART_BYTES - 3, PART_BYTES + 3),
        (PART_BYTES, 2 * PART_BYTES),
        (len(LARGE) - 5, None),
        (len(LARGE) - 5, len(LARGE) + 99),
        (len(LARGE), None),
        (7, 7),
    ):
        assert await opened(storage, blob.digest, start, stop) == LARGE[start:stop]
    empty = await put_bytes(storage.blobs, b"")
    assert empty.num_bytes == 0 and await storage.blobs.read(empty.digest) == b""
    with pytest.raises(NotFound):
        await storage.blobs.read("0" * 64)
    assert await sweep(storage) == 2


async def test_what_is_too_large_broken_or_cancelled_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    async def breaks() -> AsyncIterator[bytes]:
        yield LARGE
        raise ConnectionResetError("the client is gone")

    async def stalls(reached: asyncio.Event) -> AsyncIterator[bytes]:
        yield LARGE
        reached.set()
        await asyncio.Event().wait()

    with pytest.raises(BlobTooLarge) as caught:
        await storage.blobs.put(pieces(LARGE), limit=len(LARGE) - 1)
    assert caught.value.limit == len(LARGE) - 1
    with pytest.raises(ConnectionResetError):
        await storage.blobs.put(breaks())
    reached = asyncio.Event()
    task = asyncio.create_task(storage.blobs.put(stalls(reached)))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if is_sqlite(storage.url):
        folder = tmp_path / "antiphon.db.blobs"
        assert list(folder.iterdir()) == [] and stat.S_IMODE(folder.stat().st_mode) == 0o700
    else:
        assert query(storage.url, "SELECT count(*) FROM blob_parts") == [(0,)]


async def test_a_blob_lives_for_as_long_as_any_row_names_it(storage: Storage) -> None:
    blob = await storage.blobs.put(pieces(LARGE))
    part = await put_bytes(storage.blobs, b"a part")
    await storage.files.create(file_of(blob, "file-a"))
    await storage.files.create(file_of(blob, "file-b", expires_at=(expiry := now() + 1000)))
    upload = StoredUpload("upload_a", OWNER, "b", "user_data", "text/plain", 6, now(), now() + 10_000)
    await storage.files.create_upload(upload)
    await storage.files.add_part(StoredPart("part_a", upload.id, OWNER, 6, part.digest, now()))
    assert await sweep(storage) == 0
    await storage.files.delete(OWNER, "file-a", now())
    assert await sweep(storage) == 0 and await opened(storage, blob.digest) == LARGE
    await storage.files.cancel_upload(OWNER, upload.id, now())
    assert await sweep(storage) == 1
    storage.blobs.let_go()
    went = [swept async for swept in storage.files.sweep(expiry, grace_s=0)]
    assert [(swept.files, swept.blobs) for swept in went if swept.files or swept.blobs] == [(1, 0), (0, 1)]
    assert await sweep(storage) == 0


async def test_what_was_put_just_now_outlives_a_sweep(storage: Storage) -> None:
    """Its row may be on its way; and the same bytes put again count as new."""
    blob = await put_bytes(storage.blobs, b"new")
    assert [swept.blobs async for swept in storage.blobs.sweep()] == [0]
    assert [swept async for swept in storage.blobs.sweep()] == [], "once an hour is enough"
    storage.blobs.let_go()
    assert sum([swept.blobs async for swept in storage.blobs.sweep(grace_s=-60)]) == 1
    assert not await storage.blobs.touch(blob.digest)
    await put_bytes(storage.blobs, b"new")
    assert await storage.blobs.touch(blob.digest)
    assert await storage.blobs.read(blob.digest) == b"new"


async def test_what_nobody_holds_and_no_row_names_goes_at_once(storage: Storage) -> None:
    async def there(blob: Blob) -> bool:
        try:
            return await storage.blobs.read(blob.digest) == b"some"
        except NotFound:
            return False

    async def some() -> AsyncIterator[bytes]:
        yield b"some"

    with pytest.raises(ConnectionResetError):
        async with storage.blobs.incoming(some()) as blob:
            assert await there(blob)
            raise ConnectionResetError("refused")
    assert not await there(blob)
    async with storage.blobs.incoming(some()) as blob, storage.blobs.incoming(some()):
        assert not await storage.blobs.release(blob.digest) and await there(blob), "another holds it"
        assert await storage.blobs.touch(blob.digest)
        await storage.files.create(file_of(blob, "file-a"))
    assert await there(blob), "a row names it"
    await storage.files.create(file_of(blob, "file-b"))
    await storage.files.delete(OWNER, "file-a", now())
    assert await there(blob), "another row names it"
    assert await storage.blobs.touch(blob.digest)
    await storage.files.delete(OWNER, "file-b", now())
    assert await there(blob), "a row is on its way"
    assert await storage.blobs.release(blob.digest) and not await there(blob)


async def test_a_blob_that_is_put_again_meanwhile_stays(storage: Storage) -> None:
    """Whether a row names it is found out between two looks at it, in which others may put it and name it."""
    store = storage.blobs._store
    blob = await put_bytes(storage.blobs, b"some")
    assert await asyncio.to_thread(store.condemn, [blob.digest]) == {}, "held"
    await asyncio.to_thread(store.release, [blob.digest])
    marks = await asyncio.to_thread(store.condemn, [blob.digest])
    assert [*marks] == [blob.digest]
    async with storage.blobs.incoming(pieces(b"some")):
        assert await asyncio.to_thread(store.remove_condemned, marks, set()) == 0
        await storage.files.create(file_of(blob, "file-a"))
    again = await asyncio.to_thread(store.condemn, [blob.digest])
    assert await asyncio.to_thread(store.remove_condemned, marks, set()) == 0, (
        "an old mark says nothing of a new one"
    )
    assert await asyncio.to_thread(store.remove_condemned, again, {blob.digest}) == 0
    assert await storage.blobs.read(blob.digest) == b"some"


async def test_nothing_goes_at_once_while_a_backup_copies_the_folder(tmp_path: Path) -> None:
    storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path / 'antiphon.db'}", runner="r")
    blob = await put_bytes(storage.blobs, b"some")
    with copied(tmp_path / "antiphon.db.blobs"):
        assert not await storage.blobs.release(blob.digest)
    assert await storage.blobs.drop([blob.digest]) == 1
    await storage.close()


async def test_a_sweep_looks_at_each_blob_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = await open_storage(f"sqlite+aiosqlite:///{tmp_path / 'antiphon.db'}", runner="r")
    named = await put_bytes(storage.blobs, b"named")
    await storage.files.create(file_of(named, "file-a"))
    folder, looks = tmp_path / "antiphon.db.blobs", list[str]()
    for number in range(3000):
        (folder / sha256(b"%d" % number).hexdigest()).touch()
    looked = BlobFolder._is_old

    def look(self: BlobFolder, name: str, grace_s: float) -> bool:
        looks.append(name)
        return looked(self, name, grace_s)

    monkeypatch.setattr(BlobFolder, "_is_old", look)
    assert await sweep(storage) == 3000
    assert len(looks) == 3001 + 3000, "once to find it, and once more as it goes"
    assert [path.name for path in folder.iterdir()] == [named.digest]
    await storage.close()


# Uploads files of three parts, eight at a time, and says whose row was committed.
CHILD = """if True:
    import asyncio, os, sys
    from storage import StoredFile, open_storage

    async def upload(storage, name):
        async def stream():
            for _ in range(3):
                yield os.urandom(400_000)

        for number in range(100):
            blob = await storage.blobs.put(stream())
            id = f"file-{name}-{number}"
            file = StoredFile(id, "tenant-a", "a", "user_data", blob.num_bytes, blob.digest, number)
            await storage.files.create(file)
            os.write(1, f"{id} {blob.digest}\\n".encode())

    async def main():
        storage = await open_storage(sys.argv[1], runner="r")
        await asyncio.gather(*(upload(storage, name) for name in "abcdefgh"))

    asyncio.run(main())
"""


async def test_a_kill_loses_no_file_and_leaves_no_half_of_one(database_url: str) -> None:
    child = subprocess.Popen([READY, "-c", CHILD, database_url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [child.stdout.readline() for _ in range(random.randrange(5, 20))]
    child.send_signal(signal.SIGKILL)
    said += child.stdout.readlines()
    child.stdout.close()
    child.wait()
    acknowledged = dict(line.split() for line in said if line.endswith("\n"))
    storage = await open_storage(database_url, runner="r")
    files = (await storage.files.list(OWNER, now=now(), limit=1000)).data
    assert acknowledged.items() <= {(file.id, file.digest) for file in files}
    await sweep(storage)
    for file in files:
        assert sha256(await storage.blobs.read(file.digest)).hexdigest() == file.digest
    if is_sqlite(database_url):
        folder = Path(f"{database_url.removeprefix('sqlite+aiosqlite:///')}.blobs")
        assert {path.name for path in folder.iterdir()} == {file.digest for file in files}
    else:
        assert query(database_url, "SELECT count(DISTINCT content) FROM blob_parts") == [(len(files),)]
    await storage.close()


def test_every_column_that_names_a_blob_has_an_index() -> None:
    """The sweep asks each of them for the digests that it has found."""
    assert {f"{column.table.name}.{column.name}" for column in blob_columns()} >= {
        "files.digest",
        "upload_parts.digest",
    }
    for column in blob_columns():
        first = {index.columns[0].name for index in column.table.indexes}
        assert column.name in first, f"{column.table.name}.{column.name}"
