"""Tool outputs posted to a response: a run that waits for them, and one that completed without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy

import tools
from engine import ScriptedEngine
from server.runs import runner, takeover
from server.runs.cluster import leases
from server.runs.takeover import Takeover
from storage import StorageUnavailable, StoredItem
from tests.support import wire
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import (
    BUILTIN,
    TIME,
    WEATHER,
    Api,
    Gate,
    Live,
    answer,
    call,
    calls,
    gated,
    loose,
    prompts,
    saying,
    text,
    wrote,
)
from tests.support.wire import Json

BOTH = f"{call()}\n{call('get_time')}"
WAITING: Json = {"tools": [WEATHER, TIME], "await_tool_outputs": True}


@pytest.fixture
async def api(live_client: httpx.AsyncClient) -> Api:
    return Api(live_client)


@asynccontextmanager
async def waiting(api: Api, asked: str, **body: Any) -> AsyncIterator[tuple[Live, list[str]]]:
    """A stream that waits, and the ids of the calls that it waits for."""
    async with api.open(asked, **WAITING, **body) as live:
        for _ in range(asked.count("call ")):
            await live.until("output_item.done")
        ids = [call["call_id"] for call in (await api.waits(live.id))["pending_tool_calls"]]
        yield live, ids


# ------------------------------------------------------------------------------------------------------------
# A run that waits


@asynccontextmanager
async def little_room(folder: Path) -> AsyncIterator[tuple[Api, Json, str, str]]:
    """A run in a context of 2,048 tokens that waits for two outputs; it, and the ids of its calls."""
    both = "\n".join(wrote(name, city="Paris") for name in ("get_weather", "get_time"))
    engine = ScriptedEngine(saying(both, "It is noon."), max_model_len=2048)
    async with running_app(folder, engine) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create("hi", background=True, **WAITING)
        weather, time = [c["call_id"] for c in (await api.waits(begun["id"], 2))["pending_tool_calls"]]
        yield api, begun, weather, time


async def test_a_first_output_leaves_room_for_those_that_are_still_to_come(tmp_path: Path) -> None:
    async with little_room(tmp_path) as (api, begun, weather, time):
        path, size = f"/v1/responses/{begun['id']}/tool_outputs", 2000
        while True:  # the longest one that is taken
            output = answer(weather, "x" * size)
            if (await api.http.post(path, json={"tool_outputs": [output]})).status_code == 200:
                break
            size -= 20
        assert size > 500
        await api.outputs(begun["id"], {time: "noon"})
        assert text(await api.ended(begun["id"])) == "It is noon."


async def test_what_the_server_s_tools_returned_counts_before_outputs_are_taken(tmp_path: Path) -> None:
    async def long(expression: str) -> str:
        return "word " * 100

    registry = {**tools.BUILTIN, "calculator": replace(tools.BUILTIN["calculator"], run=long)}
    both = f"{wrote('calculator', expression='1+1')}\n{wrote('get_weather', city='Paris')}"
    offered = [{**BUILTIN, "allowed_tools": ["calculator"]}, WEATHER]
    body: Json = {"tools": offered, "await_tool_outputs": True, "background": True}
    engine = ScriptedEngine(saying(both, "Yes."), max_model_len=2048)
    async with running_app(tmp_path, engine, registry=registry) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create("hi", instructions="y " * 330, **body)
        [call] = (await api.waits(begun["id"]))["pending_tool_calls"]
        path = f"/v1/responses/{begun['id']}/tool_outputs"
        long_one, short = (answer(call["call_id"], "x " * number) for number in (150, 5))
        error = await api.fails(400, "POST", path, json={"tool_outputs": [long_one]})
        assert error["code"] == "context_length_exceeded"
        assert (await client.post(path, json={"tool_outputs": [short]})).status_code == 200
        assert text(await api.ended(begun["id"])) == "Yes."


async def test_outputs_that_leave_no_room_are_refused_and_the_run_waits_on(tmp_path: Path) -> None:
    async with little_room(tmp_path) as (api, begun, weather, time):
        half = "word " * 160

        async def refused(outputs: Json) -> None:
            path = f"/v1/responses/{begun['id']}/tool_outputs"
            items = [answer(call_id, output) for call_id, output in outputs.items()]
            error = await api.fails(400, "POST", path, json={"tool_outputs": items})
            assert (error["code"], error["param"]) == ("context_length_exceeded", "tool_outputs")

        await refused({weather: half * 3})
        await refused({weather: half, time: half})
        await api.outputs(begun["id"], {weather: half})
        await refused({time: half})
        assert (await api.get(begun["id"]))["status"] == "in_progress", "it waits for a shorter one"
        await api.outputs(begun["id"], {time: "noon"})
        ended = await api.ended(begun["id"])
    assert (ended["status"], text(ended)) == ("completed", "It is noon.")


async def test_outputs_go_on_in_the_same_stream(api: Api) -> None:
    async with waiting(api, call()) as (live, [call_id]):
        now = await api.get(live.id)
        assert (now["status"], now["usage"]) == ("in_progress", None)
        assert now["pending_tool_calls"] == [
            {"call_id": call_id, "type": "function_call", "name": "get_weather"}
        ]
        fed = await api.outputs(live.id, {call_id: "rainy"})
        assert (fed["id"], "pending_tool_calls" in fed) == (live.id, False)
        done = await live.done()
    assert [item["type"] for item in done["output"]] == ["function_call", "function_call_output", "message"]
    assert text(done) == "The tool said: rainy"
    assert [e["type"] for e in live.events].count("response.in_progress") == 1
    assert await api.replay(live.id) == live.raw
    assert await api.get(live.id) == done


async def test_usage_counts_every_generation(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        async with waiting(api, call()) as (live, [call_id]):
            await api.outputs(live.id, {call_id: "rainy"})
            done = await live.done()
        assert done["usage"]["input_tokens"] == sum(len(one.prompt_ids) for one in engine.requests)
        assert len(engine.requests) == 2
        records = await server.context.storage.records(live.id, after=-1)
        assert done["usage"]["output_tokens"] == sum(len(record.token_ids) for record in records)


async def test_the_single_form(api: Api) -> None:
    async with waiting(api, call()) as (live, [call_id]):
        body = {"tool_call_id": call_id, "output": [{"type": "output_text", "text": "rainy"}]}
        reply = await api.http.post(f"/v1/responses/{live.id}/tool_outputs", json=body)
        api.response(reply)
        done = await live.done()
    assert text(done) == "The tool said: rainy"


async def test_outputs_may_come_in_several_posts_and_any_order(api: Api) -> None:
    async with waiting(api, BOTH) as (live, [one, two]):
        after = await api.outputs(live.id, {two: "noon"})
        assert after["pending_tool_calls"] == [
            {"call_id": one, "type": "function_call", "name": "get_weather"}
        ]
        assert (await api.get(live.id))["pending_tool_calls"] == after["pending_tool_calls"]
        [listed] = (await api.page("/v1/responses"))["data"]
        assert listed == after
        await api.outputs(live.id, {one: "rainy"})
        done = await live.done()
    assert text(done) == "The tool said: rainy; noon", "outputs stand in the order of their calls"
    types = [item["type"] for item in done["output"]]
    assert types == ["function_call"] * 2 + ["function_call_output"] * 2 + ["message"]


async def test_all_outputs_in_one_post(api: Api) -> None:
    async with waiting(api, BOTH) as (live, [one, two]):
        await api.outputs(live.id, {one: "rainy", two: "noon"})
        assert text(await live.done()) == "The tool said: rainy; noon"


async def test_the_same_output_again_changes_nothing(api: Api) -> None:
    async with waiting(api, BOTH) as (live, [one, two]):
        first = await api.outputs(live.id, {one: "rainy"})
        assert await api.outputs(live.id, {one: "rainy"}) == first
        await asyncio.gather(*(api.outputs(live.id, {one: "rainy", two: "noon"}) for _ in range(5)))
        done = await live.done()
        assert await api.outputs(live.id, {one: "rainy", two: "noon"}) == done, "after the end, too"
    assert text(done) == "The tool said: rainy; noon"


async def test_another_output_for_an_answered_call_is_a_conflict(api: Api) -> None:
    async with waiting(api, BOTH) as (live, [one, two]):
        await api.outputs(live.id, {one: "rainy"})
        path = f"/v1/responses/{live.id}/tool_outputs"
        other = {"tool_outputs": [{"call_id": one, "output": "sunny"}, {"call_id": two, "output": "noon"}]}
        error = await api.fails(409, "POST", path, json=other)
        assert error["param"] == "tool_outputs[0].call_id"
        assert error["headers"]["x-should-retry"] == "false"
        assert (await api.get(live.id))["pending_tool_calls"] == [
            {"call_id": two, "type": "function_call", "name": "get_time"}
        ]
        await api.outputs(live.id, {two: "noon"})
        await live.done()
        error = await api.fails(409, "POST", path, json=other)
        assert error["param"] == "tool_outputs[0].call_id"


async def test_an_unknown_call_is_refused(api: Api) -> None:
    async with waiting(api, call()) as (live, [call_id]):
        path = f"/v1/responses/{live.id}/tool_outputs"
        body = {"tool_outputs": [{"call_id": call_id, "output": "x"}, {"call_id": "call_no", "output": "x"}]}
        error = await api.fails(400, "POST", path, json=body)
        assert error["code"] == "unknown_call_id" and "call_no" in error["message"]
        assert error["param"] == "tool_outputs[1].call_id"
        assert len((await api.get(live.id))["pending_tool_calls"]) == 1, "all or none"
        await api.outputs(live.id, {call_id: "x"})
        await live.done()


@pytest.mark.parametrize(
    "body",
    [{}, {"tool_outputs": []}, {"tool_outputs": [{"output": "x"}]}, {"tool_outputs": [{"call_id": "c"}]},
     {"tool_outputs": [{"call_id": "c", "output": "x"}] * 2}],
)  # fmt: skip
async def test_a_malformed_post_is_refused(api: Api, body: Json) -> None:
    async with waiting(api, call()) as (live, _):
        await api.fails(400, "POST", f"/v1/responses/{live.id}/tool_outputs", json=body)


async def test_outputs_may_be_posted_as_soon_as_a_call_is_seen(tmp_path: Path) -> None:
    """A client is faster than the run: it posts while the model still makes its second call."""
    gate = Gate()
    first, second = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Paris"}}}}\n</tool_call>'
        for name in ("get_weather", "get_time")
    )
    script = gated(gate, f"{first}\n{second[:-20]}", second[-20:])
    async with (
        live_app(tmp_path, ScriptedEngine(script)) as server,
        http_client(server) as client,
        Api(client).open("hi", **WAITING) as live,
    ):
        api = Api(client)
        one = (await live.until("output_item.done"))["item"]["call_id"]
        early = asyncio.create_task(api.outputs(live.id, {one: "rainy"}))
        while server.life._num_posts < 2:
            await asyncio.sleep(0.001)
        assert await api.get(live.id), "and it has been looked at"
        gate.release.set()
        two = (await live.until("output_item.done"))["item"]["call_id"]
        assert (await early)["pending_tool_calls"] == [
            {"call_id": two, "type": "function_call", "name": "get_time"}
        ]
        await api.cancel(live.id)


async def test_a_second_round_of_calls(tmp_path: Path) -> None:
    markup = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'

    def script(request: Any, prompt: str) -> Any:
        from engine import Say

        yield Say(markup % "ABC"[request.generation] if request.generation < 3 else "enough")

    async with live_app(tmp_path, ScriptedEngine(script)) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("hi", **WAITING) as live:
            for _ in range(3):
                made = (await live.until("output_item.done"))["item"]
                assert made["type"] == "function_call"
                await api.outputs(live.id, {made["call_id"]: "x"})
                await live.until("output_item.done")  # the output's own
            done = await live.done()
        assert text(done) == "enough"
        assert [item["type"] for item in done["output"]].count("function_call_output") == 3
        assert len({item["call_id"] for item in calls(done)}) == 3


async def test_a_forced_choice_holds_for_the_first_generation_only(api: Api) -> None:
    async with api.open("say hi", **WAITING, tool_choice="required") as live:
        made = (await live.until("output_item.done"))["item"]
        await api.outputs(live.id, {made["call_id"]: "rainy"})
        done = await live.done()
    assert text(done) == "The tool said: rainy"


async def test_max_output_tokens_count_over_the_whole_run(api: Api) -> None:
    async with waiting(api, call(), max_output_tokens=80) as (live, [call_id]):
        await api.outputs(live.id, {call_id: "a very long story " * 10})
        done = await live.done()
    assert (done["status"], done["usage"]["output_tokens"]) == ("incomplete", 80)


async def test_background_runs_wait_too(api: Api) -> None:
    begun = await api.create(call(), background=True, **WAITING)
    [pending] = (await api.waits(begun["id"]))["pending_tool_calls"]
    await api.outputs(begun["id"], {pending["call_id"]: "rainy"})
    assert text(await api.ended(begun["id"])) == "The tool said: rainy"


async def test_until_when_a_run_waits_is_told(api: Api) -> None:
    before = int(time.time())
    begun = await api.create(call(), background=True, **WAITING, tool_timeout_s=3600)
    now = await api.waits(begun["id"])
    assert before + 3600 <= now["tool_timeout_at"] <= time.time() + 3600
    (listed,) = (await api.http.get("/v1/responses?status=waiting")).json()["data"]
    assert listed["tool_timeout_at"] == now["tool_timeout_at"]
    await api.outputs(begun["id"], {now["pending_tool_calls"][0]["call_id"]: "rainy"})
    assert "tool_timeout_at" not in await api.ended(begun["id"])


async def test_a_run_without_calls_does_not_wait(api: Api) -> None:
    assert (await api.stream("say hi", **WAITING)).response["status"] == "completed"


async def test_server_tools_run_before_the_client_is_waited_for(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    asked = f'call calculator {{"expression": "2+2"}}\n{call()}'
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create(asked, tools=[BUILTIN, WEATHER], await_tool_outputs=True, background=True)
        now = await api.waits(begun["id"])
        assert [item["type"] for item in now["output"]] == ["mcp_list_tools", "mcp_call", "function_call"]
        [pending] = now["pending_tool_calls"]
        assert pending["name"] == "get_weather"
        await api.outputs(begun["id"], {pending["call_id"]: "rainy"})
        await api.ended(begun["id"])
        for output in ("4", "rainy"):
            assert f"<tool_response>\n{output}\n</tool_response>" in prompts(engine)[-1]


# ------------------------------------------------------------------------------------------------------------
# Deadlines and restarts


@asynccontextmanager
async def stopping(folder: Path, asked: str, **body: Any) -> AsyncIterator[tuple[Api, Live, list[str]]]:
    """A server that stops at the end of the block, with a run that waits."""
    async with live_app(folder) as server, http_client(server) as client:
        api = Api(client)
        async with waiting(api, asked, **body) as (live, ids):
            yield api, live, ids


async def test_a_run_that_waits_too_long_fails(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    async with waiting(api, call(), tool_timeout_s=0.05) as (live, [call_id]):
        done = await live.done()
        told = {"code": "server_error", "message": "No tool outputs came within 0.05 s."}
        assert (done["status"], done["error"]) == ("failed", told)
        assert f"run {live.id} failed: No tool outputs came within 0.05 s." in caplog.messages
        assert calls(done)[0]["status"] == "completed"
        late = {"tool_outputs": [{"call_id": call_id, "output": "x"}]}
        await api.fails(400, "POST", f"/v1/responses/{live.id}/tool_outputs", json=late)
    assert await api.get(live.id) == done


async def test_a_server_may_wait_where_a_request_leaves_it_open(tmp_path: Path) -> None:
    async with live_app(tmp_path, await_tool_outputs=True) as server, http_client(server) as client:
        api = Api(client)
        for form in ({"background": True}, {"background": True, "await_tool_outputs": None}):
            begun = await api.create(call(), tools=[WEATHER], tool_timeout_s=30, **form)
            [pending] = (await api.waits(begun["id"]))["pending_tool_calls"]
            await api.outputs(begun["id"], {pending["call_id"]: "rainy"})
            assert text(await api.ended(begun["id"])) == "The tool said: rainy"
        async with api.open(call(), tools=[WEATHER]) as live:
            await live.until("output_item.done")
            [pending] = (await api.waits(live.id))["pending_tool_calls"]
            await api.outputs(live.id, {pending["call_id"]: "rainy"})
            assert text(await live.done()) == "The tool said: rainy"


async def test_a_server_that_waits_changes_nothing_where_a_request_could_not_or_would_not(
    tmp_path: Path,
) -> None:
    async with live_app(tmp_path, await_tool_outputs=True) as server, http_client(server) as client:
        api = Api(client)
        assert calls(await api.create(call(), tools=[WEATHER]))[0]["status"] == "completed"
        for form in ({"store": False}, {"await_tool_outputs": False}):
            done = (await api.stream(call(), tools=[WEATHER], **form)).response
            assert done["status"] == "completed" and len(calls(done)) == 1
        assert text((await api.stream("say hi")).response) == "hi"
        reply = await client.post("/v1/responses", json={"input": "hi", "tool_timeout_s": 3})
        assert reply.headers["x-antiphon-ignored"] == "tool_timeout_s"
    off = {"store": False, "await_tool_outputs": True}
    async with live_app(tmp_path / "off", **off) as server, http_client(server) as client:
        done = (await Api(client).stream(call(), tools=[WEATHER], store=False)).response
        assert done["status"] == "completed" and len(calls(done)) == 1


async def test_waiting_survives_a_restart(tmp_path: Path) -> None:
    async with stopping(tmp_path, BOTH) as (api, live, [one, two]):
        await api.outputs(live.id, {one: "rainy"})
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        now = await api.get(live.id)
        assert now["pending_tool_calls"] == [{"call_id": two, "type": "function_call", "name": "get_time"}]
        async with api.follow(live.id, len(live.events) - 1) as rest:
            await api.outputs(live.id, {two: "noon"})
            while await rest.next() is not None:
                pass
        done = wire.check_stream([*live.events, *rest.events])
        assert text(done) == "The tool said: rainy; noon"
        assert (await api.replay(live.id)).startswith(live.raw)
        assert await api.get(live.id) == done


async def test_outputs_that_came_before_a_crash_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outputs are stored, and the server stops before it takes the run up: the next one does."""

    async def stopped(self: Takeover, response_id: str) -> None:
        return None

    async with stopping(tmp_path, call()) as (api, live, [call_id]):
        with monkeypatch.context() as patched:
            patched.setattr(Takeover, "claim", stopped)
            await api.outputs(live.id, {call_id: "rainy"})
    async with live_app(tmp_path) as server, http_client(server) as client:
        done = await Api(client).ended(live.id)
        assert (done["status"], text(done)) == ("completed", "The tool said: rainy")
        types = [e["type"] for e in wire.events(await Api(client).replay(live.id))]
        assert types.count("response.in_progress") == 1


async def test_a_run_is_taken_up_as_soon_as_the_database_can_be_read(
    live_server: Running, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs are stored and the claim is ours: it must not be left lying because of one read."""
    storage = live_server.context.storage
    waiting_inputs = storage.waiting_inputs
    failures = iter([StorageUnavailable("busy")] * 2)

    async def flaky(response_id: str) -> tuple[StoredItem, ...]:
        for failure in failures:
            raise failure
        return await waiting_inputs(response_id)

    monkeypatch.setattr(takeover, "RETRY_S", 0.001)
    monkeypatch.setattr(storage, "waiting_inputs", flaky)
    async with waiting(api, call()) as (live, [call_id]):
        await api.outputs(live.id, {call_id: "rainy"})
        assert text(await live.done()) == "The tool said: rainy"


async def test_a_deadline_passes_while_the_server_is_down(tmp_path: Path) -> None:
    async with stopping(tmp_path, call(), tool_timeout_s=0.2) as (_, live, _):
        pass
    async with live_app(tmp_path) as server, http_client(server) as client:
        done = await Api(client).ended(live.id)
        assert done["status"] == "failed" and "0.2 s" in done["error"]["message"]


async def test_a_deadline_that_a_clock_set_which_was_ahead_is_capped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stopping(tmp_path, call()) as (_, live, _):
        pass
    async with live_app(tmp_path) as server:
        ahead = sqlalchemy.text("UPDATE runs SET deadline = deadline + 31536000000000")
        await server.context.storage._write(lambda conn: conn.execute(ahead).rowcount)
    monkeypatch.setattr(runner, "MAX_TOOL_TIMEOUT_S", 0.1)
    async with live_app(tmp_path, tool_timeout_s=0.1) as server, http_client(server) as client:
        assert (await Api(client).ended(live.id))["status"] == "failed"


async def test_many_deadlines_pass_while_the_server_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are ended some at a time, and the next ones soon."""
    monkeypatch.setattr("storage.queries.runs.DUE", 1)
    monkeypatch.setattr(leases, "ROUND_S", 3600.0)
    async with (
        stopping(tmp_path, call(), tool_timeout_s=0.001) as (api, one, _),
        waiting(api, call(), tool_timeout_s=0.001) as (two, _),
    ):
        pass
    async with live_app(tmp_path) as server, http_client(server) as client:
        for id in (one.id, two.id):
            assert (await Api(client).ended(id))["status"] == "failed"


async def test_a_run_does_not_go_on_behind_another_model(tmp_path: Path) -> None:
    async with stopping(tmp_path, call()) as (_, live, [call_id]):
        pass
    other = ScriptedEngine(chat_template="{{ messages[0].content }}")
    async with live_app(tmp_path, other) as server, http_client(server) as client:
        await Api(client).outputs(live.id, {call_id: "rainy"})
        done = await Api(client).ended(live.id)
        assert done["status"] == "failed" and "changed" in done["error"]["message"]
        assert calls(done)[0]["call_id"] == call_id


async def test_a_woken_run_that_nobody_reads_has_a_grace(tmp_path: Path) -> None:
    gate = Gate()

    def script(request: Any, prompt: str) -> Any:
        from engine.backends.script import obey

        if request.generation:
            yield gate.wait()
        yield from obey(request, prompt)

    async with (
        live_app(tmp_path, ScriptedEngine(script), resume_grace_s=0.01) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        async with waiting(api, call()) as (live, [call_id]):
            pass
        await api.outputs(live.id, {call_id: "rainy"})
        async with asyncio.timeout(10):
            while (await api.get(live.id))["status"] == "in_progress":
                await asyncio.sleep(0.005)
        assert (await api.ended(live.id))["status"] == "cancelled"


async def test_cancel_while_outputs_arrive(live_server: Running, api: Api) -> None:
    """Whichever comes first, there is one end and the two answers agree with it."""
    for turns in (0, 1, 3, 7):
        async with waiting(api, call()) as (live, [call_id]):
            fed = asyncio.create_task(
                api.http.post(
                    f"/v1/responses/{live.id}/tool_outputs", json={"tool_call_id": call_id, "output": "x"}
                )
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled = await api.http.post(f"/v1/responses/{live.id}/cancel")
            done = await live.done()
            assert (await fed).status_code in (200, 400)
            if cancelled.status_code == 200:
                assert cancelled.json() == done
            else:
                assert done["status"] == "completed"
    assert live_server.context.runs.num_active == 0


# ------------------------------------------------------------------------------------------------------------
# A response that completed with its calls unanswered


async def test_outputs_of_a_completed_response_continue_it(api: Api) -> None:
    asked: Json = {
        "tools": [WEATHER],
        "instructions": "be brief",
        "metadata": {"k": "v"},
        "temperature": 0.25,
        "seed": 7,
        "stop": ["never"],
        "max_output_tokens": 100,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "required",
        "include": ["reasoning.encrypted_content"],
    }
    first = await api.create(call(), **asked)
    [made] = calls(first)
    second = await api.outputs(first["id"], {made["call_id"]: "rainy"})
    assert second["id"] != first["id"] and second["previous_response_id"] == first["id"]
    assert text(second) == "The tool said: rainy"
    for name in (
        "tools",
        "instructions",
        "metadata",
        "temperature",
        "max_output_tokens",
        "reasoning",
        "text",
    ):
        assert second[name] == first[name], name
    assert second["tool_choice"] == "auto", "a forced choice held for the first generation"
    assert await api.get(first["id"]) == first


async def test_a_continuation_is_streamed_when_its_post_says_so(api: Api) -> None:
    first = await api.create(call(), tools=[WEATHER])
    body = {"tool_call_id": calls(first)[0]["call_id"], "output": "rainy", "stream": True}
    stream = api.whole(await api.http.post(f"/v1/responses/{first['id']}/tool_outputs", json=body))
    assert text(stream.response) == "The tool said: rainy"


async def test_a_continuation_in_a_conversation_is_its_next_turn(api: Api) -> None:
    conversation = await api.conversation()
    first = await api.create(call(), tools=[WEATHER], conversation=conversation)
    second = await api.outputs(first["id"], {calls(first)[0]["call_id"]: "rainy"})
    assert second["conversation"] == {"id": conversation}
    assert len(await api.conversation_items(conversation)) == 4


async def test_a_continuation_of_a_background_response_is_one_too(api: Api) -> None:
    begun = await api.create(call(), tools=[WEATHER], background=True)
    first = await api.ended(begun["id"])
    second = await api.outputs(first["id"], {calls(first)[0]["call_id"]: "rainy"})
    assert (second["status"], second["background"]) == ("queued", True)
    assert text(await api.ended(second["id"])) == "The tool said: rainy"


async def test_a_continuation_needs_all_outputs_in_one_post(api: Api) -> None:
    first = await api.create(BOTH, tools=[WEATHER, TIME])
    one, two = (item["call_id"] for item in calls(first))
    path = f"/v1/responses/{first['id']}/tool_outputs"
    error = await api.fails(400, "POST", path, json={"tool_call_id": one, "output": "x"})
    assert two in error["message"]
    error = await api.fails(400, "POST", path, json={"tool_call_id": "call_nobody", "output": "x"})
    assert (error["code"], error["param"]) == ("unknown_call_id", "tool_outputs[0].call_id")
    extra = [{"call_id": call_id, "output": "x"} for call_id in (one, two, "call_nobody")]
    error = await api.fails(400, "POST", path, json={"tool_outputs": extra})
    assert "call_nobody" in error["message"]
    assert (error["code"], error["param"]) == ("unknown_call_id", "tool_outputs[2].call_id")
    done = await api.outputs(first["id"], {one: "rainy", two: "noon"})
    assert text(done) == "The tool said: rainy; noon"


async def test_a_response_without_pending_calls_takes_no_outputs(api: Api) -> None:
    response = await api.create("say hi")
    body = {"tool_call_id": "call_nobody", "output": "x"}
    error = await api.fails(400, "POST", f"/v1/responses/{response['id']}/tool_outputs", json=body)
    assert error["code"] == "unknown_call_id"


async def test_allowed_tools_hold_in_a_continuation(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        allowed = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_time"}],
        }
        first = await api.create(call("get_time"), tools=[WEATHER, TIME], tool_choice=allowed)
        second = await api.outputs(first["id"], {calls(first)[0]["call_id"]: "noon"})
        assert second["tool_choice"] == {**allowed, "mode": "auto"}
        assert "get_weather" not in prompts(engine)[-1]


async def test_a_keyword_that_was_only_named_does_not_stop_the_continuation(api: Api) -> None:
    """`strict` is the default of functions: only who asks for it by name is refused a misspelt keyword."""
    misspelt = {**WEATHER, "parameters": {**WEATHER["parameters"], "propertys": {}}}
    misspelt.pop("strict", None)
    first = await api.create(call(), tools=[misspelt])
    second = await api.outputs(first["id"], {calls(first)[0]["call_id"]: "rain"})
    assert (second["status"], second["tools"]) == ("completed", first["tools"])


@pytest.mark.parametrize("waits", [False, True])
async def test_a_turn_that_ends_inside_a_call_asks_nobody_for_an_answer(api: Api, waits: bool) -> None:
    """The model drew the end of its turn where an argument was to go on, with no grammar to forbid it."""
    lenient = {**WEATHER, "strict": False}
    asked = 'call get_weather {"city": "x<|im_end|>y"}'
    stream = await api.stream(asked, tools=[lenient], await_tool_outputs=waits)
    assert (stream.response["status"], stream.response["error"]) == ("completed", None)
    [torn] = stream.response["output"]
    assert (torn["type"], torn["status"]) == ("function_call", "incomplete")
    assert "pending_tool_calls" not in await api.get(stream.response["id"])
    again = await api.create("say so", previous_response_id=stream.response["id"])
    assert (again["status"], text(again)) == ("completed", "so")


BROKEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city" "Oslo"}}\n</tool_call>'


async def test_a_call_that_is_no_json_ends_the_turn_and_can_be_answered(tmp_path: Path) -> None:
    """As clients do that give the model their own error, and let it try again."""
    engine = ScriptedEngine(saying(BROKEN))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        lenient = {**WEATHER, "strict": False}
        first = await Api(client).create("hi", tools=[lenient])
        [broken] = calls(first)
        assert (first["status"], broken["status"]) == ("completed", "incomplete")
        assert broken["arguments"] == '{"city" "Oslo"}}\n'
        error = {
            "type": "function_call_output",
            "call_id": broken["call_id"],
            "output": "No JSON: try again.",
        }
        await Api(client).create([error], tools=[lenient], previous_response_id=first["id"])
    assert "No JSON: try again." in prompts(engine)[-1]


async def test_the_model_is_told_of_a_broken_call_of_a_server_tool(tmp_path: Path) -> None:
    engine = loose(saying(BROKEN.replace("get_weather", "calculator"), "I give up."))
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        response = await Api(client).create("hi", tools=[BUILTIN])
    assert (response["status"], text(response)) == ("completed", "I give up.")
    assert "no JSON" in prompts(engine)[-1]
