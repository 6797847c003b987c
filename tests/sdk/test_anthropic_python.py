"""Anthropic's SDK for Python, unmodified, against a server on a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool
from anthropic.types import Message, ThinkingBlock, ToolUseBlock
from pydantic import BaseModel

from engine import QueueFull, ScriptedEngine
from engine.backends.script import Fail, Say
from tests.support.running import Running, live_app

MODEL = "claude-opus-4-8"
TOOL: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = 'call get_weather {"city": "Oslo"}'
ADAPTIVE: Any = {"type": "adaptive"}


@pytest.fixture
async def claude(live_server: Running) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(api_key="unused", base_url=live_server.base_url, max_retries=0) as client:
        yield client


def said(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


async def create(client: AsyncAnthropic, content: Any, **fields: Any) -> Message:
    message: Message = await client.messages.create(
        model=MODEL, max_tokens=1000, messages=said(content), **fields
    )
    return message


async def test_create(claude: AsyncAnthropic) -> None:
    message = await create(claude, "say hello", system="Be brief.")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": "hello"}
    ]
    assert (message.role, message.type, message.model) == ("assistant", "message", "antiphon-scripted")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == 6 and message.usage.input_tokens > 20
    assert message.usage.cache_read_input_tokens == message.usage.cache_creation_input_tokens == 0
    assert message._request_id is not None and message._request_id.startswith("req_")


async def test_models(claude: AsyncAnthropic) -> None:
    (listed,) = [model async for model in claude.models.list()]
    assert (listed.type, listed.id, listed.display_name) == ("model", *["antiphon-scripted"] * 2)
    assert listed.lifecycle == "active" and listed.created_at.tzinfo is not None
    assert listed.max_input_tokens is not None and listed.max_input_tokens > 0
    assert await claude.models.retrieve("antiphon-scripted") == listed
    page = await claude.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, listed.id, listed.id)
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.models.retrieve("none")
    assert caught.value.type == "not_found_error" and caught.value.request_id is not None


async def test_the_synchronous_client_and_the_stream_helper(live_server: Running) -> None:
    def ask() -> tuple[str, Message]:
        with (
            Anthropic(auth_token="unused", base_url=live_server.base_url) as client,
            client.messages.stream(model=MODEL, max_tokens=100, messages=said("count 5")) as stream,
        ):
            text = "".join(stream.text_stream)
            return text, stream.get_final_message()

    text, message = await asyncio.to_thread(ask)
    assert text == "1 2 3 4 5"
    assert message.content[0].type == "text" and message.content[0].text == text
    assert message.usage.output_tokens == 10


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("say hello there", {}),
        ("think let me see then say hello", {"thinking": ADAPTIVE}),
        (f"think hm then {CALL}\n{CALL}", {"thinking": ADAPTIVE, "tools": [TOOL]}),
        (f"say one moment\n{CALL}", {"tools": [TOOL]}),
        ("count 50", {"stop_sequences": ["7"]}),
        ("say no", {"tools": [TOOL], "tool_choice": {"type": "any"}}),
        ("say  ", {}),
    ],
)
async def test_a_stream_comes_to_the_whole(claude: AsyncAnthropic, content: str, fields: Any) -> None:
    whole = await create(claude, content, **fields)
    async with claude.messages.stream(
        model=MODEL, max_tokens=1000, messages=said(content), **fields
    ) as stream:
        streamed = await stream.get_final_message()

    def comparable(message: Message) -> Any:
        dumped = message.model_dump(exclude_none=True, exclude={"id"})
        for block in dumped["content"]:
            block.pop("id", None)
            block.pop("signature", None)
            block.pop("parsed_output", None)
        return dumped

    assert comparable(streamed) == comparable(whole)


async def test_tools_in_a_loop(claude: AsyncAnthropic) -> None:
    messages = said(CALL)
    message = await claude.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[TOOL])
    [block] = message.content
    assert isinstance(block, ToolUseBlock) and message.stop_reason == "tool_use"
    assert (block.name, block.input, block.id[:6]) == ("get_weather", {"city": "Oslo"}, "toolu_")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    message = await claude.messages.create(model=MODEL, max_tokens=100, messages=messages, tools=[TOOL])
    assert message.content[0].type == "text" and message.content[0].text == "The tool said: sunny"
    assert message.stop_reason == "end_turn"


async def test_the_tool_runner(claude: AsyncAnthropic) -> None:
    asked: list[str] = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return f"sunny in {city}"

    runner = claude.beta.messages.tool_runner(
        model=MODEL, max_tokens=100, tools=[get_weather], messages=said(CALL)
    )
    message = await runner.until_done()
    assert asked == ["Oslo"]
    assert message.content[0].type == "text" and message.content[0].text == "The tool said: sunny in Oslo"


async def test_a_thought_goes_round_by_its_signature(claude: AsyncAnthropic, live_server: Running) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 2000, "tools": [TOOL], "thinking": ADAPTIVE}
    async with claude.messages.stream(messages=said(f"think it is cold then {CALL}"), **fields) as stream:
        message = await stream.get_final_message()
    thought, call = message.content
    assert isinstance(thought, ThinkingBlock) and isinstance(call, ToolUseBlock)
    assert thought.thinking == "it is cold"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}

    def history(thought: Any) -> Any:
        turn = [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
        return [*said("weather?"), *turn]

    # The signature says what was thought, whatever a client shows of it.
    await claude.messages.create(messages=history({**thought.model_dump(), "thinking": ""}), **fields)
    engine = live_server.context.models.get(None).engine
    assert isinstance(engine, ScriptedEngine)
    assert "it is cold" in engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    redacted = {"type": "redacted_thinking", "data": thought.signature}
    await claude.messages.create(messages=history(redacted), **fields)
    tampered = thought.signature[:-6] + "AAAAA="
    for block in (
        {**thought.model_dump(), "signature": tampered},
        {**thought.model_dump(), "signature": "bm9uZQ=="},
        {"type": "redacted_thinking", "data": tampered},
    ):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]\.content\[0\]\.(signature|data)"):
            await claude.messages.create(messages=history(block), **fields)


async def test_thoughts_are_told_as_they_are_asked_for(claude: AsyncAnthropic) -> None:
    content = "think it is cold then say hello"
    for thinking in (None, {"type": "disabled"}):
        fields = {} if thinking is None else {"thinking": thinking}
        message = await create(claude, content, **fields)
        assert [block.type for block in message.content] == ["text"]
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens > 0
    omitted: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    thought, _ = (await create(claude, content, thinking=omitted)).content
    assert isinstance(thought, ThinkingBlock) and thought.thinking == "" and thought.signature


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "tools": [TOOL], "thinking": ADAPTIVE},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}},
    ],
)
async def test_the_count_is_what_is_counted(claude: AsyncAnthropic, fields: Any) -> None:
    counted = await claude.messages.count_tokens(model=MODEL, messages=said("say hello"), **fields)
    message = await create(claude, "say hello", **fields)
    assert counted.input_tokens == message.usage.input_tokens


async def test_an_answer_of_a_shape(claude: AsyncAnthropic) -> None:
    class City(BaseModel):
        name: str

    message = await claude.messages.parse(
        model=MODEL, max_tokens=100, messages=said('say {"name": "Oslo"}'), output_format=City
    )
    assert message.parsed_output == City(name="Oslo")


# ------------------------------------------------------------------------------------------------------------
# Errors


def failing(error: Exception, *before: Say) -> Callable[[Any, str], Any]:
    return lambda request, prompt: [*before, Fail(error)]


async def test_errors_are_those_of_the_sdk(tmp_path: Path) -> None:
    async with (
        live_app(tmp_path, api_key=("secret",), max_body_bytes=10_000) as server,
        AsyncAnthropic(api_key="secret", base_url=server.base_url, max_retries=0) as client,
    ):
        assert (await create(client, "say hello")).stop_reason == "end_turn"
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await create(client.with_options(api_key="other"), "say hello")
        assert refused.value.type == "authentication_error" and refused.value.error_code == "invalid_api_key"
        assert refused.value.request_id is not None and refused.value.request_id.startswith("req_")
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.create(model="gpt-6", max_tokens=1, messages=said("x"))
        with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
            await client.messages.create(model=MODEL, max_tokens=-1, messages=said("x"))
        with pytest.raises(anthropic.RequestTooLargeError, match="request_too_large"):
            await create(client, "x" * 10_000)
        with pytest.raises(anthropic.NotFoundError, match="batches of messages"):
            await client.messages.batches.create(requests=[])


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (QueueFull(3.0), anthropic.RateLimitError, "rate_limit_error"),
        (RuntimeError("broken"), anthropic.InternalServerError, "api_error"),
    ],
)
async def test_what_fails_at_once_has_a_status(
    tmp_path: Path, error: Exception, kind: type[Exception], told: str
) -> None:
    async with (
        live_app(tmp_path, ScriptedEngine(failing(error))) as server,
        AsyncAnthropic(api_key="unused", base_url=server.base_url, max_retries=0) as client,
    ):
        with pytest.raises(kind, match=told):
            await create(client, "x")
        with pytest.raises(kind, match=told):
            await create(client, "x", stream=True)


async def test_what_fails_later_is_an_event(tmp_path: Path) -> None:
    engine = ScriptedEngine(failing(RuntimeError("broken"), Say("one two three")), tick_s=0.03)
    async with (
        live_app(tmp_path, engine) as server,
        AsyncAnthropic(api_key="unused", base_url=server.base_url, max_retries=0) as client,
    ):
        stream = await create(client, "x", stream=True)
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async for _ in stream:  # type: ignore[attr-defined]
                pass
