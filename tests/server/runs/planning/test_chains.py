"""Chains: what a turn stands on when it names an earlier response or an item."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import ScriptedEngine
from tests.support.running import http_client, live_app
from tests.support.talk import TIME, WEATHER, Api, Gate, answer, call, calls, gated_at, prompts, text

LENIENT = {**WEATHER, "strict": False}
"""Nothing keeps a model from saying more behind a call of it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A server, its engine, and a gate that holds every turn whose text has the word "held"."""

    api: Api
    engine: ScriptedEngine
    gate: Gate

    def shown(self) -> str:
        """The newest prompt."""
        return prompts(self.engine)[-1]


@pytest.fixture
async def chain(tmp_path: Path) -> AsyncIterator[Chain]:
    gate = Gate()
    engine = ScriptedEngine(gated_at(gate, "held"))
    async with live_app(tmp_path, engine) as server, http_client(server) as client:
        yield Chain(Api(client), engine, gate)


async def test_a_chain_is_the_same_as_sending_everything(chain: Chain) -> None:
    """Chained and client-sent give one prompt."""
    first = await chain.api.create("think hm then say one")
    second = await chain.api.create("say two", previous_response_id=first["id"])
    chained = chain.engine.requests[-1].prompt_ids
    assert second["previous_response_id"] == first["id"]
    user = {"role": "user", "content": "think hm then say one"}
    await chain.api.create([user, *first["output"], {"role": "user", "content": "say two"}])
    assert chain.engine.requests[-1].prompt_ids == chained
    assert second["usage"]["input_tokens"] == len(chained)


async def test_a_chain_forks(chain: Chain) -> None:
    root = await chain.api.create("say root")
    left = await chain.api.create("say left", previous_response_id=root["id"])
    right = await chain.api.create("say right", previous_response_id=root["id"])
    assert "say root" in chain.shown() and "left" not in chain.shown()
    await chain.api.create("say on", previous_response_id=left["id"])
    assert "say left" in chain.shown() and "right" not in chain.shown()
    assert text(right) == "right"


async def test_a_turn_may_go_on_without_new_input(chain: Chain) -> None:
    first = await chain.api.create("say one")
    reply = await chain.api.http.post("/v1/responses", json={"previous_response_id": first["id"]})
    assert chain.api.response(reply)["status"] == "completed"


async def test_instructions_are_not_carried_over(chain: Chain) -> None:
    first = await chain.api.create("say one", instructions="be brief")
    second = await chain.api.create("say two", previous_response_id=first["id"])
    assert "be brief" not in chain.shown()
    assert second["instructions"] is None
    await chain.api.create("say three", previous_response_id=second["id"], instructions="be kind")
    assert "be kind" in chain.shown() and "be brief" not in chain.shown()


async def test_a_running_parent_is_refused(chain: Chain) -> None:
    begun = await chain.api.create("say held", background=True)
    error = await chain.api.refused(400, "hi", previous_response_id=begun["id"])
    assert (error["code"], error["param"]) == ("response_not_finished", "previous_response_id")
    chain.gate.release.set()
    await chain.api.ended(begun["id"])
    assert (await chain.api.create("say hi", previous_response_id=begun["id"]))["status"] == "completed"


async def test_a_parent_that_waits_names_where_its_outputs_go(chain: Chain) -> None:
    waits = {"tools": [WEATHER], "await_tool_outputs": True, "background": True}
    begun = await chain.api.create(call(), **waits)
    [pending] = (await chain.api.waits(begun["id"]))["pending_tool_calls"]
    outputs = [answer(pending["call_id"], "wet")]
    error = await chain.api.refused(400, outputs, previous_response_id=begun["id"])
    assert error["code"] == "response_not_finished"
    assert f"POST /v1/responses/{begun['id']}/tool_outputs" in error["message"]


async def test_a_parent_and_a_conversation_exclude_each_other(chain: Chain) -> None:
    error = await chain.api.refused(400, "hi", previous_response_id="resp_1", conversation="conv_1")
    assert error["code"] == "mutually_exclusive_parameters"


# ------------------------------------------------------------------------------------------------------------
# Calls and their outputs


async def test_a_tool_loop_by_previous_response_id(chain: Chain) -> None:
    first = await chain.api.create(call(), tools=[WEATHER])
    [made] = calls(first)
    second = await chain.api.create(
        [answer(made["call_id"], "rainy")], previous_response_id=first["id"], tools=[WEATHER]
    )
    assert text(second) == "The tool said: rainy"
    [item] = (await chain.api.input_items(second["id"]))["data"]
    assert (item["type"], item["output"], item["status"]) == ("function_call_output", "rainy", "completed")


async def test_outputs_are_taken_when_the_tools_are_not_repeated(chain: Chain) -> None:
    first = await chain.api.create(call(), tools=[WEATHER])
    second = await chain.api.create([answer(calls(first)[0]["call_id"])], previous_response_id=first["id"])
    assert text(second) == "The tool said: sunny"


async def test_an_output_may_be_parts(chain: Chain) -> None:
    first = await chain.api.create(call(), tools=[WEATHER])
    parts = [{"type": "input_text", "text": "rain"}, {"type": "input_text", "text": "later"}]
    second = await chain.api.create(
        [answer(calls(first)[0]["call_id"], parts)], previous_response_id=first["id"]
    )
    assert "rain\nlater" in text(second)


async def test_unanswered_calls_are_refused_by_name(chain: Chain) -> None:
    first = await chain.api.create(f"{call()}\n{call('get_time')}", tools=[WEATHER, TIME])
    one, two = (item["call_id"] for item in calls(first))
    error = await chain.api.refused(400, "say hi", previous_response_id=first["id"])
    assert error["message"].startswith(
        f"No tool output found for function call {one}, {two}. The call is in the "
    )
    assert "that 'previous_response_id' leads to" in error["message"]
    error = await chain.api.refused(400, [answer(one)], previous_response_id=first["id"])
    assert one not in error["message"] and two in error["message"]
    done = await chain.api.create([answer(one, "x"), answer(two, "y")], previous_response_id=first["id"])
    assert text(done) == "The tool said: x; y"


async def test_an_output_without_its_call_is_refused(chain: Chain) -> None:
    first = await chain.api.create("say hi")
    error = await chain.api.refused(400, [answer("call_nobody")], previous_response_id=first["id"])
    assert "call_nobody" in error["message"]
    assert error["param"] == "input[0].call_id"


async def test_calls_of_a_cut_short_response_need_no_answer(chain: Chain) -> None:
    """The prompt leaves them out; a chain goes on behind them."""
    first = await chain.api.create(
        f"{call()}\nsay and more and more and more and more and more", tools=[LENIENT], max_output_tokens=80
    )
    assert first["status"] == "incomplete"
    assert calls(first)[0]["status"] == "completed"
    second = await chain.api.create("say on", previous_response_id=first["id"])
    assert text(second) == "on"
    assert "<tool_call>" not in chain.shown() and "and more" in chain.shown()
    third = await chain.api.create("say more", previous_response_id=second["id"])
    assert text(third) == "more"


async def test_calls_of_a_cut_short_response_may_be_answered(chain: Chain) -> None:
    first = await chain.api.create(
        f"{call()}\nsay and more and more and more and more and more", tools=[LENIENT], max_output_tokens=80
    )
    [made] = calls(first)
    second = await chain.api.create([answer(made["call_id"], "wet")], previous_response_id=first["id"])
    assert text(second) == "The tool said: wet"
    third = await chain.api.create("say on", previous_response_id=second["id"])
    assert "wet" in chain.shown() and text(third) == "on"


async def test_calls_of_a_cancelled_response_are_left_out(chain: Chain) -> None:
    begun = await chain.api.create(call(), tools=[WEATHER], background=True, await_tool_outputs=True)
    async with chain.api.follow(begun["id"]) as live:
        await live.until("output_item.done")
    cancelled = await chain.api.cancel(begun["id"])
    assert [item["status"] for item in calls(cancelled)] == ["completed"]
    after = await chain.api.create("say on", previous_response_id=begun["id"])
    assert text(after) == "on"


# ------------------------------------------------------------------------------------------------------------
# Items by id


async def test_an_item_reference_stands_for_its_item(chain: Chain) -> None:
    first = await chain.api.create("say one")
    user = (await chain.api.input_items(first["id"]))["data"][0]
    references = [{"type": "item_reference", "id": user["id"]}, {"id": first["output"][0]["id"]}]
    second = await chain.api.create([*references, {"role": "user", "content": "say two"}])
    listed = (await chain.api.input_items(second["id"], order="asc"))["data"]
    assert listed[:2] == [user, first["output"][0]]
    await chain.api.create("say two", previous_response_id=first["id"])
    assert chain.engine.requests[-1].prompt_ids == chain.engine.requests[-2].prompt_ids


async def test_an_unknown_item_reference_is_a_404(chain: Chain) -> None:
    items = [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_nobody"}]
    error = await chain.api.refused(404, items)
    assert "msg_nobody" in error["message"] and error["param"] == "input[1].id"


async def test_an_item_that_is_sent_back_is_the_same_item(chain: Chain) -> None:
    """However a client abbreviates it: one id, one item."""
    first = await chain.api.create("think hm then say one")
    reasoning, message = first["output"]
    sent = [
        {k: v for k, v in reasoning.items() if k not in ("encrypted_content", "status")},
        {"id": message["id"], "role": "assistant", "content": [{"type": "output_text", "text": "one"}]},
        {"role": "user", "content": "say two"},
    ]
    second = await chain.api.create(sent)
    listed = (await chain.api.input_items(second["id"], order="asc"))["data"]
    assert listed[:2] == [reasoning, message]


async def test_an_id_that_another_item_has_is_replaced(chain: Chain) -> None:
    first = await chain.api.create("say one")
    taken = first["output"][0]["id"]
    items = [
        {"id": taken, "role": "assistant", "content": "something else"},
        {"id": "msg_mine", "role": "user", "content": "one"},
        {"id": "msg_mine", "role": "user", "content": "two"},
        {"role": "user", "content": "say two"},
    ]
    second = await chain.api.create(items)
    listed = (await chain.api.input_items(second["id"], order="asc"))["data"]
    assert [item["content"][0]["text"] for item in listed] == ["something else", "one", "two", "say two"]
    ids = [item["id"] for item in listed]
    assert len(set(ids)) == 4 and taken not in ids and ids[1] == "msg_mine"
    assert await chain.api.get(first["id"]) == first


async def test_an_id_of_a_deleted_response_is_replaced_too(chain: Chain) -> None:
    """Its items live on for its descendants, though nobody can name them."""
    first = await chain.api.create([{"id": "msg_old", "role": "user", "content": "say one"}])
    second = await chain.api.create("say two", previous_response_id=first["id"])
    await chain.api.delete(first["id"])
    third = await chain.api.create([{"id": "msg_old", "role": "user", "content": "say other"}])
    [item] = (await chain.api.input_items(third["id"]))["data"]
    assert item["content"][0]["text"] == "say other" and item["id"] != "msg_old"
    await chain.api.create("say three", previous_response_id=second["id"])
    assert "say one" in chain.shown() and "say other" not in chain.shown()
