"""Clients that leave: unstored runs end at once, stored ones after a grace, background ones never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LocalEngine, ScriptedEngine
from engine.tiny import CHECKPOINT
from server.runs.cluster import leases
from tests.support.running import Running, http_client, live_app
from tests.support.talk import Api, Gate, gated, text


@asynccontextmanager
async def held(folder: Path, gate: Gate, **settings: float | str) -> AsyncIterator[tuple[Running, Api]]:
    """A server whose runs wait at the gate, and a client of it."""
    engine = ScriptedEngine(gated(gate))
    async with live_app(folder, engine, **settings) as server, http_client(server) as client:
        yield server, Api(client)


async def eventually(condition: Callable[[], bool]) -> None:
    """Give the event loop turns until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_unstored_stream_that_is_left_is_aborted(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate) as (server, api):
        async with api.open("hi", store=False) as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
        await eventually(lambda: server.context.runs.num_active == 0)
        engine = server.context.models.get(None).engine
        assert engine.stats().running == 0, "the engine was told"


async def test_an_unstored_plain_create_that_is_left_is_aborted(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate) as (server, api):
        left = asyncio.create_task(api.http.post("/v1/responses", json={"input": "hi", "store": False}))
        await gate.reached.wait()
        left.cancel()
        await eventually(lambda: server.context.runs.num_active == 0)


ASKED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-x"}]}]},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-x"}}]}]
    },
    "/v1/messages": {
        "model": "antiphon-scripted",
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "document", "source": {"type": "file", "file_id": "file-x"}}],
            }
        ],
    },
}


@pytest.mark.parametrize(
    ("path", "body"),
    [*ASKED.items(), ("/v1/messages/count_tokens", {**ASKED["/v1/messages"], "max_tokens": None})],
)
async def test_nothing_is_read_any_more_for_a_client_that_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def read_inputs(*_: object, **__: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    sent = {name: value for name, value in body.items() if value is not None}
    async with live_app(tmp_path, ScriptedEngine()) as server, http_client(server) as client:
        monkeypatch.setattr(server.context.runs.intake, "read_inputs", read_inputs)
        left = asyncio.create_task(client.post(path, json=sent))
        async with asyncio.timeout(10):
            await begun.wait()
            left.cancel()
            await ended.wait()


async def test_a_stored_run_goes_on_and_is_resumed(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate) as (server, api):
        async with api.open("hi") as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
        await eventually(lambda: server.context.runs.feed.total_readers == 0)
        assert (await api.get(live.id))["status"] == "in_progress"
        seen = len(live.events) - 1
        async with api.follow(live.id, seen) as rest:
            gate.release.set()
            while await rest.next() is not None:
                pass
        done = await api.ended(live.id)
        assert (done["status"], text(done)) == ("completed", "one two three four")
        assert [*live.events, *rest.events][-1]["response"] == done


async def test_a_stored_run_ends_cancelled_when_its_grace_is_over_and_says_why(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate, resume_grace_s=0.01) as (server, api):
        async with api.open("hi") as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
        await eventually(lambda: server.context.runs.num_active == 0)
        done = await api.ended(live.id)
        assert (done["status"], done["cancel_reason"], text(done)) == ("cancelled", "unread", "one two")
        forked = (await api.http.post(f"/v1/responses/{live.id}/fork", json={})).json()
        assert forked["status"] == "completed" and "cancel_reason" not in forked


async def test_long_prompts_that_are_left_are_computed_no_longer_than_their_grace(tmp_path: Path) -> None:
    """Of one in its prefill, and of one that waits behind it."""
    engine = LocalEngine(CHECKPOINT, num_threads=1, max_num_seqs=1, kv_cache_bytes=320 << 20)
    async with live_app(tmp_path, engine, resume_grace_s=0.01) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("word " * 15_000) as first, api.open("word " * 14_000) as second:
            await first.until("in_progress")
            await second.until("in_progress")
            await eventually(lambda: engine.stats().prefilling == 1)
        await eventually(lambda: server.context.runs.num_active == 0)
        await engine.settled()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.output_tokens_total) == (0, 0, 0)
        assert (await api.get(first.id))["status"] == (await api.get(second.id))["status"] == "cancelled"


async def test_a_plain_create_that_is_left_has_the_same_grace(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate, resume_grace_s=0.01) as (server, api):
        left = asyncio.create_task(api.http.post("/v1/responses", json={"input": "hi"}))
        await gate.reached.wait()
        left.cancel()
        await eventually(lambda: server.context.runs.num_active == 0)
        [response] = (await api.page("/v1/responses"))["data"]
        assert response["status"] == "cancelled"


async def test_a_reader_that_comes_back_and_leaves_again_gets_a_whole_grace(tmp_path: Path) -> None:
    """The grace counts from the last reader's leaving, not from the first's."""
    gate = Gate()
    async with held(tmp_path, gate, resume_grace_s=60) as (server, api):
        tasks = server.context.runs._tasks
        async with api.open("hi") as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
        await eventually(lambda: live.id in tasks._graces)
        first = tasks._graces[live.id]
        async with api.follow(live.id) as again:
            await again.next()
        await eventually(lambda: tasks._graces[live.id] is not first)
        assert first.cancelled()
        gate.release.set()
        assert (await api.ended(live.id))["status"] == "completed"
        await eventually(lambda: not tasks._graces)


async def test_one_of_two_readers_may_leave(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate, resume_grace_s=0) as (_, api), api.open("hi") as live:
        await live.until("output_text.delta")
        await gate.reached.wait()
        async with api.follow(live.id) as other:
            await other.next()
        gate.release.set()
        assert (await live.done())["status"] == "completed"


async def test_a_background_run_needs_no_reader(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate, resume_grace_s=0) as (server, api):
        async with api.open("hi", background=True) as live:
            await live.until("output_text.delta")
            await gate.reached.wait()
        await eventually(lambda: server.context.runs.feed.total_readers == 0)
        gate.release.set()
        assert (await api.ended(live.id))["status"] == "completed"


async def test_the_engine_dies_and_streams_say_so(tmp_path: Path) -> None:
    """Stored streams are cut and can be resumed after a restart; an unstored one is told that it failed."""
    gate = Gate()
    async with (
        held(tmp_path, gate) as (server, api),
        api.open("hi") as stored,
        api.open("hi", store=False) as unstored,
    ):
        await stored.until("output_text.delta")
        await unstored.until("output_text.delta")
        engine = server.context.models.get(None).engine
        assert isinstance(engine, ScriptedEngine)
        engine.kill(RuntimeError("out of luck"))
        await stored.cut()
        failed = await unstored.done()
        assert (failed["status"], text(failed)) == ("failed", "one two")
    gate.release.set()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate))) as server,
        http_client(server) as client,
    ):
        done = await Api(client).ended(stored.id)
        assert (done["status"], text(done)) == ("completed", "one two three four")


def test_a_deadline_is_noticed_within_a_second() -> None:
    assert leases.ROUND_S <= 1.0


async def test_a_client_that_leaves_at_once_leaves_nothing(tmp_path: Path) -> None:
    """A connection that is dropped before a byte of its stream was read."""
    gate = Gate()
    async with held(tmp_path, gate, resume_grace_s=0) as (server, _):
        host, port = server.base_url.removeprefix("http://").split(":")
        for store in (b"true", b"false"):
            body = b'{"input": "hi", "stream": true, "store": ' + store + b"}"
            _, writer = await asyncio.open_connection(host, int(port))
            head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await eventually(lambda: server.context.runs.num_active == 1)
            writer.close()
            await writer.wait_closed()
            await eventually(lambda: server.context.runs.num_active == 0)
        await eventually(lambda: server.context.runs.feed._channels == {})


async def test_http_errors_leave_no_channel(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        await api.refused(404, "hi", conversation="conv_unknown")
        await api.refused(400, "hi", previous_response_id="resp_unknown")
        with_stream = await client.get("/v1/responses/resp_unknown", params={"stream": "true"})
        assert isinstance(with_stream, httpx.Response) and with_stream.status_code == 404
        assert server.context.runs.feed._channels == {}
