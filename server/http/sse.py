"""Server-sent events: frames out, keep-alives by the clock, an end for readers that take nothing.

Owns framing and the life of one stream on one connection. Refuses to know what an event means: it is handed
whole frames. No task per stream waits for a keep-alive: one `KeepAlive` sweeps all streams.

Source of the format: the HTML standard, section 9.2. Line feeds only, and a frame is never split over two
writes: some readers lose an event whose blank line arrives alone.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEPALIVE = b": keep-alive\n\n"


class StreamCut(Exception):
    """Raised by a stream's frames to drop the connection, so that the client sees that the end is missing."""


class KeepAlive:
    """The one task that watches all streams: comments into silence, and the cut of readers that take
    nothing."""

    def __init__(self, keepalive_s: float, send_timeout_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._send_timeout_s = send_timeout_s
        self._streams: set[EventStream] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    def add(self, stream: EventStream) -> None:
        """Watch a stream; the sweep runs while there is one."""
        self._streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._sweep(), name="sse-pulse")

    def discard(self, stream: EventStream) -> None:
        """Watch it no more."""
        self._streams.discard(stream)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        interval = min(self._keepalive_s, self._send_timeout_s, 4.0) / 4
        while self._streams:
            now = loop.time()
            for stream in list(self._streams):
                stream.pulse(now, self._keepalive_s, self._send_timeout_s)
            await asyncio.sleep(interval)

    async def close(self) -> None:
        """Stop the sweep."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class EventStream(Response):
    """A reply that sends frames as they come.

    frames: complete SSE frames as bytes, possibly several joined; closed (aclose) as soon as the client
    leaves, the send timeout passes or the stream ends. Its exceptions pass through: once headers are out they
    cut the connection. on_close: called once, last, whatever ended the stream; may return an awaitable.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        on_close: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        # `Response` knows its length; a stream does not.
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._frames = frames
        self._on_close = on_close
        self._send: Send
        self._sending_since: float | None = None
        self._last_sent = 0.0
        self._comment: asyncio.Task[None] | None = None
        self._pump: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send headers at once, then frames until they end, the client leaves or takes nothing more."""
        pulse: KeepAlive = scope["app"].state.life.pulse
        self._send = send
        self._last_sent = asyncio.get_running_loop().time()
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            pulse.add(self)
            self._pump = asyncio.create_task(self._run(), name="sse-pump")
            gone = asyncio.create_task(_until_gone(receive), name="sse-presence")
            tasks = (self._pump, gone)
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                pulse.discard(self)
                waiting = [task for task in (*tasks, self._comment) if task is not None]
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
            if not self._pump.cancelled():
                self._pump.result()
            elif not gone.done() or gone.cancelled():
                raise StreamCut
        finally:
            await self._close()

    async def _run(self) -> None:
        """Pull and send. The two clock reads a frame are what the pulse judges by."""
        clock = asyncio.get_running_loop().time
        send = self._send
        async for data in self._frames:
            if self._comment is not None:
                await self._comment
                self._comment = None
            self._sending_since = clock()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending_since = None
            self._last_sent = clock()
        if self._comment is not None:
            await self._comment
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def pulse(self, now: float, keepalive_s: float, send_timeout_s: float) -> None:
        """Called by the sweep: a comment into silence, never into a send; a cut when a send stands still."""
        if self._sending_since is not None:
            if now - self._sending_since >= send_timeout_s and self._pump is not None:
                self._pump.cancel()
        elif now - self._last_sent >= keepalive_s:
            self._sending_since = now
            self._comment = asyncio.create_task(self._keep_alive(), name="sse-keepalive")

    async def _keep_alive(self) -> None:
        await self._send({"type": "http.response.body", "body": KEEPALIVE, "more_body": True})
        self._sending_since = None
        self._last_sent = asyncio.get_running_loop().time()

    async def _close(self) -> None:
        aclose = getattr(self._frames, "aclose", None)
        try:
            if aclose is not None:
                await aclose()
        finally:
            if self._on_close is not None:
                result = self._on_close()
                if inspect.isawaitable(result):
                    await result


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
