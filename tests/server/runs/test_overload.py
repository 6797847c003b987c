"""More requests than the server can answer: what is taken is answered, and the rest is told when to come."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import QueueFull, ScriptedEngine
from server.access import LOCAL_OWNER
from server.config import Config
from server.model_registry import build_engine
from tests.server.runs.test_concurrency import idle
from tests.support import wire
from tests.support.running import http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, answer, call, calls
from tests.support.wire import Json

MESSAGES: Json = {"messages": [{"role": "user", "content": "count 4"}]}
FORMS: list[tuple[str, Json]] = [
    ("/v1/responses", {"input": "count 4"}),
    ("/v1/responses", {"input": "count 4", "stream": True}),
    ("/v1/responses", {"input": "count 4", "store": False}),
    ("/v1/chat/completions", MESSAGES),
    ("/v1/chat/completions", {**MESSAGES, "stream": True}),
    ("/v1/chat/completions", {**MESSAGES, "n": 2}),
    ("/v1/chat/completions", {**MESSAGES, "n": 1, "best_of": 2}),
    ("/v1/completions", {"prompt": "count 4"}),
    ("/v1/completions", {"prompt": "count 4", "stream": True}),
]


def unfinished(reply: httpx.Response, body: Json) -> bool:
    """Whether a 200 is anything but a whole answer."""
    if body.get("stream"):
        whole = "response.completed" if "input" in body else "[DONE]"
        return whole not in reply.text or '"error":{' in reply.text
    if "input" in body:
        return bool(reply.json()["status"] != "completed")
    return any(choice["finish_reason"] != "stop" for choice in reply.json()["choices"])


def refusal(reply: httpx.Response) -> int:
    """The seconds that a well-formed refusal says."""
    assert wire.validate_error(reply.json())["code"] == "queue_full"
    said = reply.headers["retry-after"]
    assert said == str(int(said)) and 1 <= int(said) <= 120
    return int(said)


@pytest.mark.long
async def test_ten_times_too_many_requests_are_answered_or_told_when_to_come(tmp_path: Path) -> None:
    """Every 200 is whole, everything else a 429 at once whose Retry-After is near the truth."""
    lanes, waiting, tick_s = 4, 12, 0.05
    engine = ScriptedEngine(tick_s=tick_s, max_running=lanes, max_waiting=waiting)
    async with live_app(tmp_path, engine, max_waiting=waiting) as server, http_client(server) as client:
        outcomes: Counter[int] = Counter()
        waits: list[int] = []
        server_ms: list[int] = []
        taken_s: list[float] = []

        async def one(number: int) -> None:
            path, body = FORMS[number % len(FORMS)]
            began = time.monotonic()
            reply = await client.post(path, json=body)
            outcomes[reply.status_code] += 1
            if reply.status_code == 200:
                assert not unfinished(reply, body), reply.text
                taken_s.append(time.monotonic() - began)
            else:
                assert reply.status_code == 429, reply.text
                waits.append(refusal(reply))
                server_ms.append(int(reply.headers["openai-processing-ms"]))

        async with asyncio.TaskGroup() as group:
            for number in range(400):  # about 13 a second could be answered, 130 a second come
                group.create_task(one(number))
                await asyncio.sleep(0.0075)
        assert outcomes[200] >= lanes + waiting and outcomes[429] >= 200, outcomes
        listed = (await client.get("/v1/responses", params={"limit": 100})).json()["data"]
        assert {response["status"] for response in listed} == {"completed"}
        # Whoever is taken when one place is free waits as long as a refused one would have, and is answered.
        expected = sorted(taken_s)[-len(taken_s) // 4]
        settled = sorted(waits)[len(waits) // 2]
        assert 0.4 * expected <= settled <= math.ceil(2.5 * expected)
        assert sorted(server_ms)[len(server_ms) * 9 // 10] <= 50
        await idle(server)


async def test_every_way_in_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = ScriptedEngine(tick_s=60.0, max_running=1, max_waiting=1)
    async with live_app(tmp_path, ScriptedEngine()) as server, http_client(server) as client:
        first = await Api(client).create(call(), tools=[WEATHER])
        output = answer(calls(first)[0]["call_id"])
    async with live_app(tmp_path, engine, max_waiting=1) as server, http_client(server) as client:
        held = [engine.admission.enter(LOCAL_OWNER), engine.admission.enter(LOCAL_OWNER)]
        told = {"tool_outputs": [output]}
        forms = [*FORMS, (f"/v1/responses/{first['id']}/tool_outputs", told)]
        forms.append((f"/v1/responses/{first['id']}/tool_outputs", {**told, "stream": True}))
        keyed = {"idempotency-key": "again"}
        for path, body in forms:
            reply = await client.post(path, json=body, headers=keyed if path == "/v1/responses" else None)
            assert reply.status_code == 429, (path, body)
            refusal(reply)
        listed = (await client.get("/v1/responses")).json()["data"]
        assert [response["id"] for response in listed] == [first["id"]]
        assert engine.stats().running == engine.stats().waiting == 0
        for place in held:
            place.leave()
        await idle(server)


async def test_prompts_are_refused_where_too_many_of_their_tokens_wait(tmp_path: Path) -> None:
    """Short prompts pass where a long one is refused, and what is refused does not count against limits."""
    engine = ScriptedEngine(tick_s=60.0, max_running=1, max_waiting=100, max_waiting_tokens=300)
    limited = {"owner_limit": ("requests_per_minute=3",)}
    async with live_app(tmp_path, engine, **limited) as server, http_client(server) as client:
        held = [engine.admission.enter(LOCAL_OWNER) for _ in range(2)]
        held[1].bring(200)
        long = "word " * 300
        forms: list[tuple[str, Json]] = [
            ("/v1/responses", {"input": long}),
            ("/v1/responses", {"input": long, "store": False, "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
            ("/v1/completions", {"prompt": long}),
        ]
        for path, body in forms:
            reply = await client.post(path, json=body)
            assert reply.status_code == 429, (path, reply.text)
            refusal(reply)
            assert reply.headers["x-ratelimit-remaining-requests"] == "3"
        assert (await client.get("/v1/responses")).json()["data"] == []
        metrics = (await client.get("/metrics")).text
        assert 'antiphon_engine_waiting_tokens{model="antiphon-scripted"} 200.0' in metrics
        for place in held:
            place.leave()
        await idle(server)


async def test_a_full_server_does_not_look_into_what_is_asked(tmp_path: Path) -> None:
    """A refusal comes before the body is checked; what needs no place, and repeats, are no less welcome."""
    engine = ScriptedEngine(max_running=1, max_waiting=1)
    async with live_app(tmp_path, engine, max_waiting=1) as server, http_client(server) as client:
        keyed = {"idempotency-key": "again"}
        first = await client.post("/v1/responses", json={"input": "say x"}, headers=keyed)
        held = [engine.admission.enter(LOCAL_OWNER), engine.admission.enter(LOCAL_OWNER)]
        wrong: list[tuple[str, Json]] = [
            ("/v1/responses", {"input": 7}),
            ("/v1/chat/completions", {"messages": 7}),
            ("/v1/completions", {"prompt": {}}),
        ]
        for path, body in wrong:
            refusal(await client.post(path, json=body))
        reply = await client.post("/v1/responses", json={"input": 7, "background": True})
        assert reply.status_code == 400
        reply = await client.post("/v1/responses", json={"input": "say x", "model": "another"})
        assert reply.status_code == 404
        again = await client.post("/v1/responses", json={"input": "say x"}, headers=keyed)
        assert again.status_code == 200 and again.json() == first.json()
        for place in held:
            place.leave()
        await idle(server)


async def test_what_was_acknowledged_is_never_refused(tmp_path: Path) -> None:
    """Recovered runs and tool outputs of waiting ones go on, however full the queue is."""
    engine = ScriptedEngine(tick_s=60.0, max_running=1, max_waiting=4)
    async with running_app(tmp_path, engine, drain_grace_s=0.0) as server, http_client(server) as client:
        api = Api(client)
        begun = [(await api.create("count 3", background=True))["id"] for _ in range(3)]
    engine = ScriptedEngine(max_running=1, max_waiting=1)
    held = [engine.admission.enter(LOCAL_OWNER), engine.admission.enter(LOCAL_OWNER)]
    async with running_app(tmp_path, engine, max_waiting=1) as server, http_client(server) as client:
        api = Api(client)
        for response_id in begun:
            assert (await api.ended(response_id))["status"] == "completed"
        for place in held:
            place.leave()
        waiting = await api.create(call(), tools=[WEATHER], await_tool_outputs=True, background=True)
        response = await api.waits(waiting["id"])
        held = [engine.admission.enter(LOCAL_OWNER), engine.admission.enter(LOCAL_OWNER)]
        output = answer(response["pending_tool_calls"][0]["call_id"])
        reply = await client.post(
            f"/v1/responses/{waiting['id']}/tool_outputs", json={"tool_outputs": [output]}
        )
        assert reply.status_code == 200
        assert (await api.ended(waiting["id"]))["status"] == "completed"
        for place in held:
            place.leave()
        await idle(server)


@pytest.mark.parametrize("seed", range(3))
async def test_places_return_however_requests_end(tmp_path: Path, seed: int) -> None:
    """Bad requests, clients that leave, cancels, deletions, failures: no place is lost."""
    drawn = random.Random(seed)
    engine = ScriptedEngine(tick_s=0.002, max_running=3, max_waiting=5)
    app = live_app(tmp_path, engine, max_waiting=5, resume_grace_s=0.05)
    async with app as server, http_client(server) as client:

        async def one() -> None:
            path, body = drawn.choice(FORMS)
            field = "messages" if "messages" in body else "input" if "input" in body else "prompt"
            says = drawn.choice(["count 30", "say x", "fail", call()])
            asked: Json = {**body, field: says}
            if field == "messages":
                asked[field] = [{"role": "user", "content": says}]
            asked |= drawn.choice([{}, {}, {"temperature": 9}, {"previous_response_id": "resp_none"}])
            patience_s = drawn.choice([0.001, 0.01, 0.03, 5.0])
            fate: Any = drawn.choice(["", "cancel", "delete"])
            try:
                async with asyncio.timeout(patience_s):
                    reply = await client.post(path, json=asked)
            except TimeoutError:
                return
            assert reply.status_code in (200, 400, 429, 500), reply.text
            if fate and path == "/v1/responses" and reply.status_code == 200 and not asked.get("stream"):
                url = f"{path}/{reply.json()['id']}"
                await (client.delete(url) if fate == "delete" else client.post(f"{url}/cancel"))

        await asyncio.gather(*(one() for _ in range(120)))
        await idle(server)
        assert engine.admission.num_waiting == 0


def test_the_settings_say_how_much_a_scripted_engine_takes(tmp_path: Path) -> None:
    engine = build_engine(Config(data=tmp_path, engine="scripted", max_num_seqs=2, max_waiting=3))
    for _ in range(2 + 3):
        engine.admission.enter()
    with pytest.raises(QueueFull):
        engine.admission.enter()
