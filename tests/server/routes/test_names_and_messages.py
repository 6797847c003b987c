"""Responses whose clients choose the id, bring earlier messages, or want to be told those of the model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import ScriptedEngine
from tests.support import wire
from tests.support.running import Running, http_client, running_app
from tests.support.talk import WEATHER, Api, Gate, answer, call, gated_at, prompts

Json = dict[str, Any]
RESPONSES = "/v1/responses"


async def taken(client: httpx.AsyncClient, **body: Any) -> None:
    reply = await client.post(RESPONSES, json={"input": "say hi", **body})
    error = wire.validate_error(reply.json())
    assert (reply.status_code, error["code"], error["param"]) == (400, "request_id_taken", "request_id")


async def test_a_client_chooses_an_id(client: httpx.AsyncClient) -> None:
    api = Api(client)
    made = await api.create("say one", request_id="mine")
    assert made["id"] == "resp_mine" and await api.get("resp_mine") == made
    for store in (True, False):
        await taken(client, request_id="mine", store=store)
        await taken(client, request_id="resp_mine", store=store)
    more = await api.create("say two", previous_response_id="resp_mine")
    assert more["id"] != "resp_mine"
    await api.delete("resp_mine")
    await taken(client, request_id="mine")
    for wrong in ("a b", "", "x" * 65, 1):
        reply = await client.post(RESPONSES, json={"input": "say hi", "request_id": wrong})
        assert (reply.status_code, wire.validate_error(reply.json())["param"]) == (400, "request_id")


@pytest.mark.parametrize("store", [True, False])
async def test_an_id_at_work_is_taken(tmp_path: Path, store: bool) -> None:
    gate = Gate()
    async with (
        running_app(tmp_path, ScriptedEngine(gated_at(gate, "hold"))) as running,
        http_client(running) as client,
    ):
        asked = {"input": "hold\nsay hi", "request_id": "mine", "store": store}
        first = asyncio.create_task(client.post(RESPONSES, json=asked))
        await gate.reached.wait()
        await taken(client, request_id="mine")
        gate.release.set()
        assert (await first).json()["output"][0]["content"][0]["text"] == "You said: hold\nsay hi"


async def test_of_two_at_once_one_has_the_id(client: httpx.AsyncClient) -> None:
    asked = {"input": "say hi", "request_id": "mine"}
    replies = await asyncio.gather(*(client.post(RESPONSES, json=asked) for _ in range(4)))
    assert sorted(reply.status_code for reply in replies) == [200, 400, 400, 400]


async def test_another_server_cannot_have_it_either(client: httpx.AsyncClient, server_app: Running) -> None:
    """Where both have looked whether it is free, the database decides."""
    await Api(client).create("say one", request_id="mine")

    async def unknown(id: str) -> bool:
        return False

    object.__setattr__(server_app.context.storage, "response_is_known", unknown)
    await taken(client, request_id="mine")


async def test_messages_stand_before_the_input(client: httpx.AsyncClient, server_app: Running) -> None:
    engine = server_app.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    before: list[Json] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    api = Api(client)
    for given in ("say hi", [{"role": "user", "content": "say hi"}]):
        made = await api.create(given, previous_input_messages=before)
        prompt = prompts(engine)[-1]
        assert prompt.index("Be kind.") < prompt.index("hello") < prompt.index("42") < prompt.index("say hi")
        kinds = [item["type"] for item in (await api.input_items(made["id"], order="asc"))["data"]]
        assert kinds == ["message", "message", "function_call", "function_call_output", "message"]
    for wrong, param in (
        ({"previous_input_messages": "x"}, "previous_input_messages"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages[0].content"),
        ({"previous_input_messages": before, "previous_response_id": made["id"]}, "previous_input_messages"),
        ({"previous_input_messages": before, "conversation": "conv_1"}, "previous_input_messages"),
    ):
        reply = await client.post(RESPONSES, json={"input": "say hi", **wrong})
        assert (reply.status_code, wire.validate_error(reply.json())["param"]) == (400, param)


async def test_a_response_tells_the_messages_of_the_model(client: httpx.AsyncClient) -> None:
    api = Api(client)
    first = await api.create(call(), tools=[WEATHER], instructions="Be kind.", enable_response_messages=True)
    assert [message["role"] for message in first["input_messages"]] == ["system", "user"]
    (said,) = first["output_messages"]
    assert said["tool_calls"][0]["function"]["name"] == "get_weather"
    asked = answer(said["tool_calls"][0]["id"])
    stream = await api.stream([asked], previous_response_id=first["id"], enable_response_messages=True)
    final = stream.events[-1]["response"]
    assert [message["role"] for message in final["input_messages"]] == ["user", "assistant", "tool"]
    assert await api.get(final["id"]) == final
    assert "input_messages" not in stream.events[0]["response"]
    assert "input_messages" not in await api.create("say hi")
