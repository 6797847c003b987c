"""Speaks WebSocket (RFC 6455) with clients: uvicorn's protocol over `websockets`, bounded in time and memory.

A connection comes from `BoundedHttp`, which has judged its head. A message that has begun must arrive as fast
as a request's body, and what has arrived of it counts among all bodies that arrive. A client that takes
nothing of what it is sent, or answers no pings, is cut, as it is over HTTP.
"""

from __future__ import annotations

import http
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from server.errors import ApiError
from server.http.arrivals import MIN_BODY_RATE, Arrivals

LINGER_S = 10.0
"""How long a client may take to fetch what was sent before a close, and to end the connection then."""

MAX_HEADERS, MAX_HEADER_LINE = 128, 8000
"""What `websockets` reads of a handshake: headers, and bytes of a line, less what stands around them."""


class _Handshakes(ServerProtocol):
    """Refuses what is no handshake in the official shape."""

    def reject(self, status: http.HTTPStatus | int, text: str) -> Response:
        """The reply to a request that cannot become a WebSocket. text: why, for people."""
        response = super().reject(status, text)
        error = ApiError(int(status), text.partition("\n")[0], code="invalid_handshake")
        response.body = error.body()
        del response.headers["Content-Type"], response.headers["Content-Length"]
        response.headers["Content-Type"] = "application/json"
        response.headers["Content-Length"] = str(len(response.body))
        return response


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket. `is_overdue` and `expire` are asked ten times a second, as `BoundedHttp`'s are."""

    def __init__(
        self,
        *args: Any,
        arrivals: Arrivals,
        body_timeout_s: float = 30.0,
        send_timeout_s: float = 30.0,
        **kwargs: Any,
    ) -> None:
        """arrivals: of all bodies of the process. body_timeout_s: how long a message may take to arrive, and
        a second more for every 32 KiB of it. send_timeout_s: how long a client may take nothing."""
        super().__init__(*args, **kwargs)
        self.conn = _Handshakes(max_size=self.config.ws_max_size, logger=self.logger)
        self._arrivals = arrivals
        self._body_timeout_s = body_timeout_s
        self._send_timeout_s = send_timeout_s
        self._held = ExitStack()  # what of a message has arrived, among all bodies
        self._count: Callable[[int], None] | None = None
        self._num_held = 0
        self._since = 0.0  # the message began to arrive
        self._unsent = -1  # bytes, while there are more than there should be
        self._unsent_since = 0.0
        self._early = b""  # what came behind the handshake before its reply

    # -- reading ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what arrives, and count what is left of a message that is not whole.

        A client may send frames before its handshake is answered. A broken one, a ping or a close has to be
        replied to, which cannot be done before that answer: so they wait, and no more is read meanwhile.
        """
        if self.close_sent or self.transport.is_closing():
            is_ending = self.handshake_complete and self.conn.state is State.CLOSING
            if is_ending and self.conn.parser_exc is None:  # behind a broken frame all is thrown away
                super().data_received(data)  # perhaps the client's close, which is waited for
            return
        if self.handshake_initiated and not self.handshake_complete:
            self._early += data
            self.transport.pause_reading()
            return
        super().data_received(data)
        self._hold(len(self.conn.reader.buffer) + sum(map(len, self.frames)))

    def _hold(self, num_bytes: int) -> None:
        if num_bytes <= self._num_held:  # frames that belong to no message are gone again, or all is
            if not num_bytes:
                self._let_go()
            return
        if self._count is None:
            self._since = self.loop.time()
            self._count = self._held.enter_context(self._arrivals.body())
        try:
            self._count(num_bytes - self._num_held)
        except ApiError as busy:
            self._let_go()
            self._fail(CloseCode.TRY_AGAIN_LATER, busy.code or busy.type)
            return
        self._num_held = num_bytes

    def _let_go(self) -> None:
        self._held.close()
        self._count = None
        self._num_held = 0

    def send_receive_event_to_app(self) -> None:
        """A message is whole."""
        self._let_go()
        if self.curr_msg_data_type == "text":
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:  # uvicorn would log it as a mistake of the server's
                self.frames = []
                self._fail(CloseCode.INVALID_DATA, "The message is not UTF-8.")
                return
        super().send_receive_event_to_app()

    def handle_text(self, event: Frame) -> None:
        """A message, or its first fragment. Fragments grow one buffer: each for itself would cost far more
        than its bytes, and there may be any number of empty ones."""
        super().handle_text(_growing(event))

    def handle_bytes(self, event: Frame) -> None:
        """The same of a message that is no text."""
        super().handle_bytes(_growing(event))

    def handle_cont(self, event: Frame) -> None:
        """A fragment of a message."""
        message: Any = self.frames[0]
        message += event.data
        if event.fin:
            self.send_receive_event_to_app()

    # -- writing ---------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The client takes less than it is sent. Until it does, nothing is read: pongs to its pings would
        pile up."""
        super().pause_writing()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up. What it sends meanwhile has had no time to arrive."""
        super().resume_writing()
        self._since = self.loop.time()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def send(self, message: Any) -> None:
        """Send what the application says. ClientDisconnected where it is too late for an event."""
        if self.close_sent and self.initial_response is None:
            if message["type"] == "websocket.close":
                return
            raise ClientDisconnected
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # uvicorn would log a denial as an application's mistake
        elif message["type"] == "websocket.accept" and self._early and self.handshake_complete:
            early, self._early = self._early, b""
            self.data_received(early)
            if not self.read_paused and self.writable.is_set() and not self.transport.is_closing():
                self.transport.resume_reading()

    async def receive(self) -> Any:
        """The next message for the application."""
        message = await super().receive()
        if not self.writable.is_set() and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    # -- ending ----------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._let_go()
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        """No pong has come in time. While nothing is read, that is not the client's fault."""
        if self.writable.is_set() and not self.read_paused:
            super().keepalive_timeout()
        elif self.ping_timeout is not None:
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)

    def is_overdue(self, now: float) -> bool:
        """Whether the client takes nothing of what was sent, or a message is too slow."""
        if self.transport.is_closing() or not self.writable.is_set():
            unsent = self.transport.get_write_buffer_size()
            if unsent != self._unsent:
                self._unsent, self._unsent_since = unsent, now
            patience_s = LINGER_S if self.transport.is_closing() else self._send_timeout_s
            return now >= self._unsent_since + patience_s
        self._unsent = -1
        until = self._since + self._body_timeout_s + self._num_held / MIN_BODY_RATE
        return self._count is not None and not self.read_paused and now >= until

    def expire(self) -> None:
        """It is overdue: the connection is closed, with a word where the client may still hear it."""
        if self._unsent >= 0:
            self.transport.abort()
        else:
            self._fail(CloseCode.POLICY_VIOLATION, "request_timeout")

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close because of what the client has done."""
        if self.close_sent or self.transport.is_closing():
            return
        self.conn.fail(code, reason)
        self._part(int(code), reason)

    def handle_parser_exception(self) -> None:
        """A frame is broken; the parser has said so in a close."""
        close = self.conn.close_sent
        assert close is not None, "frames are parsed only once the handshake is answered"
        self._part(close.code, close.reason)

    def _part(self, code: int, reason: str) -> None:
        """Send the last bytes and the end of the stream. What the client still sends is thrown away for a
        while: closing at once would reset the connection, and it would never see why."""
        self.frames = []
        self._let_go()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        if self.close_timer is not None:
            self.close_timer.cancel()
            self.close_timer = None
        if self.transport.can_write_eof():
            self.close_timer = self.loop.call_later(LINGER_S, self.transport.abort)
            self.transport.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()


def _growing(event: Frame) -> Frame:
    """A frame as it is, if it is a whole message, or else with data that can grow."""
    if not event.fin:
        event.data = bytearray(event.data)
    return event
