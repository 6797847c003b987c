"""Turns in a conversation: seen, appended and locked as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import ScriptedEngine
from server.runs import runner
from server.runs.planning import plan
from tests.support.running import Running, http_client, live_app, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, call, calls, gated_at, prompts, text
from tests.support.wire import Json


@dataclass(frozen=True, slots=True)
class Room:
    """A server with one conversation, and a gate that holds every turn whose text has the word "held"."""

    server: Running
    api: Api
    engine: ScriptedEngine
    gate: Gate
    conversation: str

    async def items(self) -> list[Json]:
        return await self.api.conversation_items(self.conversation)


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        api = Api(client)
        yield Room(server, api, engine, gate, await api.conversation())


def said(items: list[Json]) -> list[str]:
    return [item["content"][0]["text"] if item["type"] == "message" else item["type"] for item in items]


async def test_a_turn_is_appended_whole(room: Room) -> None:
    first = await room.api.create("think hm then say one", conversation=room.conversation)
    assert first["conversation"] == {"id": room.conversation}
    assert said(await room.items()) == ["think hm then say one", "reasoning", "one"]
    assert (await room.items())[1:] == first["output"]
    second = await room.api.create("say two", conversation={"id": room.conversation})
    assert "say one" in prompts(room.engine)[-1]
    assert said(await room.items())[3:] == ["say two", "two"]
    assert (await room.items())[-1] == second["output"][0]
    own = (await room.api.input_items(second["id"]))["data"]
    assert said(own) == ["say two"], "input_items are its own"


async def test_instructions_are_not_stored(room: Room) -> None:
    await room.api.create("say one", conversation=room.conversation, instructions="be brief")
    assert said(await room.items()) == ["say one", "one"]


async def test_a_tool_loop_sends_only_what_is_new(room: Room) -> None:
    first = await room.api.create(call(), conversation=room.conversation, tools=[WEATHER])
    error = await room.api.refused(400, "say hi", conversation=room.conversation)
    call_id = calls(first)[0]["call_id"]
    assert error["message"].startswith(f"No tool output found for function call {call_id}. ")
    assert f"'function_call_output' with the call_id '{call_id}' in this request's" in error["message"]
    second = await room.api.create(
        [answer(calls(first)[0]["call_id"], "wet")], conversation=room.conversation, tools=[WEATHER]
    )
    assert text(second) == "The tool said: wet"
    types = [item["type"] for item in await room.items()]
    assert types == ["message", "function_call", "function_call_output", "message"]


async def test_who_cannot_answer_a_call_is_told_how_to_go_on(room: Room) -> None:
    await room.api.create(call(), conversation=room.conversation, tools=[WEATHER])
    error = await room.api.refused(400, "say hi", conversation=room.conversation)
    path = error["message"].partition("(DELETE ")[2].removesuffix(").")
    assert path.startswith(f"/v1/conversations/{room.conversation}/items/fc_")
    assert (await room.api.http.delete(path)).status_code == 200
    assert text(await room.api.create("say hi", conversation=room.conversation)) == "hi"


@pytest.mark.parametrize("store", [True, False])
async def test_nothing_is_appended_until_the_end(room: Room, store: bool) -> None:
    async with room.api.open("say held", conversation=room.conversation, store=store) as live:
        await room.gate.reached.wait()
        assert await room.items() == []
        room.gate.release.set()
        await live.done()
    assert said(await room.items()) == ["say held", "held"]


@pytest.mark.parametrize("asked", ["fail now", "say one\nfail now"])
async def test_a_failed_turn_appends_nothing_and_frees_the_conversation(room: Room, asked: str) -> None:
    failed = await room.api.create(asked, conversation=room.conversation)
    assert failed["status"] == "failed"
    assert await room.items() == []
    assert (await room.api.create("say two", conversation=room.conversation))["status"] == "completed"


async def test_a_cancelled_turn_appends_nothing_and_frees_the_conversation(room: Room) -> None:
    async with room.api.open("say held", conversation=room.conversation) as live:
        await room.gate.reached.wait()
        await live.next()
        await room.api.cancel(live.id)
    assert await room.items() == []
    await room.api.create("say two", conversation=room.conversation)


async def test_an_incomplete_turn_is_appended(room: Room) -> None:
    await room.api.create("count 90", conversation=room.conversation, max_output_tokens=16)
    assert [item["status"] for item in await room.items()] == ["completed", "incomplete"]


async def test_a_refused_turn_leaves_no_lock(room: Room) -> None:
    await room.api.refused(400, [answer("call_nobody")], conversation=room.conversation)
    await room.api.create("say one", conversation=room.conversation)


async def test_where_nothing_is_said_there_is_nothing_to_answer(room: Room) -> None:
    thought = {"type": "reasoning", "summary": []}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        for asked in (
            {"conversation": room.conversation},
            {"conversation": room.conversation, "input": []},
            {"input": [thought]},
        ):
            reply = await room.api.http.post(path, json=asked)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_prompt", "input")
            assert error["message"].startswith("There is nothing to answer: ")


async def test_an_unknown_conversation_is_a_404(room: Room) -> None:
    error = await room.api.refused(404, "hi", conversation="conv_unknown")
    assert error["param"] == "conversation" and "conv_unknown" in error["message"]
    await room.api.http.delete(f"/v1/conversations/{room.conversation}")
    await room.api.refused(404, "hi", conversation=room.conversation)


# ------------------------------------------------------------------------------------------------------------
# The lock


@pytest.mark.parametrize("store", [True, False])
async def test_a_second_turn_at_the_same_time_is_locked_out(room: Room, store: bool) -> None:
    async with room.api.open("say held", conversation=room.conversation, store=store) as live:
        await room.gate.reached.wait()
        await live.next()
        error = await room.api.refused(400, "say two", conversation=room.conversation)
        assert error["code"] == "conversation_locked" and live.id in error["message"]
        room.gate.release.set()
        await live.done()
    assert text(await room.api.create("say two", conversation=room.conversation)) == "two"
    assert said(await room.items()) == ["say held", "held", "say two", "two"]


async def test_a_background_turn_keeps_its_lock(room: Room) -> None:
    begun = await room.api.create("say held", conversation=room.conversation, background=True)
    await room.gate.reached.wait()
    error = await room.api.refused(400, "say two", conversation=room.conversation)
    assert begun["id"] in error["message"]
    room.gate.release.set()
    await room.api.ended(begun["id"])


async def test_a_waiting_turn_keeps_its_lock(room: Room) -> None:
    asked = {"conversation": room.conversation, "tools": [WEATHER], "await_tool_outputs": True}
    async with room.api.open(call(), **asked) as live:
        made = (await live.until("output_item.done"))["item"]
    await room.api.waits(live.id)
    for said_now in ("say two", [answer(made["call_id"], "wet")]):
        error = await room.api.refused(400, said_now, conversation=room.conversation)
        assert error["code"] == "conversation_locked"
        assert f"POST /v1/responses/{live.id}/tool_outputs" in error["message"]
    await room.api.outputs(live.id, {made["call_id"]: "wet"})
    await room.api.ended(live.id)
    assert said(await room.items())[-1] == "The tool said: wet"


@pytest.mark.parametrize("store", [True, False])
async def test_a_turn_that_nobody_reads_makes_way(room: Room, store: bool) -> None:
    """A foreground holder without any reader is cancelled, and the next turn starts after its end."""
    async with room.api.open("say held", conversation=room.conversation, store=store) as live:
        await room.gate.reached.wait()
        await live.next()
    while room.server.context.runs.feed.total_readers:
        await asyncio.sleep(0.001)
    second = await room.api.create("say two", conversation=room.conversation)
    assert text(second) == "two"
    assert said(await room.items()) == ["say two", "two"]
    if store:
        first = await room.api.get(live.id)
        assert (first["status"], first["cancel_reason"]) == ("cancelled", "next_turn")


async def test_items_may_be_added_and_deleted_under_a_lock(room: Room) -> None:
    """The running turn is pinned; what it says comes behind what was added."""
    await room.api.create("say one", conversation=room.conversation)
    async with room.api.open("say held", conversation=room.conversation) as live:
        await room.gate.reached.wait()
        path = f"/v1/conversations/{room.conversation}/items"
        added = {"items": [{"role": "user", "content": "added"}]}
        assert (await room.api.http.post(path, json=added)).status_code == 200
        oldest = (await room.items())[0]["id"]
        assert (await room.api.http.delete(f"{path}/{oldest}")).status_code == 200
        room.gate.release.set()
        await live.done()
    assert said(await room.items()) == ["one", "added", "say held", "held"]


async def test_a_turn_that_ended_between_plan_and_start_is_seen(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn planned on a history that grew meanwhile is planned again."""
    planned = asyncio.Event()
    go_on = asyncio.Event()
    make_plan = plan.make_plan

    async def slow(*args: object, **kwargs: object) -> object:
        made = await make_plan(*args, **kwargs)  # type: ignore[arg-type]
        if not planned.is_set():
            planned.set()
            await go_on.wait()
        return made

    monkeypatch.setattr(runner, "make_plan", slow)
    late = asyncio.create_task(room.api.create("say late", conversation=room.conversation))
    await planned.wait()
    await room.api.create("say early", conversation=room.conversation)
    go_on.set()
    await late
    assert "say early" in prompts(room.engine)[-1]
    assert said(await room.items()) == ["say early", "early", "say late", "late"]


# ------------------------------------------------------------------------------------------------------------
# Chains that meet conversations, and turns that are not stored


async def test_a_chain_goes_on_from_a_turn_in_a_conversation(room: Room) -> None:
    await room.api.create("say one", conversation=room.conversation)
    second = await room.api.create("say two", conversation=room.conversation)
    third = await room.api.create("say three", previous_response_id=second["id"])
    assert all(word in prompts(room.engine)[-1] for word in ("say one", "say two", "say three"))
    assert third["conversation"] is None
    assert len(await room.items()) == 4, "the chain left the conversation alone"


async def test_an_unstored_turn_is_appended_but_not_stored(room: Room) -> None:
    stream = await room.api.stream("say one", conversation=room.conversation, store=False)
    assert stream.response["store"] is False
    assert said(await room.items()) == ["say one", "one"]
    assert (await room.items())[1] == stream.response["output"][0]
    await room.api.fails(404, "GET", f"/v1/responses/{stream.response['id']}")
    await room.api.create("say two", conversation=room.conversation, store=False)
    assert "say one" in prompts(room.engine)[-1]


async def test_an_unstored_turn_whose_item_id_is_taken(room: Room) -> None:
    first = await room.api.create("say one", conversation=room.conversation)
    mine = {"id": first["output"][0]["id"], "role": "user", "content": "say two"}
    second = await room.api.create([mine], conversation=room.conversation, store=False)
    assert text(second) == "two"
    assert said(await room.items()) == ["say one", "one", "say two", "two"]


async def test_a_deleted_response_leaves_its_turn_in_the_conversation(room: Room) -> None:
    first = await room.api.create("say one", conversation=room.conversation)
    await room.api.delete(first["id"])
    assert said(await room.items()) == ["say one", "one"]
    await room.api.create("say two", conversation=room.conversation)
    assert "say one" in prompts(room.engine)[-1]


async def test_deleting_a_run_in_flight_frees_its_conversation(room: Room) -> None:
    begun = await room.api.create("say held", conversation=room.conversation, background=True)
    await room.gate.reached.wait()
    await room.api.delete(begun["id"])
    await room.api.create("say two", conversation=room.conversation)
    assert said(await room.items()) == ["say two", "two"]


async def test_a_deleted_conversation_does_not_disturb_its_running_turn(room: Room) -> None:
    async with room.api.open("say held", conversation=room.conversation) as live:
        await room.gate.reached.wait()
        await room.api.http.delete(f"/v1/conversations/{room.conversation}")
        room.gate.release.set()
        assert (await live.done())["status"] == "completed"


async def test_a_deleted_conversation_cancels_the_turn_in_it_that_waits(room: Room) -> None:
    asked = {"conversation": room.conversation, "tools": [WEATHER], "await_tool_outputs": True}
    begun = await room.api.create(call(), background=True, **asked)
    [pending] = (await room.api.waits(begun["id"]))["pending_tool_calls"]
    deleted = await room.api.http.delete(f"/v1/conversations/{room.conversation}")
    assert deleted.status_code == 200
    assert (await room.api.get(begun["id"]))["status"] == "cancelled"
    assert (await room.api.ended(begun["id"]))["output"][0]["call_id"] == pending["call_id"]


async def test_a_restart_frees_the_lock_of_a_turn_that_was_cut(tmp_path: Path) -> None:
    gate = Gate()
    for store in (True, False):
        engine = ScriptedEngine(gated_at(gate, "held"))
        async with live_app(tmp_path, engine) as server, http_client(server) as client:
            api = Api(client)
            conversation = await api.conversation()
            async with api.open("say held", conversation=conversation, store=store) as live:
                await live.next()
                await gate.reached.wait()
                await server.context.runs.drain(0)
                await live.cut()
        engine = ScriptedEngine(gated_at(Gate(), "held"))  # the turn that was cut is taken up, and held
        async with running_app(tmp_path, engine) as server, http_client(server) as client:
            assert text(await Api(client).create("say two", conversation=conversation)) == "two"
            items = await Api(client).conversation_items(conversation)
            assert said(items) == ["say two", "two"]
