"""Containers in the database: whose they are, when they go, and what a finished cell changes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection

from storage import (
    Account,
    ContainerChange,
    ContainerFile,
    ContainerFull,
    ContainerRoom,
    Counts,
    NotFound,
    PathTaken,
    RunAppend,
    Spent,
    Storage,
    StoredContainer,
    UsageFilter,
)
from tests.support.making import OTHER, OWNER, new, put_bytes, record

MADE = StoredContainer("cntr_1", OWNER, "mine", 1000, 1000, 500, "1g")
ROOM = ContainerRoom(files=3, num_bytes=100)


def file(path: str, digest: str, *, id: str = "", at: int = 1000) -> ContainerFile:
    return ContainerFile(id or f"cfile_{digest}", "cntr_1", OWNER, path, 3, digest, at, "user")


async def test_a_container_is_its_owners_until_it_expires(storage: Storage) -> None:
    containers = storage.containers
    await containers.create(MADE, [file("a.txt", "d1")], room=ROOM)
    assert not await containers.create(replace(MADE, name="again"), room=ROOM)
    assert await containers.get(OWNER, "cntr_1", 1499) == MADE
    assert [one.path for one in await containers.files(OWNER, "cntr_1", 1001)] == ["a.txt"]
    for owner, now in ((OTHER, 1001), (OWNER, 1500)):
        with pytest.raises(NotFound):
            await containers.get(owner, "cntr_1", now)
        with pytest.raises(NotFound):
            await containers.files(owner, "cntr_1", now)
        assert not (await containers.list(owner, now=now, limit=9)).data
    await containers.add_file(replace(file("a.txt", "d2"), created_at=1400), ROOM)
    assert (await containers.get(OWNER, "cntr_1", 1800)).version == 1
    assert (await containers.list(OWNER, now=1800, limit=9, name="mine")).data[0].id == "cntr_1"
    assert not (await containers.list(OWNER, now=1800, limit=9, name="other")).data
    assert (await storage.usage(OWNER)).total >= 3
    assert [num async for num in containers.sweep(1899)] == []
    assert [num async for num in containers.sweep(1900)] == [1]


async def test_a_clock_that_is_ahead_ends_no_container_of_others(storage: Storage) -> None:
    hour, containers, at = 3_600_000_000, storage.containers, time.time_ns() // 1000
    made = replace(MADE, created_at=at, last_active_at=at, lifetime=hour)
    await containers.create(made, (), room=ROOM)
    lasts = storage.shared  # a database of one process has no clock of its own
    assert await containers.alive(["cntr_1"], at + 2 * hour) == ({"cntr_1"} if lasts else set())
    later = replace(made, created_at=at + 2 * hour)
    assert await containers.create(later, (), room=ROOM) is not lasts


async def test_a_cells_changes_come_with_its_outcome_or_not_at_all(storage: Storage) -> None:
    containers = storage.containers
    await containers.create(MADE, [file("a.txt", "d1"), file("b.txt", "d3")], room=ROOM)
    claim = await storage.start_response(new("r1"))
    change = ContainerChange("cntr_1", OWNER, 1100, b"session", (file("a.txt", "d2", at=1100),), ("b.txt",))
    first = RunAppend("r1", claim.fence, records=(record(claim.next_seq),), effects=(change,))
    lost = await storage.append([replace(first, fence=claim.fence - 1)])
    assert "r1" in lost and (await containers.get(OWNER, "cntr_1", 1101)).version == 0
    assert await storage.append([first]) == {}
    found, files, state = await containers.whole(OWNER, "cntr_1", 1101)
    assert (found.version, found.cells, found.last_active_at, state) == (1, 1, 1100, b"session")
    assert [(one.path, one.digest) for one in files] == [("a.txt", "d2")]
    await containers.delete(OWNER, "cntr_1", 1101)
    await containers.change(change)
    with pytest.raises(NotFound):
        await containers.get(OWNER, "cntr_1", 1101)


async def test_what_clients_bring_is_bounded_and_is_no_file_beside_its_folder(storage: Storage) -> None:
    containers = storage.containers
    with pytest.raises(ContainerFull, match="100 bytes; it would be 120"):
        files = [replace(file(name, name), num_bytes=60) for name in "ab"]
        await containers.create(MADE, files, room=ROOM)
    with pytest.raises(NotFound):
        await containers.get(OWNER, "cntr_1", 1001)
    await containers.create(MADE, [file("a", "d1"), file("d/e/f", "d2"), file("c", "d3")], room=ROOM)
    with pytest.raises(ContainerFull, match="3 files; it would have 4"):
        await containers.add_file(file("x", "d4"), ROOM)
    with pytest.raises(PathTaken):
        await containers.add_file(file("d", "d4"), replace(ROOM, files=9))
    assert (await containers.get(OWNER, "cntr_1", 1001)).version == 0
    # A client's file in the place of a folder that code makes meanwhile goes; so does one in a folder's.
    made = (file("a/b", "d5"), file("d/e", "d6"))
    await containers.change(ContainerChange("cntr_1", OWNER, 1100, None, made))
    assert {one.path for one in await containers.files(OWNER, "cntr_1", 1101)} == {"a/b", "d/e", "c"}


async def test_a_file_is_no_folder_of_another_case(storage: Storage) -> None:
    containers, room = storage.containers, replace(ROOM, files=9)
    there = [file(path, f"d{at}") for at, path in enumerate(("Data/b", "datA/c", "dat_/d", "é/e", "data/f"))]
    await containers.create(MADE, there, room=room)
    for at, path in enumerate(("data", "dat%", "É")):
        made = (file(path, f"e{at}", at=1100),)
        await containers.change(ContainerChange("cntr_1", OWNER, 1100, None, made))
    left = {one.path for one in await containers.files(OWNER, "cntr_1", 1101)}
    assert left == {"Data/b", "datA/c", "dat_/d", "é/e", "data", "dat%", "É"}


async def test_what_makes_way_for_a_cells_files_goes_with_its_outcome(storage: Storage) -> None:
    """What a client has put meanwhile is not among the files that the cell began with."""
    containers, blobs = storage.containers, storage.blobs
    old = {name: await put_bytes(blobs, f"old {name}".encode()) for name in ("a", "b", "c/d", "e")}
    taken = [file(path, blob.digest) for path, blob in old.items()]
    await containers.create(MADE, taken, room=replace(ROOM, files=9))
    new_blobs = {name: await put_bytes(blobs, f"new {name}".encode()) for name in ("a/x", "c", "e")}
    made = tuple(file(path, blob.digest, at=1100) for path, blob in new_blobs.items())
    for blob in old.values():
        await blobs.release(blob.digest)
    claim = await storage.start_response(new("r1"))
    change = ContainerChange("cntr_1", OWNER, 1100, None, made, ("b",))
    assert await storage.append([RunAppend("r1", claim.fence, effects=(change,))]) == {}
    await asyncio.gather(*blobs._dropping)
    for blob in new_blobs.values():
        await blobs.release(blob.digest)
    files = await containers.files(OWNER, "cntr_1", 1101)
    assert {one.path for one in files} == {"a/x", "c", "e"}
    assert [await blobs.touch(blob.digest) for blob in old.values()] == [False] * 4
    assert all([await blobs.touch(blob.digest) for blob in new_blobs.values()])


async def test_uploaded_files_are_given_once_and_an_expired_container_is_made_anew(storage: Storage) -> None:
    containers, spent = storage.containers, Spent(1000, Account(OWNER, None, "", "default", "k"), Counts(1))
    assert await containers.create(MADE, room=ROOM, spent=spent)
    assert not await containers.create(MADE, room=ROOM, spent=spent)
    await containers.give(OWNER, "cntr_1", {"file-1": file("a", "d1")}, 1001, ROOM)
    change = ContainerChange("cntr_1", OWNER, 1002, b"s", (file("a", "d2"),))
    await containers.change(change)
    await containers.give(OWNER, "cntr_1", {"file-1": file("a", "d1"), "file-2": file("b", "d3")}, 1003, ROOM)
    found, files, _ = await containers.whole(OWNER, "cntr_1", 1004)
    assert found.given == ("file-1", "file-2") and found.version == 3
    assert {one.path: one.digest for one in files} == {"a": "d2", "b": "d3"}, "what code has changed stays"
    await containers.use(["cntr_1"], 1400)
    assert await containers.alive(["cntr_1", "cntr_2"], 1899) == {"cntr_1"}
    assert await containers.alive(["cntr_1"], 1900) == set()
    again = replace(MADE, created_at=1900, last_active_at=1900)
    assert await containers.create(again, room=ROOM, spent=spent)
    assert await containers.whole(OWNER, "cntr_1", 1901) == (again, (), None)
    [used] = await storage.usage_sums(UsageFilter("k", 0, 10**12), (), 10**12)
    assert used.counts.requests == 2, "once for each that was made"


@pytest.mark.parametrize("purged", [False, True], ids=["swept", "purged"])
async def test_a_container_made_anew_while_its_id_is_swept_stays(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, purged: bool
) -> None:
    containers, read = storage.containers, storage.containers._read
    await containers.create(MADE, [file("a", "d1")], room=ROOM)
    again = replace(MADE, created_at=1900, last_active_at=1900)
    made: list[bool] = []

    async def then_made_anew(job: Callable[[Connection], Any]) -> Any:
        found = await read(job)
        if not made:
            made.append(True)
            made.append(await containers.create(again, [file("b", "d2", at=1900)], room=ROOM))
        return found

    with monkeypatch.context() as during:
        during.setattr(containers, "_read", then_made_anew)
        gone = containers.purge(OWNER, 1899) if purged else containers.sweep(1900)
        assert sum([num async for num in gone]) == 0
    assert made == [True, True]
    found, files, _ = await containers.whole(OWNER, "cntr_1", 1901)
    assert (found, [one.path for one in files]) == (again, ["b"])
