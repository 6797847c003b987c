"""Several processes on one database: beats, takeover, the queue. Two openers of each kind of database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from storage import (
    ClosedItem,
    Park,
    RunAppend,
    RunClaim,
    RunLost,
    Storage,
    TooManyQueued,
    open_storage,
)
from storage.queries import runs
from tests.support.making import OTHER, OWNER, call, entry, finish, message, new, now, output, record, url
from tests.support.postgres import Postgres

A, B = "runner-a", "runner-b"

LONG = Park(10**16, 0)


@pytest.fixture(params=["sqlite", "postgresql"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Storage, Storage]]:
    """Two processes' views of one empty database."""
    where = url(tmp_path)
    if request.param == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        where = await postgres.fresh()
    async with AsyncExitStack() as stack:
        opened = []
        for runner in (A, B):
            storage = await open_storage(where, runner=runner, lock=False)
            stack.push_async_callback(storage.close)
            opened.append(storage)
        yield opened[0], opened[1]


async def start(storage: Storage, id: str, **fields: object) -> RunClaim:
    """A run of this process."""
    return await storage.start_response(
        replace(new(id, message(f"{id}.in")), runner=storage.runner, **fields)
    )


async def queue(storage: Storage, id: str, owner: str = OWNER, **fields: object) -> None:
    """A run of nobody."""
    queued = new(id, message(f"{id}.in"), owner=owner, runner=None, status="queued")
    await storage.start_response(replace(queued, **fields))


async def parked(storage: Storage, id: str, park: Park = LONG) -> RunClaim:
    """A run that waits for the output of its call `a`."""
    claim = await start(storage, id)
    closed = (ClosedItem(0, call(f"{id}.fc", "a")),)
    append = RunAppend(id, claim.fence, records=(record(2),), closed=closed, park=park)
    assert not await storage.append([append])
    return claim


# ------------------------------------------------------------------------------------------------------------
# Beats


async def test_beats_are_counted_and_seen(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    assert not await a.beat()
    assert await a.beat()
    assert not await b.beat()
    assert (await b.list_processes(0)).beats == {A: 2, B: 1}
    await a.release()
    assert (await b.list_processes(0)).beats == {B: 1}


async def test_an_owner_without_a_beat_is_seen(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    await start(a, "r1")
    seen = await b.list_processes(0)
    assert (dict(seen.beats), seen.has_free, seen.has_due) == ({A: None}, False, False)
    assert await b.release_runs(A, None) == 1
    seen = await b.list_processes(0)
    assert (dict(seen.beats), seen.has_free) == ({}, True)


# ------------------------------------------------------------------------------------------------------------
# Takeover


async def test_the_runs_of_a_dead_process_go_on_elsewhere(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    await a.beat()
    first = await start(a, "r1")
    assert not await a.append([RunAppend("r1", first.fence, records=(record(2, 3),))])
    assert await b.claim("r1") is None and await b.take(10) == ()  # it has an owner

    assert await b.release_runs(A, (await b.list_processes(0)).beats[A]) == 1
    [claim] = await b.take(10)
    assert (claim.response_id, claim.state, claim.next_seq, claim.attempt) == ("r1", "running", 5, 1)
    assert [r.first_seq for r in await b.records("r1", after=-1)] == [0, 2]
    assert (await b.list_processes(0)).beats == {B: None}

    # It was only slow: whatever it still wants to write is refused, its end too.
    late = RunAppend("r1", first.fence, records=(record(5),), head=b"late", finish=finish("failed"))
    assert isinstance((await a.append([late]))["r1"], RunLost)
    with pytest.raises(RunLost):
        await a.admit(first)
    assert not await a.beat()  # and it learns that it was taken for dead
    await b.admit(claim)
    assert not await b.append([RunAppend("r1", claim.fence, records=(record(5),), finish=finish())])
    stored = await a.get_response(OWNER, "r1")
    assert (stored.status, stored.head, stored.run) == ("completed", b'{"head":1}', None)


async def test_a_process_whose_beat_has_moved_keeps_its_runs(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    await a.beat()
    claim = await start(a, "r1")
    seen = (await b.list_processes(0)).beats[A]
    await a.beat()
    assert await b.release_runs(A, seen) == 0 and await b.release_runs(A, None) == 0
    assert (await b.list_processes(0)).beats == {A: 2}
    assert not await a.append([RunAppend("r1", claim.fence, records=(record(2),))])


async def test_appends_race_a_takeover(pair: tuple[Storage, Storage]) -> None:
    """What was committed is in the log that the next owner reads; what comes after its claim is refused."""
    a, b = pair
    refused = 0
    for number in range(20):
        id = f"r{number}"
        claim = await start(a, id)

        async def write(id: str = id, fence: int = claim.fence) -> int:
            for seq in range(2, 12):
                if await a.append([RunAppend(id, fence, records=(record(seq),))]):
                    return seq
            return 12

        async def take_over(delay: int = number % 5) -> RunClaim:
            for _ in range(delay):
                await b.list_processes(0)
            while not (claims := await b.take(1)):  # its row may be in the middle of an append
                await b.release_runs(A, None)
            return claims[0]

        end, taken = await asyncio.gather(write(), take_over())
        log = await b.records(id, after=-1)
        assert taken.next_seq == end == log[-1].first_seq + log[-1].num_events
        refused += end < 12
        assert not await b.append([RunAppend(id, taken.fence, records=(record(end),), finish=finish())])
    assert refused


async def test_two_survivors_share_what_a_dead_process_left(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    ids = {f"r{number}" for number in range(40)}
    for id in sorted(ids):
        await a.start_response(new(id, runner="dead"))
    freed = await asyncio.gather(a.release_runs("dead", None), b.release_runs("dead", None))
    assert sum(freed) == len(ids)
    taken = await _take_all(a, b)
    assert {claim.response_id for claim in taken} == ids and len(taken) == len(ids)


async def test_a_peaceful_end_hands_over_at_once_and_blames_nobody(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    await a.beat()
    first = await start(a, "r1")
    await a.release()
    assert (await b.list_processes(0)).has_free
    assert isinstance((await a.append([RunAppend("r1", first.fence, records=(record(2),))]))["r1"], RunLost)
    [claim] = await b.take(1)
    assert (claim.state, claim.strikes, claim.attempt) == ("running", 0, 1)


async def test_an_unstored_run_dies_with_its_process(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    for id in ("c1", "c2"):
        await a.create_conversation(OWNER, id, now(), b"{}")
    await start(a, "r1", store=False, conversation_id="c1", record=None, input_items=())
    await start(b, "r2", store=False, conversation_id="c2", record=None, input_items=())
    await b.release_runs(A, None)
    assert await b.take(10) == ()
    assert (await b.get_conversation(OWNER, "c1")).active_response_id is None
    assert (await b.get_conversation(OWNER, "c2")).active_response_id == "r2"


# ------------------------------------------------------------------------------------------------------------
# The queue


async def _take_all(*storages: Storage) -> list[RunClaim]:
    async def take(storage: Storage) -> list[RunClaim]:
        mine: list[RunClaim] = []
        while (await storage.list_processes(0)).has_free:
            mine += await storage.take(3)
        return mine

    return [claim for claims in await asyncio.gather(*map(take, storages)) for claim in claims]


async def test_the_queue_is_shared_and_no_run_is_taken_twice_or_lost(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    ids = {f"r{number:02}" for number in range(60)}
    for number, id in enumerate(sorted(ids)):
        await queue(pair[number % 2], id, owner=(OWNER, OTHER)[number % 3 == 0])
    taken = await _take_all(a, b)
    assert {claim.response_id for claim in taken} == ids and len(taken) == len(ids)
    assert all((claim.state, claim.attempt, claim.fence) == ("queued", 1, 2) for claim in taken)
    assert (await a.run_status([])).keys() | (await b.run_status([])).keys() == ids


async def _order(storage: Storage) -> list[str]:
    """Take all, one by one, checking that each was said to be next."""
    order = []
    while claims := await storage.take(1):
        order += [claim.response_id for claim in claims]
    return order


async def _places(storage: Storage, *ids: tuple[str, str]) -> list[str]:
    runs = [((await storage.get_response(owner, id)).run, id) for owner, id in ids]
    return [id for _, id in sorted((run.place, id) for run, id in runs if run and run.place)]


async def test_owners_take_turns(pair: tuple[Storage, Storage]) -> None:
    a, _ = pair
    for number in range(4):
        await queue(a, f"a{number}")
    for number in range(2):
        await queue(a, f"b{number}", owner=OTHER)
    ids = [(OWNER, f"a{number}") for number in range(4)] + [(OTHER, f"b{number}") for number in range(2)]
    expected = ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert await _places(a, *ids) == expected
    assert [(run.run.place if run.run else 0) for run in (await a.list_responses(OTHER, limit=9)).data] == [
        4,
        2,
    ]
    assert await _order(a) == expected


async def test_what_an_owner_has_at_work_counts_wherever_it_runs(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    for number in range(2):
        await start(b, f"busy{number}")
    for number in range(2):
        await queue(a, f"a{number}")
    for number in range(4):
        await queue(a, f"b{number}", owner=OTHER)
    assert await _order(a) == ["b0", "b1", "a0", "b2", "a1", "b3"]


async def test_turns_go_by_weight(pair: tuple[Storage, Storage]) -> None:
    """Of eight places, six are an owner's with three times the weight, where all runs are alike."""
    a, b = pair
    for owner in (OWNER, OTHER):
        await a.create_owner(owner, owner, now(), entry=entry())
    await a.limit_owner(OWNER, lambda _: b'{"weight": 3, "tokens_per_minute": 5}', entry=entry())
    await a.limit_owner(OTHER, lambda _: b'{"tokens_per_minute": 5}', entry=entry())
    for number in range(12):
        await queue(a, f"o{number:02}", owner=OTHER)
    for number in range(12):
        await queue(a, f"w{number:02}")
    order = [claim.response_id for claim in [*await a.take(5), *await b.take(3)]]
    assert order == ["o00", "w00", "w01", "w02", "o01", "w03", "w04", "w05"]
    ids = [(OTHER, "o02"), (OWNER, "w06"), (OWNER, "w07"), (OWNER, "w08")]
    assert await _places(b, *ids) == ["o02", "w06", "w07", "w08"]


async def test_priority_comes_before_fairness_and_age(pair: tuple[Storage, Storage]) -> None:
    a, _ = pair
    await queue(a, "flex", priority=1)
    await queue(a, "b0", owner=OTHER)
    await queue(a, "a0")
    await queue(a, "urgent", priority=-1)
    await queue(a, "urgent2", priority=-1)
    assert await _order(a) == ["urgent", "urgent2", "b0", "a0", "flex"]


async def test_what_has_begun_goes_on_before_anything_new(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    await queue(a, "urgent", priority=-1)
    await start(a, "cut", priority=1)
    await b.release_runs(A, None)
    assert await _places(b, (OWNER, "urgent"), (OWNER, "cut")) == ["urgent"]
    assert (await b.get_response(OWNER, "urgent")).run.place == 2  # type: ignore[union-attr]
    assert await _order(b) == ["cut", "urgent"]


async def test_a_run_that_was_fed_and_forgotten_is_taken_up(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    await parked(a, "fed")
    assert (await a.add_tool_outputs(OWNER, "fed", [output("a")], now())).runnable
    assert (await b.get_response(OWNER, "fed")).run.place is None  # type: ignore[union-attr]
    [claim] = await b.take(9)
    assert (claim.response_id, claim.state, claim.attempt) == ("fed", "queued", 2)


async def test_an_owner_may_queue_so_many_and_no_more(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    for number in range(3):
        await queue(a, f"r{number}", queue_limit=3)
    with pytest.raises(TooManyQueued):
        await queue(b, "r3", queue_limit=3)
    await queue(b, "other", owner=OTHER, queue_limit=3)
    await b.take(1)
    await queue(b, "r3", queue_limit=3)


# ------------------------------------------------------------------------------------------------------------
# Runs of others


async def test_a_glance_tells_how_runs_stand(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    claim = await start(a, "r1")
    await start(b, "mine")
    await queue(a, "waits")
    await a.append([RunAppend("r1", claim.fence, records=(record(2, 4),))])
    await b.request_cancel(OWNER, "r1")
    seen = await b.run_status(["r1", "gone"])
    assert set(seen) == {"r1", "mine"}
    assert (seen["r1"].runner, seen["r1"].next_seq, seen["r1"].cancel_requested) == (A, 6, True)
    assert set(await a.run_status([])) == {"r1"}
    await a.append([RunAppend("r1", claim.fence, records=(record(6),), finish=finish("cancelled"))])
    assert set(await b.run_status(["r1"])) == {"mine"}


async def test_an_owner_learns_that_its_run_is_read_elsewhere(pair: tuple[Storage, Storage]) -> None:
    a, b = pair
    await start(a, "r1")
    assert await a.watched("r1") == 0
    assert await b.mark_watched(["r1", "gone"]) == ("r1",)
    assert await a.watched("r1") == 1 and await a.watched("gone") == 0


@pytest.mark.parametrize("first", ["cancel", "park"])
async def test_a_waiting_run_that_is_to_be_cancelled_is_due(
    pair: tuple[Storage, Storage], first: str
) -> None:
    a, b = pair
    if first == "cancel":
        claim = await start(a, "r1")
        await b.request_cancel(OWNER, "r1")
        await a.append([RunAppend("r1", claim.fence, park=LONG)])
    else:
        await parked(a, "r1")
        assert not (await b.list_processes(10**15)).has_due
        await b.request_cancel(OWNER, "r1")
    assert (await b.list_processes(0)).has_due
    due = await asyncio.gather(a.claim_due(0), b.claim_due(0))
    [claim] = [claim for claims in due for claim in claims]
    assert claim.cancel_requested and claim.state == "waiting"
    assert not (await b.list_processes(10**15)).has_due


async def test_runs_that_are_out_of_time_are_taken_over_some_at_a_time(
    pair: tuple[Storage, Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr(runs, "DUE", 2, raising=False)
    for number in range(3):
        await parked(a, f"r{number}", Park(0, 0))
    for expected in (2, 1, 0):
        assert (await b.list_processes(10**15)).has_due == bool(expected)
        assert len(await b.claim_due(10**15)) == expected


async def test_deadlines_are_by_one_clock(pair: tuple[Storage, Storage]) -> None:
    """On a database that several processes share, the clocks of these may differ by years."""
    a, b = pair
    await parked(a, "over", Park(0, 10**17 if a.shared else 499))
    await parked(a, "begun", Park(3_600_000_000, 0))
    if not a.shared:
        assert not (await b.list_processes(498)).has_due and await b.claim_due(498) == ()
    early, late = (0, 10**17) if a.shared else (499, 3_600_000_000 - 1)
    assert (await b.list_processes(early)).has_due
    assert [due.response_id for due in await b.claim_due(early)] == ["over"]
    assert not (await b.list_processes(late)).has_due and await b.claim_due(late) == ()
    if not a.shared:
        assert [due.response_id for due in await b.claim_due(late + 1)] == ["begun"]


async def test_of_two_claims_one_wins(pair: tuple[Storage, Storage]) -> None:
    for number in range(10):
        await parked(pair[0], f"r{number}")
        await pair[0].add_tool_outputs(OWNER, f"r{number}", [output("a")], now())
        claims = await asyncio.gather(*(storage.claim(f"r{number}") for storage in pair))
        assert len([claim for claim in claims if claim is not None]) == 1
