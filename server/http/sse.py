"""Replies that stream server-sent events, carried by sse-starlette.

This module adds to its `EventSourceResponse` what a durable stream needs: joined frames are passed through
as bytes, the end of a slow reader cuts the connection, and whatever ends the stream is told to its source.
Signals stay with the server: a parked stream is cut without an end, and its reader comes back.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError

from server.event_profiles import PING_S

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from server.http.state import ServerState

# The library would end every stream at the first SIGTERM; the lifecycle of this server decides that instead.
AppStatus.enable_automatic_graceful_drain = False

KEEPALIVE = ServerSentEvent(comment="keep-alive", sep="\n")
PING = "response.ping"


class _Begun:
    """A coroutine that has begun: it is over, or `waits`, and then its rest can be awaited."""

    def __init__(self, begun: Awaitable[Any]) -> None:
        self._steps = begun.__await__()
        self.waits = True
        try:
            self._awaited = next(self._steps)
        except StopIteration:
            self.waits = False

    def __await__(self) -> Generator[Any, Any, None]:
        while True:
            try:
                told = yield self._awaited
            except BaseException as error:
                step = partial(self._steps.throw, error)
            else:
                step = partial(self._steps.send, told)
            try:
                self._awaited = step()
            except StopIteration:
                return


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
        """Send headers at once, then frames until they end, the client leaves or takes nothing more."""
        life: ServerState = scope["app"].state.life
        self.ping_interval = PING_S if self._pings else life.config.keepalive_s
        self.send_timeout = life.config.send_timeout_s
        life.num_streams += 1
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            raise StreamCut from None
        finally:
            life.num_streams -= 1
            await self._close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """The library's, with a timer for those sends alone that have to wait: the socket mostly takes what
        it is given, and a timer costs as much as that."""
        sending = _Begun(send(message))
        if sending.waits:
            with anyio.move_on_after(self.send_timeout) as scope:
                await sending
            if scope.cancel_called:
                raise SendTimeoutError

    async def _listen_for_exit_signal_with_grace(self) -> None:
        """Wait for ever: the library would poll for signals in a task that nobody ends."""
        await asyncio.Event().wait()

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
