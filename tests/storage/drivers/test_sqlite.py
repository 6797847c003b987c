"""SQLite: what reaches the disk when, a WAL that stays small, a full disk, a broken one."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import Connection

from storage import LEAST_ROOM, NotFound, RunAppend, Storage, StorageUnavailable, open_storage
from storage.drivers import sqlite, writer
from storage.drivers.interface import ErrorKind
from storage.drivers.sqlite import SQLiteWriting, trouble
from tests.support.blocking import gathered, is_unready, note, notes, until
from tests.support.making import OWNER, RUNNER, check, message, new, record, url


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    """An empty database file, open."""
    opened = await open_storage(url(tmp_path), runner=RUNNER)
    yield opened
    await opened.close()
    check(opened.url)


def written(storage: Storage) -> SQLiteWriting:
    writing = storage._writer._writing
    assert isinstance(writing, SQLiteWriting)
    return writing


def database(storage: Storage) -> str:
    return storage.url.removeprefix("sqlite+aiosqlite:///")


async def test_deltas_reach_the_disk_soon(storage: Storage) -> None:
    await storage.start_response(new("r1"))
    assert written(storage)._dirty_since is None  # a promise was on the disk when it returned
    for step in range(2, 5):
        synced = storage.commit_stats().synced
        assert not await storage.append([RunAppend("r1", 1, records=(record(step),))])
        await until(lambda: written(storage)._dirty_since is None)
        assert storage.commit_stats().synced == synced + 1


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def test_the_memory_of_the_writer_does_not_grow_with_the_database(storage: Storage) -> None:
    """SQLite keeps every page that it has written until its cache is full."""

    async def store(first: int, count: int) -> None:
        for number in range(first, first + count):
            await storage.start_response(new(f"r{number}", message(f"m{number}", b"x" * 65_536)))

    await store(0, 200)
    before = resident()
    await store(200, 600)  # 38 MiB
    assert resident() - before < 12 << 20


async def test_deltas_can_be_on_the_disk_before_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "SYNC_DELAY_S", 3600.0)  # no idle moment ever comes
    storage = await open_storage(url(tmp_path), runner=RUNNER, synced=True)
    await storage.start_response(new("r1"))
    synced = storage.commit_stats().synced
    for step in range(2, 7):
        assert not await storage.append([RunAppend("r1", 1, records=(record(step),))])
    assert storage.commit_stats().synced == synced + 5
    await storage.close()


async def test_a_busy_writer_does_not_put_the_disk_off(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "SYNC_LIMIT_S", 0.0)
    monkeypatch.setattr(sqlite, "SYNC_DELAY_S", 3600.0)  # no idle moment ever comes
    await storage.start_response(new("r1"))
    synced = storage.commit_stats().synced
    for step in range(2, 12):
        assert not await storage.append([RunAppend("r1", 1, records=(record(step),))])
    assert storage.commit_stats().synced >= synced + 5


async def test_the_wal_stays_small(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "WAL_OPPORTUNE", 1 << 20)
    monkeypatch.setattr(sqlite, "WAL_LIMIT", 2 << 20)
    monkeypatch.setattr(sqlite, "CHECKPOINT_STEP", 1 << 20)
    await storage.start_response(new("r1"))
    seen = 0
    for step in range(2, 120):
        large = type(record(0))(step, 1, b"x" * 200_000)
        assert not await storage.append([RunAppend("r1", 1, records=(large,))])
        seen = max(seen, storage.commit_stats().wal_bytes)
    assert seen < 4 << 20 and storage.commit_stats().checkpoints > 5
    wal = Path(f"{database(storage)}-wal")
    assert wal.stat().st_size < 5 << 20
    writing = storage._writer._writing
    assert isinstance(writing, SQLiteWriting)
    await until(lambda: not writing._uncheckpointed)  # and once more when idle


async def test_a_reader_can_hold_the_wal_back_and_does_not_stop_writes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "WAL_OPPORTUNE", 1 << 18)
    await storage.start_response(new("r1"))
    reader = sqlite3.connect(database(storage), isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM records").fetchone() == (1,)
    for step in range(2, 60):
        large = type(record(0))(step, 1, b"x" * 50_000)
        assert not await storage.append([RunAppend("r1", 1, records=(large,))])
    assert reader.execute("SELECT count(*) FROM records").fetchone() == (1,)  # one moment
    reader.close()
    assert len(await storage.records("r1", after=-1, limit_bytes=1 << 30)) == 59


def allow(conn: Connection, more: int) -> None:
    """Let the database have so many pages more."""
    pages = conn.exec_driver_sql("PRAGMA page_count").scalar_one()
    conn.exec_driver_sql(f"PRAGMA max_page_count={pages + more}")


async def test_a_full_disk(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """What was begun waits for room, also while less would find some; what is new is refused meanwhile."""
    for id in ("r0", "r1"):
        await storage.start_response(new(id))
    await storage._write(partial(allow, more=3))
    large = type(record(0))(2, 1, b"x" * 100_000)
    stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(large,))]))
    await until(lambda: storage._writer._blocked_since is not None)
    await storage._write(lambda conn: note(conn, "small"))
    for size in (100_000, 1):
        with pytest.raises(StorageUnavailable, match="full") as refused:
            await storage.start_response(new("r2", message("m", b"x" * size)))
        assert refused.value.full
    with pytest.raises(StorageUnavailable) as unready:
        await storage.ready()
    assert unready.value.full
    assert (await storage.get_response(OWNER, "r1")).status == "in_progress"
    assert not stream.done()
    await storage._writer.submit(partial(allow, more=1 << 20), durable=False, retry_until_available=True)
    assert await stream == {}
    assert len(await storage.records("r1", after=-1)) == 2
    await storage.ready()
    await storage.start_response(new("r2"))
    said = [each.message for each in caplog.records if each.name == "antiphon.storage"]
    assert [line.partition(":")[0] for line in said] == [
        "there is no room",
        "the database can be written again, after 0 s",
    ], "once each"


async def test_nothing_is_begun_on_a_disk_with_little_room(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was begun needs it for its end. Room is noticed without a write, so that probes notice it, too."""
    free = LEAST_ROOM - 1
    monkeypatch.setattr(writer, "LOOK_S", 0.001)
    monkeypatch.setattr(sqlite, "free_bytes", lambda _: free)
    await storage.start_response(new("r1"))
    await until(lambda: is_unready(storage))
    with pytest.raises(StorageUnavailable) as refused:
        await storage.start_response(new("r2"))
    assert refused.value.full
    assert await storage.append([RunAppend("r1", 1, records=(record(2),))]) == {}
    free = LEAST_ROOM + sqlite.ENOUGH_MORE
    await until(lambda: not is_unready(storage))
    await storage.start_response(new("r2"))
    assert "only 4.2 MB are free" in caplog.text


async def test_one_write_without_room_is_no_obstacle_to_others(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    await storage._write(partial(allow, more=3))
    with pytest.raises(StorageUnavailable, match="full"):
        await storage.start_response(new("r1", message("m", b"x" * 100_000)))
    await storage.ready()
    await storage.start_response(new("r1"))
    assert not [each for each in caplog.records if each.name == "antiphon.storage"]


@pytest.mark.parametrize("says", [OSError(errno.ESTALE, "Stale file handle"), (0, 0, 0)])
async def test_a_disk_that_does_not_say_what_is_free_is_written(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, says: OSError | tuple[int, int, int]
) -> None:
    def usage(_folder: Path) -> SimpleNamespace:
        if isinstance(says, OSError):
            raise says
        return SimpleNamespace(**dict(zip(("total", "used", "free"), says, strict=True)))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert storage._database.free_bytes() is None
    assert storage._writer._writing.look()
    await storage.start_response(new("r1"))


async def test_close_does_not_wait_for_an_operator(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 3600.0)
    await storage.start_response(new("r1"))

    def full(_conn: Connection) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    waiting = storage._writer.submit(full, durable=True, retry_until_available=True)
    await until(lambda: is_unready(storage))
    async with asyncio.timeout(30):
        await storage.close()
    with pytest.raises(StorageUnavailable):
        await waiting


@pytest.mark.parametrize("suffix", ["", "-wal", ".lock"])
async def test_a_file_that_is_removed_under_the_server_is_missed_before_anything_is_lost(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    """SQLite would go on writing to it. Where the file itself comes back, all goes on."""
    monkeypatch.setattr(writer, "LOOK_S", 0.001)
    await storage.start_response(new("r1"))
    await storage.get_response(OWNER, "r1")  # which opens what reading goes on by
    file = Path(database(storage) + suffix)
    file.rename(aside := file.with_name("aside"))
    with pytest.raises(StorageUnavailable, match="was removed or replaced") as refused:
        await storage.start_response(new("r2"))
    assert refused.value.moved
    stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(2),))]))
    file.touch()  # another in its place
    await until(lambda: is_unready(storage))
    with pytest.raises(StorageUnavailable) as unready:
        await storage.ready()
    assert unready.value.moved and not stream.done()
    assert (await storage.get_response(OWNER, "r1")).status == "in_progress", "reading goes on"
    if not suffix:
        begun, over = threading.Event(), threading.Event()

        def read(_conn: Connection) -> None:
            begun.set()
            over.wait()

        reading = asyncio.create_task(storage._read(read))
        await until(begun.is_set)
        with pytest.raises(StorageUnavailable) as misread:
            await storage.list_keys()  # by a further connection, which would read the other file
        assert misread.value.moved
        over.set()
        await reading
    aside.replace(file)
    assert await stream == {}
    await until(lambda: not is_unready(storage))
    await storage.start_response(new("r2"))
    said = [each for each in caplog.records if each.name == "antiphon.storage"]
    assert [each.levelname for each in said] == ["ERROR", "WARNING"], "once each"
    assert str(file) in said[0].message


async def test_a_failed_sync_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.start_response(new("r1"))
    death = asyncio.create_task(storage.dead())

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("storage.drivers.wal.os.fdatasync", broken)
    assert await storage.append([RunAppend("r1", 1, records=(record(2),))]) == {}
    error = await asyncio.wait_for(death, 10)
    assert isinstance(error, OSError) and error.errno == errno.EIO
    with pytest.raises(StorageUnavailable):
        await storage.append([RunAppend("r1", 1, records=(record(3),))])
    with pytest.raises(StorageUnavailable):
        await storage.ready()
    assert await storage.dead() is error
    await storage.close()
    check(storage.url)


async def test_a_broken_disk_fails_whoever_waits(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)

    def broken(_conn: Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    results = await gathered(storage, lambda conn: note(conn, "a"), broken, lambda conn: note(conn, "b"))
    assert [type(result) for result in results] == [StorageUnavailable] * 3
    assert isinstance(await storage.dead(), sqlite3.OperationalError)
    assert await notes(storage) == []
    await storage.close()


def test_the_kinds_of_trouble() -> None:
    def error(code: int) -> sqlite3.Error:
        made = sqlite3.OperationalError("x")
        made.sqlite_errorcode = code
        return made

    assert trouble(error(sqlite3.SQLITE_BUSY_SNAPSHOT)) is ErrorKind.BLOCKED
    assert trouble(error(sqlite3.SQLITE_FULL)) is ErrorKind.REFUSED
    assert trouble(error(sqlite3.SQLITE_IOERR_SHMSIZE)) is ErrorKind.REFUSED
    assert trouble(error(sqlite3.SQLITE_IOERR_WRITE)) is ErrorKind.FATAL
    assert trouble(error(sqlite3.SQLITE_CORRUPT)) is ErrorKind.FATAL
    assert trouble(error(sqlite3.SQLITE_CONSTRAINT)) is None
    assert trouble(NotFound("a", "b")) is None


async def test_close_leaves_no_wal(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.start_response(new("r1"))
    await storage.close()
    assert Path(f"{database(storage)}-wal").exists() is False  # all is in the database file
