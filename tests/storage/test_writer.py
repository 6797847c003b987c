"""The writer: group commit, what reaches the disk when, and a database that is locked, full or broken."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert

from storage import NotFound, RunAppend, Storage, StorageUnavailable, open_storage, writer
from storage.database import Trouble, trouble
from storage.tables import api_keys
from tests.storage.making import OWNER, RUNNER, check, finish, message, new, record, turn, url


async def until(state: Callable[[], object]) -> None:
    """Waits for a state of the writer's thread, which has no awaitable for it."""
    async with asyncio.timeout(10):
        while not state():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def locked(storage: Storage) -> AsyncIterator[None]:
    """Another process at work on the database: nobody else can write."""
    other = sqlite3.connect(storage.path, isolation_level=None)
    other.execute("PRAGMA wal_autocheckpoint=0")
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def note(conn: Connection, name: str) -> str:
    """A job that leaves a trace: one row in api_keys."""
    conn.execute(
        insert(api_keys).values(id=name, owner="", name="", hash=name.encode(), hint="", created_at=0)
    )
    return name


async def notes(storage: Storage) -> list[str]:
    return sorted(key.id for key in await storage.list_keys())


async def gathered(storage: Storage, *jobs: Callable[[Connection], Any]) -> list[Any]:
    """Jobs that are sure to meet in one batch: they wait behind one that is held up."""
    async with locked(storage):
        first = storage._writer.submit(lambda conn: None, promise=False, patient=True)
        await until(lambda: storage._writer._blocked_since is not None)
        futures = [storage._writer.submit(job, promise=False) for job in jobs]
    results = await asyncio.gather(first, *futures, return_exceptions=True)
    return results[1:]


async def test_waiting_jobs_share_a_commit(storage: Storage) -> None:
    before = storage.commit_stats()
    names = [f"n{number:03}" for number in range(100)]
    results = await gathered(storage, *(lambda conn, name=name: note(conn, name) for name in names))
    assert results == names and await notes(storage) == names
    after = storage.commit_stats()
    assert after.jobs - before.jobs == 101 and after.commits - before.commits <= 3
    assert len(after.seconds) == after.commits


async def test_a_job_that_raises_takes_nobody_with_it(storage: Storage) -> None:
    def broken(conn: Connection) -> None:
        note(conn, "half")
        raise NotFound("thing", "x")

    def twice(conn: Connection) -> None:
        note(conn, "a")

    results = await gathered(
        storage,
        lambda conn: note(conn, "a"),
        broken,
        lambda conn: note(conn, "b"),
        twice,
        lambda conn: note(conn, "c"),
    )
    assert [type(result).__name__ for result in results] == [
        "str",
        "NotFound",
        "str",
        "IntegrityError",
        "str",
    ]
    assert await notes(storage) == ["a", "b", "c"]
    with pytest.raises(NotFound):  # alone in its batch
        await storage._write(broken)
    assert await notes(storage) == ["a", "b", "c"]


async def test_jobs_from_many_tasks(storage: Storage) -> None:
    async def one_run(number: int) -> None:
        id = f"r{number}"
        claim = await storage.start_response(new(id, message(f"{id}.in"), message("shared")))
        for step in range(2, 12):
            assert not await storage.append([RunAppend(id, claim.fence, records=(record(step),))])
            assert (await storage.records(id, after=step - 1))[0].first_seq == step  # what is written is read
        assert not await storage.append([RunAppend(id, claim.fence, finish=finish())])
        assert (await storage.get_response(OWNER, id)).status == "completed"

    await asyncio.gather(*(one_run(number) for number in range(24)))
    assert len((await storage.list_responses(OWNER, limit=100)).data) == 24


async def test_a_caller_that_leaves_does_not_undo_its_write(storage: Storage) -> None:
    async with locked(storage):
        task = asyncio.create_task(storage.start_response(new("r1")))
        await until(lambda: storage._writer._blocked_since is not None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await turn(storage, "r2")
    assert (await storage.get_response(OWNER, "r1")).status == "in_progress"


async def test_readers_that_leave_do_no_harm(storage: Storage) -> None:
    await turn(storage, "r1", message("m1"))
    for _ in range(20):
        tasks = [asyncio.create_task(storage.get_response(OWNER, "r1")) for _ in range(8)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(getattr(result, "id", None) == "r1" for result in results[1::2])
    await storage.ready()


async def test_deltas_reach_the_disk_soon(storage: Storage) -> None:
    await storage.start_response(new("r1"))
    assert storage._writer._dirty_since is None  # a promise was on the disk when it returned
    for step in range(2, 5):
        synced = storage.commit_stats().synced
        assert not await storage.append([RunAppend("r1", 1, records=(record(step),))])
        await until(lambda: storage._writer._dirty_since is None)
        assert storage.commit_stats().synced == synced + 1


async def test_a_busy_writer_does_not_put_the_disk_off(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SYNC_LIMIT_S", 0.0)
    monkeypatch.setattr(writer, "SYNC_DELAY_S", 3600.0)  # no idle moment ever comes
    await storage.start_response(new("r1"))
    synced = storage.commit_stats().synced
    for step in range(2, 12):
        assert not await storage.append([RunAppend("r1", 1, records=(record(step),))])
    assert storage.commit_stats().synced >= synced + 5


async def test_the_wal_stays_small(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "WAL_OPPORTUNE", 1 << 20)
    monkeypatch.setattr(writer, "WAL_LIMIT", 2 << 20)
    monkeypatch.setattr(writer, "CHECKPOINT_STEP", 1 << 20)
    await storage.start_response(new("r1"))
    seen = 0
    for step in range(2, 120):
        large = type(record(0))(step, 1, b"x" * 200_000)
        assert not await storage.append([RunAppend("r1", 1, records=(large,))])
        seen = max(seen, storage.commit_stats().wal_bytes)
    assert seen < 4 << 20 and storage.commit_stats().checkpoints > 5
    wal = Path(f"{storage.path}-wal")
    assert wal.stat().st_size < 5 << 20
    checkpoints = storage.commit_stats().checkpoints
    await until(lambda: storage.commit_stats().checkpoints > checkpoints)  # and once more when idle


async def test_a_reader_can_hold_the_wal_back_and_does_not_stop_writes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAL_OPPORTUNE", 1 << 18)
    await storage.start_response(new("r1"))
    reader = sqlite3.connect(storage.path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM records").fetchone() == (1,)
    for step in range(2, 60):
        large = type(record(0))(step, 1, b"x" * 50_000)
        assert not await storage.append([RunAppend("r1", 1, records=(large,))])
    assert reader.execute("SELECT count(*) FROM records").fetchone() == (1,)  # one moment
    reader.close()
    assert len(await storage.records("r1", after=-1, limit_bytes=1 << 30)) == 59


async def test_a_short_lock_is_no_error(storage: Storage) -> None:
    await turn(storage, "r0", message("m0"))
    async with locked(storage):
        starting = asyncio.create_task(storage.start_response(new("r1")))
        await until(lambda: storage._writer._blocked_since is not None)
        assert (await storage.get_response(OWNER, "r0")).status == "completed"  # reads go on
    assert (await starting).fence == 1
    await storage.ready()


async def test_a_long_lock_refuses_new_work_and_holds_streams(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.3)
    await storage.start_response(new("r1"))
    async with locked(storage):
        stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(2),))]))
        ending = asyncio.create_task(
            storage.append([RunAppend("r1", 1, records=(record(3),), finish=finish())])
        )
        for attempt in range(2):
            with pytest.raises(StorageUnavailable):
                await storage.start_response(new(f"new{attempt}"))
        await until(lambda: is_unready(storage))
        with pytest.raises(StorageUnavailable):
            await storage.ready()
        assert not stream.done() and not ending.done()
    assert await stream == {} and await ending == {}
    assert (await storage.get_response(OWNER, "r1")).status == "completed"
    await storage.ready()
    with pytest.raises(NotFound):  # who was told of a failure finds nothing done later
        await storage.get_response(OWNER, "new0")


def is_unready(storage: Storage) -> bool:
    try:
        storage._writer.check()
    except StorageUnavailable:
        return True
    return False


async def test_a_full_disk(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    await storage.start_response(new("r1"))

    def allow(conn: Connection, more: int) -> None:
        pages = conn.exec_driver_sql("PRAGMA page_count").scalar_one()
        conn.exec_driver_sql(f"PRAGMA max_page_count={pages + more}")

    await storage._write(lambda conn: allow(conn, 3))
    large = type(record(0))(2, 1, b"x" * 100_000)
    stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(large,))]))
    await until(lambda: storage._writer._blocked_since is not None)
    with pytest.raises(StorageUnavailable, match="full"):
        await storage.start_response(new("r2", message("m", b"x" * 100_000)))
    assert (await storage.get_response(OWNER, "r1")).status == "in_progress"
    assert not stream.done()
    await storage._writer.submit(lambda conn: allow(conn, 1 << 20), promise=False, patient=True)
    assert await stream == {}
    assert len(await storage.records("r1", after=-1)) == 2
    await storage.start_response(new("r2"))


async def test_a_failed_sync_stops_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.start_response(new("r1"))
    death = asyncio.create_task(storage.dead())

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("storage.wal.os.fdatasync", broken)
    assert await storage.append([RunAppend("r1", 1, records=(record(2),))]) == {}
    error = await asyncio.wait_for(death, 10)
    assert isinstance(error, OSError) and error.errno == errno.EIO
    with pytest.raises(StorageUnavailable):
        await storage.append([RunAppend("r1", 1, records=(record(3),))])
    with pytest.raises(StorageUnavailable):
        await storage.ready()
    assert await storage.dead() is error
    await storage.close()
    check(storage.path)


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

    assert trouble(error(sqlite3.SQLITE_BUSY_SNAPSHOT)) is Trouble.BLOCKED
    assert trouble(error(sqlite3.SQLITE_FULL)) is Trouble.REFUSED
    assert trouble(error(sqlite3.SQLITE_IOERR_SHMSIZE)) is Trouble.REFUSED
    assert trouble(error(sqlite3.SQLITE_IOERR_WRITE)) is Trouble.FATAL
    assert trouble(error(sqlite3.SQLITE_CORRUPT)) is Trouble.FATAL
    assert trouble(error(sqlite3.SQLITE_CONSTRAINT)) is None
    assert trouble(NotFound("a", "b")) is None


async def test_close_commits_what_waits(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.start_response(new("r1"))
    appends = [
        asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(step),))]))
        for step in range(2, 9)
    ]
    await asyncio.sleep(0)
    await storage.close()
    assert await asyncio.gather(*appends) == [{}] * 7
    assert Path(f"{storage.path}-wal").exists() is False  # all is in the database file
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    assert len(await storage.records("r1", after=-1)) == 8
    await storage.close()


async def test_close_gives_up_on_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.2)
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.start_response(new("r1"))
    async with locked(storage):
        stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(2),))]))
        await until(lambda: storage._writer._blocked_since is not None)
        await storage.close()
        with pytest.raises(StorageUnavailable):
            await stream
    check(storage.path)
