"""Waiting for a response by GET, and when to ask again: `?wait=` and `openai-poll-after-ms`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from engine import ScriptedEngine
from tests.server.runs.test_disconnect import eventually, held
from tests.support.postgres import Postgres
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, call, gated, text
from tests.support.wire import Json


def hint(reply: httpx.Response) -> int | None:
    """When to ask again, in milliseconds."""
    value = reply.headers.get("openai-poll-after-ms")
    return None if value is None else int(value)


async def wait(api: Api, response_id: str, seconds: float = 60) -> httpx.Response:
    return await api.http.get(f"/v1/responses/{response_id}", params={"wait": seconds})


async def begun(server: Running, api: Api) -> str:
    """A background response that has begun to speak, and that nobody reads."""
    made = await api.create("hi", background=True)
    async with api.follow(made["id"]) as live:
        await live.until("output_text.delta")
    await eventually(lambda: server.context.runs.feed.total_readers == 0)
    found: str = made["id"]
    return found


async def waiting(server: Running, api: Api, response_id: str) -> asyncio.Task[httpx.Response]:
    """A GET that waits, once the server knows of it."""
    readers = server.context.runs.feed.num_readers
    before = readers(response_id)
    task = asyncio.create_task(wait(api, response_id))
    await eventually(lambda: readers(response_id) == before + 1)
    return task


async def test_it_is_answered_when_the_response_has_ended(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate) as (server, api):
        response_id = await begun(server, api)
        tasks = [await waiting(server, api, response_id) for _ in range(3)]
        gate.release.set()
        replies = [await task for task in tasks]
        done = await api.ended(response_id)
        assert [api.response(reply) for reply in replies] == [done] * 3
        assert text(done) == "one two three four"
        assert hint(replies[0]) is None
        assert api.response(await wait(api, response_id)) == done
        await eventually(lambda: server.context.runs.feed.total_readers == 0)


async def test_it_is_answered_with_the_state_when_the_time_is_up(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate) as (server, api):
        response_id = await begun(server, api)
        for seconds in (0, 0.01):
            reply = await wait(api, response_id, seconds)
            assert api.response(reply)["status"] == "in_progress"
            assert hint(reply) == 1000
        assert server.context.runs.feed.total_readers == 0
        await api.cancel(response_id)


async def test_a_cancel_ends_the_wait(tmp_path: Path) -> None:
    async with held(tmp_path, Gate()) as (server, api):
        response_id = await begun(server, api)
        task = await waiting(server, api, response_id)
        cancelled = await api.cancel(response_id)
        assert api.response(await task) == cancelled


async def test_a_deletion_ends_the_wait(tmp_path: Path) -> None:
    async with held(tmp_path, Gate()) as (server, api):
        response_id = await begun(server, api)
        task = await waiting(server, api, response_id)
        await api.delete(response_id)
        reply = await task
        # It is cancelled before it goes, and the wait ends with either.
        assert reply.status_code == 404 or api.response(reply)["status"] == "cancelled"


async def test_it_is_answered_when_it_is_the_clients_turn(tmp_path: Path) -> None:
    async with live_app(tmp_path) as server, http_client(server) as http:
        api = Api(http)
        made = await api.create(call(), tools=[WEATHER], background=True, await_tool_outputs=True)
        reply = await wait(api, made["id"])
        [pending] = reply.json()["pending_tool_calls"]
        assert hint(reply) == 5000
        assert (await wait(api, made["id"])).json() == reply.json(), "nothing but outputs helps"
        await api.outputs(made["id"], {pending["call_id"]: "sunny"})
        done = api.response(await wait(api, made["id"]))
        assert text(done) == "The tool said: sunny"


async def test_a_foreground_run_that_somebody_waits_for_is_read(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate, resume_grace_s=0) as (server, api):
        async with api.open("hi") as live:
            await live.until("output_text.delta")
            task = await waiting(server, api, live.id)
        await eventually(lambda: server.context.runs.feed.num_readers(live.id) == 1)
        gate.release.set()
        assert api.response(await task)["status"] == "completed"


async def test_a_client_that_leaves_waits_no_longer(tmp_path: Path) -> None:
    async with held(tmp_path, Gate()) as (server, api):
        response_id = await begun(server, api)
        task = await waiting(server, api, response_id)
        task.cancel()
        await eventually(lambda: server.context.runs.feed.total_readers == 0)
        await api.cancel(response_id)


async def test_a_server_that_stops_answers_with_the_state(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate) as (server, api):
        task = await waiting(server, api, await begun(server, api))
        await server.context.runs.drain(0)
        assert api.response(await task)["status"] == "in_progress"


async def test_it_waits_for_what_another_server_runs(tmp_path: Path, postgres: Postgres) -> None:
    gate = Gate()
    url = await postgres.fresh()
    async with (
        held(tmp_path / "one", gate, db=url) as (one, api),
        live_app(tmp_path / "two", db=url) as two,
        http_client(two) as http,
    ):
        response_id = await begun(one, api)
        task = await waiting(two, Api(http), response_id)
        gate.release.set()
        assert api.response(await task) == await api.get(response_id)
        assert (await api.get(response_id))["status"] == "completed"
    await postgres.give_back(url)


async def test_hundreds_wait_at_once_and_reading_goes_on(tmp_path: Path) -> None:
    """They hold no thread and no connection to the database, of which there are few."""
    gate = Gate()
    async with running_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as http:
        api = Api(http)
        made = await api.create("hi", background=True)
        tasks = [asyncio.create_task(wait(api, made["id"])) for _ in range(300)]
        await eventually(lambda: server.context.runs.feed.total_readers == 300)
        async with asyncio.timeout(10):
            assert (await api.get(made["id"]))["status"] in ("queued", "in_progress")
        gate.release.set()
        replies = await asyncio.gather(*tasks)
        assert len({reply.content for reply in replies}) == 1
        assert replies[0].json()["status"] == "completed"


@pytest.mark.parametrize("seconds", ["-1", "300.1", "soon", "nan", "inf", "1e2", "1_0", "0x1", " 1"])
async def test_what_is_no_time_to_wait_is_refused(client: httpx.AsyncClient, seconds: str) -> None:
    refused = await Api(client).fails(400, "GET", "/v1/responses/resp_0", params={"wait": seconds})
    assert refused["param"] == "wait"


async def test_a_stream_does_not_wait_in_this_way(client: httpx.AsyncClient) -> None:
    params = {"wait": "1", "stream": "true"}
    refused = await Api(client).fails(400, "GET", "/v1/responses/resp_0", params=params)
    assert refused["param"] == "wait"
    await Api(client).fails(404, "GET", "/v1/responses/resp_0", params={"wait": "1", "stream": "false"})


async def test_every_reply_of_an_unfinished_response_says_when_to_ask_again(tmp_path: Path) -> None:
    gate = Gate()
    async with held(tmp_path, gate) as (server, api):
        body: Json = {"input": "hi", "background": True}
        path = f"/v1/responses/{await begun(server, api)}"
        assert hint(await api.http.get(path)) == 1000
        assert hint(await api.http.post(f"{path}/cancel")) is None
        assert hint(await api.http.get(path)) is None
        assert hint(await api.http.post("/v1/responses", json=body)) == 2000, "queued"
        gate.release.set()
        assert hint(await api.http.post("/v1/responses", json={"input": "hi"})) is None
