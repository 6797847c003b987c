"""Images among the parts of messages, as chat templates are given them.

A template writes a token in the place of each image; which image it is, no template is told. Some templates
go through the parts of every message, and print nothing of one that is a text: those are given parts only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.types import Picture, RenderInput

Message = dict[str, Any]

PROBE = "a9f3"
"""A text that no template prints of its own."""


def without_pictures(inp: RenderInput) -> tuple[RenderInput, list[Picture]]:
    """An input whose images are parts without a content, and these images in their order."""
    if not any(isinstance(message.get("content"), list) for message in inp.messages):
        return inp, []
    options = tuple(sorted(inp.image_options.items()))
    pictures: list[Picture] = []
    messages: list[Mapping[str, Any]] = []
    for message in inp.messages:
        if isinstance(content := message.get("content"), list):
            pictures += [
                replace(part["image"], options=options) for part in content if part.get("type") == "image"
            ]
            parts = [{"type": "image"} if part.get("type") == "image" else part for part in content]
            message = {**message, "content": parts}
        messages.append(message)
    return replace(inp, messages=messages), pictures


def wants_parts(render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether a template prints the text of a message only where it is given as a part. render: renders
    messages; it may raise."""
    return PROBE not in _printed(render, PROBE) and PROBE in _printed(render, text_parts(PROBE))


def text_parts(text: str) -> list[dict[str, Any]]:
    """A text as parts: one, also where it is empty, because templates look at the first."""
    return [{"type": "text", "text": text}]


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages (plain data) with every text as a part."""
    return [
        {**message, "content": text_parts(message["content"])}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _printed(render: Callable[[Sequence[Message]], str], content: Any) -> str:
    try:
        return render([{"role": "user", "content": content}])
    except Exception:  # whatever a template raises: it takes no such content
        return ""
