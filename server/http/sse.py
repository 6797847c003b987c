"""Replies that stream server-sent events, carried by sse-starlette.

This module adds to its `EventSourceResponse` what a durable stream needs: joined frames are passed through
as bytes, the end of a slow reader cuts the connection, and whatever ends the stream is told to its source.
In place of the library's four tasks for each stream there is one that waits for the client to leave, and one
for pings after the first silence. Signals stay with the server: a parked stream is cut without an end, and
its reader comes back.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sse_starlette.event import ServerSentEvent, ensure_bytes
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import ClientDisconnect, Request

from server.event_profiles import PING_S
from server.http.departure import Eager, Interrupt, connected
from server.http.request import principal

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from server.http.state import ServerState

KEEPALIVE = ServerSentEvent(comment="keep-alive", sep="\n")
PING = "response.ping"


class StreamCut(Exception):
    """Raised by a stream's frames to drop the connection, so that the client sees that the end is missing."""


class EventStream(EventSourceResponse):
    """A reply that sends frames as they come, and a comment every `keepalive_s`.

    frames: complete SSE frames as bytes, possibly several joined; closed (aclose) as soon as the client
    leaves, a send takes longer than `send_timeout_s`, or the stream ends. Its exceptions pass through: once
    headers are out they cut the connection. on_close: called once, last, whatever ended the stream; may
    return an awaitable. ping: makes the JSON of an event that is sent in the place of the comment, after
    `PING_S`. keepalive: the JSON of an event `ping` that is sent in the place of the comment, as often.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        on_close: Callable[[], Any] | None = None,
        ping: Callable[[], bytes] | None = None,
        keepalive: bytes | None = None,
    ) -> None:
        def silent() -> ServerSentEvent:
            if keepalive is not None:
                return ServerSentEvent(keepalive.decode(), event="ping", sep="\n")
            return KEEPALIVE if ping is None else ServerSentEvent(ping().decode(), event=PING, sep="\n")

        super().__init__(frames, headers=headers, sep="\n", ping_message_factory=silent)
        self._pings = ping is not None
        self._frames = frames
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send headers at once, then frames until they end, the client leaves or takes nothing more, or its
        key is good no more."""
        life: ServerState = scope["app"].state.life
        self.ping_interval = PING_S if self._pings else life.config.keepalive_s
        self.send_timeout = life.config.send_timeout_s
        life.num_streams += 1
        try:
            with suppress(ClientDisconnect):
                async with connected(receive) as interrupt:
                    who = principal(Request(scope))
                    # Whoever comes back with a key that is good no more is told so.
                    with (
                        self._pinging(send, interrupt),
                        life.held_open.by(who, lambda _: interrupt(StreamCut())),
                    ):
                        await self._stream_response(send)
        except SendTimeoutError:
            raise StreamCut from None
        finally:
            life.num_streams -= 1
            await self._close()

    @contextmanager
    def _pinging(self, send: Send, interrupt: Interrupt) -> Iterator[None]:
        """Held while pings are sent. Most streams end before the first, and need no task for them."""
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []
        first = loop.call_later(
            self.ping_interval, lambda: tasks.append(loop.create_task(self._ping_on(send, interrupt)))
        )
        try:
            yield
        finally:
            first.cancel()
            for task in tasks:
                task.cancel()

    async def _ping_on(self, send: Send, interrupt: Interrupt) -> None:
        """Send a ping now, and again every `ping_interval` seconds."""
        assert self.ping_message_factory is not None
        try:
            while self.active:
                async with self._send_lock:
                    if self.active:
                        # Made only now, because it names the last event, which may just have been sent.
                        body = ensure_bytes(self.ping_message_factory(), self.sep)
                        message = {"type": "http.response.body", "body": body, "more_body": True}
                        await self._send_with_timeout(send, message)
                await asyncio.sleep(self.ping_interval)
        except Exception as error:
            interrupt(error)

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """The library's, with a timer for those sends alone that have to wait: the socket mostly takes what
        it is given, and a timer costs as much as that."""
        sending = Eager(send(message))
        if sending.waits:
            try:
                async with asyncio.timeout(self.send_timeout) as timer:
                    await sending
            except TimeoutError:
                if timer.expired():
                    raise SendTimeoutError from None
                raise

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
