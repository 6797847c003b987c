"""What a key holds open ends soon after the key does, and nothing else ends with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close

from engine import ScriptedEngine
from server.access import Keys, held_open
from server.errors import ApiError
from storage import StorageUnavailable
from tests.support.lines import line
from tests.support.running import Running, http_client, live_app

ONE, OTHER = ({"authorization": f"Bearer sk-{name}-of-a-fair-length"} for name in ("one", "other"))
BOTH = tuple(headers["authorization"].split()[1] for headers in (ONE, OTHER))
COUNTING = "count 600"


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_open, "LOOK_S", 0.02)


def revoke_one(running: Running) -> None:
    running.life.keys.give(BOTH[1:])


async def to_its_end(reply: httpx.Response, begun: asyncio.Event) -> str:
    read = b""
    try:
        async for piece in reply.aiter_raw():
            read += piece
            begun.set()
    except httpx.RemoteProtocolError:
        return "cut"
    return "whole" if b"completed" in read or b"[DONE]" in read or b"message_stop" in read else "ended early"


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": COUNTING},
    "/v1/chat/completions": {
        "model": "antiphon-scripted",
        "messages": [{"role": "user", "content": COUNTING}],
    },
    "/v1/completions": {"model": "antiphon-scripted", "prompt": COUNTING, "max_tokens": 9000},
    "/v1/messages": {
        "model": "antiphon-scripted",
        "max_tokens": 9000,
        "messages": [{"role": "user", "content": COUNTING}],
    },
}


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_is_cut_and_that_of_another_key_is_not(tmp_path: Path, path: str) -> None:
    engine, asked = ScriptedEngine(tick_s=0.001), {**STREAMS[path], "stream": True}
    begun = asyncio.Event(), asyncio.Event()
    async with (
        live_app(tmp_path, engine, api_key=BOTH) as running,
        http_client(running) as http,
        http.stream("POST", path, json=asked, headers=ONE) as its,
        http.stream("POST", path, json=asked, headers=OTHER) as others,
    ):
        reading = (to_its_end(*each) for each in zip((its, others), begun, strict=True))
        ends = asyncio.gather(*reading)
        await asyncio.gather(*(event.wait() for event in begun))
        revoke_one(running)
        assert await asyncio.wait_for(ends, 60) == ["cut", "whole"]


async def test_a_socket_is_closed_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, ScriptedEngine(tick_s=0.01), api_key=BOTH) as running,
        line(running.base_url, additional_headers=ONE) as socket,
    ):
        await socket.ask(COUNTING)
        await socket.until("response.output_text.delta")
        revoke_one(running)
        with pytest.raises(ConnectionClosed) as closed:
            while True:  # a client that leaves 16 frames unread reads no more, and never sees the close
                await socket.next()
        assert closed.value.rcvd == Close(1008, "invalid_api_key")


async def test_a_database_that_is_away_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = asyncio.Queue[None]()
    of = Keys.of

    async def away(self: Keys, owner: str, key_id: str | None) -> Any:
        looks.put_nowait(None)
        raise StorageUnavailable("it is away")

    async with live_app(tmp_path, api_key=BOTH) as running:
        who = await running.life.keys.principal(BOTH[0])
        why: list[ApiError] = []
        ended = asyncio.Event()

        def end(error: ApiError) -> None:
            why.append(error)
            ended.set()

        with running.life.held_open.by(who, end):
            monkeypatch.setattr(Keys, "of", away)
            revoke_one(running)
            await looks.get()
            await looks.get()
            assert not why
            monkeypatch.setattr(Keys, "of", of)
            await asyncio.wait_for(ended.wait(), 60)
        assert [(error.status, error.code) for error in why] == [(401, "invalid_api_key")]


async def test_who_has_no_key_is_not_asked_for_one(tmp_path: Path) -> None:
    async with live_app(tmp_path) as running:
        local, keyed = await running.life.keys.principal(None), asyncio.Event()
        ends: list[ApiError] = []
        with running.life.held_open.by(local, ends.append):
            running.life.keys.give(BOTH)  # from now on one is needed
            who = await running.life.keys.principal(BOTH[0])
            with running.life.held_open.by(who, lambda _: keyed.set()):
                running.life.keys.give(BOTH[1:])
                await asyncio.wait_for(keyed.wait(), 60)
        assert not ends
