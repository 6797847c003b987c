"""Frames that wait for their turn: how much of them there may be, and that they hold up nobody else."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.websockets import WebSocket

from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import Step, obey
from server.runs.tool_outputs import ToolOutputs
from tests.support.blocking import until
from tests.support.lines import ENDS, Line, line
from tests.support.running import Running, http_client, live_app
from tests.support.talk import WEATHER, Gate, Script, answer, call, gated_at, text, wrote

FRAME = 100_000
"""Bytes that a frame may have in these tests."""


def padded(size: int = FRAME, **fields: Any) -> str:
    """A `response.create` of so many bytes."""
    return json.dumps({"type": "response.create", "input": "say next", **fields}).ljust(size)


async def occupied(socket: Line, gate: Gate, **fields: Any) -> None:
    """Have a response at work on a lane, which is held."""
    await socket.ask("say held", **fields)
    await gate.reached.wait()


async def test_frames_that_wait_are_no_bodies_that_arrive(tmp_path: Path) -> None:
    gate = Gate()
    limits = {"max_body_bytes": FRAME, "max_arriving_bytes": FRAME}
    async with (
        live_app(tmp_path, ScriptedEngine(gated_at(gate, "held")), **limits) as running,
        line(running.base_url) as socket,
        http_client(running) as http,
    ):
        await occupied(socket, gate)
        await socket.socket.send(padded())
        await socket.socket.send("{")  # answered once the frame before it was read
        await socket.until("error")
        assert running.life.arrivals.num_bytes == 0
        reply = await http.post("/v1/responses", content=json.dumps({"input": "say free"}).ljust(FRAME),
                                headers={"content-type": "application/json"})  # fmt: skip
        assert reply.status_code == 200 and text(reply.json()) == "free"
        gate.release.set()
        assert [text(await socket.answer()) for _ in range(2)] == ["held", "next"]


async def test_the_bytes_that_wait_on_a_connection_are_limited(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    async with (
        live_app(tmp_path, engine, max_body_bytes=FRAME) as running,
        line(running.base_url) as socket,
    ):
        await occupied(socket, gate)
        await socket.socket.send(padded(FRAME // 2))
        await socket.socket.send(padded(FRAME // 2))
        await socket.ask("say more")
        error = (await socket.until("error"))["error"]
        assert error["code"] == "queue_full" and error["headers"]["retry-after"] == "1"
        gate.release.set()
        assert [text(await socket.answer()) for _ in range(3)] == ["held", "next", "next"]
        await socket.socket.send(padded())
        assert text(await socket.answer()) == "next", "there is room for a whole frame again"


async def test_the_bytes_that_wait_for_one_owner_are_limited(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    keys = {"ann": {"authorization": "Bearer sk-ann"}, "bob": {"authorization": "Bearer sk-bob"}}
    async with AsyncExitStack() as stack:
        settings: dict[str, Any] = {"api_key": ("sk-ann", "sk-bob"), "max_body_bytes": FRAME}
        running = await stack.enter_async_context(live_app(tmp_path, engine, **settings))

        async def opened(owner: str) -> Line:
            entered = line(running.base_url, additional_headers=keys[owner])
            socket = await stack.enter_async_context(entered)
            gate.reached.clear()
            await occupied(socket, gate)
            return socket

        async def errors(socket: Line) -> list[str]:
            """What a whole frame that has to wait is answered with, and nonsense behind it."""
            await socket.socket.send(padded())
            await socket.socket.send("{")
            found = [(await socket.until("error"))["error"]["code"]]
            while found[-1] != "invalid_json":
                found.append((await socket.until("error"))["error"]["code"])
            return found

        ann = [await opened("ann") for _ in range(5)]
        assert [await errors(socket) for socket in ann[:4]] == [["invalid_json"]] * 4
        assert await errors(ann[4]) == ["queue_full", "invalid_json"]
        assert await errors(await opened("bob")) == ["invalid_json"], "another owner has a share of their own"
        await ann[0].socket.close()
        await until(lambda: len(running.life.sockets) == 5)
        assert await errors(ann[4]) == ["invalid_json"], "what waited on a connection is gone with it"
        gate.release.set()
        assert [text(await ann[4].answer()) for _ in range(2)] == ["held", "next"]


async def test_what_can_begin_at_once_does_not_wait(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    size = 1000  # small enough to be read without leaving the event loop
    async with (
        live_app(tmp_path, engine, max_body_bytes=size) as running,
        line(running.base_url) as socket,
    ):
        for lane in ("a", "b", "c"):  # they come together
            socket.socket.protocol.send_text(padded(size, stream_id=lane).encode())
        await socket.ask("say next")
        assert [text(await socket.answer()) for _ in range(4)] == ["next"] * 4


async def test_a_frame_is_let_go_before_the_next_one_comes(
    live_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Message(dict[str, Any]):
        """A message that can be watched."""

    receive, seen = WebSocket.receive, list[weakref.ref[Message]]()

    async def watched(socket: WebSocket) -> Any:
        message = Message(await receive(socket))
        seen.append(weakref.ref(message))
        return message

    monkeypatch.setattr(WebSocket, "receive", watched)
    async with line(live_server.base_url) as socket:
        for number, frame in enumerate(("{", b"{}"), 2):
            await socket.socket.send(frame)
            await socket.next()
            await until(lambda: seen[-1]() is None)
            assert len(seen) == number, "the first one opened the connection"


# -- outputs of tools ----------------------------------------------------------------------------------------


def slow_to_park(second: Gate, third: Gate) -> Script:
    """A model that makes three calls about a slow thing: the next is made once the gate is open, and shows
    that the one before it is whole."""

    def script(request: GenerateRequest, prompt: str) -> Iterator[Step]:
        if "slow" not in prompt or "<tool_response>" in prompt:
            yield from obey(request, prompt)
            return
        written = "\n".join(wrote("get_weather", city=city) for city in ("Paris", "Turku", "Oslo"))
        for gate, city in ((second, "Turku"), (third, "Oslo")):
            before, city, after = written.partition(city)
            yield Say(before)
            yield gate.wait()
            written = city + after
        yield Say(written)

    return script


async def fed(socket: Line, response_id: str, *call_ids: str) -> None:
    outputs = [answer(call_id) for call_id in call_ids]
    asked = {"type": "response.inject", "response_id": response_id, "input": outputs}
    await socket.socket.send(json.dumps(asked))


async def called(socket: Line, input: str, lane: str) -> tuple[str, str]:
    """A response that calls its client, and waits for it: its id, and that of the call."""
    await socket.ask(input, tools=[WEATHER], await_tool_outputs=True, stream_id=lane)
    response_id = (await socket.until("response.created"))["response"]["id"]
    return response_id, (await socket.until("response.output_item.done"))["item"]["call_id"]


async def test_outputs_that_wait_hold_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, third, waits = Gate(), Gate(), asyncio.Event()
    pending = ToolOutputs.pending

    async def watched(taker: ToolOutputs, owner: str, response_id: str) -> Any:
        waits.set()
        return await pending(taker, owner, response_id)

    monkeypatch.setattr(ToolOutputs, "pending", watched)
    async with (
        live_app(tmp_path, ScriptedEngine(slow_to_park(second, third))) as running,
        line(running.base_url) as socket,
    ):
        slow, slow_call = await called(socket, "something slow", "a")
        await fed(socket, slow, slow_call)
        await waits.wait()

        second.release.set()  # events of its own response
        done = await socket.until("response.output_item.done")
        assert done["stream_id"] == "a" and "Turku" in done["item"]["arguments"]

        other, its_call = await called(socket, call(), "b")  # and outputs for others
        await fed(socket, other, its_call)
        ended = await socket.until(*ENDS)
        assert (ended["stream_id"], ended["response"]["status"]) == ("b", "completed")

        steer = {"type": "response.steer", "previous_response_id": slow, "input": "left"}
        await socket.socket.send(json.dumps(steer))
        failed = await socket.next()
        assert (failed["type"], failed["stream_id"]) == ("response.steer.failed", "a")

        await fed(socket, slow, done["item"]["call_id"])  # it waits behind those for the same response
        third.release.set()
        last = (await socket.until("response.output_item.done"))["item"]["call_id"]
        await fed(socket, slow, last)
        ended = await socket.until(*ENDS)
        assert (ended["stream_id"], ended["response"]["status"]) == ("a", "completed")
        created = [frame for frame in socket.frames if frame["type"] == "response.inject.created"]
        assert [frame["response_id"] for frame in created] == [other, slow, slow, slow]


async def test_outputs_that_wait_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never, num_waiting = asyncio.Event(), 0

    async def waits(taker: ToolOutputs, owner: str, response_id: str) -> Any:
        nonlocal num_waiting
        num_waiting += 1
        await never.wait()

    monkeypatch.setattr(ToolOutputs, "pending", waits)
    async with live_app(tmp_path, max_body_bytes=FRAME) as running, line(running.base_url) as socket:
        for index in range(64):
            await fed(socket, f"resp_{index}", "call_x")
        await until(lambda: num_waiting == 64)
        await fed(socket, "resp_more", "call_x")
        await socket.error("queue_full")
        await socket.refused("queue_full", input="say more")
