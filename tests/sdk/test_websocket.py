"""WebSocket mode by the clients as they come: the SDK's connection and sessions, and the Agents SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents import Agent, ModelSettings, RunConfig, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesWSModel
from openai import AsyncOpenAI
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits
from openai.types.responses.responses_client_event import ResponseCreate

from engine import ScriptedEngine
from tests.support.running import Running, live_app
from tests.support.talk import call, prompts

LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=512, max_events=2048, max_bytes_per_lane=1 << 24, max_bytes=1 << 25
)


def client_of(running: Running) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="unused")


async def answer(connection: Any) -> tuple[str, Any]:
    """The pieces of an answer's text, and the response when it has ended."""
    said = ""
    async for event in connection:
        if event.type == "response.output_text.delta":
            said += event.delta
        if event.type == "response.completed":
            return said, event.response
    raise AssertionError("the connection has ended before its answer")


async def test_a_connection_of_the_sdk(live_server: Running) -> None:
    async with client_of(live_server) as client, client.responses.connect() as connection:
        await connection.response.create(model="antiphon-scripted", input="say hello", store=False)
        said, response = await answer(connection)
        assert said == response.output_text == "hello"
        await connection.response.create(model="nothing", input="x")
        error = await connection.recv()
        assert error.type == "error" and error.error.code == "model_not_found"


async def test_a_connection_of_the_beta(live_server: Running) -> None:
    async with client_of(live_server) as client, client.beta.responses.connect() as connection:
        await connection.response.create(model="antiphon-scripted", input="say hello", store=False)
        said, _ = await answer(connection)
        assert said == "hello"


async def test_lanes_of_a_session(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with (
        live_app(tmp_path, engine) as running,
        client_of(running) as client,
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        one, two = session.lane("one"), session.lane("two")
        asked = {"type": "response.create", "model": "antiphon-scripted", "store": False}
        await one.send({**asked, "input": "say first"})
        await two.send({**asked, "input": "say second"})
        first, second = await one.get_final_response(), await two.get_final_response()
        assert (first.output_text, second.output_text) == ("first", "second")
        warm = ResponseCreate(
            type="response.create", model="antiphon-scripted", store=False, generate=False,
            input="My name is Mark.",
        )  # fmt: skip
        await one.send(warm)
        warmed = await one.get_final_response()
        assert warmed.output == []
        await two.send({**asked, "input": "say more", "previous_response_id": warmed.id})
        assert (await two.get_final_response()).output_text == "more"
        assert "My name is Mark." in prompts(engine)[-1]


async def test_an_agent_with_tools(tmp_path: Path) -> None:
    set_tracing_disabled(True)
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        asked.append(city)
        return "sunny"

    engine = ScriptedEngine()
    async with live_app(tmp_path, engine) as running, client_of(running) as client:
        model = OpenAIResponsesWSModel("antiphon-scripted", client)
        agent = Agent(name="a", model=model, tools=[get_weather], model_settings=ModelSettings(store=False))
        result = await Runner.run(agent, call(), run_config=RunConfig(tracing_disabled=True))
        assert asked == ["Paris"] and result.final_output
        assert running.life.sockets.num_received == 2 and len(running.life.sockets) == 1
        streamed = Runner.run_streamed(agent, "say hello", run_config=RunConfig(tracing_disabled=True))
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "hello"
        await model.close()
