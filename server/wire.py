"""HTTP/1.1 on the wire: uvicorn's httptools protocol with a bound on headers.

Owns what has to be refused before there is a request. Refuses to know the application. httptools itself takes
headers of any size and keeps them in memory.
"""

from __future__ import annotations

import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError


class BoundedHttp(HttpToolsProtocol):
    """One connection. A request line and headers above uvicorn's `h11_max_incomplete_event_size` (which has the same
    meaning for its other parser) are a 431 and the end of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_head_bytes = self.config.h11_max_incomplete_event_size or 64 << 10
        self._head_bytes = 0
        self._in_head = True
        self._refused = False

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
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole: it may have come in one read, so its size is judged again."""
        self._in_head = False
        self._head_bytes = 0
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self._max_head_bytes:
            self._refuse_head()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body; after a refusal there is no request that it could belong to."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        if not self._refused:
            super().on_message_complete()

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
