"""Structured output through the official SDK, with the shipped model: whatever it says, it parses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from engine import LocalEngine
from engine.tiny import CHECKPOINT
from tests.engine.structured.test_shapes import PATCH, is_patch
from tests.support.running import live_app

MODEL = "antiphon-tiny"


class Stop(BaseModel):
    """A nested part."""

    city: str = Field(max_length=12)
    kind: Literal["train", "bus"]
    minutes: int | None


class Journey(BaseModel):
    """What is asked for."""

    title: str = Field(max_length=20)
    stops: list[Stop] = Field(max_length=3)
    direct: bool
    price: float = Field(ge=0, le=100)


@pytest.fixture
async def sdk(tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    engine = LocalEngine(CHECKPOINT, name=MODEL)
    async with live_app(tmp_path, engine, served_model_name=(MODEL,)) as server:
        url = f"{server.base_url}/v1"
        async with AsyncOpenAI(api_key="unused", base_url=url, max_retries=0) as sdk:
            yield sdk


async def test_parsed_answers(sdk: AsyncOpenAI) -> None:
    """Greedy and at temperature 1.5: each completed answer is the model asked for."""
    whole = 0
    for seed in range(6):
        drawn: dict[str, Any] = {"temperature": 1.5 if seed else 0.0}
        asked = "From Rome to Paris by train in 90 minutes."
        response = await sdk.responses.parse(
            model=MODEL,
            input=asked,
            text_format=Journey,
            max_output_tokens=700,
            extra_body={"seed": seed},
            **drawn,
        )
        assert response.status in ("completed", "incomplete")
        if response.status == "completed":
            assert isinstance(response.output_parsed, Journey)
            whole += 1
        chat = await sdk.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": asked}],
            response_format=Journey,
            seed=seed,
            **drawn,
        )
        assert isinstance(chat.choices[0].message.parsed, Journey)
    assert whole >= 4


async def test_a_patch_language_streamed(sdk: AsyncOpenAI) -> None:
    """A custom tool's grammar at temperature 1.5: every input parses, and is what its deltas said."""
    form = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    tool: Any = {"type": "custom", "name": "apply_patch", "format": form}
    for seed in range(8):
        stream = await sdk.responses.create(
            model=MODEL,
            input="Rename the file.",
            tools=[tool],
            tool_choice={"type": "custom", "name": "apply_patch"},
            temperature=1.5,
            stream=True,
            extra_body={"seed": seed},
        )
        said = ""
        async for event in stream:
            if event.type == "response.custom_tool_call_input.delta":
                said += event.delta
            elif event.type == "response.completed":
                item = event.response.output[-1]
                assert item.type == "custom_tool_call" and item.input == said
        assert is_patch(said), said
