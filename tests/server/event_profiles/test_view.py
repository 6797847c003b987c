"""How readers are shown events: padded ones, and those of the older profiles."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from openai import AsyncOpenAI

from engine import ScriptedEngine
from server.event_profiles import View, older_response
from server.event_profiles.view import LARGE
from server.http import sse
from tests.server.event_profiles.test_logprobs import entry
from tests.support import wire
from tests.support.lines import ENDS, line
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import BUILTIN, WEATHER, Api, Gate, Live, call, gated, prompts

Json = dict[str, Any]
GOLDEN = Path(__file__).with_name("transcripts.json")
ID = re.compile(r"([a-z]{2,4})_[0-9a-f]{12,}")

SCENARIOS: dict[str, Json] = {
    "text": {"input": "say one two"},
    "reasoning": {"input": "think hm ha then say one"},
    "call": {"input": call(), "tools": [WEATHER]},
    "calls": {"input": f"think hm then say one\n{call()}\n{call(city='Rome')}", "tools": [WEATHER]},
    "incomplete": {"input": "count 50", "max_output_tokens": 16},
    "failed": {"input": "fail oh"},
    "server tool": {"input": 'call calculator {"expression": "6*7"}', "tools": [BUILTIN]},
    "sealed": {"input": "think hm then say one", "include": ["reasoning.encrypted_content"]},
    "background": {"input": "say one", "background": True},
}

A_CALL = ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par', 'is"}}\n</tool_call>')
"""A call as the model writes it, in two pieces."""


def parsed(raw: bytes) -> list[Json]:
    """The events of an older stream, which ends with [DONE]."""
    *frames, done = raw.split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    found = []
    for frame in frames:
        name, data = frame.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        found.append(event)
    return found


async def events_of(client: httpx.AsyncClient, response_id: str, profile: str, **params: str) -> bytes:
    reply = await client.get(
        f"/v1/responses/{response_id}",
        params={"stream": "true", **params},
        headers={"x-antiphon-profile": profile},
    )
    assert reply.status_code == 200, reply.text
    return reply.content


def steady(value: Any, known: dict[str, str]) -> Any:
    """A JSON value without what differs from run to run: ids, times, and what is sealed. Responses are cut
    down to what a profile changes."""
    if isinstance(value, list):
        return [steady(each, known) for each in value]
    if not isinstance(value, dict):
        if isinstance(value, str) and (kind := ID.fullmatch(value)) is not None:
            return known.setdefault(value, f"{kind[1]}_{len(known)}")
        return value
    if value.get("object") == "response":
        value = {name: value[name] for name in ("id", "status", "error", "incomplete_details", "output")}
    told = {name: steady(each, known) for name, each in value.items()}
    for name in ("encrypted_content", "tools"):
        if told.get(name):
            told[name] = "..."
    return told


# ------------------------------------------------------------------------------------------------------------
# Transcripts


@pytest.mark.parametrize("name", SCENARIOS)
async def test_the_transcripts_of_each_profile(client: httpx.AsyncClient, name: str) -> None:
    """From one log. `python -m tests.server.event_profiles.test_view` writes the file anew."""
    golden = json.loads(GOLDEN.read_text())[name]
    assert await transcripts(client, SCENARIOS[name]) == golden


async def transcripts(client: httpx.AsyncClient, body: Json) -> Json:
    """The events of one response in both profiles, without what differs from run to run."""
    streamed = await client.post("/v1/responses", json={"stream": True, **body})
    official = wire.events(streamed.content)
    wire.check_stream(official)
    response_id = official[0]["response"]["id"]
    older = parsed(await events_of(client, response_id, "legacy"))
    return {
        "openai": steady(official, {}),
        "legacy": steady(older, {}),
    }


async def test_frames_of_a_websocket_are_of_the_same_log(tmp_path: Path) -> None:
    """Official over a connection, whatever the profile of the server; the same log over HTTP in each."""
    golden = json.loads(GOLDEN.read_text())
    async with (
        live_app(tmp_path, responses_profile="legacy") as running,
        http_client(running) as client,
        line(running.base_url) as socket,
    ):
        names = [name for name in SCENARIOS if name != "background"]  # which a connection does not take
        lanes = {f"lane-{place}": name for place, name in enumerate(names)}
        for lane, name in lanes.items():
            await socket.ask(**SCENARIOS[name], stream_id=lane)
        for _ in lanes:
            await socket.until(*ENDS)
        for lane, name in lanes.items():
            frames = [frame for frame in socket.frames if frame["stream_id"] == lane]
            bare = [{key: frame[key] for key in frame if key != "stream_id"} for frame in frames]
            assert steady(bare, {}) == golden[name]["openai"], name
            response_id = bare[0]["response"]["id"]
            assert wire.events(await events_of(client, response_id, "openai")) == bare
            older = parsed(await events_of(client, response_id, "legacy"))
            assert steady(older, {}) == golden[name]["legacy"], name


@pytest.mark.parametrize("name", SCENARIOS)
async def test_one_vocabulary_and_the_official_numbers(client: httpx.AsyncClient, name: str) -> None:
    streamed = await client.post(
        "/v1/responses", json={"stream": True, **SCENARIOS[name]}, headers={"x-antiphon-profile": "legacy"}
    )
    older = parsed(streamed.content)
    response_id = older[0]["response"]["id"]
    official = wire.events(await Api(client).replay(response_id))
    numbers = [event["sequence_number"] for event in older]
    assert numbers == sorted(numbers)
    assert {*numbers} <= {event["sequence_number"] for event in official}
    assert numbers[-1] == official[-1]["sequence_number"]
    kinds = {event["type"] for event in older}
    for gone in ("reasoning_text", "reasoning_summary", "function_call_arguments", "response.failed"):
        assert not [kind for kind in kinds if gone in kind]
    assert older[-1]["response"] == older_response(official[-1]["response"])
    # The same bytes from the log as at first.
    assert await events_of(client, response_id, "legacy") == streamed.content


@pytest.mark.parametrize("profile", ["legacy", "legacy-string"])
@pytest.mark.parametrize("name", ["calls", "sealed", "failed"])
async def test_a_stream_is_resumed_from_any_event(client: httpx.AsyncClient, name: str, profile: str) -> None:
    streamed = await client.post(
        "/v1/responses", json={"stream": True, **SCENARIOS[name]}, headers={"x-antiphon-profile": profile}
    )
    whole = parsed(streamed.content)
    response_id = whole[0]["response"]["id"]
    for after in range(-1, whole[-1]["sequence_number"] + 1):
        tail = parsed(await events_of(client, response_id, profile, starting_after=str(after)))
        assert tail == [event for event in whole if event["sequence_number"] > after]


async def test_arguments_as_a_text(client: httpx.AsyncClient) -> None:
    response = await Api(client).create(call(), tools=[WEATHER])
    found: dict[str, list[Json]] = {}
    for profile in ("legacy", "legacy-string"):
        events = parsed(await events_of(client, response["id"], profile))
        deltas = [event for event in events if event["type"] == "response.tool_call.delta"]
        found[profile] = [part for event in deltas for part in event["delta"]["content"]]
    assert found["legacy"] and "".join(part["arguments"] for part in found["legacy"]) == '{"city": "Paris"}'
    assert [json.loads(str(part)) for part in found["legacy-string"]] == found["legacy"]


async def test_a_running_stream_is_resumed_in_a_call(tmp_path: Path) -> None:
    """The names of calls come from events that the client has seen, and this stream does not send."""
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate, *A_CALL))) as server,
        http_client(server) as client,
    ):
        body = {"input": "hi", "tools": [WEATHER], "background": True}
        begun = (await client.post("/v1/responses", json=body)).json()
        await asyncio.wait_for(gate.reached.wait(), 20)
        last: Json = {"type": "none"}
        async with asyncio.timeout(20):  # what the engine has said is stored a moment later
            while last["type"] != "response.function_call_arguments.delta":
                page = (await client.get(f"/v1/responses/{begun['id']}/events")).json()["data"]
                last = page[-1]
        path = f"/v1/responses/{begun['id']}"
        params = {"stream": "true", "starting_after": str(last["sequence_number"] - 1)}
        headers = {"x-antiphon-profile": "legacy"}
        async with client.stream("GET", path, params=params, headers=headers) as reply:
            live = Live(reply.aiter_raw())
            first = await live.next()
            assert first is not None and first["type"] == "response.tool_call.delta"
            assert first["response"] == {"id": begun["id"]}
            assert first["delta"]["content"][0]["name"] == "get_weather"
            gate.release.set()
            raw = live.raw + b"".join([chunk async for chunk in live.chunks])
        assert parsed(raw)[-1]["type"] == "response.completed"


async def test_after_a_kill_in_the_middle_the_older_stream_goes_on(tmp_path: Path) -> None:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        begun = (await client.post("/v1/responses", json={"input": "hi", "background": True})).json()
        await asyncio.wait_for(gate.reached.wait(), 20)
        before = (await client.get(f"/v1/responses/{begun['id']}/events")).json()["data"]
        await server.context.runs.drain(0.0)
    gate = Gate()
    gate.release.set()
    async with running_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        after = before[-1]["sequence_number"]
        tail = parsed(await events_of(client, begun["id"], "legacy", starting_after=str(after)))
        whole = parsed(await events_of(client, begun["id"], "legacy"))
        official = wire.events(await Api(client).replay(begun["id"]))
    assert tail == [event for event in whole if event["sequence_number"] > after]
    assert official[: len(before)] == before
    assert whole[-1]["type"] == "response.completed"


async def test_the_setting_and_the_header(tmp_path: Path) -> None:
    async with running_app(tmp_path, responses_profile="legacy") as server, http_client(server) as client:
        body = {"input": call(), "tools": [WEATHER]}
        older = (await client.post("/v1/responses", json=body)).json()
        assert [item["type"] for item in older["output"]] == ["function"]
        path = f"/v1/responses/{older['id']}"
        assert (await client.get(path)).json() == older
        assert (await client.get("/v1/responses")).json()["data"] == [older]
        official = (await client.get(path, headers={"x-antiphon-profile": "openai"})).json()
        wire.validate_response(official)
        # What was shown is taken back.
        outputs = [{"type": "function_call_output", "call_id": older["output"][0]["id"], "output": "sunny"}]
        said = [{"role": "user", "content": "hi"}, *older["output"], *outputs]
        again = await client.post("/v1/responses", json={"input": said, "tools": [WEATHER]})
        assert again.status_code == 200, again.text
        thought = (await client.post("/v1/responses", json={"input": "think hm then say one"})).json()
        assert thought["output"][0]["content"] == [{"type": "reasoning", "reasoning": "hm"}]
        sent = [{"role": "user", "content": "hi"}, *thought["output"], {"role": "user", "content": "say two"}]
        assert (await client.post("/v1/responses", json={"input": sent})).status_code == 200
        error = await Api(client).fails(400, "GET", path, headers={"x-antiphon-profile": "newer"})
        assert error["param"] == "x-antiphon-profile"


async def test_an_unknown_profile_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    gate = Gate()
    async with (
        live_app(tmp_path, ScriptedEngine(gated(gate, *A_CALL))) as server,
        http_client(server) as client,
    ):
        api, headers = Api(client), {"x-antiphon-profile": "newer"}
        error = await api.fails(400, "POST", "/v1/responses", json={"input": "hi"}, headers=headers)
        assert error["param"] == "x-antiphon-profile"
        assert (await client.get("/v1/responses")).json()["data"] == []
        body = {"input": "hi", "tools": [WEATHER], "background": True}
        begun = (await client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{begun['id']}"
        await asyncio.wait_for(gate.reached.wait(), 20)
        await api.fails(400, "POST", f"{path}/cancel", headers=headers)
        assert (await client.get(path)).json()["status"] == "in_progress"
        gate.release.set()
        ended = (await client.get(path, params={"wait": "20"})).json()
        assert ended["status"] == "completed"
        await api.fails(400, "POST", f"{path}/fork", headers=headers)
        outputs = {"tool_outputs": [{"call_id": ended["output"][0]["call_id"], "output": "sunny"}]}
        await api.fails(400, "POST", f"{path}/tool_outputs", json=outputs, headers=headers)
        listed = (await client.get("/v1/responses")).json()["data"]
        assert [response["id"] for response in listed] == [begun["id"]]


async def test_a_failure_is_a_number(client: httpx.AsyncClient) -> None:
    streamed = await client.post(
        "/v1/responses", json={"input": "fail oh", "stream": True}, headers={"x-antiphon-profile": "legacy"}
    )
    last = parsed(streamed.content)[-1]
    assert last["type"] == "response.error"
    assert last["error"] == last["response"]["error"]
    assert last["error"]["code"] == 500


async def test_log_probabilities_are_shown_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not parsed, which would hold the interpreter for all of them at once."""
    part = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": [entry("a", *"bcd")] * 1000}
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}
    response = {"id": "resp_1", "status": "completed", "error": None, "output": [message, call, message]}
    event = {"type": "response.completed", "sequence_number": 3, "response": response}
    bodies = [orjson.dumps(event), orjson.dumps(response)]
    parsed_sizes: list[int] = []

    def loads(body: bytes) -> Any:
        parsed_sizes.append(len(body))
        return json.loads(body)

    monkeypatch.setattr(orjson, "loads", loads)
    view = View("legacy")
    ((number, shown),) = await view.shown(3, bodies[:1])
    told = await view.response(bodies[1])
    assert max(parsed_sizes) < LARGE < min(map(len, bodies))
    assert json.loads(told) == older_response(response)
    assert number == 3 and json.loads(shown) == {**event, "response": older_response(response)}


async def test_a_cache_key_is_a_salt(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_app(tmp_path, engine) as server, http_client(server) as client:
        body = {"input": "say hi", "prompt_cache_key": "k"}
        plain = await client.post("/v1/responses", json=body)
        salted = await client.post("/v1/responses", json=body, headers={"x-antiphon-profile": "legacy"})
    assert plain.headers["x-antiphon-ignored"] == "prompt_cache_key"
    assert "x-antiphon-ignored" not in salted.headers
    assert salted.json()["prompt_cache_key"] == "k"
    assert [bool(request.cache_salt) for request in engine.requests] == [False, True]
    assert len(prompts(engine)) == 2


async def test_silence_is_broken_by_a_ping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        body, headers = {"input": "hi", "stream": True}, {"x-antiphon-profile": "legacy"}
        async with client.stream("POST", "/v1/responses", json=body, headers=headers) as reply:
            raw, chunks = b"", reply.aiter_raw()
            while b"event: response.ping\n" not in raw:
                raw += await asyncio.wait_for(anext(chunks), 20)
            gate.release.set()
            raw += b"".join([chunk async for chunk in chunks])
    events = parsed(raw)
    ping = next(event for event in events if event["type"] == "response.ping")
    before = events[: events.index(ping)]
    assert ping["sequence_number"] == before[-1]["sequence_number"]
    assert ping["response"] == {} and isinstance(ping["timestamp"], int)
    assert b": keep-alive" not in raw


async def test_limits_are_told_before_the_end(tmp_path: Path) -> None:
    limits = ("requests_per_minute=100",)
    async with running_app(tmp_path, owner_limit=limits) as server, http_client(server) as client:
        headers = {"x-antiphon-profile": "legacy"}
        body = {"input": "say hi", "stream": True}
        events = parsed((await client.post("/v1/responses", json=body, headers=headers)).content)
    told, last = events[-2:]
    assert (told["type"], last["type"]) == ("response.rate_limits.updated", "response.completed")
    assert told["sequence_number"] == last["sequence_number"]
    (requests,) = told["rate_limits"]
    assert (requests["name"], requests["limit"], requests["remaining"]) == ("requests", 100, 99)
    assert requests["reset_seconds"] > 0


# ------------------------------------------------------------------------------------------------------------
# Padding


async def test_pieces_of_text_are_padded_and_the_same_again(client: httpx.AsyncClient) -> None:
    body = {"input": "think hm then say one two three", "stream": True}
    options = {"stream_options": {"include_obfuscation": True}}
    reply = await client.post("/v1/responses", json={**body, **options})
    assert "x-antiphon-ignored" not in reply.headers
    events = wire.events(reply.content)
    wire.check_stream(events)
    deltas = [event for event in events if event["type"].endswith(".delta")]
    assert deltas and all(event["obfuscation"] for event in deltas)
    assert not [event for event in events if "obfuscation" in event and event not in deltas]
    sizes = {
        len(line) - len(b"data: ")
        for line in reply.content.split(b"\n")
        if line.startswith(b"data: ") and b'"obfuscation"' in line
    }
    assert {size % 32 for size in sizes} == {0}
    assert len({event["obfuscation"] for event in deltas}) == len(deltas)
    response_id = events[0]["response"]["id"]
    plain = await Api(client).replay(response_id)
    assert b"obfuscation" not in plain
    again = await client.get(
        f"/v1/responses/{response_id}", params={"stream": "true", "include_obfuscation": "true"}
    )
    assert again.content == reply.content
    assert "x-antiphon-ignored" not in again.headers
    for event in deltas:
        del event["obfuscation"]
    assert events == wire.events(plain)


async def test_padding_in_the_older_profile(client: httpx.AsyncClient) -> None:
    response = await Api(client).create("think hm then say one")
    raw = await events_of(client, response["id"], "legacy", include_obfuscation="true")
    deltas = [event for event in parsed(raw) if event["type"].endswith(".delta")]
    assert deltas and all(event["obfuscation"] for event in deltas)


async def test_the_official_sdk_reads_padded_events(live_sdk: AsyncOpenAI) -> None:
    stream = await live_sdk.responses.create(
        model="antiphon-scripted",
        input="say one two",
        stream=True,
        stream_options={"include_obfuscation": True},
    )
    events = [event async for event in stream]
    said = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in said) == "one two"
    assert all(getattr(event, "obfuscation", "") for event in said)
    response_id = events[0].response.id  # type: ignore[union-attr]
    again = await live_sdk.responses.retrieve(response_id, stream=True, include_obfuscation=True)
    assert [event async for event in again] == events


async def _write(folder: Path) -> None:
    async with running_app(folder) as running, http_client(running) as client:
        found = {name: await transcripts(client, body) for name, body in SCENARIOS.items()}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        asyncio.run(_write(Path(made)))
