"""Several servers on one database: each answers for the runs of all, and nothing depends on one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine import ScriptedEngine
from server.runs.fleet import Watch
from tests import wire
from tests.postgres import Postgres
from tests.running import Running, http_client, live_app
from tests.talk import WEATHER, Api, Gate, Live, call, gated, text

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
        self.server.life._drained = True


@dataclass(slots=True)
class Fleet:
    """Starts servers on one database."""

    url: str
    folder: Path
    stack: AsyncExitStack
    replicas: list[Replica] = field(default_factory=list)

    async def add(self, gate: Gate | None = None, *, script: Any = None, **settings: Any) -> Replica:
        gate = gate or opened()
        folder = self.folder / str(len(self.replicas))
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
        await live.cut()
        await there.cut()
    await until(lambda: a.engine.stats().running == 0 and a.server.context.runs.num_active == 0)
    await a.api.fails(404, "GET", f"/v1/responses/{live.id}")


async def test_tool_outputs_come_in_at_another_server(fleet: Fleet) -> None:
    """The other one goes on; whoever read at the first one reads on there."""
    from engine.script import obey

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
    from engine.script import obey

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
        assert text(await b.api.ended(queued["id"])) == SAID


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


def test_a_beat_that_stands_still_for_the_lease_is_dead() -> None:
    watch = Watch("me", 10.0)
    assert watch.dead({"me": 1, "a": 5, "b": None}, 0.0) == {}
    for now in (2.0, 4.0, 6.0, 8.0):
        assert watch.dead({"me": 1, "a": 5, "b": None, "c": int(now)}, now) == {}
    assert watch.dead({"me": 1, "a": 6, "b": None, "c": 9}, 10.0) == {"b": None}
    for now in (12.0, 14.0, 16.0, 18.0):
        assert watch.dead({"me": 1, "a": 6}, now) == {}
    assert watch.dead({"me": 1, "a": 6}, 20.0) == {"a": 6}


def test_after_a_pause_of_ones_own_the_watch_begins_anew() -> None:
    watch = Watch("me", 10.0)
    watch.dead({"a": 5}, 0.0)
    assert watch.dead({"a": 5}, 3600.0) == {}
    for now in (3602.0, 3604.0, 3606.0, 3608.0):
        assert watch.dead({"a": 5}, now) == {}
    assert watch.dead({"a": 5}, 3610.0) == {"a": 5}


def test_one_that_comes_back_is_watched_anew() -> None:
    watch = Watch("me", 10.0)
    for now in (0.0, 4.0, 8.0):
        assert watch.dead({"a": 5}, now) == {}
    assert watch.dead({}, 9.0) == {}
    assert watch.dead({"a": 5}, 12.0) == {}
