"""Turns over a WebSocket: the events of a POST, lanes, chains that are not stored, and what ends them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine import ScriptedEngine
from server.runs.tool_outputs import ToolOutputs
from tests.support import wire
from tests.support.blocking import until
from tests.support.lines import ENDS, Line, line
from tests.support.running import Running, http_client, live_app
from tests.support.talk import WEATHER, Api, Gate, answer, call, calls, gated_at, prompts, text


async def test_a_turn_has_the_events_of_a_stream(
    live_server: Running, live_client: httpx.AsyncClient
) -> None:
    stream = await Api(live_client).stream("say one two three")
    async with line(live_server.base_url) as socket:
        response = await socket.turn("say one two three")
        assert [frame["type"] for frame in socket.frames] == [event["type"] for event in stream.events]
        assert [frame["sequence_number"] for frame in socket.frames] == list(range(len(stream.events)))
        assert not any("stream_id" in frame for frame in socket.frames)
    assert await Api(live_client).get(response["id"]) == response
    assert text(response) == "one two three"


async def test_stream_goes_without_saying(live_server: Running) -> None:
    async with line(live_server.base_url) as socket:
        assert text(await socket.turn("say hello", stream=True)) == "hello"
        assert "headers" not in socket.frames[0]
        await socket.turn("say hello", stream=False, nonsense=1)
        headers = next(frame["headers"] for frame in socket.frames if "headers" in frame)
        assert headers == {"x-antiphon-ignored": "stream,nonsense"}


async def test_a_prompt_template_and_padding(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as running, http_client(running) as http:
        template = {"instructions": "You live in {{city}}."}
        prompt = (await http.post("/v1/prompts", json={"template": template})).json()["id"]
        async with line(running.base_url) as socket:
            asked = {"id": prompt, "variables": {"city": "Turku"}}
            padded = {"stream_options": {"include_obfuscation": True}}
            response = await socket.turn("say hello", prompt=asked, **padded)
            assert "You live in Turku." in prompts(engine)[-1]
            assert response["prompt"] == {**asked, "version": "1"}
            deltas = [frame for frame in socket.frames if frame["type"].endswith(".delta")]
            assert deltas
            assert all(frame["obfuscation"] for frame in deltas)
            wrong = await socket.refused("missing_required_parameter", input="x", prompt={"id": prompt})
            assert wrong["error"]["param"] == "prompt.variables.city"


async def test_a_chain_that_is_not_stored(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as running, line(running.base_url) as socket:
        first = await socket.turn("say Mark", store=False)
        second = await socket.turn("say again", store=False, previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        await socket.turn("say thrice", store=False, previous_response_id=second["id"])
        last = prompts(engine)[-1]
        assert [last.count(word) for word in ("say Mark", "say again", "say thrice")] == [1, 1, 1]
        assert last.index("say Mark") < last.index("say again") < last.index("say thrice")
        # A branch of the first has nothing of the second.
        await socket.turn("say other", store=False, previous_response_id=first["id"], stream_id="b")
        assert "say again" not in prompts(engine)[-1]
        async with http_client(running) as http:
            assert (await http.get(f"/v1/responses/{first['id']}")).status_code == 404
            assert (await http.get("/v1/responses")).json()["data"] == []


async def test_a_chain_is_told_as_a_stored_one_is(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as running, line(running.base_url) as socket:
        for store in (True, False):
            first = await socket.turn(call(), tools=[WEATHER], store=store)
            output = answer(calls(first)[0]["call_id"])
            await socket.turn([output], tools=[WEATHER], store=store, previous_response_id=first["id"])
        stored, unstored = prompts(engine)[1], prompts(engine)[3]
        assert unstored == stored


async def test_a_chain_belongs_to_its_connection(live_server: Running) -> None:
    async with line(live_server.base_url) as socket:
        first = await socket.turn("say hello", store=False)
        async with line(live_server.base_url) as other:
            error = await other.refused(
                "previous_response_not_found", input="x", previous_response_id=first["id"], stream_id="b"
            )
            assert (error["status"], error["error"]["param"]) == (400, "previous_response_id")
            assert error["stream_id"] == "b"


async def test_a_stored_response_goes_on_from_one_that_is_not(live_server: Running) -> None:
    async with line(live_server.base_url) as socket, http_client(live_server) as http:
        first = await socket.turn("say one", store=False)
        second = await socket.turn("say two", previous_response_id=first["id"])
        assert second["previous_response_id"] is None
        items = (await Api(http).input_items(second["id"], order="asc"))["data"]
        said = [part["text"] for item in items for part in item["content"]]
        assert said == ["say one", "one", "say two"]


async def test_a_failed_turn_evicts_its_parent_on_its_own_lane_only(live_server: Running) -> None:
    async with line(live_server.base_url) as socket:
        first = await socket.turn("say one", store=False)
        asked = {"store": False, "previous_response_id": first["id"]}
        await socket.refused("decimal_above_max_value", input="x", temperature=9, stream_id="b", **asked)
        assert text(await socket.turn("say two", **asked)) == "two"  # a fork's failure leaves it
        await socket.refused("decimal_above_max_value", input="x", temperature=9, **asked)
        await socket.refused("previous_response_not_found", input="x", **asked)


async def test_a_response_that_fails_evicts_its_parent(tmp_path: Path) -> None:
    async with live_app(tmp_path) as running, line(running.base_url) as socket:
        first = await socket.turn("say one", store=False)
        asked = {"store": False, "previous_response_id": first["id"]}
        await socket.ask("fail now", **asked)
        assert (await socket.until(*ENDS))["type"] == "response.failed"
        await socket.refused("previous_response_not_found", input="x", **asked)


async def test_lanes_interleave_and_each_is_in_order(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    async with live_app(tmp_path, engine) as running, line(running.base_url) as socket:
        await socket.ask("say held", stream_id="a")
        await socket.ask("say second", stream_id="a")
        await gate.reached.wait()
        await socket.ask("say free", stream_id="b")
        assert text(await socket.answer()) == "free"
        assert {frame["stream_id"] for frame in socket.frames if frame["type"] in ENDS} == {"b"}
        gate.release.set()
        assert text(await socket.answer()) == "held"
        assert text(await socket.answer()) == "second"
        lanes = [frame["stream_id"] for frame in socket.frames]
        assert lanes.index("b") < len(lanes) - 1 - lanes[::-1].index("a") and set(lanes) == {"a", "b"}


async def test_warming_up(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as running, line(running.base_url) as socket:
        for fields in ({"generate": False}, {"prompt_cache_options": {"prewarm": True}}):
            warm = await socket.turn("My name is Mark.", store=False, **fields)
            assert [frame["type"] for frame in socket.frames] == [
                "response.created", "response.in_progress", "response.completed"
            ]  # fmt: skip
            assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
            assert warm["usage"]["input_tokens"] > 0
            assert engine.requests[-1].sampling.max_tokens == 1
            await socket.turn("say go on", store=False, previous_response_id=warm["id"])
            assert "My name is Mark." in prompts(engine)[-1]
            socket.frames.clear()
        stored = await socket.turn("say hello", generate=False)
        async with http_client(running) as http:
            assert (await http.get(f"/v1/responses/{stored['id']}")).json() == stored
            over_http = await http.post("/v1/responses", json={"input": "say hello", "generate": False})
            wire.validate_response(over_http.json(), warm_up=True)


async def test_outputs_are_injected_into_a_response_that_waits(live_server: Running) -> None:
    async with line(live_server.base_url) as socket:
        await socket.ask(call(), tools=[WEATHER], await_tool_outputs=True, stream_id="a")
        item = (await socket.until("response.output_item.done"))["item"]
        response_id = next(f["response"]["id"] for f in socket.frames if "response" in f)
        wrong = {"type": "response.inject", "response_id": response_id, "input": [{"type": "message"}]}
        await socket.socket.send(json.dumps(wrong))
        error = await socket.next()
        assert error["error"]["param"].startswith("input[0]"), error
        for outputs, told in (
            ([], "Invalid 'input': empty array. Expected an array with minimum length 1"),
            (None, "Missing required parameter: 'input'."),
            ("x", "Invalid type for 'input': expected an array, but got a string"),
        ):
            await socket.socket.send(json.dumps({**wrong, "input": outputs}))
            error = (await socket.next())["error"]
            assert error["param"] == "input" and error["message"].startswith(told), error
        fed = {"type": "response.inject", "response_id": response_id, "input": [answer(item["call_id"])]}
        await socket.socket.send(json.dumps(fed))
        ended = await socket.until(*ENDS)
        created = next(f for f in socket.frames if f["type"] == "response.inject.created")
        assert created["response_id"] == response_id and created["stream_id"] == "a"
        assert ended["response"]["status"] == "completed"
        await socket.socket.send(json.dumps(fed))
        failed = await socket.until("response.inject.failed")
        assert failed["error"]["code"] == "response_already_completed" and failed["input"] == fed["input"]
        await socket.socket.send(json.dumps({**fed, "response_id": "resp_none"}))
        assert (await socket.next())["error"]["code"] == "response_not_found"


async def test_a_turn_waits_where_the_server_does_by_default(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, await_tool_outputs=True) as running,
        line(running.base_url) as socket,
        http_client(running) as http,
    ):
        await socket.ask(call(), tools=[WEATHER])
        item = (await socket.until("response.output_item.done"))["item"]
        response_id = socket.frames[0]["response"]["id"]
        await Api(http).waits(response_id)
        fed = {"type": "response.inject", "response_id": response_id, "input": [answer(item["call_id"])]}
        await socket.socket.send(json.dumps(fed))
        assert (await socket.until(*ENDS))["response"]["status"] == "completed"
        done = await socket.turn(call(), tools=[WEATHER], await_tool_outputs=False)
        assert len(calls(done)) == 1


async def test_outputs_are_acknowledged_before_what_comes_of_them(
    live_server: Running, live_client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = ToolOutputs.feed

    async def feed_and_finish(taker: ToolOutputs, who: Any, stored: Any, outputs: Any, *, by: Any) -> Any:
        """Feed, and come back only once the response has gone on to its end."""
        fed = await feed(taker, who, stored, outputs, by=by)
        await Api(live_client).ended(stored.id)
        return fed

    monkeypatch.setattr(ToolOutputs, "feed", feed_and_finish)
    async with line(live_server.base_url) as socket:
        await socket.ask(call(), tools=[WEATHER], await_tool_outputs=True)
        item = (await socket.until("response.output_item.done"))["item"]
        response_id = socket.frames[0]["response"]["id"]
        fed = {"type": "response.inject", "response_id": response_id, "input": [answer(item["call_id"])]}
        await socket.socket.send(json.dumps(fed))
        await socket.until(*ENDS)
    kinds = [frame["type"] for frame in socket.frames]
    at = kinds.index("response.inject.created")
    assert "response.output_item.added" in kinds[at:], "the answer comes behind the acknowledgement"
    assert socket.frames[at]["sequence_number"] == socket.frames[at - 1]["sequence_number"]
    assert socket.frames[at + 1]["sequence_number"] == socket.frames[at]["sequence_number"] + 1


async def test_a_frame_that_cancels_is_told_the_request_that_does(live_server: Running) -> None:
    async with line(live_server.base_url) as socket:
        error = await socket.refused("invalid_value", type="response.cancel", response_id="resp_x")
        assert "POST /v1/responses/{response_id}/cancel" in error["error"]["message"]


async def test_a_socket_at_the_path_of_requests_is_told_where_sockets_are(live_server: Running) -> None:
    url = f"ws{live_server.base_url.removeprefix('http')}/v1/chat/completions"
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url):
            pass
    assert caught.value.response.status_code == 404
    assert b"a WebSocket is opened at /v1/responses" in (caught.value.response.body or b"")


async def test_steering_is_refused_in_its_own_words(live_server: Running) -> None:
    async with line(live_server.base_url) as socket:
        steer = {"type": "response.steer", "previous_response_id": "resp_x", "input": "left"}
        await socket.socket.send(json.dumps(steer))
        failed = await socket.next()
        assert failed["type"] == "response.steer.failed"
        assert failed["error"]["code"] == "steering_not_supported"
        assert failed["steer"] == {"input": "left", "previous_response_id": "resp_x"}
        await socket.socket.send(json.dumps({"type": "response.processed", "response_id": "resp_x"}))
        assert text(await socket.turn("say hello")) == "hello"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"stream_id": "a b"}, "invalid_stream_id", "stream_id"),
        ({"stream_id": ""}, "invalid_stream_id", "stream_id"),
        ({"stream_id": 3}, "invalid_stream_id", "stream_id"),
        ({"type": "response.nonsense"}, "invalid_value", "type"),
        ({"type": None}, "invalid_value", "type"),
        ({"response": {"input": "say hello"}}, "unsupported_parameter", "response"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"generate": "no"}, "invalid_type", "generate"),
        ({"prompt_cache_options": {"prewarm": 1}}, "invalid_type", "prompt_cache_options.prewarm"),
        ({"model": "nothing"}, "model_not_found", "model"),
    ],
)
async def test_frames_that_make_no_sense(
    live_server: Running, fields: dict[str, Any], code: str, param: str
) -> None:
    async with line(live_server.base_url) as socket:
        error = await socket.refused(code, **{"input": "say hello", **fields})
        assert error["error"]["param"] == param
        assert text(await socket.turn("say hello")) == "hello"


async def test_lanes_and_waiting_requests_are_limited(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "held"))) as running,
        line(running.base_url) as socket,
    ):
        for index in range(32):
            await socket.turn("say hello", stream_id=f"lane-{index}", store=False)
        error = await socket.refused("websocket_stream_limit_reached", input="x", stream_id="one-more")
        assert (error["error"]["param"], error["stream_id"]) == ("stream_id", "one-more")
        assert text(await socket.turn("say hello", stream_id="lane-0")) == "hello"
        assert text(await socket.turn("say hello")) == "hello"
        await socket.ask("say held")
        await gate.reached.wait()
        for _ in range(64):
            await socket.ask("say next")
        await socket.ask("say too many")
        await socket.until("error")
        assert socket.frames[-1]["error"]["code"] == "queue_full"
        gate.release.set()
        for expected in ("held", *["next"] * 64):
            assert text(await socket.answer()) == expected


async def test_sixteen_responses_are_made_at_once(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "held"))) as running,
        line(running.base_url) as socket,
    ):
        for index in range(17):
            await socket.ask("say held", stream_id=f"lane-{index}")
        begun = {(await socket.until("response.in_progress"))["stream_id"] for _ in range(16)}
        gate.release.set()
        seventeenth = (await socket.until("response.in_progress"))["stream_id"]
        assert begun | {seventeenth} == {f"lane-{index}" for index in range(17)}
        before = socket.frames.index(socket.frames[-1])
        assert any(frame["type"] in ENDS for frame in socket.frames[:before])


async def test_a_connection_that_has_lasted_long_enough_is_closed_when_it_rests(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "held")), websocket_s=0.5) as running,
        line(running.base_url) as socket,
    ):
        await socket.ask("say held", stream_id="a")
        await gate.reached.wait()
        while (frame := await _asked(socket, "say more"))["type"] != "error":
            await socket.until(*ENDS)
        assert frame["error"]["code"] == "websocket_connection_limit_reached"
        gate.release.set()
        assert text(await socket.answer()) == "held"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


async def _asked(socket: Line, input: str) -> Any:
    await socket.ask(input, stream_id="b")
    return await socket.next()


async def test_a_drain_lets_turns_end_and_closes(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "held"))) as running,
        line(running.base_url) as idle,
        line(running.base_url) as socket,
    ):
        await socket.ask("say held", stream_id="a")
        await gate.reached.wait()
        draining = asyncio.create_task(running.life.drain(20))
        with pytest.raises(ConnectionClosed) as closed:
            await idle.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        await socket.ask("say more", stream_id="b")
        error = await socket.until("error")
        assert (error["status"], error["error"]["code"]) == (503, "draining")
        assert error["error"]["headers"]["retry-after"]
        gate.release.set()
        assert text(await socket.answer()) == "held"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.next()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        await draining


@pytest.mark.parametrize("num_stored", [0, 1, 3])
async def test_a_drain_names_what_is_stored_and_did_not_end(tmp_path: Path, num_stored: int) -> None:
    """Also where a lane whose response is not stored hears of the end first."""
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    async with live_app(tmp_path, engine) as running, line(running.base_url) as socket:
        stored = []
        for lane in range(num_stored + 1):
            await socket.ask("held", stream_id=str(lane), store=bool(lane))
            begun = await socket.until("response.created")
            if lane:
                stored.append(begun["response"]["id"])
        await until(lambda: engine.stats().running == num_stored + 1)
        draining = asyncio.create_task(running.life.drain(0.1))
        with pytest.raises(ConnectionClosed) as closed:
            await socket.until("error")
        gate.release.set()
        await draining
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
        named = " ".join(["resume", *stored[:2]]) if stored else "interrupted"
        assert closed.value.rcvd.reason == named


async def test_a_client_that_leaves_ends_what_is_not_stored(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated_at(gate, "held"))) as running:
        async with line(running.base_url) as socket:
            await socket.ask("say held", store=False)
            await gate.reached.wait()
            assert running.context.runs.num_active == 1
        async with asyncio.timeout(10):
            while running.context.runs.num_active:
                await asyncio.sleep(0)
        assert len(running.life.sockets) == 0
        assert running.life.sockets.kept.num_bytes == 0
        assert running.life.arrivals.num_bytes == 0


async def test_a_stored_response_is_read_on_over_http(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated_at(gate, "held"))) as running:
        async with line(running.base_url) as socket:
            await socket.ask("say held")
            begun = await socket.until("response.in_progress")
            await gate.reached.wait()
        gate.release.set()
        async with http_client(running) as http:
            assert text(await Api(http).ended(begun["response"]["id"])) == "held"
