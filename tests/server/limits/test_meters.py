"""Counts that several servers keep together, and that outlive them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from engine import ScriptedEngine
from server import clock as server_clock
from server.clock import now_ns
from server.limits.gcra import SECOND, Rate
from server.limits.limit_set import DAY, MINUTE
from server.limits.meters import SLICE, Meters
from storage import Storage, StorageUnavailable, open_storage
from tests.server.limits.test_limiter import held, used
from tests.support.blocking import until
from tests.support.making import url
from tests.support.postgres import Postgres
from tests.support.running import http_client, running_app


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "sqlite":
        yield url(tmp_path)
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    fresh = await postgres.fresh()
    yield fresh
    await postgres.give_back(fresh)


@asynccontextmanager
async def metering(
    database: str, runner: str = "r", time: Callable[[], int] | None = None
) -> AsyncIterator[Meters]:
    """Meters of one server, flushed at its end."""
    storage = await open_storage(database, runner=runner)
    meters = Meters(storage) if time is None else Meters(storage, time)
    meters.start()
    try:
        yield meters
    finally:
        await meters.close()
        await storage.close()


async def arrivals(database: str) -> dict[str, int]:
    """What the database holds of each limit: for how long it is used up, in nanoseconds."""
    storage = await open_storage(database, runner="reader")
    try:
        return {id: left for id in ("a", "b") if (left := await _left(storage, id)) > 0}
    finally:
        await storage.close()


async def _left(storage: Storage, id: str) -> int:
    return await storage.move_quotas([id], lambda states, now: ({}, states[id] - now), now_ns())


@pytest.mark.parametrize("limit", [120, 3000])
async def test_three_servers_let_through_what_one_may(postgres: Postgres, limit: int) -> None:
    """64 clients of three servers, for a second and a half: never more than the limit and what came back
    meanwhile, and at most 5 % less."""
    database = await postgres.fresh()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(metering(database, f"r{n}")) for n in range(3)]
        clock = asyncio.get_running_loop().time
        began, passed = clock(), 0

        async def client(number: int) -> None:
            nonlocal passed
            meters = servers[number % 3]
            while clock() < began + 1.5:
                if await meters.take([(meters.meter("a", Rate(limit, MINUTE)), 1)]) is None:
                    passed += 1
                else:
                    await asyncio.sleep(0.02)

        await asyncio.gather(*map(client, range(64)))
        most = limit * (1 + (clock() - began) / 60) + 1
    assert 0.95 * limit <= passed <= most, (passed, most)
    await postgres.give_back(database)


async def test_what_was_reserved_and_settled_by_three_servers_adds_up(postgres: Postgres) -> None:
    database = await postgres.fresh()
    rate = Rate(10_000_000, DAY)
    spent = 0
    draw = random.Random(7)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(metering(database, f"r{n}")) for n in range(3)]

        async def client(number: int) -> None:
            nonlocal spent
            meters = servers[number % 3]
            for _ in range(5):
                meter = meters.meter("a", rate)
                assert await meters.take([(meter, 5000)]) is None
                await asyncio.sleep(0)
                used = draw.randrange(9000)
                meters.charge(meter, used - 5000)
                spent += used

        await asyncio.gather(*map(client, range(64)))
    (left,) = (await arrivals(database)).values()
    assert abs(left * rate.limit // DAY - spent) < 0.002 * rate.limit, "but for what came back meanwhile"
    await postgres.give_back(database)


async def test_who_takes_and_who_only_asks_can_wait_together(postgres: Postgres) -> None:
    """A request asks whether any tokens are left, while another takes some: neither fails of the other."""
    database = await postgres.fresh()
    async with metering(database) as meters:
        meter = meters.meter("a", Rate(1000, DAY))
        found = await asyncio.gather(*(meters.take([(meter, units)]) for units in (0, 5, 0, 7, 0)))
        assert found == [None] * 5
        assert meters._waiting == {}
    await postgres.give_back(database)


async def test_one_holds_no_more_than_a_slice_of_the_others(postgres: Postgres) -> None:
    database = await postgres.fresh()
    async with metering(database, "r1") as one, metering(database, "r2") as two:
        rate = Rate(1000, DAY)
        assert await one.take([(one.meter("a", rate), 1)]) is None
        assert one.meter("a", rate).held == 1000 // SLICE - 1
        assert await two.take([(two.meter("a", rate), 1000 - 1000 // SLICE)]) is None
        assert await two.take([(two.meter("a", rate), 1)]) is not None
        await until(lambda: one.meter("a", rate).held == 0)  # given back, as nobody spends it
        async with asyncio.timeout(10):  # for a second a refusal is believed
            while await two.take([(two.meter("a", rate), 9)]) is not None:
                await asyncio.sleep(0.05)
    await postgres.give_back(database)


async def test_what_is_given_back_at_ends_does_not_pile_up(postgres: Postgres) -> None:
    """Answers that are shorter than expected leave no more than a slice at a server that is busy."""
    database = await postgres.fresh()
    async with metering(database) as meters:
        meter = meters.meter("a", Rate(10_000, DAY))
        assert await meters.take([(meter, 5000)]) is None
        meters.charge(meter, -4000)
        assert meter.held >= 4000

        def busy() -> bool:
            meter.used = True
            return meter.held > 10_000 // SLICE

        await until(lambda: not busy())
        assert meter.held == 10_000 // SLICE
    await postgres.give_back(database)


async def test_counts_outlive_a_server(database: str) -> None:
    rate = Rate(10, DAY)
    async with metering(database) as meters:
        assert await meters.take([(meters.meter("a", rate), 7)]) is None
    async with metering(database) as meters:
        meter, units, wait = await meters.take([(meters.meter("a", rate), 4)]) or pytest.fail("let through")
        assert (meter.id, units) == ("a", 4) and wait is not None and 0 < wait <= DAY // 10
        assert await meters.take([(meters.meter("a", rate), 3)]) is None


HOUR = 3600 * SECOND


async def test_a_clock_that_is_set_back_between_two_servers_refuses_nobody_for_long(database: str) -> None:
    """What an hour's step back leaves of a limit of one minute is that limit, used up. Where a database is
    shared, its own clock counts."""
    rate = Rate(60, MINUTE)
    async with metering(database, time=lambda: now_ns() + HOUR) as meters:
        assert await meters.take([(meters.meter("a", rate), 60)]) is None
    async with metering(database) as meters:
        _, _, wait = await meters.take([(meters.meter("a", rate), 1)]) or pytest.fail("let through")
        assert wait is not None and 0 < wait <= SECOND
    async with metering(database) as meters:  # and settling knows no more than that either
        meters.charge(meters.meter("a", rate), 6)
    assert (await arrivals(database))["a"] <= MINUTE + 6 * SECOND


async def test_limits_go_by_the_clock_that_nobody_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with metering(url(tmp_path)) as meters:
        monkeypatch.setattr(server_clock, "_START_NS", server_clock._START_NS + HOUR)
        assert abs(now_ns() - meters.now()) < SECOND
        assert await meters.take([(meters.meter("a", Rate(60, MINUTE)), 1)]) is None
    assert (await arrivals(url(tmp_path)))["a"] <= SECOND


async def test_what_is_settled_before_it_was_read_counts(database: str) -> None:
    """A run that an earlier server left may end before anybody asks for its limits."""
    rate = Rate(10, DAY)
    async with metering(database) as meters:
        assert await meters.take([(meters.meter("a", rate), 7)]) is None
    async with metering(database) as meters:
        meters.charge(meters.meter("a", rate), -4)
        assert await meters.take([(meters.meter("a", rate), 8)]) is not None
        assert await meters.take([(meters.meter("a", rate), 7)]) is None


async def test_all_or_none(database: str) -> None:
    async with metering(database) as meters:
        wide, narrow = meters.meter("a", Rate(1000, DAY)), meters.meter("b", Rate(1, DAY))
        assert await meters.take([(wide, 1), (narrow, 1)]) is None
        refused = await meters.take([(wide, 1), (narrow, 1)])
        assert refused is not None and refused[0] is narrow
    assert (await arrivals(database))["a"] <= DAY // 1000


async def test_a_limit_that_changes_keeps_the_share_that_is_used(database: str) -> None:
    async with metering(database) as meters:
        assert await meters.take([(meters.meter("a", Rate(10, DAY)), 5)]) is None
        assert meters.meter("a", Rate(100, DAY)).remaining(meters.now() + SECOND) in range(50, 57)


async def test_a_database_that_is_away_refuses_nobody_for_good(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with metering(database) as meters:
        storage = meters._storage
        move = storage.move_quotas

        async def away(*_: object) -> None:
            raise StorageUnavailable("away")

        monkeypatch.setattr(storage, "move_quotas", away)
        with pytest.raises(StorageUnavailable):
            await meters.take([(meters.meter("a", Rate(10, DAY)), 1)])
        monkeypatch.setattr(storage, "move_quotas", move)
        assert await meters.take([(meters.meter("a", Rate(10, DAY)), 10)]) is None


async def test_a_run_that_a_server_left_is_settled_by_the_next(tmp_path: Path) -> None:
    limits = ("tokens_per_day=100000",)
    async with (
        running_app(tmp_path, ScriptedEngine(held), owner_limit=limits) as server,
        http_client(server) as client,
    ):
        asked = {"input": "say hold", "background": True}
        made = (await client.post("/v1/responses", json=asked)).json()["id"]
        assert used(server, "tokens_per_day") > 256
    async with running_app(tmp_path, owner_limit=limits) as server, http_client(server) as client:
        reply = (await client.get(f"/v1/responses/{made}?wait=10")).json()
        assert reply["status"] == "completed"
        assert (await client.post("/v1/responses", json={"input": "say hi"})).status_code == 200
        await until(lambda: used(server, "tokens_per_day") < 200)
        assert used(server, "tokens_per_day") > reply["usage"]["total_tokens"]
