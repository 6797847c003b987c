"""Reads what a server of images answers: JSON, server-sent events, and errors."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.egress import GATEWAY_STATUSES
from tools.encodings import well_formed
from tools.spec import ToolError

MAX_COMPLAINT = 1000
"""Characters that are shown of what a server says is wrong."""

FACTS = ("revised_prompt", "size", "quality", "background", "output_format")
"""What a server may say of an image, as texts."""

MAX_FACT = 32_000
"""Characters of such a text: the longest is a prompt."""

_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))


class ImageFailed(ToolError):
    """A server did not answer with an image. told: the members of an official error object, as far as the
    server has said them."""

    def __init__(
        self, message: str, told: Mapping[str, str] | None = None, *, uncertain: bool = False
    ) -> None:
        super().__init__(message, uncertain=uncertain)
        self.told = dict(told or {})


@dataclass(frozen=True, slots=True)
class Image:
    """An image. base64: its bytes. facts: some of FACTS, `output_format` always."""

    base64: str
    num_bytes: int
    facts: Mapping[str, str] = field(default_factory=dict)


def image_of(data: bytes, said: Mapping[str, Any]) -> Image:
    """An image of these bytes, of which a server says this much. Raises ImageFailed for what is none."""
    if (kind := image_kind(data)) is None:
        raise ImageFailed("The image server did not answer with a PNG, JPEG, WebP or GIF image.")
    facts = {
        name: well_formed(said[name][:MAX_FACT])
        for name in FACTS
        if isinstance(said.get(name), str) and said[name]
    }
    return Image(base64.b64encode(data).decode(), len(data), {**facts, "output_format": kind})


def image_kind(data: bytes) -> str | None:
    """What kind of image some bytes begin as: png, jpeg, webp or gif; None for none of these."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for mark, kind in _KINDS if data.startswith(mark)), None)


def decoded(text: str) -> bytes:
    """The bytes of an image in base64, which may stand in a data URL. Raises ImageFailed."""
    try:
        return base64.b64decode("".join(text.rpartition("base64,")[2].split()), validate=True)
    except (binascii.Error, ValueError):
        raise ImageFailed("The image server's image is no base64.") from None


def object_of(content: bytes) -> dict[str, Any]:
    """A JSON object; raises ImageFailed for anything else."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ImageFailed("The image server did not answer with a JSON object.")
    return said


def complaint(status: int | None, said: Any) -> ImageFailed:
    """The failure that a server tells of, in the official form or another. status: of HTTP, where it is
    one."""
    error = said.get("error", said) if isinstance(said, dict) else None
    fault = {}
    if isinstance(error, dict):
        names = ("type", "code", "param", "message")
        fault = {
            name: well_formed(error[name][:MAX_COMPLAINT])
            for name in names
            if isinstance(error.get(name), str)
        }
    told = (
        fault.get("message") or _text(error) or _text(said.get("detail") if isinstance(said, dict) else None)
    )
    what = "The image server failed" if status is None else f"The image server answered with status {status}"
    return ImageFailed(
        well_formed(f"{what}: {told}") if told else f"{what}.", fault, uncertain=status in GATEWAY_STATUSES
    )


def _text(value: Any) -> str:
    return value[:MAX_COMPLAINT] if isinstance(value, str) else ""


async def events_of(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events, as JSON objects. Raises ImageFailed for data that are none."""
    data: list[bytes] = []
    async for line in _lines(parts):
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif not line and data:
            whole, data = b"\n".join(data), []
            if whole != b"[DONE]":
                yield object_of(whole)
    if data and data != [b"[DONE]"]:  # the last blank line may be missing
        yield object_of(b"\n".join(data))


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    held: list[bytes] = []  # of a line that is not whole: an image stands on one of megabytes
    async for part in parts:
        first, *others = part.split(b"\n")
        held.append(first)
        for start in others:
            yield b"".join(held).rstrip(b"\r")
            held = [start]
    yield b"".join(held).rstrip(b"\r")
