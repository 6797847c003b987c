"""A database that takes nothing while runs are made: who waits for their ends is told, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection

from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Step
from server.runs.events import Channel, Journal, RunLog, journal
from server.runs.planning import RunPlan
from storage import Park, RunAppend, RunLost, Storage, StorageUnavailable
from tests.support.blocking import locked, until
from tests.support.making import is_sqlite
from tests.support.running import http_client, live_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, gated, saying, text, wrote

Trouble = Callable[[Storage], AbstractAsyncContextManager[None]]

LONG = "x" * 200_000
KEYED = {"idempotency-key": "k"}


@asynccontextmanager
async def full(storage: Storage) -> AsyncIterator[None]:
    """A disk with room for nothing but what is small."""
    if not is_sqlite(storage.url):
        pytest.skip("the disk of a database server is its own")

    def allow(conn: Connection, more: int) -> None:
        pages = conn.exec_driver_sql("PRAGMA page_count").scalar_one()
        conn.exec_driver_sql(f"PRAGMA max_page_count={pages + more}")

    await storage._write(lambda conn: allow(conn, 0))
    try:
        yield
    finally:
        await storage._writer.submit(
            lambda conn: allow(conn, 1 << 20), durable=False, retry_until_available=True
        )


def broken(_data: bytes) -> RunPlan:
    raise TypeError("written by another version")


def told(reply: httpx.Response) -> str:
    """The message of a reply that says to come back."""
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "storage_unavailable", reply.text
    assert int(reply.headers["retry-after"]) > 0
    message: str = reply.json()["error"]["message"]
    return message


@pytest.mark.parametrize("trouble", [full, locked])
async def test_a_create_whose_end_cannot_be_stored_is_told_so_and_its_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
) -> None:
    monkeypatch.setattr(journal, "STALL_S", 0.1)
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate, after=LONG))) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        storage = server.context.storage
        creating = asyncio.create_task(client.post("/v1/responses", json={"input": "hi"}, headers=KEYED))
        await gate.reached.wait()
        async with api.open("hi", background=True) as live:
            await live.until("output_text.delta")
            async with trouble(storage):
                gate.release.set()
                first = told(await creating)
                assert "was begun" in first
                again = client.post("/v1/responses", json={"input": "hi"}, headers=KEYED)
                assert told(await again) == first, "a repeat finds the same response"
                if trouble is full:
                    assert first.startswith("The disk of the server is full")
                    assert told(await client.get("/ready")).startswith("The disk of the server is full")
                    assert "begun" not in told(await client.post("/v1/responses", json={"input": "hi"}))
            assert (await live.done())["status"] == "completed", "a stream waits"
        assert (await client.get("/ready")).status_code == 200
        done = api.response(await client.post("/v1/responses", json={"input": "hi"}, headers=KEYED))
        assert done["id"] in first and done["status"] == "completed" and text(done) == f"one two{LONG}"


async def test_one_that_is_to_go_and_cannot_end_is_there_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STALL_S", 0.1)
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate, after=LONG))) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        async with api.open("hi", background=True) as live:
            await live.until("output_text.delta")
            async with full(server.context.storage):
                gate.release.set()
                assert "was begun" in told(await client.delete(f"/v1/responses/{live.id}"))
                waited = await client.get(f"/v1/responses/{live.id}?wait=0.2")
                assert waited.json()["status"] == "in_progress", "reading goes on"
            await live.done()
        await api.delete(live.id)


@pytest.mark.parametrize("readable", [True, False])
async def test_one_that_waits_for_its_client_and_cannot_end_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """It has no task until it is to end. readable: whether what is stored of it can be restored."""
    monkeypatch.setattr(journal, "STALL_S", 0.1)
    engine = ScriptedEngine(saying(LONG + wrote("get_weather", city="Paris")))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        waits = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
        gone, late, other = [(await api.create("hi", **waits))["id"] for _ in range(3)]
        for id in (gone, late, other):
            await api.waits(id)
        if not readable:
            monkeypatch.setattr(RunPlan, "load", broken)
        async with full(server.context.storage), asyncio.timeout(20):
            first, second, third = await asyncio.gather(
                client.delete(f"/v1/responses/{gone}"),
                client.post(f"/v1/responses/{late}/cancel"),
                client.post(f"/v1/responses/{late}/cancel"),
            )
            assert gone in told(first) and late in told(second) and late in told(third)
            assert other in told(await client.post(f"/v1/responses/{other}/cancel"))
            assert late in told(await client.post(f"/v1/responses/{late}/cancel"))
            assert (await api.get(gone))["status"] == "in_progress"
        for id in (gone, late, other):
            assert (await api.ended(id))["status"] == "cancelled"
        await api.delete(gone)
        assert server.context.runs.num_active == 0


async def test_those_out_of_time_whose_ends_cannot_be_stored_are_few_and_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.queries.runs.DUE", 1)
    monkeypatch.setattr(journal, "STALL_S", 0.1)
    engine = ScriptedEngine(saying(LONG + wrote("get_weather", city="Paris")))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api, runs = Api(client), server.context.runs
        waits = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
        ids = [(await api.create("hi", **waits))["id"] for _ in range(2)]
        for id in ids:
            await api.waits(id)
        async with full(server.context.storage), asyncio.timeout(20):
            monkeypatch.setattr("server.runs.takeover.now_us", lambda: 1 << 62)
            await runs._takeover.end_due()
            await runs._takeover.end_due()
            assert runs.num_active == 1
            for id in ids:
                assert id in told(await client.delete(f"/v1/responses/{id}"))
        ended = [await api.ended(id) for id in ids]
        assert sorted(one["status"] for one in ended) == ["cancelled", "failed"]


async def test_one_that_nobody_can_read_meanwhile_is_not_cancelled_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits before its tool is called, so it has not ended; who waited for it was told to come back."""
    monkeypatch.setattr(journal, "STALL_S", 0.1)
    gate = Gate()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        if request.generation:
            yield Say("done")
        else:
            yield gate.wait()
            yield Say(LONG + wrote("calculator", expression="1+1"))

    engine = ScriptedEngine(script)
    async with (
        live_app(tmp_path, engine, resume_grace_s=0.0) as server,
        http_client(server) as client,
        AsyncExitStack() as stack,
    ):
        api, runs = Api(client), server.context.runs
        creating = asyncio.create_task(client.post("/v1/responses", json={"input": "hi", "tools": [BUILTIN]}))
        await gate.reached.wait()
        [run] = runs._tasks
        id = run.plan.response_id
        async with full(server.context.storage):
            gate.release.set()
            message = told(await creating)
            assert id in message and "a GET" in message
            async with api.follow(id) as left:
                await left.until("created")
            await until(lambda: not runs.feed.num_readers(id))
            live = await stack.enter_async_context(api.follow(id))
            await live.until("created")
            assert run.stepping and not run.cancelled
        done = await live.done()
        assert done["status"] == "completed" and text(done) == f"{LONG}done"


async def test_one_of_which_only_the_conversation_is_stored_is_in_that_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STALL_S", 0.1)
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate, after=LONG))) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        conversation = await api.conversation()
        turn = {"input": "hi", "store": False, "conversation": conversation}
        creating = asyncio.create_task(client.post("/v1/responses", json=turn))
        await gate.reached.wait()
        async with full(server.context.storage):
            gate.release.set()
            message = told(await creating)
            assert "was begun" in message and message.endswith("its conversation gets it.")
        await until(lambda: not server.context.runs.num_active)
        [_, said] = await api.conversation_items(conversation)
        assert said["content"][0]["text"] == f"one two{LONG}"


async def test_a_turn_is_not_told_of_the_response_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STALL_S", 0.1)
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate, before=LONG))) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        conversation = await api.conversation()
        async with api.open("hi", conversation=conversation) as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
        await until(lambda: not server.context.runs.feed.num_readers(live.id))
        async with full(server.context.storage):
            turn = {"input": "again", "conversation": conversation}
            assert "resp_" not in told(await client.post("/v1/responses", json=turn))
        assert (await api.ended(live.id))["cancel_reason"] == "next_turn"


async def test_a_server_that_is_stopped_on_a_full_disk_ends_and_the_next_one_goes_on(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate, after=LONG))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        storage = server.context.storage
        begun = await Api(client).create("hi", background=True)
        await gate.reached.wait()
        async with full(storage):
            gate.release.set()
            await until(lambda: storage._writer._obstacle is not None)
            async with asyncio.timeout(10):
                await server.life.drain(0)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        done = await Api(client).ended(begun["id"])
        assert done["status"] == "completed" and text(done) == f"one two{LONG}"


class Held:
    """A database that takes what it is given once it is open, and says until then that it cannot."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    def require_writable(self) -> None:
        raise StorageUnavailable("held")

    async def append(self, batch: Sequence[RunAppend]) -> Mapping[str, Exception]:
        await self.open.wait()
        return {}


@asynccontextmanager
async def stalled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Held, RunLog]]:
    """A run that parks, which shows no event and cannot be stored."""
    monkeypatch.setattr(journal, "STALL_S", 0.01)
    held: Any = Held()
    writing = Journal(held, lambda seconds: None)
    writing.start()
    entry = writing.resume(Channel("resp_1", b"", stored=True, next_seq=2), 1, 2)
    writing.write(entry, [], park=Park(1, 1))
    flushed = asyncio.create_task(writing.flushed(entry))
    await entry.channel.stalled.wait()
    yield held, entry
    await flushed
    held.open.set()
    await writing.close()


async def test_a_stall_ends_with_what_shows_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stalled(monkeypatch) as (held, entry):
        held.open.set()
        await until(lambda: not entry.num_uncommitted)
        assert not entry.channel.stalled.is_set()


async def test_a_stall_ends_where_the_run_is_another_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stalled(monkeypatch) as (_, entry):
        entry.on_lost = lambda lost, why: lost.channel.rest()
        entry.lose(RunLost("resp_1"))
        assert not entry.channel.stalled.is_set()


async def test_what_is_stored_in_the_last_moment_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "STALL_S", 0.0)
    held: Any = Held()
    writing = Journal(held, lambda seconds: None)
    entry = writing.resume(Channel("resp_1", b"", stored=True, next_seq=2), 1, 2)
    writing.write(entry, [], park=Park(1, 1))

    def committed() -> None:
        entry.num_uncommitted = 0
        entry.committed.set()
        raise StorageUnavailable("held")

    held.require_writable = committed
    await writing.flushed(entry)
    assert not entry.channel.stalled.is_set()
