"""Images through the official SDK, with a tiny model that sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from engine import LocalEngine
from tests.support.running import live_app
from tests.support.seeing import data_url, png

ASKED = "What do you see in this image? Answer in one sentence."
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
async def sdk(seeing: Callable[[str], Path], tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    engine = LocalEngine(seeing("idefics3"), name="seeing", num_threads=1, num_blocks=100)
    async with live_app(tmp_path, engine, served_model_name=("seeing",)) as server:
        url = f"{server.base_url}/v1"
        async with AsyncOpenAI(api_key="unused", base_url=url, max_retries=0) as sdk:
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
