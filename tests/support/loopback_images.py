"""A small server of images on 127.0.0.1, with the official endpoints."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartParser

from tests.support.wire import Json


def png(width: int = 1, noise: bytes = b"") -> bytes:
    """A PNG image of one row of grey, and behind it a chunk that viewers skip."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, 1, 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(b"\0" + b"\x80" * width))]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"noIs", noise), chunk(b"IEND", b"")])


def encoded(data: bytes) -> str:
    """Bytes in base64."""
    return base64.b64encode(data).decode()


PNG = encoded(png())


async def read_form(content: bytes, kind: str) -> list[tuple[str, str | bytes]]:
    """The fields of a form, in their order."""

    async def stream() -> AsyncIterator[bytes]:
        yield content

    form = await MultiPartParser(Headers({"content-type": kind}), stream()).parse()
    found = []
    for name, value in form.multi_items():
        found.append((name, await value.read() if isinstance(value, UploadFile) else value))
    await form.close()
    return found


@dataclass
class LoopbackImages:
    """port: where it is. asked: the bodies of all requests for images. edited: the forms of all requests that
    change some, the files among them as bytes. keys: their `authorization`. status, reply: what they are
    answered with; a list is a stream of events. hold: whether the next one waits, which sets `held`, for
    `release`."""

    port: int = 0
    asked: list[Json] = field(default_factory=list)
    edited: list[list[tuple[str, str | bytes]]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    status: int = 200
    reply: Json | list[Json] | bytes = field(default_factory=lambda: {"data": [{"b64_json": PNG}]})
    hold: bool = False
    held: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """What an operator writes into the table `[images]`."""
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        line = (await reader.readline()).decode()
        headers = {}
        while raw := (await reader.readline()).decode().strip():
            name, _, value = raw.partition(":")
            headers[name.lower()] = value.strip()
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if line.split()[1] == "/v1/images/generations":
            self.asked.append(json.loads(content))
            self.keys.append(headers.get("authorization"))
            await self._send(writer)
        elif line.split()[1] == "/v1/images/edits":
            self.edited.append(await read_form(content, headers["content-type"]))
            await self._send(writer)
        else:
            found = png() if line.split()[1].startswith("/made/") else b'{"data": []}'
            self._head(writer, self.status, "application/octet-stream")
            writer.write(found)
        writer.close()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        if isinstance(self.reply, list):
            self._head(writer, self.status, "text/event-stream")
            for event in self.reply:
                writer.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
                await writer.drain()
                await self._wait()
            return
        await self._wait()
        self._head(writer, self.status, "application/json")
        writer.write(self.reply if isinstance(self.reply, bytes) else json.dumps(self.reply).encode())

    async def _wait(self) -> None:
        if self.hold:
            self.held.set()
            await self.release.wait()

    def _head(self, writer: asyncio.StreamWriter, status: int, kind: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode())


@asynccontextmanager
async def loopback_images() -> AsyncIterator[LoopbackImages]:
    """A server of images at work."""
    images = LoopbackImages()
    async with await asyncio.start_server(images.answer, "127.0.0.1", 0, limit=1 << 20) as server:
        images.port = server.sockets[0].getsockname()[1]
        yield images
        images.release.set()
