"""How stateless streams end when they do not end well: clients that leave, engines that fail, queues that
fill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import (
    EngineUnavailable,
    Fail,
    GenerateRequest,
    RequestFailed,
    SamplingParams,
    Say,
    ScriptedEngine,
    Wait,
)
from engine.backends.script import Step
from server.stateless.choices import begin, side_by_side
from tests.support import wire
from tests.support.running import Running, http_client, live_app, running_app

Json = dict[str, Any]
CHAT: Json = {"messages": [{"role": "user", "content": "x"}]}
TEXT: Json = {"prompt": "x"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


class Gated:
    """A script that says a word, waits at a gate, says another, and counts who got where."""

    def __init__(self, *, before: tuple[Step, ...] = (), after: tuple[Step, ...] = ()) -> None:
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()
        self._before = before
        self._after = after

    def __call__(self, request: GenerateRequest, prompt: str) -> Iterator[Step]:
        yield from self._before
        yield Wait(self.gate, self.reached)
        yield from self._after
        yield Say(" late")


@asynccontextmanager
async def live(
    tmp_path: Path, script: Gated, **engine: Any
) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    scripted = ScriptedEngine(script, **engine)
    async with live_app(tmp_path, scripted) as running, http_client(running) as client:
        yield running, client
        script.gate.set()


async def idle(running: Running) -> None:
    """Wait until the engine runs nothing."""
    engine = running.context.models.get(None).engine
    async with asyncio.timeout(5):
        while engine.stats().running or engine.stats().waiting:
            await asyncio.sleep(0)
    engine.check_integrity()


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_its_stream_ends_the_generations(
    tmp_path: Path, path: str, body: Json, n: int
) -> None:
    script = Gated(before=(Say("early"),))
    async with live(tmp_path, script) as (running, client):
        async with client.stream("POST", path, json={**body, "n": n, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if "early" in line:
                    break
        await idle(running)
        assert not script.gate.is_set()


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_many_choices_leave_places_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Json
) -> None:
    monkeypatch.setattr("server.stateless.choices.AT_ONCE", 2)
    script = Gated()
    async with live(tmp_path, script, max_running=3) as (running, client):
        engine = running.context.models.get(None).engine
        many = asyncio.create_task(client.post(path, json={**body, "n": 5}))
        async with asyncio.timeout(5):
            while engine.stats().running < 2:
                await asyncio.sleep(0)
            one = asyncio.create_task(client.post(path, json=body))
            while engine.stats().running < 3:
                await asyncio.sleep(0)
        assert not engine.stats().waiting
        script.gate.set()
        assert len((await many).json()["choices"]) == 5 and (await one).status_code == 200


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_client_that_leaves_before_the_answer_ends_the_generation(
    tmp_path: Path, path: str, body: Json
) -> None:
    script = Gated()
    async with live(tmp_path, script) as (running, client):
        asked = asyncio.create_task(client.post(path, json={**body, "n": 2}))
        await script.reached.wait()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await idle(running)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_headers_do_not_wait_for_a_long_prefill(tmp_path: Path, path: str, body: Json) -> None:
    script = Gated()
    async with (
        live(tmp_path, script) as (_, client),
        client.stream("POST", path, json={**body, "stream": True}) as reply,
    ):
        assert reply.status_code == 200  # and nothing was said yet
        script.gate.set()
        assert wire.chunks(await reply.aread())


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("n", [1, 2])
async def test_what_fails_at_once_is_an_http_error(tmp_path: Path, path: str, body: Json, n: int) -> None:
    script = Gated(before=(Fail(RequestFailed("boom")),))
    async with live(tmp_path, script) as (running, client):
        for stream in (False, True):
            reply = await client.post(path, json={**body, "stream": stream, "n": n})
            assert reply.status_code == 500
            wire.validate_error(reply.json())
        await idle(running)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("before", [(), (Say("early"),)])
async def test_what_fails_later_is_the_last_event(
    tmp_path: Path, path: str, body: Json, before: tuple[Step, ...]
) -> None:
    script = Gated(before=before, after=(Fail(RequestFailed("boom")),))
    async with live(tmp_path, script) as (running, client):
        async with client.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200
            script.gate.set()
            frames = wire.parse_sse(await reply.aread())
        assert wire.validate_error(httpx.Response(200, text=frames[-1].data).json())["type"] == "server_error"
        assert all("error" not in frame.data for frame in frames[:-1])
        await idle(running)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_an_error_in_a_stream_says_when_to_come_back(tmp_path: Path, path: str, body: Json) -> None:
    """Behind the headers there is no Retry-After; where waiting does not help there is none in the error."""
    for failure, retry_after in ((EngineUnavailable("away"), 5), (RequestFailed("boom"), None)):
        script = Gated(before=(Say("early"),), after=(Fail(failure),))
        async with live(tmp_path, script) as (running, client):
            async with client.stream("POST", path, json={**body, "stream": True}) as reply:
                script.gate.set()
                frames = wire.parse_sse(await reply.aread())
            assert json.loads(frames[-1].data)["error"].get("retry_after") == retry_after
            await idle(running)


@pytest.mark.parametrize("n", [1, 3])
async def test_one_choice_that_fails_ends_them_all(tmp_path: Path, n: int) -> None:
    script = Gated(before=(Say("early"),), after=(Fail(RequestFailed("boom")),))
    async with live(tmp_path, script) as (running, client):
        script.gate.set()
        reply = await client.post("/v1/chat/completions", json={**CHAT, "n": n})
        assert reply.status_code == 500
        await idle(running)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_429_at_once(tmp_path: Path, path: str, body: Json, stream: bool) -> None:
    script = Gated()
    async with live(tmp_path, script, max_running=1, max_waiting=0) as (_, client):
        first = asyncio.create_task(client.post(path, json=body))
        await script.reached.wait()
        reply = await client.post(path, json={**body, "stream": stream})
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
        assert wire.validate_error(reply.json())["code"] == "queue_full"
        script.gate.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_prompt_that_is_too_long_is_400_with_its_length(
    tmp_path: Path, path: str, body: Json
) -> None:
    long = (
        {"prompt": "x" * 300} if "prompt" in body else {"messages": [{"role": "user", "content": "x" * 300}]}
    )
    async with (
        running_app(tmp_path, ScriptedEngine(max_model_len=200)) as running,
        http_client(running) as client,
    ):
        reply = await client.post(path, json=long)
        assert reply.status_code == 400
        error = wire.validate_error(reply.json())
        assert error["code"] == "context_length_exceeded" and "200 tokens" in error["message"]
        assert error["param"] in long, "the field that is too long"


async def test_frames_that_nobody_takes_are_closed_all_the_same() -> None:
    script = Gated(before=(Say("early"),))
    engine = ScriptedEngine(script)
    await engine.start()
    prompt = await engine.tokenize("x")
    request = GenerateRequest(id="r", prompt_ids=prompt, sampling=SamplingParams(seed=1, max_tokens=50))
    chunks = side_by_side([engine.generate(request), engine.generate(request)])

    async def frames() -> AsyncGenerator[bytes]:
        try:
            async for _, chunk in chunks:
                yield repr(chunk).encode()
        finally:
            await chunks.aclose()

    begun = await begin(frames())
    assert engine.stats().running == 2
    await begun.aclose()
    assert engine.stats().running == 0
    await engine.close()
