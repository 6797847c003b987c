"""A scripted engine that sees, and images as clients send them."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from engine import Picture, Prompt, RenderInput, ScriptedEngine
from tests.support.wire import Json


class SeeingScript(ScriptedEngine):
    """A scripted engine that is shown images: its prompts say the digest of each. `seen`: the images of the
    latest prompt."""

    def __init__(self, *script: Any, **settings: Any) -> None:
        super().__init__(*script, **settings)
        self.seen: list[Picture] = []
        self.options: dict[str, Any] = {}
        options = frozenset({"do_image_splitting"})
        self._info = replace(self._info, modalities=frozenset({"text", "image"}), image_options=options)

    async def render(self, messages: RenderInput) -> Prompt:
        """Render messages with a text for each image."""
        self.seen, self.options = [], dict(messages.image_options)
        plain = [{**message, "content": self._told(message)} for message in messages.messages]
        return await super().render(replace(messages, messages=plain))

    def _told(self, message: Any) -> Any:
        content = message.get("content")
        if not isinstance(content, list):
            return content
        told = []
        for part in content:
            if part["type"] == "image":
                self.seen.append(part["image"])
                told.append(f"(image {part['image'].digest.hex()})")
            else:
                told.append(part["text"])
        return "\n".join(told)


def png(color: str = "red", width: int = 30, height: int = 20) -> bytes:
    """A PNG of one color."""
    return encoded("PNG", color, width, height)


def encoded(
    kind: str, color: Any = "red", width: int = 30, height: int = 20, mode: str = "RGB", **save: Any
) -> bytes:
    """An image file of one color."""
    from PIL import Image

    data = io.BytesIO()
    Image.new(mode, (width, height), color).save(data, kind, **save)
    return data.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def asked(*images: Json, text: str = "say fine") -> list[Json]:
    """A user's message with images in front of a text."""
    parts = [{"type": "input_image", **image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]


def chat(*images: Json, text: str = "say fine") -> list[Json]:
    """The same as a message of chat."""
    parts: Sequence[Json] = [{"type": "image_url", "image_url": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def messages(source: Json, text: str = "say fine") -> list[Json]:
    """The same as a message of Anthropic's API."""
    blocks: Sequence[Json] = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    return [{"role": "user", "content": [*blocks]}]


def base64_source(data: bytes, kind: str = "image/png") -> Json:
    """A file as a source of that API."""
    return {"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()}


def size_of(picture: Picture) -> tuple[int, int]:
    """Width and height of an image that an engine was given."""
    from PIL import Image

    return Image.open(io.BytesIO(picture.png)).size


def color_of(picture: Picture) -> Any:
    """The color of its first pixel."""
    from PIL import Image

    return Image.open(io.BytesIO(picture.png)).getpixel((0, 0))


@asynccontextmanager
async def pictures(files: Mapping[str, bytes]) -> AsyncIterator[str]:
    """A server of files on loopback; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = files.get(head.split()[1].decode())
        status = b"404 Not Found" if found is None else b"200 OK"
        content = found or b""
        size = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        writer.write(b"HTTP/1.1 " + status + b"\r\n" + size + content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def uploaded(client: httpx.AsyncClient, content: bytes, name: str = "a.png") -> str:
    """The id of a file that was uploaded."""
    form: Any = {"files": {"file": (name, content)}, "data": {"purpose": "vision"}}
    made = (await client.post("/v1/files", **form)).json()
    return str(made["id"])
