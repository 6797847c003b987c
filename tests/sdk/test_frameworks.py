"""Other clients, unmodified: LangChain, LiteLLM, pydantic-ai."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from tests.support.running import Running
from tests.support.talk import BUILTIN, WEATHER, call

MODEL = "antiphon-scripted"
SAID = "The tool said: sunny in Paris"
SUM = 'call calculator {"expression": "2+3"}'


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


# ------------------------------------------------------------------------------------------------------------
# LangChain


@asynccontextmanager
async def langchain(server: Running, **settings: Any) -> AsyncIterator[Any]:
    from langchain_openai import ChatOpenAI

    settings |= {"model": MODEL, "base_url": f"{server.base_url}/v1", "api_key": SecretStr("unused")}
    async with httpx.AsyncClient() as http:  # its own clients are cached and never closed
        yield ChatOpenAI(http_async_client=http, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_responses_api": True},
        {"use_responses_api": True, "use_previous_response_id": True},
        {"use_responses_api": True, "output_version": "responses/v1"},
        {"use_responses_api": True, "output_version": "v1", "store": False},
        {},
    ],
    ids=["responses", "chained", "responses/v1", "v1 unstored", "chat"],
)
async def test_langchain(live_server: Running, settings: dict[str, Any]) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    async with langchain(live_server, **settings) as model:
        plain = await model.ainvoke("say hello")
        assert plain.text == "hello" and plain.usage_metadata["output_tokens"] == 6
        bound = model.bind_tools([get_weather])
        history: list[Any] = [HumanMessage(f"think hm then {call()}")]
        asked = await bound.ainvoke(history)
        [made] = asked.tool_calls
        assert (made["name"], made["args"]) == ("get_weather", {"city": "Paris"})
        history += [asked, ToolMessage(get_weather(**made["args"]), tool_call_id=made["id"])]
        answered = await bound.ainvoke(history)
        assert answered.text == SAID
        history += [answered, HumanMessage("say on")]
        assert (await bound.ainvoke(history)).text == "on"


@pytest.mark.parametrize("responses", [True, False])
async def test_langchain_streamed(live_server: Running, responses: bool) -> None:
    async with langchain(live_server, use_responses_api=responses, stream_usage=True) as model:
        chunks = [chunk async for chunk in model.bind_tools([get_weather]).astream(f"say Look.\n{call()}")]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.text.strip() == "Look."
    assert [made["args"] for made in whole.tool_calls] == [{"city": "Paris"}]
    assert whole.usage_metadata["output_tokens"] > 0


async def test_langchain_has_tools_of_the_server_on_chat(live_server: Running) -> None:
    async with langchain(live_server, use_responses_api=False, stream_usage=True) as model:
        bound = model.bind_tools([BUILTIN, get_weather])
        plain = await bound.ainvoke(SUM)
        assert plain.text == "The tool said: 5" and not plain.tool_calls
        both = await bound.ainvoke(f"{SUM}\n{call()}")
        assert [made["name"] for made in both.tool_calls] == ["get_weather"]
        chunks = [chunk async for chunk in bound.astream(SUM)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.text == plain.text and whole.usage_metadata == plain.usage_metadata


# ------------------------------------------------------------------------------------------------------------
# LiteLLM


@pytest.fixture
async def litellm_settings(live_server: Running) -> AsyncIterator[dict[str, Any]]:
    import litellm

    yield {"model": f"openai/{MODEL}", "api_base": f"{live_server.base_url}/v1", "api_key": "unused"}
    await litellm.close_litellm_async_clients()  # type: ignore[attr-defined]


async def test_litellm_responses(litellm_settings: dict[str, Any]) -> None:
    import litellm

    plain: Any = await litellm.aresponses(input="say hello", **litellm_settings)
    assert plain.output[0].content[0].text == "hello"
    stream: Any = await litellm.aresponses(input="say one two", stream=True, **litellm_settings)
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    first: Any = await litellm.aresponses(input=call(), tools=[WEATHER], **litellm_settings)
    made = first.output[-1]
    answer = {"type": "function_call_output", "call_id": made.call_id, "output": "sunny in Paris"}
    second: Any = await litellm.aresponses(
        input=[answer], previous_response_id=first.id, tools=[WEATHER], **litellm_settings
    )
    assert second.output[-1].content[0].text == SAID


async def test_litellm_completion(litellm_settings: dict[str, Any]) -> None:
    import litellm

    messages = [{"role": "user", "content": "say hello"}]
    plain: Any = await litellm.acompletion(messages=messages, **litellm_settings)
    assert plain.choices[0].message.content == "hello"
    stream: Any = await litellm.acompletion(messages=messages, stream=True, **litellm_settings)
    said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert said == "hello"


async def test_litellm_has_tools_of_the_server_on_chat(litellm_settings: dict[str, Any]) -> None:
    import litellm

    asked = {"messages": [{"role": "user", "content": SUM}], "tools": [BUILTIN], **litellm_settings}
    plain: Any = await litellm.acompletion(**asked)
    said = plain.choices[0].message
    assert said.content == "The tool said: 5" and not said.tool_calls
    stream: Any = await litellm.acompletion(stream=True, **asked)
    whole: Any = litellm.stream_chunk_builder([chunk async for chunk in stream])
    assert whole.choices[0].message.content == said.content


# ------------------------------------------------------------------------------------------------------------
# pydantic-ai


@pytest.mark.parametrize("kind", ["responses", "chat"])
async def test_pydantic_ai(live_server: Running, kind: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{live_server.base_url}/v1", api_key="unused")
    model: Any = (OpenAIResponsesModel if kind == "responses" else OpenAIChatModel)(MODEL, provider=provider)
    agent = Agent(model, instructions="Be brief.", tools=[get_weather])
    result = await agent.run(f"think hm then {call()}")
    assert result.output == SAID
    again = await agent.run("say on", message_history=result.all_messages())
    assert again.output == "on"
    async with agent.run_stream("say one two three") as streamed:
        pieces = [piece async for piece in streamed.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "one two three"
    await provider.client.close()
