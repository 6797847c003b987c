"""A database that takes nothing while runs are made: who waits for their ends is told, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Connection

from engine import ScriptedEngine
from server.runs.events import journal
from storage import Storage
from tests.support.blocking import locked, until
from tests.support.making import is_sqlite
from tests.support.running import http_client, live_app
from tests.support.talk import Api, Gate, gated, text

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
