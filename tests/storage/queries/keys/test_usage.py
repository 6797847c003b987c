"""Sums of usage: counted with the end of a run, by minute, by every process, and put together in hours."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from storage import (
    Account,
    Counts,
    Dimension,
    RunAppend,
    RunLost,
    Spent,
    Storage,
    UsageFilter,
    UsageSum,
    open_storage,
)
from storage.queries.keys import usage
from storage.queries.keys.usage import HOUR, MINUTE, shard_of
from tests.support.making import OTHER, OWNER, RUNNER, finish, new, now, query, record

NOON = 12 * HOUR
DAY = 24 * HOUR
ONE = Counts(1, 10, 4, 5, 2)


def spent(at: int = NOON, counts: Counts = ONE, **fields: Any) -> Spent:
    account = Account(**{"owner": OWNER, "key_id": None, "model": "m", "tier": "default", **fields})
    return Spent(at, account, counts)


def times(number: int) -> Counts:
    return Counts(number, 10 * number, 4 * number, 5 * number, 2 * number)


async def sums(
    storage: Storage, *by: Dimension, width: int = DAY, since: int = 0, before: int = DAY, **fields: Any
) -> tuple[UsageSum, ...]:
    wanted = UsageFilter(**{"kind": "completions", "since": since, "before": before, **fields})
    return await storage.usage_sums(wanted, by, width)


async def end(storage: Storage, id: str, fence: int = 1) -> dict[str, Exception]:
    ending = RunAppend(id, fence, records=(record(2),), finish=replace(finish(), spent=spent()))
    return dict(await storage.append([ending]))


async def test_a_run_counts_once_with_its_end(storage: Storage) -> None:
    await storage.start_response(new("r1"))
    assert await sums(storage) == ()
    await storage.free_all()
    [claim] = await storage.take(1)
    assert isinstance((await end(storage, "r1"))["r1"], RunLost)  # whom it was taken from
    assert await sums(storage) == ()
    assert await end(storage, "r1", claim.fence) == {}
    assert isinstance((await end(storage, "r1", claim.fence))["r1"], RunLost)
    assert await sums(storage) == (UsageSum(0, {}, ONE),)


async def test_ends_of_one_commit_are_one_sum(storage: Storage) -> None:
    for number in range(3):
        await storage.start_response(new(f"r{number}"))
    ends = [
        RunAppend(f"r{number}", 1, records=(record(2),), finish=replace(finish(), spent=one))
        for number, one in enumerate((spent(), spent(NOON + 1), None))
    ]
    assert await storage.append(ends) == {}
    assert await sums(storage, width=MINUTE) == (UsageSum(NOON, {}, times(2)),)


async def test_borders_of_buckets(storage: Storage) -> None:
    for at in (NOON - 1, NOON, NOON + MINUTE - 1, NOON + MINUTE, NOON + HOUR):
        await storage.add_usage([spent(at)])
    assert [(one.start, one.counts) for one in await sums(storage, width=MINUTE)] == [
        (NOON - MINUTE, ONE),
        (NOON, times(2)),
        (NOON + MINUTE, ONE),
        (NOON + HOUR, ONE),
    ]
    assert [(one.start, one.counts.requests) for one in await sums(storage, width=HOUR)] == [
        (NOON - HOUR, 1),
        (NOON, 3),
        (NOON + HOUR, 1),
    ]
    assert [one.counts.requests for one in await sums(storage, since=NOON, before=NOON + HOUR)] == [3]


async def test_it_is_told_apart_and_filtered(storage: Storage) -> None:
    await storage.add_usage(
        [
            spent(),
            spent(key_id="k1"),
            spent(key_id="k1", model="n", tier="flex"),
            spent(owner=OTHER, batch=True),
            spent(kind="embeddings"),
        ]
    )
    by_all = await sums(storage, "owner", "key_id", "model", "tier", "batch")
    assert [tuple(one.by.values()) for one in by_all] == [
        (OWNER, None, "m", "default", False),
        (OWNER, "k1", "m", "default", False),
        (OWNER, "k1", "n", "flex", False),
        (OTHER, None, "m", "default", True),
    ]
    filters: list[tuple[dict[str, Any], int]] = [
        ({}, 4),
        ({"owners": (OWNER,)}, 3),
        ({"owners": (OWNER,), "key_ids": ("k1",)}, 2),
        ({"models": ("n", "o")}, 1),
        ({"batch": True}, 1),
        ({"batch": False}, 3),
        ({"kind": "embeddings"}, 1),
    ]
    for fields, expected in filters:
        assert sum(one.counts.requests for one in await sums(storage, **fields)) == expected, fields
    assert await sums(storage, kind="images") == ()


async def test_minutes_become_hours_and_sums_stay(storage: Storage, database_url: str) -> None:
    for at in (NOON, NOON + MINUTE, NOON + 59 * MINUTE, NOON + HOUR, NOON + 2 * HOUR):
        await storage.add_usage([spent(at), spent(at, owner=OTHER), spent(at, key_id="k")])
    before = await sums(storage, "owner", "key_id", width=HOUR)
    went = []
    while num := await storage.fold_usage(NOON + 2 * HOUR + 30 * MINUTE):
        went.append(num)
    assert went == [6, 3, 2, 1]  # an hour and an owner at a time; the hour at work is left alone
    assert await sums(storage, "owner", "key_id", width=HOUR) == before
    assert query(database_url, "SELECT count(*) FROM usage WHERE shard <> -1") == [(3,)]
    assert [one.start for one in await sums(storage, width=MINUTE)] == [NOON, NOON + HOUR, NOON + 2 * HOUR]
    await storage.add_usage([spent(NOON + MINUTE)])  # late
    assert await storage.fold_usage(NOON + 3 * HOUR) == 1
    assert [one.counts.requests for one in await sums(storage, owners=(OWNER,))] == [11]


async def test_a_run_that_is_deleted_counts_what_it_used_until_then(storage: Storage) -> None:
    def spending(plan: bytes, log: Any) -> Spent:
        assert plan == b"plan"
        assert log == [(0, None), (3, b"{}"), (2, None)]
        return spent(counts=Counts(1, 0, 0, sum(num for num, _ in log)))

    claim = await storage.start_response(new("r1"))
    log = (replace(record(2, tokens=(1, 2, 3)), facts=b"{}"), record(3, tokens=(4, 5)))
    await storage.append([RunAppend("r1", claim.fence, records=log)])
    assert await storage.delete_response(OWNER, "r1", now(), spending=spending)
    assert [one.counts for one in await sums(storage)] == [Counts(1, 0, 0, 5)]
    assert isinstance((await end(storage, "r1"))["r1"], RunLost)

    await storage.start_response(new("r2"))
    await end(storage, "r2")
    assert not await storage.delete_response(OWNER, "r2", now(), spending=spending)
    assert [one.counts.requests for one in await sums(storage)] == [2]


async def test_a_purge_counts_runs_that_it_cuts_and_leaves_the_sums(storage: Storage) -> None:
    claim = await storage.start_response(new("r1"))
    await storage.append([RunAppend("r1", claim.fence, records=(record(2, tokens=(1,)),))])
    steps = storage.purge(OWNER, now(), entry=None, spending=lambda plan, log: spent())
    assert [id async for step in steps for id in step.runs] == ["r1"]
    assert await sums(storage) == (UsageSum(0, {}, ONE),)


async def test_two_processes_write_one_minute(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "SHARDS", 4)
    names = [f"runner-{number}" for number in range(64)]
    twin = next(name for name in names if shard_of(name) == shard_of(RUNNER) and name != RUNNER)
    alone = next(name for name in names if shard_of(name) != shard_of(RUNNER))
    opened = [await open_storage(database_url, runner=name, lock=False) for name in (RUNNER, twin, alone)]
    try:
        if opened[0].shared:

            async def write(storage: Storage, name: str) -> None:
                for number in range(20):
                    id = f"{name}.{number}"
                    await storage.start_response(new(id, runner=storage.runner))
                    assert await end(storage, id) == {}
                    await storage.add_usage([spent()])

            await asyncio.gather(*(write(storage, storage.runner) for storage in opened))
        else:
            for storage in opened:
                for number in range(20):
                    await storage.add_usage([spent(), spent(NOON + number)])
        assert await sums(opened[0]) == (UsageSum(0, {}, times(120)),)
        assert query(database_url, "SELECT count(*) FROM usage") == [(2,)]
        folded = await asyncio.gather(*(storage.fold_usage(DAY) for storage in opened))
        assert sum(folded) == 2
        assert await sums(opened[1]) == (UsageSum(0, {}, times(120)),)
    finally:
        for storage in opened:
            await storage.close()


# ------------------------------------------------------------------------------------------------------------
# Persons


async def by_person(storage: Storage, **asked: Any) -> dict[Any, int]:
    """Requests by owner, person and model."""
    found = await sums(storage, "owner", "person", "model", **asked)
    return {tuple(one.by.values()): one.counts.requests for one in found}


async def test_persons_are_told_apart_and_the_sums_of_owners_stay(storage: Storage) -> None:
    await storage.add_usage(
        [
            spent(),
            spent(person="ann"),
            spent(NOON + MINUTE, person="ann"),
            spent(person="ann", model="n", key_id="k", batch=True),
            spent(person="bob"),
            spent(owner=OTHER, person="ann"),
            spent(person="ann", kind="embeddings"),
        ]
    )
    assert await sums(storage) == (UsageSum(0, {}, times(6)),)
    apart = {
        (OWNER, None, "m"): 1,
        (OWNER, "ann", "m"): 2,
        (OWNER, "ann", "n"): 1,
        (OWNER, "bob", "m"): 1,
        (OTHER, "ann", "m"): 1,
    }
    assert await by_person(storage) == apart
    assert (await sums(storage, "person", owners=(OTHER,))) == (UsageSum(0, {"person": "ann"}, ONE),)
    assert await by_person(storage, persons=("ann",), owners=(OWNER,)) == {
        (OWNER, "ann", "m"): 2,
        (OWNER, "ann", "n"): 1,
    }
    assert await sums(storage, persons=("ann", "bob"), batch=False) == (UsageSum(0, {}, times(4)),)
    assert await sums(storage, persons=("ann",), key_ids=("k",), models=("n",)) == (UsageSum(0, {}, ONE),)
    assert await sums(storage, persons=("carol",)) == ()
    while await storage.fold_usage(DAY):
        pass
    assert await by_person(storage) == apart


async def test_persons_are_counted_by_the_hour(storage: Storage) -> None:
    for at in (NOON - 1, NOON, NOON + HOUR - 1, NOON + HOUR):
        await storage.add_usage([spent(at), spent(at, person="ann")])
    found = await sums(storage, "person", width=HOUR, persons=("ann",))
    assert [(one.start, one.counts.requests) for one in found] == [
        (NOON - HOUR, 1),
        (NOON, 2),
        (NOON + HOUR, 1),
    ]
    apart = await sums(storage, "person", since=NOON, before=NOON + HOUR)
    assert {one.by["person"]: one.counts for one in apart} == {None: times(2), "ann": times(2)}


async def test_a_run_counts_once_for_its_person(storage: Storage, database_url: str) -> None:
    claim = await storage.start_response(new("r1"))
    ending = replace(finish(), spent=spent(person="ann"))
    append = RunAppend("r1", claim.fence, records=(record(2),), finish=ending)
    assert await storage.append([append]) == {}
    assert isinstance((await storage.append([append]))["r1"], RunLost)
    assert await sums(storage) == await sums(storage, persons=("ann",)) == (UsageSum(0, {}, ONE),)
    assert query(database_url, "SELECT count(*) FROM person_usage") == [(1,)]


async def test_only_so_many_persons_of_an_hour_are_told_apart(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER, max_persons=3)
    try:
        await storage.add_usage([spent(person=f"p{number}") for number in range(2)])
        await storage.add_usage([spent(person=f"p{number}") for number in (5, 1, 4)])
        await storage.add_usage([spent(person=f"p{number}") for number in (4, 0)])
        await storage.add_usage([spent(owner=OTHER, person="p4"), spent(NOON + HOUR, person="p4")])
        assert await by_person(storage) == {
            (OWNER, "p0", "m"): 2,
            (OWNER, "p1", "m"): 2,
            (OWNER, "p5", "m"): 1,
            (OWNER, "p4", "m"): 1,  # in the next hour
            (OWNER, None, "m"): 2,
            (OTHER, "p4", "m"): 1,
        }
        assert await sums(storage) == (UsageSum(0, {}, times(9)),)
        assert query(database_url, "SELECT count(*) FROM person_usage") == [(5,)]
        before = await by_person(storage)
    finally:
        await storage.close()
    again = await open_storage(database_url, runner="another", max_persons=4)
    try:
        await again.add_usage([spent(person=person) for person in ("p7", "p4", "p0", "p9")])
        after = await by_person(again)
        assert {of: num - before.get(of, 0) for of, num in after.items() if num != before.get(of)} == {
            (OWNER, "p0", "m"): 1,
            (OWNER, "p7", "m"): 1,
            (OWNER, None, "m"): 2,
        }
    finally:
        await again.close()


async def test_a_bound_of_none_tells_nobody_apart(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER, max_persons=0)
    try:
        await storage.add_usage([spent(person="ann")])
        assert await by_person(storage) == {(OWNER, None, "m"): 1}
    finally:
        await storage.close()


async def test_persons_are_forgotten_with_time_and_by_a_purge(storage: Storage) -> None:
    for at in (NOON, NOON + HOUR):
        await storage.add_usage([spent(at, person="ann"), spent(at, owner=OTHER, person="ann")])
    assert await storage.forget_person_usage(NOON + HOUR) == 2
    assert await storage.forget_person_usage(NOON + HOUR) == 0
    assert await by_person(storage) == {
        (OWNER, None, "m"): 1,
        (OWNER, "ann", "m"): 1,
        (OTHER, None, "m"): 1,
        (OTHER, "ann", "m"): 1,
    }
    async for _ in storage.purge(OWNER, now(), entry=None):
        pass
    assert await by_person(storage) == {
        (OWNER, None, "m"): 2,
        (OTHER, None, "m"): 1,
        (OTHER, "ann", "m"): 1,
    }
