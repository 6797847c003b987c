"""The queue's fair shares: tokens, by weight, between the owners of queued runs.

Two processes on each kind of database; what else the queue does stands in `test_fleet`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from storage import (
    Account,
    ClosedItem,
    Counts,
    OfModels,
    Park,
    RunAppend,
    RunClaim,
    Spent,
    Storage,
    open_storage,
)
from tests.support.making import OTHER, OWNER, call, entry, finish, new, now, output, record, rows, url
from tests.support.postgres import Postgres

THIRD = "tenant-c"

Pair = tuple[Storage, Storage]


@pytest.fixture(params=["sqlite", "postgresql"])
async def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return url(tmp_path)
    postgres: Postgres = request.getfixturevalue("postgres")
    return await postgres.fresh()


@pytest.fixture
async def pair(where: str) -> AsyncIterator[Pair]:
    """Two processes' views of it."""
    async with AsyncExitStack() as stack:
        opened = []
        for runner in ("runner-a", "runner-b"):
            storage = await open_storage(where, runner=runner, lock=False)
            stack.push_async_callback(storage.close)
            opened.append(storage)
        yield opened[0], opened[1]


async def queue(storage: Storage, owner: str, ids: Sequence[str], cost: int = 100, priority: int = 0) -> None:
    """Runs of nobody, which are expected to take so many tokens each."""
    runs = [replace(new(id, owner=owner, runner=None, status="queued"), cost=cost) for id in ids]
    await asyncio.gather(*(storage.start_response(replace(run, priority=priority)) for run in runs))


def named(prefix: str, number: int, start: int = 0) -> list[str]:
    return [f"{prefix}{index:03}" for index in range(start, start + number)]


def _replaced_by(limits: bytes, _: bytes | None) -> bytes:
    return limits


async def weigh(storage: Storage, weights: Mapping[str, float]) -> None:
    for owner, weight in weights.items():
        await storage.create_owner(owner, owner, now(), entry=entry())
        limits = b'{"weight": %g}' % weight
        await storage.limit_owner(owner, partial(_replaced_by, limits), entry=entry())


async def end(storage: Storage, claim: RunClaim, tokens: int = 100, weight: float = 1.0) -> None:
    """A run ends that took so many tokens."""
    account = Account(claim.owner, None, "m", "default")
    spent = Spent(now(), account, Counts(1, tokens), served=tokens / weight)
    ending = replace(finish(), spent=spent)
    assert not await storage.append(
        [RunAppend(claim.response_id, claim.fence, records=(record(claim.next_seq),), finish=ending)]
    )


async def order(storage: Storage) -> list[str]:
    """All that are queued, taken one by one; none of them ends."""
    found = []
    while claims := await storage.take(1):
        found += [claim.response_id for claim in claims]
    return found


async def shares(pair: Pair, tokens: Mapping[str, int], queued: Mapping[str, int]) -> Counter[str]:
    """What each owner was served, in tokens, by the time that one of them has nothing queued any more. Either
    process has two places, and what began first in it ends first. tokens: that a run takes."""
    served: Counter[str] = Counter()
    left = Counter(queued)
    at_work: tuple[list[RunClaim], list[RunClaim]] = ([], [])
    while all(left.values()):
        for storage, claims in zip(pair, at_work, strict=True):
            if len(claims) == 2:
                ended = claims.pop(0)
                await end(storage, ended, tokens[ended.owner])
                served[ended.owner] += tokens[ended.owner]
            for claim in await storage.take(1):
                claims.append(claim)
                left[claim.owner] -= 1
    return served


LONG, SHORT = 8_000, 50
"""Tokens of prompts; an answer has a hundred."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (3, 1)])
async def test_long_prompts_and_short_ones_get_tokens_by_weight(pair: Pair, weights: tuple[int, int]) -> None:
    """Places by weight would give the owner of long prompts fifty times as many tokens."""
    a, b = pair
    weight = dict(zip((OWNER, OTHER), weights, strict=True))
    await weigh(a, weight)
    tokens = {OWNER: LONG + 100, OTHER: SHORT + 100}
    queued = {OWNER: 8, OTHER: 400}
    await queue(a, OWNER, named("long", queued[OWNER]), tokens[OWNER])
    await queue(b, OTHER, named("short", queued[OTHER]), tokens[OTHER])
    served: Counter[str] = Counter()
    left = Counter(queued)
    at_work: list[tuple[Storage, RunClaim]] = []
    while all(left.values()):
        storage = pair[left.total() % 2]
        for claim in await storage.take(1):
            at_work.append((storage, claim))
            served[claim.owner] += tokens[claim.owner]
            left[claim.owner] -= 1
        if len(at_work) == 4:
            storage, claim = at_work.pop(0)
            await end(storage, claim, tokens[claim.owner], weight[claim.owner])
    ahead = served[OWNER] / weight[OWNER] - served[OTHER] / weight[OTHER]
    assert abs(ahead) <= max(tokens[owner] / weight[owner] for owner in weight)
    assert min(served.values()) > 2 * LONG


async def test_what_was_really_taken_counts(pair: Pair) -> None:
    """All runs are expected to take as much; those of one owner take ten times as much as another's."""
    a, b = pair
    await queue(a, OWNER, named("a", 30))
    await queue(b, OTHER, named("b", 100))
    served = await shares(pair, {OWNER: 1000, OTHER: 100}, {OWNER: 30, OTHER: 100})
    assert served[OTHER] >= 5000
    assert abs(served[OWNER] - served[OTHER]) <= 4 * 1000  # as many as are at work at once


async def test_a_newcomer_starts_level_with_the_least_served(pair: Pair) -> None:
    """It is neither made to wait for what others were served before it came, nor put before all of that."""
    a, b = pair
    await queue(a, OWNER, named("a", 20))
    for _ in range(16):
        [claim] = await a.take(1)
        await end(a, claim)
    await queue(b, OTHER, named("b", 4))
    assert await order(b) == ["a016", "b000", "a017", "b001", "a018", "b002", "a019", "b003"]


async def test_an_idle_owner_saves_nothing_up_and_is_forgiven_nothing(pair: Pair) -> None:
    a, b = pair
    await queue(a, OWNER, named("a", 30))
    await queue(b, OTHER, named("b", 1))
    await queue(b, THIRD, named("c", 1))
    tokens = {OWNER: 100, OTHER: 100, THIRD: 450}
    for number in range(12):  # both others have come and gone, and the first has had 1,000
        for claim in await pair[number % 2].take(1):
            await end(pair[number % 2], claim, tokens[claim.owner])
    await queue(b, OTHER, named("b", 3, start=1))
    for expected in ("a010", "b001", "a011", "b002", "a012", "b003"):
        [claim] = await a.take(1)
        assert claim.response_id == expected
        await end(a, claim)
    await queue(a, THIRD, named("d", 2))  # had 450, less than all others by now
    assert (await order(b))[:4] == ["a013", "d000", "a014", "d001"]


async def test_who_was_served_more_waits_after_a_pause_too(pair: Pair) -> None:
    a, b = pair
    await queue(a, OWNER, named("a", 1))
    await queue(a, OTHER, named("b", 20))
    [claim] = await a.take(1)
    await end(a, claim, 550)
    await queue(b, OWNER, named("a", 2, start=1))  # its queue was empty for a moment
    assert (await order(b))[:8] == [*named("b", 6), "a001", "b006"]


async def test_a_tier_has_counters_of_its_own(pair: Pair) -> None:
    a, b = pair
    await queue(a, OWNER, named("flex", 3), priority=1)
    await queue(b, OTHER, named("other", 3), priority=1)
    await queue(a, OWNER, named("now", 3))
    for _ in range(3):
        [claim] = await a.take(1)
        assert claim.response_id.startswith("now")
        await end(a, claim, 9000)
    assert await order(b) == ["flex000", "other000", "flex001", "other001", "flex002", "other002"]


async def test_shares_outlive_the_processes(where: str) -> None:
    storage = await open_storage(where, runner="first")
    await queue(storage, OWNER, named("a", 4))
    await queue(storage, OTHER, named("b", 9))
    for claim in await storage.take(2):
        await end(storage, claim, 510 if claim.owner == OWNER else 100)
    await storage.close()
    storage = await open_storage(where, runner="second")
    assert await order(storage) == [*named("b", 5, start=1), "a001", "b006", "a002", "b007", "a003", "b008"]
    await storage.close()


async def test_a_cut_run_counts_once(pair: Pair) -> None:
    """Neither twice, where it is carried on elsewhere, nor not at all."""
    a, b = pair
    await queue(a, OWNER, named("a", 3))
    await queue(a, OTHER, named("b", 4))
    await a.take(1)
    await b.release_runs(a.runner, None)
    [again] = await b.take(1)
    assert again.response_id == "a000"
    await end(b, again, 150)
    assert await order(b) == ["b000", "b001", "a001", "b002", "a002", "b003"]


async def test_a_wait_for_tools_does_not_save_up_either(pair: Pair) -> None:
    """A run that was parked comes back to the queue as its owner's only one."""
    a, b = pair
    claim = await a.start_response(replace(new("fed", owner=OTHER, runner=a.runner), cost=100))
    closed = (ClosedItem(0, call("fed.fc", "c")),)
    await a.append([RunAppend("fed", claim.fence, records=(record(2),), closed=closed, park=Park(10**16, 0))])
    await queue(a, OWNER, named("a", 9))
    for _ in range(3):
        [run] = await a.take(1)
        await end(a, run, 1000)
    assert (await b.add_tool_outputs(OTHER, "fed", [output("c")], now())).runnable
    await queue(b, OTHER, named("b", 2))
    assert (await order(b))[:4] == ["fed", "a003", "a004", "b000"]


async def test_places_are_the_order(pair: Pair) -> None:
    """Whatever runs are queued: what each is told of its place, and when it is taken, agree."""
    a, b = pair
    draw = random.Random(11)
    names = [OWNER, OTHER, THIRD]
    await weigh(a, {OTHER: 3, THIRD: 0.7})
    for number in range(60):
        storage = draw.choice(pair)
        await queue(
            storage, draw.choice(names), [f"r{number}"], draw.randint(1, 500), draw.choice((-1, 0, 0, 7))
        )
        if draw.random() < 0.3:
            for claim in await storage.take(draw.randint(1, 2)):
                if draw.random() < 0.6:
                    await end(storage, claim, draw.randint(1, 900))
    queued = [one for name in names for one in (await a.list_responses(name, limit=100)).data if one.run]
    placed = {one.run.place: one.id for one in queued if one.run is not None and one.run.place is not None}
    assert len(placed) > 20 and sorted(placed) == list(range(1, len(placed) + 1))
    expected = [placed[place] for place in sorted(placed)]
    assert [claim.response_id for claim in await b.take(9)] == expected[:9]
    assert await order(a) == expected[9:]


# ------------------------------------------------------------------------------------------------------------
# What is kept of it


async def _counters(storage: Storage) -> int:
    return (await rows(storage)).get("queue_shares", 0)


async def test_nothing_is_counted_while_nobody_waits(pair: Pair) -> None:
    a, _ = pair
    for id in named("a", 3):
        await end(a, await a.start_response(new(id, runner=a.runner)))
    await queue(a, OWNER, ["last"])
    [claim] = await a.take(1)
    await end(a, claim)
    assert await _counters(a) == 0


async def test_counters_are_put_together_and_then_forgotten(pair: Pair) -> None:
    a, b = pair
    await queue(a, OWNER, named("a", 8))
    await queue(a, OTHER, named("b", 8))
    for storage in (a, b, a, b):
        for claim in await storage.take(2):
            await end(storage, claim, 220 if claim.owner == OWNER else 100)
    assert await _counters(a) == 4  # of two owners, by two processes
    assert await a.forget_shares() == 2 and await b.forget_shares() == 0
    assert (await order(b))[:3] == ["b005", "b006", "a003"]  # from 500 and 660
    assert await a.forget_shares() == 2 and await _counters(a) == 0


async def test_a_purge_takes_the_counter_too(pair: Pair) -> None:
    a, _ = pair
    await queue(a, OWNER, named("a", 2))
    [claim] = await a.take(1)
    await end(a, claim)
    assert await _counters(a) == 1
    async for _ in a.purge(OWNER, now(), entry=None):
        pass
    assert await _counters(a) == 0


# ------------------------------------------------------------------------------------------------------------
# Of some models


async def test_only_runs_of_the_models_asked_for_are_taken(pair: Pair) -> None:
    a, b = pair
    for index, (owner, model) in enumerate([(OWNER, "m"), (OWNER, "m"), (OWNER, "n"), (OTHER, "o")]):
        run = new(f"r{index}", owner=owner, model=model, runner=None, status="queued")
        await a.start_response(replace(run, created_at=run.created_at + index))
    assert sorted(await a.free_models()) == ["m", "n", "o"]
    assert await a.claim("r0", OfModels(("n",))) is None
    # The runs of another model before it hold nothing up.
    assert [claim.response_id for claim in await a.take(1, OfModels(("n",)))] == ["r2"]
    assert [claim.response_id for claim in await b.take(9, OfModels(("m",), others=True))] == ["r3"]
    assert await a.free_models() == ("m",)
    # Nor do those that are left out.
    assert await a.claim("r1", OfModels((), others=True, but=("r1",))) is None
    assert await a.take(9, OfModels(("m",), but=("r0", "r1"))) == ()
    # One that is to be cancelled needs no model.
    await a.request_cancel(OWNER, "r1")
    assert [claim.response_id for claim in await b.take(9, OfModels((), but=("r1",)))] == ["r1"]
    assert [claim.response_id for claim in await b.take(9)] == ["r0"]
