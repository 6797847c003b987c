"""Compaction by clients as they come: the official SDK, over WebSockets too, and the Agents SDK's session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, OpenAIResponsesModel, Runner, SQLiteSession, set_tracing_disabled
from agents.memory import OpenAIResponsesCompactionSession
from openai import AsyncOpenAI
from openai.types.responses import ResponseCompactionCompactingEvent

from engine import GenerateRequest, Say, ScriptedEngine
from engine.backends.script import obey
from server.runs.planning.compaction import ASK
from tests.support.running import live_app
from tests.support.talk import prompts

ALIAS = "gpt-local"
TRIGGER: Any = {"type": "compaction_trigger"}


def summarising(request: GenerateRequest, prompt: str) -> Iterator[Any]:
    yield from [Say("Mark wants a boat. " * 8)] if ASK in prompt[-len(ASK) - 60 :] else obey(request, prompt)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(summarising)


@pytest.fixture
async def sdk(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[AsyncOpenAI]:
    async with (
        live_app(tmp_path, engine, served_model_name=("antiphon-scripted", ALIAS)) as server,
        AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as client,
    ):
        yield client


async def test_the_sdk_compacts_and_goes_on(sdk: AsyncOpenAI, engine: ScriptedEngine) -> None:
    first = await sdk.responses.create(model=ALIAS, input="My name is Mark.")
    compacted = await sdk.responses.compact(model=ALIAS, previous_response_id=first.id)
    assert (compacted.object, compacted.usage.output_tokens > 0) == ("response.compaction", True)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    # A new chain from the whole output, unchanged, and from two compactions in a row.
    window: list[Any] = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    again = await sdk.responses.compact(model=ALIAS, input=[*window, {"role": "user", "content": "say hm"}])
    assert [item.type for item in again.output] == ["message", "message", "compaction"]
    window = [item.model_dump(exclude_none=True, warnings=False) for item in again.output]
    last = await sdk.responses.create(model=ALIAS, input=[*window, {"role": "user", "content": "say on"}])
    assert last.output_text == "on" and "- My name is Mark." in prompts(engine)[-1]
    counted = await sdk.responses.input_tokens.count(
        model=ALIAS, input=[*window, {"role": "user", "content": "say on"}]
    )
    assert last.usage is not None and counted.input_tokens == last.usage.input_tokens


async def test_the_sdk_is_shown_a_compaction_in_a_stream(sdk: AsyncOpenAI) -> None:
    asked: list[Any] = [{"role": role, "content": "word " * 80} for role in ("user", "assistant", "user")]
    managed: Any = [{"type": "compaction", "compact_threshold": 1000}]
    async with sdk.responses.stream(
        model=ALIAS, input=[*asked, {"role": "user", "content": "say on"}], context_management=managed
    ) as stream:  # type: ignore[arg-type]
        seen = [event async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["compaction", "message"] and final.output_text == "on"
    shown = [event for event in seen if event.type == "response.compaction.compacting"]
    assert shown and isinstance(shown[0], ResponseCompactionCompactingEvent)
    assert shown[0].item_id == final.output[0].model_dump()["id"]


async def test_a_chain_that_only_its_websocket_keeps(sdk: AsyncOpenAI, engine: ScriptedEngine) -> None:
    async with sdk.responses.connect() as connection:

        async def turn(**body: Any) -> Any:
            await connection.response.create(model=ALIAS, store=False, **body)
            async for event in connection:
                assert event.type != "error", event
                if event.type == "response.completed":
                    return event.response

        first = await turn(input="My name is Mark.")
        made = await turn(input=[TRIGGER], previous_response_id=first.id)
        assert [item.type for item in made.output] == ["compaction"]
        last = await turn(input="say on", previous_response_id=made.id)
    assert last.output_text == "on"
    assert "- My name is Mark." in prompts(engine)[-1] and "You said" not in prompts(engine)[-1]


async def test_a_session_of_the_agents_sdk(sdk: AsyncOpenAI, engine: ScriptedEngine) -> None:
    set_tracing_disabled(True)  # it would go to another server
    kept = SQLiteSession("s")
    session = OpenAIResponsesCompactionSession(
        "s",
        kept,
        client=sdk,
        model=ALIAS,
        should_trigger_compaction=lambda seen: len(seen["session_items"]) >= 4,
    )
    agent = Agent(name="A", model=OpenAIResponsesModel(model=ALIAS, openai_client=sdk))
    for asked in ("My name is Mark.", "say two", "say three"):
        result = await Runner.run(agent, asked, session=session)
    assert result.final_output == "three"
    types = [item.get("type", "message") for item in await kept.get_items()]
    assert "compaction" in types and len(types) < 6
    assert "Summary:" in prompts(engine)[-1] or "compaction" in types[-1:]
    last = await Runner.run(agent, "say four", session=session)
    assert last.final_output == "four" and "- My name is Mark." in prompts(engine)[-1]
