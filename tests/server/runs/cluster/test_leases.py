"""Several servers on one database: each answers for the runs of all, and nothing depends on one of them."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from engine import ScriptedEngine
from server.limits import Charge
from server.runs.cluster import leases, presence
from server.runs.cluster.leases import BUSY, IDLE, Watch
from server.runs.cluster.presence import Presence
from storage import FleetView, StorageUnavailable
from tests.support import wire
from tests.support.lines import line
from tests.support.making import query
from tests.support.postgres import Postgres
from tests.support.running import Running, http_client, live_app
from tests.support.talk import WEATHER, Api, Gate, Live, call, gated, text
from tests.support.usage import told, used

LEASE_S = 0.4
SAID = "one two three four"


def opened() -> Gate:
    """A gate that holds nobody."""
    gate = Gate()
    gate.release.set()
    return gate


@dataclass(slots=True)
class Replica:
    """One server of a fleet. Its runs say "one two", wait at its gate, and say the rest."""

    server: Running
    api: Api
    gate: Gate

    @property
    def engine(self) -> ScriptedEngine:
        engine = self.server.context.models.get(None).engine
        assert isinstance(engine, ScriptedEngine)
        return engine

    async def pause(self) -> None:
        """As a process that was stopped is seen by others: it beats and looks no more."""
        for chore in self.server.context.runs._chores:
            chore.cancel()

    async def die(self) -> None:
        """End like a process that was killed: nothing is written, nobody is told."""
        runs = self.server.context.runs
        await self.pause()
        journal = runs._journal._task
        assert journal is not None
        journal.cancel()
        await asyncio.gather(journal, *runs._chores, return_exceptions=True)
        for run in list(runs._tasks._runs.values()):
            if run.task is not None:
                run.task.cancel()
        runs.feed.stop()
        runs._presence.leave()
        self.server.life._drained = True


@dataclass(slots=True)
class Fleet:
    """Starts servers on one database."""

    url: str
    folder: Path
    stack: AsyncExitStack
    replicas: list[Replica] = field(default_factory=list)

    async def add(
        self, gate: Gate | None = None, *, script: Any = None, folder: str | None = None, **settings: Any
    ) -> Replica:
        """`folder`: its data folder, one of its own where none is named."""
        gate = gate or opened()
        folder = self.folder / (folder or str(len(self.replicas)))
        engine = ScriptedEngine(script or gated(gate, "one two", " three four"))
        server = await self.stack.enter_async_context(
            live_app(folder, engine, **{"db": self.url, "lease_s": LEASE_S, **settings})
        )
        client = await self.stack.enter_async_context(http_client(server))
        self.replicas.append(Replica(server, Api(client), gate))
        return self.replicas[-1]


@pytest.fixture
async def fleet(postgres: Postgres, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(await postgres.fresh(), tmp_path, stack)


@asynccontextmanager
async def both(a: Replica, b: Replica, input: str, **body: Any) -> AsyncIterator[tuple[Live, Live]]:
    """A stream at the first server, and the same at the second one."""
    async with a.api.open(input, **body) as live:
        await live.next()
        async with b.api.follow(live.id) as there:
            yield live, there


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------
# Runs of another server


@pytest.mark.parametrize("background", [False, True])
async def test_any_server_answers_for_a_run_of_another(fleet: Fleet, background: bool) -> None:
    a, b = await fleet.add(Gate()), await fleet.add()
    async with a.api.open("hi", background=background) as live:
        await live.until("output_text.delta")
        await a.gate.reached.wait()
        running = await b.api.get(live.id)
        assert (running["status"], running["attempt"]) == ("in_progress", 1)
        assert running == await a.api.get(live.id)
        [listed] = (await b.api.page("/v1/responses"))["data"]
        assert listed == running
        error = await b.api.fails(
            400, "GET", f"/v1/responses/{live.id}", params={"stream": "true", "starting_after": "99"}
        )
        assert error["code"] == "cursor_beyond_log"
        async with b.api.follow(live.id) as there, b.api.follow(live.id, after=2) as later:
            await there.until("output_text.delta")
            await later.next()
            a.gate.release.set()
            done = await live.done()
            assert await there.done() == done and there.raw == live.raw
            while await later.next() is not None:
                pass
            assert live.raw.endswith(later.raw) and later.events[0]["sequence_number"] == 3
        assert text(done) == SAID
        assert await b.api.get(live.id) == done and "attempt" not in done
    assert not b.engine.requests


async def test_a_long_poll_at_another_server_sees_the_end(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate()), await fleet.add()
    begun = await a.api.create("hi", background=True)
    await a.gate.reached.wait()
    waiting = asyncio.create_task(b.api.http.get(f"/v1/responses/{begun['id']}", params={"wait": "20"}))
    await until(lambda: b.server.context.runs.feed.num_readers(begun["id"]) > 0)
    a.gate.release.set()
    assert Api.response(await waiting)["status"] == "completed"


async def test_a_run_is_cancelled_from_another_server(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate()), await fleet.add()
    async with a.api.open("hi") as live:
        await live.until("output_text.delta")
        await a.gate.reached.wait()
        cancelled = await b.api.cancel(live.id)
        assert (cancelled["status"], text(cancelled)) == ("cancelled", "one two")
        assert await live.done() == cancelled
    await until(lambda: a.engine.stats().running == 0)


async def test_a_run_is_deleted_from_another_server(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate()), await fleet.add()
    async with both(a, b, "hi") as (live, there):
        await live.until("output_text.delta")
        await there.until("output_text.delta")
        await a.gate.reached.wait()
        await b.api.delete(live.id)
        assert (await live.done())["status"] == (await there.done())["status"] == "cancelled"
        assert (await used(b.server)).output_tokens > 0
    await until(lambda: a.engine.stats().running == 0 and a.server.context.runs.num_active == 0)
    await a.api.fails(404, "GET", f"/v1/responses/{live.id}")


async def test_tool_outputs_come_in_at_another_server(fleet: Fleet) -> None:
    """The other one goes on; whoever read at the first one reads on there."""
    from engine.backends.script import obey

    a, b = await fleet.add(script=obey), await fleet.add(script=obey)
    async with both(a, b, call(), tools=[WEATHER], await_tool_outputs=True) as (live, there):
        made = await live.until("output_item.done")
        fed = await b.api.outputs(live.id, {made["item"]["call_id"]: "rainy"})
        assert fed["status"] in ("in_progress", "completed")
        done = await live.done()
        assert await there.done() == done and live.raw == there.raw
        assert (done["status"], text(done)) == ("completed", "The tool said: rainy")
    assert [len(a.engine.requests), len(b.engine.requests)] == [1, 1]


async def test_a_waiting_run_is_cancelled_from_another_server(fleet: Fleet) -> None:
    from engine.backends.script import obey

    a, b = await fleet.add(script=obey), await fleet.add(script=obey)
    async with a.api.open(call(), tools=[WEATHER], await_tool_outputs=True) as live:
        await live.until("output_item.done")
        cancelled = await b.api.cancel(live.id)
        assert cancelled["status"] == "cancelled"
        assert await live.done() == cancelled


async def test_a_run_that_is_read_elsewhere_is_not_given_up(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate(), resume_grace_s=1), await fleet.add(resume_grace_s=1)
    async with a.api.open("hi") as live:
        await live.until("output_text.delta")
        await a.gate.reached.wait()
        async with b.api.follow(live.id) as there:
            await there.until("output_text.delta")
            run = a.server.context.runs._tasks.get(live.id)
            assert run is not None
            await live.chunks.aclose()  # type: ignore[attr-defined]
            await until(lambda: a.server.context.runs.feed.num_readers(live.id) == 0)
            for _ in range(2):  # a grace is over, and another one begins
                seen = run.watched
                await until(lambda seen=seen: run.watched > seen)  # type: ignore[misc]
            a.gate.release.set()
            assert (await there.done())["status"] == "completed"


async def test_a_turn_that_is_read_elsewhere_keeps_its_conversation(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate()), await fleet.add()
    runs, clock = a.server.context.runs, asyncio.get_running_loop().time
    conversation = (await a.api.http.post("/v1/conversations", json={})).json()["id"]
    async with a.api.open("hi", conversation=conversation) as live:
        await live.until("output_text.delta")
        await a.gate.reached.wait()
        async with b.api.follow(live.id) as there:
            await there.until("output_text.delta")
            run = runs._tasks.get(live.id)
            assert run is not None
            await live.chunks.aclose()  # type: ignore[attr-defined]
            await until(lambda: runs.feed.num_readers(live.id) == 0)
            async with asyncio.timeout(20):
                while not (told := await a.server.context.storage.watched(live.id)):
                    await asyncio.sleep(0.005)
            error = await a.api.refused(400, "again", conversation=conversation)
            assert error["code"] == "conversation_locked"
            # As at the end of a grace, or where the run was just taken up: the next time is yet to come.
            run.watched, run.watched_at = told, clock()
            await a.api.refused(400, "again", conversation=conversation)
            a.gate.release.set()
            assert (await there.done())["status"] == "completed"


# ------------------------------------------------------------------------------------------------------------
# Takeover


async def test_the_runs_of_a_dead_server_go_on_at_another(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate()), await fleet.add()
    async with both(a, b, "hi") as (live, there):
        await live.until("output_text.delta")
        await a.gate.reached.wait()
        queued = await a.api.create("hi", background=True)
        await a.die()
        done = await there.done()
        assert (done["status"], text(done)) == ("completed", SAID)
        assert there.raw.startswith(live.raw), "what was seen is the beginning of what is read"
        assert await b.api.replay(live.id) == there.raw
        late = await b.api.ended(queued["id"])
        assert text(late) == SAID
        assert await used(b.server) == told(done, late), "each counts once"


async def test_a_run_of_a_newer_version_is_left_to_others_for_a_while(fleet: Fleet) -> None:
    """What its plan says besides stands here for what only the newer version knows."""
    a = await fleet.add(Gate())
    begun = [(await a.api.create("hi", background=True))["id"] for _ in range(2)]
    await asyncio.wait_for(a.gate.reached.wait(), 20)
    plan = "convert_from(plan, 'UTF8')::jsonb"
    newer = f"""UPDATE responses SET plan = convert_to(({plan} || '{{"curfew": 1}}')::text, 'UTF8')"""
    query(fleet.url, newer)
    b = await fleet.add()
    takeover = b.server.context.runs._takeover
    await a.die()
    await until(lambda: takeover._aside.keys() == {*begun})
    assert (await b.api.create("hi"))["status"] == "completed", "it stands in nobody's way"
    known = f"UPDATE responses SET plan = convert_to(({plan} - 'curfew')::text, 'UTF8')"
    query(fleet.url, f"{known} WHERE id = '{begun[0]}'")
    c = await fleet.add()
    ended = await b.api.ended(begun[0])
    assert (ended["status"], text(ended), ended["restarts"]) == ("completed", SAID, 1)
    assert len(b.engine.requests) == len(c.engine.requests) == 1
    # The other one is nobody's, until its time is over.
    assert (await b.api.get(begun[1]))["status"] == "in_progress"
    takeover._aside[begun[1]] = asyncio.get_running_loop().time()
    ended = await b.api.ended(begun[1])
    assert (ended["status"], text(ended)) == ("failed", "one two")
    assert "newer version" in ended["error"]["message"]


async def test_what_began_over_a_websocket_goes_on_at_another(fleet: Fleet) -> None:
    """Its client reads it on over HTTP at another server, which takes the run up where the first one dies."""
    a, b = await fleet.add(Gate()), await fleet.add()
    async with line(a.server.base_url) as socket:
        await socket.ask("hello", stream_id="one")
        await socket.until("response.output_text.delta")
        begun = [{k: v for k, v in frame.items() if k != "stream_id"} for frame in socket.frames]
    response_id, last = begun[0]["response"]["id"], begun[-1]["sequence_number"]
    async with b.api.follow(response_id, last) as there:
        await a.die()
        while await there.next() is not None:
            pass
    response = wire.check_stream([*begun, *there.events])
    assert text(response) == SAID
    async with line(b.server.base_url) as socket:
        more = await socket.turn("more", previous_response_id=response_id)
    assert more["previous_response_id"] == response_id


async def test_a_server_that_was_only_paused_writes_nothing(fleet: Fleet) -> None:
    """Its readers, of streams and of plain requests, get the end that the other server wrote."""
    a = await fleet.add(Gate())
    async with a.api.open("hi") as live:
        plain = asyncio.create_task(a.api.create("hi"))
        await live.until("output_text.delta")
        await until(lambda: a.engine.stats().running == 2)
        await a.pause()
        b = await fleet.add()
        done = await b.api.ended(live.id)
        [late, _] = (await b.api.page("/v1/responses"))["data"]
        end = await b.api.ended(late["id"])
        a.gate.release.set()  # it goes on as if nothing had happened
        await until(lambda: a.server.context.runs.num_active == 0)
        follower = asyncio.create_task(a.server.context.runs._follower.run())
        assert await live.done() == done and text(done) == SAID
        assert await plain == end
        follower.cancel()
        assert await b.api.replay(live.id) == live.raw
        wire.check_stream(wire.events(await b.api.replay(late["id"])))
        assert await used(a.server) == told(done, end), "what it wrote late is not counted"


async def test_what_another_server_ends_counts_once_against_limits(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"owner_limit": ("tokens_per_day=100000",)}
    a = await fleet.add(Gate(), **limits)
    begun = await a.api.create("hi", background=True)
    await a.gate.reached.wait()
    await a.pause()
    b = await fleet.add(**limits)
    settled: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    for name, replica in (("a", a), ("b", b)):
        limiter, log = replica.server.context.limiter, settled[name]

        def settle(charge: Charge, tokens: int, log: list[tuple[int, int]] = log) -> None:
            log.append((charge.tokens, tokens))

        monkeypatch.setattr(limiter, "settle", settle)
    done = await b.api.ended(begun["id"])
    await until(lambda: b.server.context.runs.num_active == 0)
    a.gate.release.set()
    await until(lambda: a.server.context.runs.num_active == 0)
    [(reserved, rest)] = settled["b"]
    assert reserved + rest == done["usage"]["total_tokens"]
    assert settled["a"] == []


async def test_a_server_that_is_stopped_hands_over_at_once(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate(), lease_s=3600), await fleet.add(lease_s=3600)
    async with both(a, b, "hi") as (live, there):
        await there.until("output_text.delta")
        await a.gate.reached.wait()
        await a.server.context.runs.drain(0)
        done = await there.done()
        assert (done["status"], text(done)) == ("completed", SAID)
        await live.cut()
        assert there.raw.startswith(live.raw)


async def test_a_cancel_that_a_death_overtook_is_carried_out(fleet: Fleet) -> None:
    a = await fleet.add(Gate())
    begun = await a.api.create("hi", background=True)
    async with a.api.follow(begun["id"]) as live:
        await live.until("output_text.delta")
        await live.until("output_text.delta")
        await a.die()
        await live.cut()
    b = await fleet.add()
    cancelled = await b.api.cancel(begun["id"])
    assert (cancelled["status"], text(cancelled)) == ("cancelled", "one two")
    assert not b.engine.requests


async def test_a_cancel_of_a_waiting_run_is_carried_out_at_the_next_start(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        async with api.open(call(), tools=[WEATHER], await_tool_outputs=True) as live:
            await live.until("output_item.done")
            await until(lambda: server.context.runs.num_active == 0)
            await server.context.runs.drain(0)
            await server.context.storage.request_cancel("local", live.id)
            await live.cut()
    async with live_app(tmp_path) as server, http_client(server) as client:
        assert (await Api(client).ended(live.id))["status"] == "cancelled"


# ------------------------------------------------------------------------------------------------------------
# The queue


async def test_queued_work_goes_to_whoever_has_room(fleet: Fleet) -> None:
    a = await fleet.add(Gate(), max_num_seqs=1)
    first = await a.api.create("hi", background=True)
    await a.gate.reached.wait()
    queued = [await a.api.create("hi", background=True) for _ in range(3)]
    shown = [await a.api.get(response["id"]) for response in queued]
    assert [(one["status"], one["queue_position"], one["attempt"]) for one in shown] == [
        ("queued", 1, 0),
        ("queued", 2, 0),
        ("queued", 3, 0),
    ]
    b = await fleet.add(max_num_seqs=1)
    for response in queued:
        done = await a.api.ended(response["id"])
        assert text(done) == SAID and "queue_position" not in done
    assert len(b.engine.requests) == 3 and len(a.engine.requests) == 1
    a.gate.release.set()
    assert (await b.api.ended(first["id"]))["status"] == "completed"


async def test_a_queued_run_is_streamed_cancelled_and_deleted(fleet: Fleet) -> None:
    a = await fleet.add(Gate(), max_num_seqs=1)
    await a.api.create("hi", background=True)
    await a.gate.reached.wait()
    queued = [await a.api.create("hi", background=True) for _ in range(2)]
    async with a.api.open("hi", background=True) as live:
        await live.until("queued")
        cancelled = await a.api.cancel(queued[0]["id"])
        assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
        await a.api.delete(queued[1]["id"])
        a.gate.release.set()
        assert text(await live.done()) == SAID
        assert await a.api.replay(live.id) == live.raw
    assert len(a.engine.requests) == 2


async def test_a_restarted_server_goes_on_with_its_queue(tmp_path: Path) -> None:
    @asynccontextmanager
    async def serving(gate: Gate) -> AsyncIterator[Api]:
        engine = ScriptedEngine(gated(gate, "one two", " three four"))
        async with live_app(tmp_path, engine, max_num_seqs=1) as server, http_client(server) as client:
            yield Api(client)

    gate = Gate()
    async with serving(gate) as api:
        begun = [await api.create("hi", background=True) for _ in range(3)]
        await gate.reached.wait()
    async with serving(opened()) as api:
        for response in begun:
            assert text(await api.ended(response["id"])) == SAID


async def test_tiers_and_their_order(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate))
    async with live_app(tmp_path, engine, max_num_seqs=1) as server, http_client(server) as client:
        api = Api(client)
        await api.create("hi", background=True)
        await gate.reached.wait()
        asked = {"flex": "flex", "auto": "default", "scale": "default", "fast": "priority"}
        begun = {}
        for tier, effective in asked.items():
            response = await api.create(f"say {tier}", background=True, service_tier=tier)
            assert response["service_tier"] == effective
            begun[tier] = response["id"]
        places = {tier: (await api.get(id))["queue_position"] for tier, id in begun.items()}
        assert places == {"fast": 1, "auto": 2, "scale": 3, "flex": 4}
        gate.release.set()
        for id in begun.values():
            await api.ended(id)
        assert [request.priority for request in engine.requests] == [0, -1, 0, 0, 1]


async def test_a_tenant_may_queue_so_many(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate))
    settings = {"max_num_seqs": 1, "max_queued": 2}
    async with live_app(tmp_path, engine, **settings) as server, http_client(server) as client:
        api = Api(client)
        begun = [await api.create("hi", background=True) for _ in range(3)]
        error = await api.refused(429, "hi", background=True)
        assert error["code"] == "queue_full" and int(error["headers"]["retry-after"]) > 0
        gate.release.set()
        for response in begun:
            await api.ended(response["id"])
        assert (await api.create("hi", background=True))["status"] == "queued"


# ------------------------------------------------------------------------------------------------------------
# Who is dead

LEASE = 10.0


def view(owners: str = "", **beats: int | None) -> FleetView:
    return FleetView(beats, frozenset(owners), has_free=False, has_due=False)


def looks(watch: Watch, view: FleetView, *times: float) -> list[dict[str, int | None]]:
    return [watch.dead(view, now, now) for now in times]


def test_the_beat_of_one_that_owns_nothing_stands_still_for_the_lease() -> None:
    watch = Watch("me", LEASE)
    assert looks(watch, view(me=1, a=5, b=None), 0, 2, 4, 6, 8) == [{}] * 5
    assert looks(watch, view(me=1, a=6, b=None), 10) == [{"b": None}]
    assert looks(watch, view(me=1, a=6), 12, 14, 16, 18, 20) == [{}] * 4 + [{"a": 6}]


def test_that_of_one_that_owns_runs_for_less() -> None:
    watch = Watch("me", LEASE)
    assert looks(watch, view("ma", me=1, a=5), 0, 4, 8, 8.4, 8.5) == [{}] * 4 + [{"a": 5}]


def test_one_that_takes_up_its_first_run_is_watched_anew() -> None:
    """Until then it beats seldom."""
    watch = Watch("me", LEASE)
    assert looks(watch, view(a=5), 0, 4, 8) == [{}] * 3
    assert looks(watch, view("a", a=5), 9, 13, 17, 17.5) == [{}] * 3 + [{"a": 5}]


def test_after_a_pause_of_ones_own_the_watch_begins_anew() -> None:
    watch = Watch("me", LEASE)
    assert looks(watch, view("a", a=5), 0, 3600, 3604, 3608, 3608.5) == [{}] * 4 + [{"a": 5}]


def test_a_look_that_took_long_counts_for_the_least_that_it_can_have_seen() -> None:
    watch = Watch("me", LEASE)
    assert watch.dead(view("a", a=5), 0.0, 4.0) == {}
    assert looks(watch, view("a", a=5), 4.5, 8.5, 12.4, 12.5) == [{}] * 3 + [{"a": 5}]
    watch = Watch("me", LEASE)
    assert looks(watch, view("a", a=5), 0, 4) == [{}] * 2
    assert watch.dead(view("a", a=5), 8.6, 9.1) == {}, "what it saw may be older than half a lease"


def test_one_that_comes_back_is_watched_anew() -> None:
    watch = Watch("me", LEASE)
    assert looks(watch, view(a=5), 0, 4, 8) == [{}] * 3
    assert looks(watch, view(), 9) == [{}]
    assert looks(watch, view(a=5), 12) == [{}]


def noticed(stands_still_s: float, beaten: int, looked: int) -> float | None:
    """How long after a process stopped it is taken for dead; None if it never is.

    beaten, looked: how many tenths of the time between two beats, and two looks, had passed by then.
    """
    every, stops = LEASE / BUSY, 30.0
    last, back = stops - every * beaten / 10, stops + stands_still_s

    def beat(now: float) -> int:
        if now >= back:
            return 1 + int((now - back) / every)
        return math.floor((min(now, last) - last) / every)

    watch, now = Watch("me", LEASE), every * looked / 10
    while now < stops + 2 * LEASE:
        if watch.dead(view("a", a=beat(now)), now, now):
            return now - stops
        now += watch.pause_s(now)
    return None


def test_a_death_is_noticed_within_the_lease_and_a_pause_is_not_taken_for_one() -> None:
    for beaten, looked in itertools.product(range(10), repeat=2):
        assert noticed(7.95, beaten, looked) is None
        took = noticed(math.inf, beaten, looked)
        assert took is not None and 0.8 * LEASE <= took <= 0.9 * LEASE + 1e-6


def test_looks_are_seldom_where_there_is_nothing_to_take_over() -> None:
    watch = Watch("me", LEASE)
    watch.dead(view("m", me=1, a=1), 0.0, 0.0)
    assert watch.pause_s(0.0) == LEASE / IDLE
    watch.dead(view("a", me=1, a=1), 2.0, 2.0)
    assert watch.pause_s(2.0) == LEASE / BUSY
    watch.dead(view("a", me=1, a=1), 6.0, 6.0)
    watch.dead(view("a", me=1, a=1), 10.0, 10.0)
    assert watch.pause_s(10.4) == pytest.approx(0.1), "no later than it can be dead"


# ------------------------------------------------------------------------------------------------------------
# Who is gone


async def test_a_server_that_is_started_again_goes_on_at_once(fleet: Fleet) -> None:
    a = await fleet.add(Gate(), lease_s=3600)
    begun = await a.api.create("hi", background=True)
    await a.gate.reached.wait()
    await a.die()
    b = await fleet.add(folder="0", lease_s=3600)
    assert text(await b.api.ended(begun["id"])) == SAID


async def test_a_server_beside_one_that_dies_goes_on_at_once(fleet: Fleet) -> None:
    a, b = await fleet.add(Gate(), folder="0", lease_s=3600), await fleet.add(folder="0", lease_s=3600)
    async with both(a, b, "hi") as (_, there):
        await a.gate.reached.wait()
        await b.server.context.runs._fleet.look()
        assert b.server.context.runs.num_active == 0, "it lives"
        await a.die()
        await b.server.context.runs._fleet.look()
        assert text(await there.done()) == SAID


def test_who_lives_is_not_gone_and_who_was_never_there_neither(tmp_path: Path) -> None:
    a, b = Presence(tmp_path, "host/1"), Presence(tmp_path, "host/2")
    a.enter()
    b.enter()
    everybody = ["host/1", "host/2", "elsewhere"]
    assert a.gone(everybody) == b.gone(everybody) == set()
    b.leave()
    assert a.gone(everybody) == a.gone(everybody) == {"host/2"}
    assert [file.name for file in tmp_path.iterdir()] == ["host%2F1"]
    a.leave()


def test_what_another_kernel_left_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boot_id").write_text("another machine, or this one before it was started anew\n")
    folder = tmp_path / "runners"
    a, b = Presence(folder, "a"), Presence(folder, "b")
    with monkeypatch.context() as patched:
        patched.setattr(presence, "BOOT_ID", tmp_path / "boot_id")
        a = Presence(folder, "a")
    a.enter()
    a.leave()
    b.enter()
    assert b.gone(["a"]) == set()
    b.leave()


def test_where_locks_keep_nobody_out_nobody_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.runs.cluster.presence.fcntl.flock", lambda fd, how: None)
    a, b = Presence(tmp_path, "a"), Presence(tmp_path, "b")
    a.enter()
    b.enter()
    assert "a lock keeps nobody out" in caplog.text
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c").write_bytes(presence.BOOT_ID.read_bytes())  # of one to whom locks mean something
    assert a.gone(["b", "c"]) == b.gone(["a", "c"]) == set()
    a.leave()
    b.leave()


def test_a_file_that_cannot_be_removed_stops_no_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Presence(tmp_path, "a"), Presence(tmp_path, "b")
    a.enter()
    b.enter()
    b.leave()

    def denied(file: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", denied)
        assert a.gone(["b"]) == {"b"}
    a.leave()


def test_without_a_folder_to_write_to_nobody_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    a = Presence(tmp_path / "file", "a")
    a.enter()
    assert "others will not see at once" in caplog.text
    assert a.gone(["b"]) == set()
    a.leave()


# ------------------------------------------------------------------------------------------------------------
# Servers that do not belong together


async def test_a_server_with_another_model_is_named_in_the_log(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    first = await fleet.add()
    second = await fleet.add()
    third = await fleet.add(served_model_name=("other",))
    names = [each.server.context.storage.runner for each in (first, second, third)]

    def told() -> list[str]:
        return [
            str(record.args[0])
            for record in caplog.records
            if "serves other models" in record.message and isinstance(record.args, tuple)
        ]

    await until(lambda: len(told()) >= 4)  # the third by both others, and they by the third
    beats = (await first.server.context.storage.list_processes(0)).beats
    await until_beaten(first, names, beats)
    assert sorted(told()) == sorted([names[2], names[2], names[0], names[1]])  # once each, and no others


async def until_beaten(replica: Replica, names: list[str], before: Mapping[str, int | None]) -> None:
    """Wait until each of these has beaten twice more, and so was looked at again."""
    async with asyncio.timeout(20):
        while True:
            beats = (await replica.server.context.storage.list_processes(0)).beats
            if all((beats[name] or 0) >= (before[name] or 0) + 2 for name in names):
                return
            await asyncio.sleep(0.02)


async def test_the_log_says_when_a_database_that_was_away_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away, looked = iter([True, True]), asyncio.Event()

    async def look(self: leases.Fleet) -> None:
        if caplog.text.count("answers again"):
            looked.set()
        if next(away, False):
            raise StorageUnavailable("away")

    monkeypatch.setattr(leases.Fleet, "look", look)
    monkeypatch.setattr(leases, "ROUND_S", 0.01)
    async with live_app(tmp_path):
        async with asyncio.timeout(10):
            await looked.wait()
    assert caplog.text.count("could not be looked at: away") == 1
    assert caplog.text.count("the database answers again, after ") == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StorageUnavailable("away"), ["the others may take this process for dead: away"]),
        (StorageUnavailable("no room", full=True), []),
        (StorageUnavailable("a standby", read_only=True), []),
    ],
)
async def test_the_log_tells_once_that_writes_fail(
    error: StorageUnavailable,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And leaves it to storage where only an operator can mend it: then no database was away."""
    monkeypatch.setattr(leases, "ROUND_S", 0.01)
    storage = AsyncMock(runner="me", shared=True)
    storage.beat.side_effect = itertools.chain([error] * 3, itertools.repeat(None))
    storage.list_processes.side_effect = itertools.chain([error] * 3, itertools.repeat(view()))
    alone = leases.Fleet(
        storage,
        0.1,
        Mock(gone=Mock(return_value=())),
        serves=dict,
        at_work=bool,
        free=Mock(),
        due=AsyncMock(),
    )
    chores = [asyncio.create_task(alone.beat()), asyncio.create_task(alone.watch())]
    async with asyncio.timeout(10):
        while min(storage.beat.call_count, storage.list_processes.call_count) < 5:
            await asyncio.sleep(0.01)
    for chore in chores:
        chore.cancel()
    said = [each.message for each in caplog.records if each.name == "antiphon.fleet"]
    looks = [line for line in said if line not in told]
    assert [line for line in said if line in told] == told
    assert len(looks) == 2 * len(told)  # that it was away, and that it answers again
