"""What the Open Responses suite does over HTTP, all of it at once, with models that really answer.

That suite is stricter than the official schema in the fields that every response must have, its reader of
streams knows line feeds only, and its weather tool is offered without a `tool_choice`. The folder `websocket`
has the rest of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

from engine import LocalEngine
from tests.support import wire
from tests.support.running import http_client, live_app
from tests.support.seeing import data_url, png
from tests.support.talk import text
from tests.support.wire import Json

Scenario = Callable[[httpx.AsyncClient], Awaitable[None]]

ALWAYS = {
    *("completed_at", "status", "previous_response_id", "truncation", "text", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "top_p", "reasoning", "usage", "max_output_tokens"),
    *("max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
NUMBERS = ("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "top_p")
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state"}},
        "required": ["location"],
    },
}


async def made(client: httpx.AsyncClient, input: str | list[Json], **fields: object) -> Json:
    """A response that is complete and has whatever the suite asks of one."""
    reply = await client.post("/v1/responses", json={"model": "any", "input": input, **fields})
    assert reply.status_code == 200, reply.text
    response: Json = reply.json()
    check(response)
    return response


def check(response: Json) -> None:
    """The suite's own demands, beside those of the official schema."""
    wire.validate_response(response)
    assert response["status"] == "completed" and response.keys() >= ALWAYS
    assert all(response[name] is not None for name in NUMBERS)
    assert response["reasoning"] is None or {"effort", "summary"} <= response["reasoning"].keys()
    for tool in response["tools"]:
        assert {"name", "description", "parameters", "strict"} <= tool.keys()
    for item in response["output"]:
        assert item["id"] and item["status"] == "completed"


def said(role: str, words: str, **fields: str) -> Json:
    return {"type": "message", "role": role, "content": words, **fields}


async def basic_text(client: httpx.AsyncClient) -> None:
    assert text(await made(client, [said("user", "Say hello in exactly 3 words.")]))


async def streaming(client: httpx.AsyncClient) -> None:
    body = {"model": "any", "input": [said("user", "Count from 1 to 5.")], "stream": True}
    raw = (await client.post("/v1/responses", json=body)).content
    assert b"\r" not in raw and raw.endswith(b"}\n\n")
    kinds = [event["type"] for event in wire.events(raw)]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds


async def system_prompt(client: httpx.AsyncClient) -> None:
    told = said("system", "You are a pirate. Always respond in pirate speak.")
    assert text(await made(client, [told, said("user", "Say hello.")]))


async def a_tool_that_the_model_chooses(client: httpx.AsyncClient) -> None:
    asked = [said("user", "What's the weather like in San Francisco?")]
    [item] = (await made(client, asked, tools=[WEATHER]))["output"]
    assert item["type"] == "function_call" and item["name"] == "get_weather"
    assert "San Francisco" in item["arguments"]


async def several_turns(client: httpx.AsyncClient) -> None:
    turns = [said("user", "My name is Alice."), said("assistant", "Hello Alice! Nice to meet you.")]
    assert text(await made(client, [*turns, said("user", "What is my name?")]))


async def history_with_phases(client: httpx.AsyncClient) -> None:
    turns = [said("user", "Hi."), said("assistant", "Let me look.", phase="commentary")]
    turns += [said("assistant", "Here you are.", phase="final_answer"), said("user", "Thank you.")]
    assert text(await made(client, turns))


async def a_chain(client: httpx.AsyncClient) -> None:
    first = await made(client, "My name is Bob.")
    second = await made(client, "Say hello.", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"] and text(second)


async def compacted(client: httpx.AsyncClient) -> list[Json]:
    turns = [said("user", "My dog is called Rex."), said("assistant", "What a nice name.")]
    reply = await client.post("/v1/responses/compact", json={"model": "any", "input": turns})
    assert reply.status_code == 200 and reply.json()["object"] == "response.compaction", reply.text
    output: list[Json] = reply.json()["output"]
    assert "compaction" in {item["type"] for item in output}
    return output


async def compact(client: httpx.AsyncClient) -> None:
    assert text(await made(client, [*await compacted(client), said("user", "Say hello.")]))


async def compact_and_a_new_chain(client: httpx.AsyncClient) -> None:
    begun = await made(client, [*await compacted(client), said("user", "Say hello.")])
    assert text(await made(client, "And again.", previous_response_id=begun["id"]))


SCENARIOS: tuple[Scenario, ...] = (
    basic_text,
    streaming,
    system_prompt,
    a_tool_that_the_model_chooses,
    several_turns,
    history_with_phases,
    a_chain,
    compact,
    compact_and_a_new_chain,
)


async def test_all_that_needs_no_eyes_at_once(tmp_path: Path) -> None:
    engine = LocalEngine(Path("engine/tiny/checkpoint"), num_threads=1, kv_cache_bytes=64 << 20)
    async with (
        live_app(tmp_path, engine, served_model_name=("any",)) as running,
        http_client(running) as client,
    ):
        await asyncio.gather(*(scenario(client) for scenario in SCENARIOS))


async def test_an_image_in_a_message(tmp_path: Path, seeing: Callable[[str], Path]) -> None:
    parts = [
        {"type": "input_text", "text": "What do you see in this image? Answer in one sentence."},
        {"type": "input_image", "image_url": data_url(png())},
    ]
    engine = LocalEngine(seeing("idefics3"), num_blocks=256, num_threads=1)
    async with (
        live_app(tmp_path, engine, served_model_name=("any",)) as running,
        http_client(running) as client,
    ):
        body = {"model": "any", "input": [{"role": "user", "content": parts}], "max_output_tokens": 16}
        reply = await client.post("/v1/responses", json=body)
        assert reply.status_code == 200, reply.text
        wire.validate_response(reply.json())
