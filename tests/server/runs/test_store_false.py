"""store=false: a run that leaves nothing behind, in the database or in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from engine import EngineUnavailable, Fail, GenerateRequest, RequestFailed, Say, ScriptedEngine
from engine.backends.script import Step
from server.runs.events import channel
from tests.server.runs.test_concurrency import idle
from tests.support import wire
from tests.support.making import queries, tables
from tests.support.running import Running, http_client, live_app, used_database
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, call, calls, gated, text


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


def rows(folder: Path) -> int:
    """How many rows a database has; the owners and the sums of what they used aside, and the numbers by which
    PostgreSQL's commits are told apart."""
    where = used_database(folder)
    counted = set(tables(where)) - {"owners", "usage", "commits"}
    counts = queries(where, [f"SELECT count(*) FROM {table}" for table in sorted(counted)])
    return sum(count for ((count,),) in counts)


@pytest.mark.parametrize("form", [{}, {"stream": True}])
async def test_nothing_is_written(
    server_app: Running, api: Api, tmp_path: Path, form: dict[str, bool]
) -> None:
    before = rows(tmp_path)
    asked = {"input": "think hm then say hi", "store": False, **form}
    reply = await api.http.post("/v1/responses", json=asked)
    response = api.whole(reply).response if form else api.response(reply)
    assert (text(response), response["store"]) == ("hi", False)
    assert rows(tmp_path) == before
    for method, tail in (("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("GET", "/input_items")):
        await api.fails(404, method, f"/v1/responses/{response['id']}{tail}")
    error = await api.refused(400, "hi", previous_response_id=response["id"])
    assert error["code"] == "previous_response_not_found"
    await api.refused(404, [{"type": "item_reference", "id": response["output"][0]["id"]}])
    assert (await api.page("/v1/responses"))["data"] == []
    feed = server_app.context.runs.feed
    assert (server_app.context.runs.num_active, feed._channels) == (0, {})


async def test_the_client_keeps_the_history(api: Api) -> None:
    first = await api.create(call(), tools=[WEATHER], store=False)
    output = {"type": "function_call_output", "call_id": calls(first)[0]["call_id"], "output": "wet"}
    second = await api.create(
        [{"role": "user", "content": call()}, *first["output"], output], tools=[WEATHER], store=False
    )
    assert text(second) == "The tool said: wet"


async def test_server_tools_need_no_store(api: Api) -> None:
    response = await api.create('call calculator {"expression": "2+3"}', tools=[BUILTIN], store=False)
    assert text(response) == "The tool said: 5"


async def test_a_failed_run_says_so(api: Api) -> None:
    stream = await api.stream("say one\nfail now", store=False)
    assert (stream.response["status"], text(stream.response)) == ("failed", "one")


async def test_a_client_may_wait_for_its_own_outputs_only_when_stored(api: Api) -> None:
    """A run that waits is durable; without a store there is nothing that could wait."""
    error = await api.refused(400, call(), tools=[WEATHER], await_tool_outputs=True, stream=True, store=False)
    assert error["param"] == "await_tool_outputs"


async def test_an_unstored_stream_has_the_same_events(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        gate.release.set()
        kept = await api.stream("hi")
        unkept = await api.stream("hi", store=False)
        assert kept.types == unkept.types
        assert (
            wire.check_items([e for e in unkept.events if "response" not in e]) == unkept.response["output"]
        )


async def test_a_live_response_can_be_read_until_it_has_ended(tmp_path: Path) -> None:
    """By its owner, and by others as an unknown id; what is read is what its own stream says."""
    gate = Gate()

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        yield Say("<think>\nhm\n</think>\n\none two")
        yield gate.wait()
        yield Say(" three")

    keys = ("sk-ann-0123456789", "sk-bob-0123456789")
    async with (
        live_app(tmp_path, ScriptedEngine(script), api_key=keys) as server,
        http_client(server, authorization=f"Bearer {keys[0]}") as client,
        http_client(server, authorization=f"Bearer {keys[1]}") as stranger,
    ):
        api = Api(client)
        async with api.open("hi", store=False) as first:
            await first.until("output_text.delta")
            await gate.reached.wait()
            path = f"/v1/responses/{first.id}"
            standing = api.response(await client.get(path))
            assert (standing["status"], standing["store"]) == ("in_progress", False)
            assert [item["type"] for item in standing["output"]] == ["reasoning"]
            for tail in ("", "?stream=true", "?wait=1"):
                await Api(stranger).fails(404, "GET", path + tail)
            error = await api.fails(400, "GET", f"{path}?stream=true&starting_after=500")
            assert (error["code"], error["param"]) == ("cursor_beyond_log", "starting_after")
            waiting = asyncio.create_task(client.get(f"{path}?wait=30"))
            while server.context.runs.feed.num_readers(first.id) < 2:
                await asyncio.sleep(0.005)
            async with api.follow(first.id, after=2) as second:
                assert (await second.next() or {})["sequence_number"] == 3
                gate.release.set()
                ended = await first.done()
                while await second.next() is not None:
                    pass
            assert second.events == first.events[3:] and text(ended) == "one two three"
            assert api.response(await waiting) == ended
        await idle(server)
        for tail in ("", "?stream=true", "?wait=1"):
            await api.fails(404, "GET", path + tail)


async def test_another_reader_keeps_a_live_response_going(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        async with AsyncExitStack() as held:
            async with api.open("hi", store=False) as first:
                await first.until("output_text.delta")
                second = await held.enter_async_context(api.follow(first.id))
                await second.until("output_text.delta")
            while server.context.runs.feed.num_readers(first.id) > 1:
                await asyncio.sleep(0.005)
            gate.release.set()
            assert text(await second.done()) == "one two three four"
        await idle(server)


async def test_events_that_memory_has_lost_are_a_400(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "TAIL_BYTES", 1)
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("hi", store=False) as first:
            seen = await first.until("output_text.delta")
            await gate.reached.wait()
            error = await api.fails(400, "GET", f"/v1/responses/{first.id}?stream=true")
            assert (error["code"], error["param"]) == ("events_expired", "stream")
            monkeypatch.setattr(channel, "TAIL_BYTES", 1 << 20)
            async with api.follow(first.id, after=seen["sequence_number"]) as second:
                gate.release.set()
                while (event := await second.next()) is not None:
                    last = event
            assert text(last["response"]) == "one two three four"


async def test_one_that_is_stored_for_repeats_alone_is_shown_while_it_is_made(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        asked = {"input": "hi", "store": False, "stream": True}
        making = asyncio.create_task(
            client.post("/v1/responses", json=asked, headers={"idempotency-key": "k"})
        )
        await gate.reached.wait()
        [run] = server.context.runs._tasks
        path = f"/v1/responses/{run.plan.response_id}"
        assert Api.response(await client.get(path))["status"] == "in_progress"
        gate.release.set()
        await making
        await idle(server)
        await Api(client).fails(404, "GET", path)


@pytest.mark.parametrize(
    ("failure", "retry_after"), [(EngineUnavailable("away"), 5), (RequestFailed("no"), None)]
)
async def test_a_failed_response_says_when_to_come_back(
    tmp_path: Path, failure: Exception, retry_after: int | None
) -> None:
    engine = ScriptedEngine(lambda request, prompt: [Say("one"), Fail(failure)])
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        response = (await Api(client).stream("hi", store=False)).response
        assert response["error"].get("retry_after") == retry_after
