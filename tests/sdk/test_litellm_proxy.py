"""LiteLLM's proxy before this server, with the configuration of the guide, driven by the SDKs.

The proxy needs older versions of what other clients need, and 750 MB with all that it brings: it has an
environment of its own, whose program `litellm` TEST_WITH_LITELLM names.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.support.pages import read_page
from tests.support.pooling_checkpoints import make_embedder
from tests.support.processes import free_port
from tests.support.running import Running, live_app
from tests.support.talk import BUILTIN, WEATHER, call

PROGRAM = os.environ.get("TEST_WITH_LITELLM")
if PROGRAM is None:
    pytest.skip(
        "TEST_WITH_LITELLM names no program; V/bin/litellm is made by "
        "`python -m venv V && V/bin/pip install 'litellm[proxy]==1.108.7'`",
        allow_module_level=True,
    )

GUIDE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MODEL = "my-model"
KEY = "sk-proxy"
SAID = "The tool said: sunny"
START_S = 120.0
"""It takes half a minute to import what it is made of."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = make_embedder("bert", tmp_path_factory.mktemp("vectors"))
    async with live_app(
        tmp_path_factory.mktemp("data"),
        embedding_model=(f"my-vectors={folder}",),
        api_key=("sk-ours",),
        num_threads=1,
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(server: Running, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The URL of a proxy that was started as the guide says."""
    blocks = [block for block in read_page(GUIDE).blocks if "litellm" in block.text]
    [config] = [block.text for block in blocks if block.language == "yaml"]
    [commands] = [block.text for block in blocks if block.language == "sh"]
    local = dict(re.findall(r"(LITELLM_LOCAL_\w+)=(\w+)", commands))
    assert len(local) == 5
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    config = config.replace("http://127.0.0.1:8000", server.base_url)
    config = config.replace("openai/my-model", "openai/antiphon-scripted")
    (folder / "config.yaml").write_text(config)
    keys = {"LITELLM_MASTER_KEY": KEY, "ANTIPHON_API_KEY": "sk-ours"}
    with open(folder / "log", "w") as log:
        child = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)),
            *("--telemetry", "False"),
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **local, **keys},
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
            ready = False
            while not ready:
                assert child.returncode is None, (folder / "log").read_text()[-2000:]
                with suppress(httpx.TransportError):
                    ready = (await client.get(f"{url}/health/readiness")).status_code == 200
                await asyncio.sleep(0.1)
        yield url
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(proxy: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(proxy: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=proxy, api_key=KEY, max_retries=0) as client:
        yield client


def said(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


# ------------------------------------------------------------------------------------------------------------
# Chat and text completions, vectors

FUNCTION: Any = {
    "type": "function",
    "function": {key: value for key, value in WEATHER.items() if key != "type"},
}


async def test_chat(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": said("think hm then say hello you")}
    plain = await client.chat.completions.create(**asked)
    assert plain.choices[0].message.content == "hello you"
    assert plain.choices[0].message.reasoning_content == "hm"  # type: ignore[attr-defined]
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "hello you" and len([text for text in texts if text]) == 2
    assert chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens > 0


async def test_chat_with_functions(client: AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [FUNCTION], "messages": said(f"{call()}\n{call(city='Oslo')}")}
    message = (await client.chat.completions.create(**asked)).choices[0].message
    calls: Any = message.tool_calls
    assert [made.function.arguments for made in calls] == ['{"city": "Paris"}', '{"city": "Oslo"}']
    arguments = ["", ""]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            arguments[piece.index] += piece.function.arguments
    assert arguments == [made.function.arguments for made in calls]
    outputs = [{"role": "tool", "tool_call_id": made.id, "content": "sunny"} for made in calls]
    asked["messages"] += [message.model_dump(exclude_none=True), *outputs]
    assert (await client.chat.completions.create(**asked)).choices[0].message.content == f"{SAID}; sunny"


async def test_text_completions_and_vectors(client: AsyncOpenAI) -> None:
    plain = await client.completions.create(model=MODEL, prompt="say hello")
    assert plain.choices[0].text == "hello"
    stream = await client.completions.create(model=MODEL, prompt="say hello you", stream=True)
    assert "".join([chunk.choices[0].text or "" async for chunk in stream]) == "hello you"
    vectors = await client.embeddings.create(model="my-vectors", input=["a dog", "the river"])
    assert [len(row.embedding) for row in vectors.data] == [64, 64] and vectors.usage.prompt_tokens > 0


async def test_errors_keep_their_status_and_their_message(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'temperature': decimal above maximum value"):
        await client.chat.completions.create(model=MODEL, messages=said("say x"), temperature=9)
    with pytest.raises(openai.BadRequestError, match="'temperature': decimal above maximum value"):
        await client.responses.create(model=MODEL, input="say x", temperature=9)


# ------------------------------------------------------------------------------------------------------------
# Responses


async def test_responses(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="think hm then say hello")
    assert first.output_text == "hello" and first.output[0].type == "reasoning"
    second = await client.responses.create(model=MODEL, input="say on", previous_response_id=first.id)
    assert second.output_text == "on"
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 10, "the first turn is in the prompt"
    assert (await client.responses.retrieve(first.id)).output_text == "hello"
    [item] = (await client.responses.input_items.list(second.id)).data
    assert item.type == "message" and item.content[0].type == "input_text"
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)


async def test_a_stream_of_a_response_is_ours(client: AsyncOpenAI) -> None:
    async with client.responses.stream(model=MODEL, input="think hm then say hello you") as stream:
        events = [event async for event in stream]
    numbers = [event.sequence_number for event in events]
    assert numbers == [*range(len(events))]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == ["hello", " you"] and events[-1].type == "response.completed"
    assert events[-1].response.output_text == "hello you"


async def test_responses_with_functions(client: AsyncOpenAI) -> None:
    tools: Any = [WEATHER]
    async with client.responses.stream(model=MODEL, input=call(), tools=tools) as stream:
        first = await stream.get_final_response()
    made = first.output[-1]
    assert made.type == "function_call" and made.arguments == '{"city": "Paris"}'
    answer: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "sunny"}
    second = await client.responses.create(
        model=MODEL, input=[answer], previous_response_id=first.id, tools=tools
    )
    assert second.output_text == SAID


async def test_responses_with_tools_of_the_server(client: AsyncOpenAI) -> None:
    tools: Any = [{**BUILTIN, "require_approval": "never"}]
    made = await client.responses.create(
        model=MODEL, input='call calculator {"expression": "2+3"}', tools=tools
    )
    assert [item.type for item in made.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert made.output_text == "The tool said: 5"


async def test_responses_in_the_background(client: AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="say hello", background=True)
    async with asyncio.timeout(10):
        while made.status != "completed":
            made = await client.responses.retrieve(made.id)
    assert made.output_text == "hello"
    made = await client.responses.create(model=MODEL, input="count 1000000", background=True)
    assert (await client.responses.cancel(made.id)).status == "cancelled"


async def test_conversations_pass_through(client: AsyncOpenAI) -> None:
    conversation = await client.conversations.create(items=[{"role": "user", "content": "Be brief."}])
    made = await client.responses.create(
        model=MODEL, input="say hello", extra_body={"extra_body": {"conversation": conversation.id}}
    )
    assert made.conversation is not None and made.conversation.id == conversation.id
    items = await client.conversations.items.list(conversation.id, order="asc")
    assert [item.role async for item in items] == ["user", "user", "assistant"]  # type: ignore[union-attr]
    with pytest.raises(openai.APIStatusError, match="No connected db"):  # of keys
        await client.with_options(api_key="sk-another").conversations.retrieve(conversation.id)


# ------------------------------------------------------------------------------------------------------------
# Messages


async def test_messages_pass_through(claude: AsyncAnthropic) -> None:
    asked: Any = {"model": "claude-opus-4-8", "max_tokens": 2000, "thinking": {"type": "adaptive"}}
    message = await claude.messages.create(messages=said("think hm then say hello"), **asked)
    thought, text = message.content
    assert thought.type == "thinking" and thought.thinking == "hm" and thought.signature
    assert text.type == "text" and text.text == "hello" and message.stop_reason == "end_turn"
    async with claude.messages.stream(messages=said("think hm then say hello"), **asked) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    turn = [*said("think hm then say hello"), {"role": "assistant", "content": streamed.content}]
    again = await claude.messages.create(messages=[*turn, *said("say on")], **asked)
    assert again.content[0].type == "text" and again.content[0].text == "on"
    counted = await claude.messages.count_tokens(model="claude-opus-4-8", messages=said("say hello"))
    assert counted.input_tokens > 20


@pytest.mark.parametrize("model", ["claude-opus-4-8", MODEL], ids=["anthropic/", "openai/"])
async def test_messages_with_tools(claude: AsyncAnthropic, model: str) -> None:
    tool: Any = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
    messages = said(call())
    async with claude.messages.stream(model=model, max_tokens=99, messages=messages, tools=[tool]) as stream:
        message = await stream.get_final_message()
    made = message.content[-1]
    assert made.type == "tool_use" and made.input == {"city": "Paris"} and message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    message = await claude.messages.create(model=model, max_tokens=99, messages=messages, tools=[tool])
    assert message.content[-1].type == "text" and message.content[-1].text == SAID


async def test_thoughts_of_a_response_are_redacted_in_a_message(claude: AsyncAnthropic) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 2000, "thinking": {"type": "adaptive"}}
    message = await claude.messages.create(messages=said("think hm then say hello"), **asked)
    assert [block.type for block in message.content] == ["redacted_thinking", "text"]
