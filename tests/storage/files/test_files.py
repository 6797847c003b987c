"""Files and uploads: of one owner, in pages, until they expire; counted, purged and copied with the rest."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

from storage import (
    Limits,
    NotFound,
    StorageError,
    StoredFile,
    StoredPart,
    StoredUpload,
    UploadEnded,
    back_up,
    open_storage,
)
from storage.files import Files
from storage.storage import Storage
from tests.support.making import OTHER, OWNER, counts, message, now, put_bytes, turn, url


async def file(storage: Storage, id: str, *, owner: str = OWNER, **fields: object) -> StoredFile:
    """A file that holds its own id."""
    blob = await put_bytes(storage.blobs, id.encode())
    made = StoredFile(id, owner, f"{id}.txt", "user_data", blob.num_bytes, blob.digest, now())
    made = replace(made, **fields)
    await storage.files.create(made)
    return made


async def test_files_are_found_by_their_owner_until_they_expire(storage: Storage) -> None:
    expiry = now() + 100
    first = await file(storage, "file-1")
    second = await file(storage, "file-2", purpose="assistants")
    third = await file(storage, "file-3", expires_at=expiry)
    await file(storage, "file-4", owner=OTHER)
    files = storage.files

    async def page(at: int = 0, **wanted: object) -> tuple[list[StoredFile], bool]:
        found = await files.list(OWNER, now=at, **{"limit": 10, **wanted})
        return list(found.data), found.has_more

    assert await page() == ([third, second, first], False)
    assert await page(order="asc", limit=2) == ([first, second], True)
    assert await page(order="asc", after="file-2") == ([third], False)
    assert await page(after="file-2") == ([first], False)
    assert await page(purpose="assistants") == ([second], False)
    assert await page(at=expiry) == ([second, first], False)
    assert await files.get(OWNER, "file-3", expiry - 1) == third
    assert await files.get_many(OWNER, ["file-1", "file-4", "none"], 0) == {"file-1": first}
    for owner, id, at in ((OWNER, "file-4", 0), (OWNER, "file-3", expiry), (OTHER, "file-1", 0)):
        with pytest.raises(NotFound):
            await files.get(owner, id, at)
        with pytest.raises(NotFound):
            await files.delete(owner, id, at)
        with pytest.raises(NotFound):
            await files.list(owner, now=at, limit=1, after=id)
    await files.delete(OWNER, "file-1", 0)
    assert await page() == ([third, second], False)


async def test_a_clock_that_is_ahead_ends_nothing_of_others(storage: Storage) -> None:
    """Files and uploads expire by the earlier one of the clocks of a server and of the database that others
    share."""
    hour, files, at = 3_600_000_000, storage.files, time.time_ns() // 1000
    made = await file(storage, "file-1", expires_at=at + hour)
    await files.create_upload(
        StoredUpload("upload_1", OWNER, "u.txt", "user_data", "text/plain", 6, at, at + hour)
    )
    part = StoredPart("part_1", "upload_1", OWNER, made.num_bytes, made.digest, at + 2 * hour)
    lasts = storage.shared  # a database of one process has no clock of its own
    assert await files.get_many(OWNER, ["file-1"], at + 2 * hour) == ({"file-1": made} if lasts else {})
    with nullcontext() if lasts else pytest.raises(UploadEnded):
        await files.add_part(part)
    assert (await files.parts(OWNER, "upload_1") == {"part_1": part}) is lasts


async def test_an_upload_becomes_a_file_once_and_takes_parts_until_then(storage: Storage) -> None:
    files, end = storage.files, now() + 1000
    upload = StoredUpload("upload_1", OWNER, "u.txt", "user_data", "text/plain", 6, now(), end)
    await files.create_upload(upload)
    assert await files.get_upload(OWNER, "upload_1") == upload
    blob = await put_bytes(storage.blobs, b"abc")
    parts = [StoredPart(f"part_{n}", "upload_1", OWNER, 3, blob.digest, now()) for n in range(3)]
    for part in parts:
        await files.add_part(part)
    assert await files.parts(OWNER, "upload_1") == {part.id: part for part in parts}
    assert await files.parts(OTHER, "upload_1") == {}
    assert (await storage.usage(OWNER)).held == 9
    whole = await put_bytes(storage.blobs, b"abcabc")
    made = StoredFile("file-1", OWNER, "u.txt", "user_data", 6, whole.digest, now())
    with pytest.raises(NotFound):
        await files.complete_upload("upload_1", replace(made, owner=OTHER))
    completed = await files.complete_upload("upload_1", made)
    assert completed == replace(upload, status="completed", file_id="file-1")
    assert await files.get(OWNER, "file-1", 0) == made
    assert (await storage.usage(OWNER)).held == 6
    for late in (
        files.add_part(replace(parts[0], id="late")),
        files.complete_upload("upload_1", replace(made, id="file-2")),
        files.cancel_upload(OWNER, "upload_1", 0),
    ):
        with pytest.raises(UploadEnded) as caught:
            await late
        assert caught.value.status == "completed"
    await files.create_upload(replace(upload, id="upload_2"))
    with pytest.raises(UploadEnded) as caught:
        await files.add_part(replace(parts[0], upload_id="upload_2", created_at=end))
    assert caught.value.status == "expired"
    assert (await files.cancel_upload(OWNER, "upload_2", 0)).status == "cancelled"
    assert sum([swept.uploads async for swept in files.sweep(end)]) == 2
    with pytest.raises(NotFound):
        await files.get_upload(OWNER, "upload_1")


async def test_files_count_among_what_their_owner_stores_and_go_with_it(storage: Storage) -> None:
    await turn(storage, "r1", message("m1"))
    async for _ in storage.sweep(Limits(measured=True), now()):
        pass
    before, before_all = await storage.usage(OWNER), await storage.num_bytes()
    await file(storage, "file-1")
    await file(storage, "file-22", owner=OTHER)
    usage = await storage.usage(OWNER)
    assert (usage.total - before.total, usage.held - before.held) == (6, 6)
    assert await storage.num_bytes() == before_all + 13
    assert await storage.owner_known(OTHER)
    upload = StoredUpload("upload_1", OWNER, "u", "user_data", "text/plain", 6, now(), now() + 9**9)
    await storage.files.create_upload(upload)
    await storage.files.add_part(StoredPart("p", "upload_1", OWNER, 3, "0" * 64, now()))
    assert sum([gone.files async for gone in storage.purge(OWNER, now(), entry=None)]) == 1
    left = counts(storage.url)
    assert left.pop("files") == 1 and not left.keys() & {"uploads", "upload_parts"}
    assert await storage.usage(OWNER) == replace(usage, total=0, held=0)


async def test_what_hangs_on_files_goes_in_the_same_transaction(storage: Storage) -> None:
    told: list[str] = []

    def removed(conn: Connection, ids: object) -> None:
        told.extend(ids)  # type: ignore[call-overload]
        if "file-bad" in told:
            raise ZeroDivisionError

    files = Files(storage._read, storage._write, storage.blobs, (removed,))
    for id in ("file-1", "file-2", "file-3", "file-bad"):
        await file(storage, id, expires_at=5 if id == "file-2" else None)
    await files.delete(OWNER, "file-1", 0)
    async for _ in files.sweep(6):
        pass
    assert told == ["file-1", "file-2"]
    with pytest.raises(ZeroDivisionError):
        await files.delete(OWNER, "file-bad", 0)
    assert (await files.get(OWNER, "file-bad", 0)).id == "file-bad"


async def test_a_backup_holds_the_contents_too(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner="test")
    await file(storage, "file-1")
    broken = await file(storage, "file-2")
    target = tmp_path / "copy" / "antiphon.db"
    target.parent.mkdir()
    size = await back_up(url(tmp_path), target, lambda copied, total: None)
    assert size == target.stat().st_size + 12
    (tmp_path / "antiphon.db.blobs" / broken.digest).unlink()
    with pytest.raises(StorageError, match=f"blob {broken.digest}, which is missing"):
        await back_up(url(tmp_path), tmp_path / "second.db", lambda copied, total: None)
    assert not list(tmp_path.glob("second*"))
    await storage.close()
    restored = await open_storage(url(target.parent), runner="test")
    kept = await restored.files.get(OWNER, "file-2", 0)
    assert await restored.blobs.read(kept.digest) == b"file-2"
    await restored.close()
    target.unlink()
    with pytest.raises(StorageError, match="blobs exists already"):
        await back_up(url(tmp_path), target, lambda copied, total: None)
