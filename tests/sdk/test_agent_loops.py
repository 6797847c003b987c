"""Agent loops on the shipped model, `tool_choice` auto: question, call, output, answer, without a network.

Nothing here says which tool to call or that there is one to be called: the model decides.

What only one test drives is imported there: each takes a second or more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import agents
import pytest
from openai import AsyncOpenAI

from engine import LocalEngine
from engine.tiny import CHECKPOINT
from tests.support.running import Running, live_app

MODEL = "antiphon-tiny"
QUESTION = "What's the weather in Tokyo?"
ANSWER = "The weather in Tokyo is sunny."
CALLED: list[dict[str, Any]] = []

agents.set_tracing_disabled(True)  # it would go to another server


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    CALLED.append({"city": city})
    return "sunny"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    CALLED.append({"a": a, "b": b})
    return a + b


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    CALLED.clear()
    engine = LocalEngine(CHECKPOINT, name=MODEL)
    async with live_app(tmp_path, engine, served_model_name=(MODEL,)) as running:
        yield running


def url(server: Running) -> str:
    return f"{server.base_url}/v1"


@pytest.mark.parametrize("kind", ["responses", "chat"])
async def test_openai_agents(server: Running, kind: str) -> None:
    async with AsyncOpenAI(api_key="unused", base_url=url(server), max_retries=0) as sdk:
        by_kind = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
        agent: Any = agents.Agent(
            name="Assistant",
            instructions="You are a helpful assistant.",
            model=by_kind[kind](model=MODEL, openai_client=sdk),
            tools=[agents.function_tool(get_weather), agents.function_tool(add)],
            model_settings=agents.ModelSettings(temperature=0),
        )
        result = await agents.Runner.run(agent, QUESTION)
        assert (CALLED, result.final_output) == ([{"city": "Tokyo"}], ANSWER)
        again = await agents.Runner.run(
            agent, [*result.to_input_list(), {"role": "user", "content": "Add 17 and 25."}]
        )
        assert (CALLED[1:], again.final_output) == ([{"a": 17, "b": 25}], "The result is 42.")


@pytest.mark.parametrize("responses", [False, True])
async def test_langgraph(server: Running, responses: bool) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    settings: dict[str, Any] = {
        "model": MODEL,
        "base_url": url(server),
        "api_key": "unused",
        "temperature": 0,
    }
    model = ChatOpenAI(**settings, use_responses_api=responses)
    graph: Any = create_agent(model, tools=[get_weather, add], system_prompt="You are a helpful assistant.")
    state = await graph.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert (CALLED, state["messages"][-1].text) == ([{"city": "Tokyo"}], ANSWER)
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]


@pytest.mark.parametrize("kind", ["responses", "chat"])
async def test_pydantic_ai(server: Running, kind: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url(server), api_key="unused")
    model: Any = (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)(MODEL, provider=provider)
    agent = Agent(
        model,
        instructions="You are a helpful assistant.",
        tools=[get_weather, add],
        model_settings={"temperature": 0},
    )
    result = await agent.run(QUESTION)
    assert (CALLED, result.output) == ([{"city": "Tokyo"}], ANSWER)
    await provider.client.close()
