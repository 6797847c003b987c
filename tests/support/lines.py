"""A client of the WebSocket of /v1/responses for tests: frames as objects, turns by lane."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.support import wire
from tests.support.wire import Json

ENDS = tuple(f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled"))


class Line:
    """One connection. frames: all that came. A lane that warms up has nothing else at work until it has
    ended."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.frames: list[Json] = []
        self._warming: set[str | None] = set()

    async def ask(self, input: Any = None, **fields: Any) -> None:
        """Send a `response.create`."""
        asked = {"type": "response.create", **({} if input is None else {"input": input}), **fields}
        if (
            fields.get("generate") is False
            or (fields.get("prompt_cache_options") or {}).get("prewarm") is True
        ):
            self._warming.add(fields.get("stream_id"))
        await self.socket.send(json.dumps(asked))

    async def next(self) -> Json:
        """The next frame, which is an event or an error as they should be."""
        async with asyncio.timeout(20):
            frame: Json = json.loads(await self.socket.recv())
        self.frames.append(frame)
        if frame["type"] == "error":
            wire.validate("ResponseWsError", frame)
        elif not frame["type"].startswith(("response.inject", "response.steer")):
            event = {k: v for k, v in frame.items() if k not in ("stream_id", "headers")}
            lane = frame.get("stream_id")
            wire.validate_event(event, warm_up=lane in self._warming)
            if frame["type"] in ENDS:
                self._warming.discard(lane)
        return frame

    async def until(self, *kinds: str) -> Json:
        """Read up to a frame of one of these types."""
        while (frame := await self.next())["type"] not in kinds:
            pass
        return frame

    async def answer(self) -> Json:
        """Read to the end of a response; the response."""
        frame = await self.until(*ENDS, "error")
        assert frame["type"] != "error", frame
        found: Json = frame["response"]
        return found

    async def turn(self, input: Any = None, **fields: Any) -> Json:
        """One response, to its end."""
        await self.ask(input, **fields)
        return await self.answer()

    async def refused(self, code: str, **fields: Any) -> Json:
        """A `response.create` that is answered with an error."""
        await self.ask(**fields)
        return await self.error(code)

    async def error(self, code: str) -> Json:
        """The next frame, which must be this error."""
        frame = await self.next()
        assert (frame["type"], frame.get("error", {}).get("code")) == ("error", code), frame
        return frame


@asynccontextmanager
async def line(url: str, **options: Any) -> AsyncIterator[Line]:
    """A connection to the server at an http URL."""
    address = url.replace("http", "ws", 1) + "/v1/responses"
    async with connect(address, compression=None, max_size=None, proxy=None, **options) as socket:
        yield Line(socket)
