"""Many streams at once, with clients that leave and cancel when it suits them: nothing hangs, nothing is
left."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from engine import ScriptedEngine
from tests.support import wire
from tests.support.running import Running, http_client, live_app
from tests.support.talk import BUILTIN, WEATHER, Api, call, text
from tests.support.wire import Json

NUM_STREAMS = 64

ASKED: tuple[tuple[str, Json], ...] = (
    ("count 40", {}),
    ("think some more thoughts then count 20", {}),
    (call(), {"tools": [WEATHER]}),
    ('call calculator {"expression": "6*7"}', {"tools": [BUILTIN]}),
    ("count 90", {"max_output_tokens": 60}),
    ("say one\nfail now", {}),
)  # fmt: skip


async def idle(server: Running) -> None:
    """Wait until no run is active and nobody reads; then nothing may be left of them."""
    runs, engine = server.context.runs, server.context.models.get(None).engine
    async with asyncio.timeout(20):
        while (
            runs.num_active
            or runs.feed.total_readers
            or engine.stats().running
            or engine.admission.num_places
        ):
            await asyncio.sleep(0.005)
    engine.check_integrity()
    assert (runs.feed._channels, runs.feed._running, runs._tasks._graces) == ({}, set(), {})
    assert engine.stats().waiting == 0
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not [name for name in names if name.startswith("resp_")], "a run's task outlived it"


async def test_many_streams_at_once(tmp_path: Path) -> None:
    """All of them whole, each with its own text, and read again as they were seen."""
    engine = ScriptedEngine(max_running=24)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        streams = await asyncio.gather(
            *(
                api.stream(f"say stream number {n} speaking", background=n % 3 == 0)
                for n in range(NUM_STREAMS)
            )
        )
        for n, stream in enumerate(streams):
            assert text(stream.response) == f"stream number {n} speaking"
        for stream in streams[::8]:
            assert await api.replay(stream.response["id"]) == stream.raw
        await idle(server)


@pytest.mark.long
async def test_clients_that_leave_and_cancel_at_random_moments(tmp_path: Path) -> None:
    seed = int(os.environ.get("ANTIPHON_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"seed {seed}")
    draw = random.Random(seed)
    engine = ScriptedEngine(tick_s=0.001, max_running=40)
    async with (
        live_app(tmp_path, engine, resume_grace_s=0.05) as server,
        http_client(server) as client,
    ):
        api = Api(client)
        stored: list[str] = []

        async def one(n: int) -> None:
            asked, body = ASKED[n % len(ASKED)]
            fate, events = draw.choice(("stay", "leave", "cancel", "delete")), draw.randrange(1, 30)
            store, background = draw.random() < 0.8, draw.random() < 0.3
            form = {"background": background} if store else {"store": False}
            async with api.open(asked, **body, **form) as live:
                for _ in range(events):
                    if await live.next() is None:
                        break
                if store and fate != "delete":
                    stored.append(live.id)
                if fate == "stay":
                    await live.done()
                elif fate == "cancel":
                    reply = await client.post(f"/v1/responses/{live.id}/cancel")
                    assert reply.status_code in (200, 400, 404), reply.text
                elif fate == "delete":
                    reply = await client.delete(f"/v1/responses/{live.id}")
                    assert reply.status_code == (200 if store else 404), reply.text

        await asyncio.gather(*(one(n) for n in range(NUM_STREAMS)))
        await idle(server)
        ended = [await api.ended(response_id) for response_id in stored]
        assert {response["status"] for response in ended} <= {
            "completed",
            "incomplete",
            "failed",
            "cancelled",
        }
        await idle(server)


async def test_turns_of_one_conversation_exclude_each_other(tmp_path: Path) -> None:
    """Whoever gets the lock, the conversation holds whole turns, one behind the other."""
    engine = ScriptedEngine(tick_s=0.001)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        conversation = await api.conversation()

        async def turn(n: int) -> bool:
            reply = await client.post(
                "/v1/responses", json={"input": f"say turn {n} is here", "conversation": conversation}
            )
            if reply.status_code == 200:
                return True
            assert wire.validate_error(reply.json())["code"] == "conversation_locked"
            return False

        outcomes = await asyncio.gather(*(turn(n) for n in range(16)))
        assert any(outcomes)
        items = await api.conversation_items(conversation)
        assert len(items) == 2 * sum(outcomes)
        for asked, answered in zip(items[::2], items[1::2], strict=True):
            assert asked["content"][0]["text"] == f"say {answered['content'][0]['text']}"
        await idle(server)


async def test_the_queue_is_bounded(tmp_path: Path) -> None:
    engine = ScriptedEngine(tick_s=0.05, max_running=1, max_waiting=2)
    async with live_app(tmp_path, engine, max_waiting=2) as server, http_client(server) as client:
        api = Api(client)
        begun = [await api.create("count 5", background=True) for _ in range(3)]
        async with asyncio.timeout(10):
            while engine.stats().waiting < 2:
                await asyncio.sleep(0.001)
        error = await api.refused(429, "hi")
        assert (error["code"], error["headers"]["retry-after"]) == ("queue_full", "1")
        for response in begun:
            assert (await api.ended(response["id"]))["status"] == "completed"
        await idle(server)
