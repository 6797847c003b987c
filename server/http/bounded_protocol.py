"""HTTP/1.1 on the wire: uvicorn's httptools protocol with two bounds.

Owns what has to be refused before there is a request (httptools itself takes headers of any size and keeps
them in memory), and what becomes of a body whose request was answered before it was whole. Refuses to know
the application.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError

LINGER_S = 10.0
"""How long the rest of a refused body is read and thrown away: closing at once would reset the connection,
and a client that is still sending would never see why."""


class BoundedHttp(HttpToolsProtocol):
    """One connection. A request line and headers above uvicorn's `h11_max_incomplete_event_size` (which has
    the same meaning for its other parser) are a 431 and the end of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_head_bytes = self.config.h11_max_incomplete_event_size or 64 << 10
        self._head_bytes = 0
        self._in_head = True
        self._refused = False
        self._in_message = False
        self._lingering: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Count what arrives until the head is whole. One read is at most 256 kB, which bounds the excess."""
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._max_head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins; its first bytes are counted already."""
        self._in_head = self._in_message = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole: it may have come in one read, so its size is judged again."""
        self._in_head = False
        self._head_bytes = 0
        if (
            len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            > self._max_head_bytes
        ):
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body; after a refusal there is no request that it could belong to."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._in_message = False
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The reply is out; the body may still be on its way."""
        super().on_response_complete()
        if self._in_message and not self.transport.is_closing():
            self._lingering = self.loop.call_later(LINGER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, and with it whatever was awaited."""
        if self._lingering is not None:
            self._lingering.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What the parser refuses, in the official shape."""
        self._refuse(400, msg, "invalid_http")

    def _refuse_head(self) -> None:
        message = f"The request's line and headers are larger than {self._max_head_bytes} bytes."
        self._refuse(431, message, "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self._refused:
            return
        self._refused = True
        body = ApiError(status, message, code=code).body()
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"x-request-id: req_%s\r\n" % uuid.uuid4().hex.encode()
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()
