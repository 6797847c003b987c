"""Containers in the database: whose they are, when they go, and what a finished cell changes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage import ContainerChange, ContainerFile, NotFound, RunAppend, Storage, StoredContainer
from tests.support.making import OTHER, OWNER, new, record

MADE = StoredContainer("cntr_1", OWNER, "mine", 1000, 1000, 500, "1g")


def file(path: str, digest: str, *, id: str = "", at: int = 1000) -> ContainerFile:
    return ContainerFile(id or f"cfile_{digest}", "cntr_1", OWNER, path, 3, digest, at, "user")


async def test_a_container_is_its_owners_until_it_expires(storage: Storage) -> None:
    containers = storage.containers
    await containers.create(MADE, [file("a.txt", "d1")])
    await containers.create(replace(MADE, name="again"))
    assert await containers.get(OWNER, "cntr_1", 1499) == MADE
    assert [one.path for one in await containers.files(OWNER, "cntr_1", 1001)] == ["a.txt"]
    for owner, now in ((OTHER, 1001), (OWNER, 1500)):
        with pytest.raises(NotFound):
            await containers.get(owner, "cntr_1", now)
        with pytest.raises(NotFound):
            await containers.files(owner, "cntr_1", now)
        assert not (await containers.list(owner, now=now, limit=9)).data
    await containers.add_file(replace(file("a.txt", "d2"), created_at=1400))
    assert (await containers.get(OWNER, "cntr_1", 1800)).version == 1
    assert (await containers.list(OWNER, now=1800, limit=9, name="mine")).data[0].id == "cntr_1"
    assert not (await containers.list(OWNER, now=1800, limit=9, name="other")).data
    assert (await storage.usage(OWNER)).total >= 3
    assert [num async for num in containers.sweep(1899)] == []
    assert [num async for num in containers.sweep(1900)] == [1]


async def test_a_cells_changes_come_with_its_outcome_or_not_at_all(storage: Storage) -> None:
    containers = storage.containers
    await containers.create(MADE, [file("a.txt", "d1"), file("b.txt", "d3")])
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
