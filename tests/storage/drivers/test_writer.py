"""The writer: group commit, and a database that is held by somebody else. The same on every database."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Connection

from storage import NotFound, RunAppend, Storage, StorageUnavailable, open_storage
from storage.drivers import writer
from tests.support.blocking import gathered, is_unready, locked, note, notes, until
from tests.support.making import OWNER, RUNNER, finish, message, new, record, turn


async def test_waiting_jobs_share_a_commit(storage: Storage) -> None:
    before = storage.commit_stats()
    names = [f"n{number:03}" for number in range(100)]
    results = await gathered(storage, *(lambda conn, name=name: note(conn, name) for name in names))
    assert results == names and await notes(storage) == names
    after = storage.commit_stats()
    assert after.jobs - before.jobs == 101 and after.commits - before.commits <= 3
    assert sum(after.seconds) == after.commits and after.seconds_sum > 0


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
    await storage.start_response(new("r2"))
    async with locked(storage):
        stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(2),))]))
        ending = asyncio.create_task(
            storage.append([RunAppend("r2", 1, records=(record(2),), finish=finish())])
        )
        for attempt in range(2):
            with pytest.raises(StorageUnavailable):
                await storage.start_response(new(f"new{attempt}"))
        await until(lambda: is_unready(storage))
        with pytest.raises(StorageUnavailable):
            await storage.ready()
        assert not stream.done() and not ending.done()
    assert await stream == {} and await ending == {}
    assert (await storage.get_response(OWNER, "r2")).status == "completed"
    await storage.ready()
    with pytest.raises(NotFound):  # who was told of a failure finds nothing done later
        await storage.get_response(OWNER, "new0")


async def test_close_commits_what_waits(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER)
    await storage.start_response(new("r1"))
    appends = [
        asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(step),))]))
        for step in range(2, 9)
    ]
    await asyncio.sleep(0)
    await storage.close()
    assert await asyncio.gather(*appends) == [{}] * 7
    storage = await open_storage(database_url, runner=RUNNER)
    assert len(await storage.records("r1", after=-1)) == 8
    await storage.close()


async def test_close_gives_up_on_a_locked_database(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.2)
    storage = await open_storage(database_url, runner=RUNNER)
    await storage.start_response(new("r1"))
    async with locked(storage):
        stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(2),))]))
        await until(lambda: storage._writer._blocked_since is not None)
        await storage.close()
        with pytest.raises(StorageUnavailable):
            await stream
