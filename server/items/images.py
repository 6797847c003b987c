"""The images of a conversation, which a prompt numbers: those that messages hold, and those that were made.

A model that reads text is told of an image by its number alone, and names it so where it has one changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

READ_IMAGES = "images.read"
"""What reads the bytes of such images: the name of a tool that no model is shown."""


def images_of(items: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The images of a conversation in the order of their numbers, from 1: the parts of messages, and the
    items whose `result` they are. `Transcript.image` counts the same ones."""
    found: list[Mapping[str, Any]] = []
    for item in items:
        if item["type"] == "image_generation_call" and item["status"] == "completed":
            found.append(item)
        elif item["type"] == "message" and item["role"] != "assistant":
            found += [part for part in item["content"] if is_image(part)]
    return found


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is an image."""
    found: bool = part["type"] == "input_image"
    return found
