"""Cancelling: any run in flight, wherever it stands; what was said stays, and nothing ends twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine import EngineUnavailable, ScriptedEngine
from server.runs.execution import RunTasks
from tests.support import wire
from tests.support.running import Running, http_client, live_app
from tests.support.talk import WEATHER, Api, Gate, call, gated, text


@dataclass(frozen=True, slots=True)
class Held:
    """A server whose runs say "one two" and then wait at the gate."""

    server: Running
    api: Api
    gate: Gate


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    gate = Gate()
    async with live_app(tmp_path, ScriptedEngine(gated(gate))) as server, http_client(server) as client:
        yield Held(server, Api(client), gate)
        assert server.context.runs.num_active == 0


@pytest.fixture
def api(client: httpx.AsyncClient) -> Api:
    return Api(client)


@pytest.mark.parametrize("background", [False, True])
async def test_a_cancelled_stream_keeps_what_was_said(held: Held, background: bool) -> None:
    async with held.api.open("hi", background=background) as live:
        await live.until("output_text.delta")
        await held.gate.reached.wait()
        cancelled = await held.api.cancel(live.id)
        assert await live.done() == cancelled
        assert (cancelled["status"], text(cancelled)) == ("cancelled", "one two")
        assert "cancel_reason" not in cancelled
        assert cancelled["output"][0]["status"] == "incomplete"
        assert cancelled["usage"]["output_tokens"] == len("one two")
        assert cancelled["usage"]["input_tokens"] > 0
        assert cancelled["completed_at"] is None
        assert live.events[-1]["type"] == "response.cancelled"
        assert await held.api.replay(live.id) == live.raw
        assert await held.api.get(live.id) == cancelled


async def test_cancelling_twice_changes_nothing(held: Held) -> None:
    begun = await held.api.create("hi", background=True)
    await held.gate.reached.wait()
    first, second = await asyncio.gather(held.api.cancel(begun["id"]), held.api.cancel(begun["id"]))
    assert first == second == await held.api.cancel(begun["id"])
    assert first["status"] == "cancelled"
    await held.api.ended(begun["id"])


async def test_a_cancelled_foreground_response_is_over(held: Held) -> None:
    async with held.api.open("hi") as live:
        await held.gate.reached.wait()
        await live.until("output_text.delta")
        await held.api.cancel(live.id)
        error = await held.api.fails(400, "POST", f"/v1/responses/{live.id}/cancel")
        assert error["code"] == "response_not_cancellable" and "cancelled" in error["message"]


async def test_a_plain_create_answers_with_the_cancelled_response(held: Held) -> None:
    waiting = asyncio.create_task(held.api.create("hi"))
    await held.gate.reached.wait()
    [running] = (await held.api.page("/v1/responses"))["data"]
    cancelled = await held.api.cancel(running["id"])
    assert await waiting == cancelled


async def test_a_run_is_cancelled_before_its_first_token(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate, "", "never"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create("hi", background=True)
        await gate.reached.wait()
        cancelled = await api.cancel(begun["id"])
        assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
        assert cancelled["usage"]["output_tokens"] == 0
        assert await api.ended(begun["id"]) == cancelled


async def test_a_run_that_waits_for_room_in_the_engine_is_cancelled(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate), max_running=1)
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        first = await api.create("hi", background=True)
        await gate.reached.wait()
        second = await api.create("hi", background=True)
        cancelled = await api.cancel(second["id"])
        assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
        gate.release.set()
        assert (await api.ended(first["id"]))["status"] == "completed"
        engine.check_integrity()
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_usage_of_a_cancelled_run_counts_its_reasoning(tmp_path: Path) -> None:
    gate = Gate()
    engine = ScriptedEngine(gated(gate, "<think>\nhm hm hm", "never"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create("hi", background=True)
        await gate.reached.wait()
        cancelled = await api.cancel(begun["id"])
        usage = cancelled["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"] > len("hm hm hm")
        assert cancelled["output"][0]["content"][0]["text"].strip() == "hm hm hm"
        await api.ended(begun["id"])


async def test_a_call_that_was_just_made_is_not_torn(tmp_path: Path) -> None:
    """The end of a call waits for the event after it; a cancel in between must not lose it."""
    gate = Gate()
    markup = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    engine = ScriptedEngine(gated(gate, markup, "never"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        begun = await api.create("hi", background=True, tools=[WEATHER])
        await gate.reached.wait()
        cancelled = await api.cancel(begun["id"])
        assert [item["status"] for item in cancelled["output"]] == ["completed"]
        assert cancelled["usage"]["output_tokens"] == len(engine.tokenizer.encode(markup))
        assert await api.ended(begun["id"]) == cancelled


async def test_a_waiting_run_is_cancelled(held: Held, tmp_path: Path) -> None:
    async with live_app(tmp_path / "other") as server, http_client(server) as client:
        api = Api(client)
        async with api.open(call(), tools=[WEATHER], await_tool_outputs=True) as live:
            await live.until("output_item.done")
            cancelled = await api.cancel(live.id)
            assert await live.done() == cancelled
            assert cancelled["status"] == "cancelled"
            [item] = cancelled["output"]
            assert item["status"] == "completed", "the call was whole"
            late = {"tool_outputs": [{"call_id": item["call_id"], "output": "x"}]}
            error = await api.fails(400, "POST", f"/v1/responses/{live.id}/tool_outputs", json=late)
            assert error["code"] == "response_not_waiting"


async def test_a_completed_response_cannot_be_cancelled_but_a_background_one_is_shown(api: Api) -> None:
    foreground = await api.create("say hi")
    error = await api.fails(400, "POST", f"/v1/responses/{foreground['id']}/cancel")
    assert "completed" in error["message"]
    background = await api.create("say hi", background=True)
    ended = await api.ended(background["id"])
    assert await api.cancel(background["id"]) == ended, "200, and unchanged"
    assert ended["status"] == "completed"


async def test_an_unstored_run_is_cancelled_by_its_id(held: Held) -> None:
    async with held.api.open("hi", store=False) as live:
        await live.until("output_text.delta")
        await held.gate.reached.wait()
        cancelled = await held.api.cancel(live.id)
        assert await live.done() == cancelled
        assert text(cancelled) == "one two"
    await held.api.fails(404, "POST", f"/v1/responses/{live.id}/cancel")


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34])
async def test_cancel_races_completion_and_one_terminal_event_comes(tmp_path: Path, turns: int) -> None:
    """However a cancel and an end cross each other."""
    async with live_app(tmp_path) as server, http_client(server) as client:
        api = Api(client)
        async with api.open("say one two three") as live:
            await live.next()
            runs = server.context.runs
            cancelling = asyncio.create_task(runs.cancel("local", live.id))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = await live.done()
            (outcome,) = await asyncio.gather(cancelling, return_exceptions=True)
        assert done["status"] in ("completed", "cancelled")
        if isinstance(outcome, BaseException):
            assert done["status"] == "completed" and "Cannot cancel" in str(outcome)
        else:
            assert await api.get(live.id) == done
        types = [event["type"] for event in wire.events(await api.replay(live.id))]
        assert types == [event["type"] for event in live.events]


async def test_a_run_that_nothing_carries_on_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a start that was given up while it was written: its row is this process's, and no task is."""
    async with live_app(tmp_path, ScriptedEngine()) as server, http_client(server) as client:
        runs, api = server.context.runs, Api(client)
        with monkeypatch.context() as patched:
            patched.setattr(RunTasks, "spawn", lambda self, run: None)
            begun = await api.create("say hi", background=True)
        runs.feed.release(begun["id"])
        await runs._takeover.find_lost()
        [found] = (await server.context.storage.run_status([begun["id"]])).values()
        assert found.runner == server.context.storage.runner, "it may be about to begin"
        await runs._takeover.find_lost()
        done = await api.ended(begun["id"])
        assert (done["status"], text(done)) == ("completed", "hi")


async def test_what_is_to_be_cancelled_does_not_wait_for_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do others: they are taken up one after the other."""

    async def away(*_: object) -> None:
        raise EngineUnavailable("away")

    async with live_app(tmp_path, ScriptedEngine()) as server, http_client(server) as client:
        api = Api(client)
        waiting = await api.create(call(), tools=[WEATHER], background=True, await_tool_outputs=True)
        await api.waits(waiting["id"])
        monkeypatch.setattr("server.runs.execution.recovery_restore.enforced", away)
        async with asyncio.timeout(10):
            assert (await api.cancel(waiting["id"]))["status"] == "cancelled"
