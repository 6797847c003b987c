"""Images through the SDKs of OpenAI and Anthropic, with a tiny model that sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError

from engine import LocalEngine
from tests.support.running import Running, live_app
from tests.support.seeing import base64_source, data_url, messages, pictures, png

ASKED = "What do you see in this image? Answer in one sentence."
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def server(seeing: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[Running]:
    engine = LocalEngine(seeing("idefics3"), name="seeing", num_threads=1, num_blocks=100)
    async with live_app(tmp_path, engine, served_model_name=("seeing",), egress="any") as server:
        yield server


@pytest.fixture
async def sdk(server: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="unused", base_url=f"{server.base_url}/v1", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
async def claude(server: Running) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(api_key="unused", base_url=server.base_url, max_retries=0) as sdk:
        yield sdk


async def test_responses_and_chat_see_alike(sdk: AsyncOpenAI) -> None:
    image = data_url(png("red", 60, 44))
    file = await sdk.files.create(file=("a.png", png("red", 60, 44)), purpose="vision")
    texts = []
    for named in ({"image_url": image}, {"file_id": file.id}):
        parts: list[Any] = [
            {"type": "input_text", "text": ASKED},
            {"type": "input_image", "detail": "auto", **named},
        ]
        message: Any = {"type": "message", "role": "user", "content": parts}
        response = await sdk.responses.create(model="seeing", input=[message], max_output_tokens=16, **GREEDY)
        assert response.output and response.usage is not None
        texts.append(response.output_text)
    url: Any = {"type": "image_url", "image_url": {"url": image, "detail": "high"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": ASKED}, url]}]
    chunks = []
    stream = await sdk.chat.completions.create(
        model="seeing", messages=messages, max_tokens=16, stream=True, **GREEDY
    )
    async for chunk in stream:
        chunks += [choice.delta.content or "" for choice in chunk.choices]
    assert texts == ["".join(chunks)] * 2 and texts[0]
    another = await sdk.responses.create(
        model="seeing", previous_response_id=response.id, input="And now?", max_output_tokens=16
    )
    assert another.usage is not None and response.usage is not None
    assert another.usage.input_tokens > response.usage.input_tokens
    with pytest.raises(BadRequestError) as caught:
        messages[0]["content"][1] = {"type": "image_url", "image_url": {"url": data_url(b"<svg/>")}}
        await sdk.chat.completions.create(model="seeing", messages=messages)
    assert caught.value.code == "unsupported_image_media_type"


async def test_messages_see_what_responses_do(sdk: AsyncOpenAI, claude: AsyncAnthropic) -> None:
    image = png("red", 60, 44)
    parts = [{"type": "input_image", "image_url": data_url(image)}, {"type": "input_text", "text": ASKED}]
    items: Any = [{"role": "user", "content": parts}]
    response = await sdk.responses.create(
        model="seeing", input=items, max_output_tokens=16, temperature=0, reasoning={"effort": "none"}
    )
    assert response.usage is not None
    blind = await claude.messages.count_tokens(model="seeing", messages=[{"role": "user", "content": ASKED}])
    file = await sdk.files.create(file=("a.png", image), purpose="vision")
    async with pictures({"/a.png": image}) as url:
        sources = [
            base64_source(image),
            {"type": "url", "url": f"{url}/a.png"},
            {"type": "file", "file_id": file.id},
        ]
        for source in sources:
            asked: Any = {"model": "seeing", "messages": messages(source, ASKED)}
            greedy = {"max_tokens": 16, "extra_body": {"temperature": 0}}
            message = await claude.messages.create(**asked, **greedy)
            async with claude.messages.stream(**asked, **greedy) as stream:
                streamed = await stream.get_final_message()
            texts = [getattr(block, "text", None) for block in (*message.content, *streamed.content)]
            assert texts == [response.output_text] * 2 and texts[0]
            told = message.usage
            cached = (told.cache_read_input_tokens or 0) + (told.cache_creation_input_tokens or 0)
            counted = await claude.messages.count_tokens(**asked)
            assert counted.input_tokens == told.input_tokens + cached == response.usage.input_tokens
            assert counted.input_tokens > blind.input_tokens + 16, "an image has tokens of its own"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]") as caught:
        await claude.messages.count_tokens(model="seeing", messages=messages(base64_source(b"<svg/>")))
    assert caught.value.error_code == "unsupported_image_media_type"
    with pytest.raises(anthropic.BadRequestError) as caught:
        gone: Any = messages({"type": "url", "url": f"{url}/a.png"})
        await claude.messages.create(model="seeing", messages=gone, max_tokens=16)
    assert caught.value.error_code == "failed_to_download_image"
