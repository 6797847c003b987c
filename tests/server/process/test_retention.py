"""Retention as a client sees it: what was pruned is said so, and what stays works; the task that prunes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import httpx
import pytest

from engine import ScriptedEngine
from server.clock import now_us
from server.config import Config
from server.event_profiles import View
from server.http.sse import StreamCut
from server.process import retention
from server.process.retention import DAY_S, Pace, Retention, limits
from server.routes.responses import _frames
from storage import (
    Account,
    Counts,
    EventsExpired,
    Limits,
    Spent,
    Storage,
    StorageUnavailable,
    StoredFile,
    Swept,
    UsageFilter,
)
from tests.support.making import put_bytes, rows
from tests.support.postgres import Postgres
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, call, calls, gated, text

SOON = 1e-6  # seconds: whatever has ended is old enough


async def sweep(running: Running) -> Swept:
    """What the server's own task does once a minute."""
    assert running.life._retention is not None
    return await running.life._retention.sweep()


async def test_pruned_events_are_a_400_and_the_response_still_works(tmp_path: Path) -> None:
    async with running_app(tmp_path, event_retention_s=SOON) as server, http_client(server) as client:
        api = Api(client)
        streamed = await api.stream("say hello")
        response = streamed.response
        called = await api.create(call(), tools=[WEATHER])
        assert await sweep(server) == Swept(logs=2)
        for query in ("?stream=true", "?stream=true&starting_after=1", "?stream=true&starting_after=99"):
            error = await api.fails(400, "GET", f"/v1/responses/{response['id']}{query}")
            assert (error["code"], error["param"]) == ("events_expired", "stream")
            assert error["type"] == "invalid_request_error"
            assert "retrieve it without 'stream'" in error["message"] and "since 20" in error["message"]
            assert "x-should-retry" not in error["headers"]
        assert await api.get(response["id"]) == response
        assert len((await api.input_items(response["id"]))["data"]) == 1
        assert text(await api.create("say more", previous_response_id=response["id"])) == "more"
        [waiting] = calls(called)
        continued = await api.outputs(called["id"], {waiting["call_id"]: "sunny"})
        assert continued["previous_response_id"] == called["id"]
        chained = [answer(waiting["call_id"])]
        assert (await api.create(chained, previous_response_id=called["id"]))["status"] == "completed"
        await api.delete(response["id"])


async def test_a_stream_in_flight_is_never_pruned(tmp_path: Path) -> None:
    gate = Gate()
    settings = {"event_retention_s": SOON, "retention_s": SOON, "max_responses_per_owner": 1}
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate)), **settings) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        async with api.open("hello") as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
            assert await sweep(server) == Swept()
            async with api.follow(live.id) as other:
                gate.release.set()
                assert await live.done() == await other.done()
        assert await sweep(server) == Swept(responses=1)
        await api.fails(404, "GET", f"/v1/responses/{live.id}")


async def test_a_reader_whose_log_is_pruned_under_it_is_cut(tmp_path: Path) -> None:
    async with running_app(tmp_path, event_retention_s=SOON) as server, http_client(server) as client:
        done = await Api(client).create("count 20")
        storage = server.context.storage
        storage.records = partial(storage.records, limit_bytes=1)  # a page is one record
        reader, stored = await server.context.runs.views.follow("local", done["id"])
        assert stored.log_erased_at is None
        events, stream = reader.events(ended=True), _frames(reader, View("openai"), True, False)
        await anext(events)
        await anext(stream)
        await sweep(server)
        with pytest.raises(EventsExpired):
            await anext(events)
        with pytest.raises(StreamCut):
            await anext(stream)
        reader.close()


async def test_limits_of_number_and_bytes(tmp_path: Path) -> None:
    async with (
        running_app(tmp_path, max_responses_per_owner=3, max_bytes_per_owner=1 << 30) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        conversation = await api.conversation()
        ids = [(await api.create("say a", conversation=conversation))["id"]]
        ids += [(await api.create(f"say {n}"))["id"] for n in range(5)]
        before = await api.conversation_items(conversation)
        assert await sweep(server) == Swept(responses=3)
        assert [r["id"] for r in await api.pages("/v1/responses", order="asc")] == ids[3:]
        assert await api.conversation_items(conversation) == before
        assert text(await api.create("say on", conversation=conversation)) == "on"
    async with running_app(tmp_path, max_bytes_per_owner=1) as server, http_client(server) as client:
        assert await sweep(server) == Swept(responses=4)
        assert await Api(client).pages("/v1/responses") == []


async def test_what_went_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.retention")
    async with running_app(tmp_path, retention_s=SOON) as server, http_client(server) as client:
        assert await sweep(server) == Swept()
        assert not caplog.records
        await Api(client).create("say hello")
        await sweep(server)
        assert [record.getMessage() for record in caplog.records] == [
            "let go of 1 responses, 0 logs, 0 idempotent requests, 0 conversations, 0 chat completions, "
            "0 containers"
        ]
        assert "antiphon_retention_responses_total 1.0" in (await client.get("/metrics")).text


async def test_deleting_everything_leaves_nothing(server_app: Running, client: httpx.AsyncClient) -> None:
    api = Api(client)
    storage = server_app.context.storage
    conversation = await api.conversation({"role": "user", "content": "seed"})
    keyed = {"Idempotency-Key": "once"}
    reply = await client.post("/v1/responses", json={"input": "say keyed"}, headers=keyed)
    ids = [reply.json()["id"]]
    ids += [(await api.create("say a", conversation=conversation))["id"]]
    ids += [(await api.create("say b", previous_response_id=ids[-1]))["id"]]
    waits = {"tools": [WEATHER], "background": True, "await_tool_outputs": True}
    ids += [(await api.create(call(), previous_response_id=ids[-1], **waits))["id"]]
    assert (await client.delete(f"/v1/conversations/{conversation}")).status_code == 200
    for id in ids:
        await api.delete(id)
    assert await rows(storage) == {"owners": 1}  # the server's own, of whoever has no key


# ------------------------------------------------------------------------------------------------------------
# The task


async def test_a_clock_that_is_far_ahead_removes_nothing_for_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = int(DAY_S * 1e6)
    ahead = 365 * day

    async def as_wrong(_: Storage, now: int) -> int:
        return now

    monkeypatch.setattr(retention, "now_us", lambda: now_us() + ahead)
    monkeypatch.setattr("storage.storage.Storage.shared_now", as_wrong)  # the database's clock, too
    async with running_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        assert not caplog.records, "nothing is stored that the clock could be ahead of"
        kept = await api.create("say hello")
        await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "store": True}
        )
        storage, account = server.context.storage, Account("local", None, "m", "default")
        await storage.add_usage([Spent(now_us() + ahead, account, Counts(1))])  # as the next start finds it
    async with running_app(tmp_path) as server, http_client(server) as client:
        [warning] = [record for record in caplog.records if record.name == "antiphon.retention"]
        assert "the clock is 365 days ahead of the newest thing" in warning.getMessage()
        assert await sweep(server) == Swept()
        assert await Api(client).get(kept["id"]) == kept
        assert len((await client.get("/v1/chat/completions")).json()["data"]) == 1
        ahead += day
        assert (await sweep(server)).responses == 1
        assert (await client.get("/v1/chat/completions")).json()["data"] == []
    caplog.clear()
    monkeypatch.setattr(retention, "now_us", now_us)
    async with running_app(tmp_path):
        assert not caplog.records


def test_zero_seconds_stand_for_no_limit() -> None:
    found = limits(Config(retention_s=0, event_retention_s=0, idempotency_ttl_s=2))
    assert found == Limits(request_age=2_000_000, measured=True)
    assert limits(Config()).age == 30 * 86400 * 1_000_000


class Troubled:
    """A storage whose sweeps fail in every way before they work."""

    def __init__(self) -> None:
        self.troubles: list[Exception] = [StorageUnavailable("locked"), ValueError("a bug")]
        self.swept = asyncio.Event()
        self.shared = False

    async def sweep(self, limits: Limits, now: int) -> AsyncGenerator[Swept]:
        if self.troubles:
            raise self.troubles.pop(0)
        yield Swept(responses=1)
        self.swept.set()

    async def newest(self, before: int) -> None:
        """Nothing is stored."""

    async def forget(self) -> None:
        """Nothing is remembered."""


async def swept(monkeypatch: pytest.MonkeyPatch) -> Retention:
    """What has swept again and again, until a sweep had no trouble."""
    monkeypatch.setattr(retention, "EVERY_S", 0.001)
    storage = Troubled()
    sweeper = Retention(storage, Config())
    await sweeper.start(storage.forget)
    async with asyncio.timeout(10):
        await storage.swept.wait()
    await sweeper.close()
    return sweeper


async def test_no_failure_ends_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = await swept(monkeypatch)
    [went] = sweeper.readings()
    assert isinstance(went.numbers, dict) and went.numbers["responses_total"] >= 1


async def test_each_sweep_looks_at_the_clocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.telemetry.clock_watch.ahead_s", lambda: 3600.0)
    await swept(monkeypatch)
    assert caplog.text.count("the wall clock is 3600 s ahead") == 1


@pytest.mark.parametrize(("off_s", "way"), [(7200.0, "behind"), (-7200.0, "ahead of")])
async def test_a_clock_that_is_apart_from_the_database_s_removes_nothing_early(
    tmp_path: Path,
    postgres: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    off_s: float,
    way: str,
) -> None:
    """What expires in an hour stays, what has expired by both clocks goes; and the log says it once."""
    db = await postgres.fresh()
    right = now_us()

    def expiring(id: str, in_s: float) -> StoredFile:
        at = right - 86_400_000_000
        return StoredFile(id, "local", "a", "user_data", 1, digest, at, right + int(in_s * 1e6))

    try:
        async with live_app(tmp_path, db=db) as server, http_client(server) as http:
            storage, sweeper = server.context.storage, server.life._retention
            assert sweeper is not None
            digest = (await put_bytes(storage.blobs, b"x")).digest
            monkeypatch.setattr(retention, "now_us", lambda: now_us() + int(off_s * 1e6))
            for id, in_s in (("file-hour", 3600.0), ("file-gone", -10_000.0)):
                await storage.files.create(expiring(id, in_s))
            for _ in range(2):
                await sweeper._look_at_database()
                await sweeper.sweep()
            left = await storage.files.list("local", limit=9, now=0)
            assert [file.id for file in left.data] == ["file-hour"]
            page = (await http.get("/metrics")).text
    finally:
        await postgres.drop(db)
    [line] = [line for line in page.splitlines() if line.startswith("antiphon_clock_ahead_of_database")]
    assert float(line.split()[1]) == pytest.approx(off_s, abs=20)
    assert caplog.text.count(f"the database's clock is 7200 s {way} the clock of this process") == 1


async def test_a_sweep_that_lasts_rests_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 15 responses a second, and steps of 16 that each wait half a second for their turn, what is left to
    go stays bounded; with rests that stay as long as they are at first it would grow by 8 a second."""
    now = [0.0]

    async def passes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("server.process.retention.asyncio.sleep", passes)
    gone, left = 0, []
    while now[0] < 4 * 3600:
        there, pace = int(15 * now[0]), Pace(lambda: now[0])  # a sweep looks once for what is to go
        while gone < there:
            now[0] += 0.5
            gone += 16
            await pace.rest()
        left.append(15 * now[0] - gone)
        now[0] += max(0.0, retention.EVERY_S - pace.lasted_s)
    assert len(left) > 20 and max(left) < 8000 and abs(left[-1] - left[-2]) < 50


async def test_what_owners_store_is_told_of_the_largest_ones(
    server_app: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LARGEST", 2)
    storage = server_app.context.storage
    for number, owner in enumerate(("ann", "bob", "cy", "dan"), 1):
        blob = await put_bytes(storage.blobs, b"x" * (number * 100_000))
        row = StoredFile(
            f"file-{owner}", owner, "a", "user_data", blob.num_bytes, blob.digest, now_us(), None
        )
        await storage.files.create(row)
    assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 200
    await sweep(server_app)
    stored = await storage.num_bytes_by_owner()
    assert [*stored] == ["dan", "cy", "bob", "ann", "local"]
    assert {owner: (await storage.usage(owner)).total for owner in stored} == stored and stored["local"] > 0
    lines = (await client.get("/metrics")).text.splitlines()
    told = {line for line in lines if line.startswith("antiphon_stored_bytes{")}
    rest = float(300_000 + stored["local"])
    assert told == {
        f'antiphon_stored_bytes{{owner="{owner}"}} {num_bytes}'
        for owner, num_bytes in (("dan", 400_000.0), ("cy", 300_000.0), ("others", rest))
    }


async def test_old_usage_is_kept_by_the_hour(server_app: Running) -> None:
    storage, account = server_app.context.storage, Account("ann", None, "m", "default")
    hour, minute = 3600 * 1_000_000, 60 * 1_000_000
    begin = now_us() - int(retention.USAGE_MINUTES_S * 1e6) - 3 * hour
    begin -= begin % hour
    young = begin + 10 * hour
    times = (begin + 5 * minute, begin + 6 * minute, young + 5 * minute, young + 6 * minute)
    await storage.add_usage([Spent(at, account, Counts(1)) for at in times])
    await sweep(server_app)
    sums = await storage.usage_sums(UsageFilter("completions", 0, now_us()), (), minute)
    assert [(one.start, one.counts.requests) for one in sums] == [(begin, 2), *((at, 1) for at in times[2:])]


@pytest.mark.parametrize(("kept_s", "requests"), [(86400.0, [1]), (0.0, [2])])
async def test_what_persons_used_goes_with_time(tmp_path: Path, kept_s: float, requests: list[int]) -> None:
    async with running_app(tmp_path, identifier_usage_s=kept_s) as server:
        storage, account = server.context.storage, Account("ann", None, "m", "default", person="p")
        now = now_us()
        await storage.add_usage([Spent(at, account, Counts(1)) for at in (now, now - 2 * 86_400_000_000)])
        await sweep(server)
        for persons, expected in ((("p",), requests), ((), [2])):
            wanted = UsageFilter("completions", 0, now + 3_600_000_000, persons=persons)
            sums = await storage.usage_sums(wanted, (), 1 << 62)
            assert [one.counts.requests for one in sums] == expected
