"""What the Open Responses suite does over WebSockets, all of it at once, as that suite does it: no request
says `stream`, each scenario has a connection of its own, and every event fits its schema."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine import ScriptedEngine
from tests.support.lines import line
from tests.support.running import live_app
from tests.support.talk import WEATHER, answer, call, calls, prompts, text

Scenario = Callable[[str], Awaitable[None]]
MESSAGE = {"type": "message", "role": "user"}


async def one_response(url: str) -> None:
    async with line(url) as socket:
        made = await socket.turn([{**MESSAGE, "content": "say hello"}])
        assert (made["status"], text(made)) == ("completed", "hello")


async def several_in_a_row(url: str) -> None:
    async with line(url) as socket:
        for word in ("one", "two", "three"):
            assert text(await socket.turn([{**MESSAGE, "content": f"say {word}"}])) == word
        numbers = [frame["sequence_number"] for frame in socket.frames]
        assert numbers.count(0) == 3, "each response counts its events from 0"


async def a_call_and_its_output(url: str) -> None:
    async with line(url) as socket:
        asked = await socket.turn(call(), tools=[WEATHER], store=False)
        kinds = {frame["type"] for frame in socket.frames}
        assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
        [made] = calls(asked)
        outputs = [answer(made["call_id"])]
        told = await socket.turn(outputs, previous_response_id=asked["id"], tools=[WEATHER], store=False)
        assert told["status"] == "completed" and "sunny" in text(told)


async def going_on_without_storing(url: str) -> None:
    async with line(url) as socket:
        first = await socket.turn("My name is Alice.", store=False)
        second = await socket.turn("say hi", store=False, previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"] and text(second) == "hi"


async def a_connection_that_was_lost(url: str) -> None:
    """What was not stored is gone with its connection; a client then sends all of it again."""
    async with line(url) as socket:
        gone = await socket.turn("My name is Bob.", store=False)
        kept = await socket.turn("My name is Carol.", store=True)
    async with line(url) as socket:
        error = await socket.refused(
            "previous_response_not_found", input="say a", store=False, previous_response_id=gone["id"]
        )
        assert (error["status"], error["error"]["param"]) == (400, "previous_response_id")
        whole = [{**MESSAGE, "content": "My name is Bob."}, *gone["output"], {**MESSAGE, "content": "say a"}]
        assert text(await socket.turn(whole, store=False)) == "a"
        assert text(await socket.turn("say b", store=False, previous_response_id=kept["id"])) == "b"


async def an_unknown_response(url: str) -> None:
    async with line(url) as socket:
        await socket.refused("previous_response_not_found", input="say a", previous_response_id="resp_none")
        assert text(await socket.turn("say on")) == "on", "the connection goes on"


async def a_failure_evicts(url: str) -> None:
    async with line(url) as socket:
        first = await socket.turn(call(), tools=[WEATHER], store=False)
        wrong = [answer("call_of_nobody")]
        await socket.ask(wrong, previous_response_id=first["id"], tools=[WEATHER], store=False)
        assert (await socket.next())["type"] == "error"
        await socket.refused(
            "previous_response_not_found", input="say a", store=False, previous_response_id=first["id"]
        )


SCENARIOS: tuple[Scenario, ...] = (
    one_response,
    several_in_a_row,
    a_call_and_its_output,
    going_on_without_storing,
    a_connection_that_was_lost,
    an_unknown_response,
    a_failure_evicts,
)


async def test_all_at_once(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as running:
        await asyncio.gather(*(scenario(running.base_url) for scenario in SCENARIOS))
        assert any("My name is Alice." in prompt and "say hi" in prompt for prompt in prompts(engine))
