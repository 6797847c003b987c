"""Speaks HTTP/1.1 with clients: uvicorn's httptools protocol, made strict and bounded in time and memory.

The parser (llhttp) already refuses bare line feeds, folded headers and contradictory lengths; this module
judges the requests that the parser lets through, and answers bad ones before the application sees them. Each
connection has one deadline at a time, which `server.process.serve` checks ten times a second. When a request
is answered before its body has arrived, the rest of the body is read and thrown away for a while, because
closing at once would reset the connection before the client sees the reply.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError, is_of_messages, messages_error, names_of
from server.http.websocket import MAX_HEADER_LINE, MAX_HEADERS

LINGER_S = 10.0
"""How long the rest of a refused body is read and thrown away, and how long a client may take to fetch what
was sent before a close: closing at once would reset the connection, and a client that is still sending would
never see why."""

MAX_PIPELINED = 64
"""Requests of one connection that wait behind the one at work. One read can hold ten thousand, each of which
would cost kilobytes; a connection with more is closed once these are answered."""

CHUNK_OVERHEAD = 8
"""Bytes of framing per byte of a chunked body; a chunk of one byte has five. More is an endless extension."""

READ_BYTES = 256 << 10
"""The most that one read can bring."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose bodies mean something; those of others are thrown away as they come."""

_REQUEST_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [^\x00-\x20\x7f]+ HTTP/\d\.\d\r\n")
_ABSOLUTE = re.compile(rb"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<host>[^/?#]*)")
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
_NO_SUCH_VERSION = frozenset({"Invalid HTTP version", "Pause on PRI/Upgrade"})


class BoundedHttp(HttpToolsProtocol):
    """One connection. A request line and headers above uvicorn's `h11_max_incomplete_event_size` (which has
    the same meaning for its other parser) are a 414 or 431 and the end of it.

    deadline: the loop's time at which `expire` is to be called; infinite while the application is at work.
    """

    def __init__(
        self, *args: Any, head_timeout_s: float = 15.0, send_timeout_s: float = 30.0, **kwargs: Any
    ) -> None:
        """head_timeout_s: how long a request's line and headers may take, from their first byte on.
        send_timeout_s: how long a client may take nothing of what it is sent."""
        super().__init__(*args, **kwargs)
        self._send_timeout_s = send_timeout_s
        self.deadline = math.inf
        self.url = b""
        self._head_timeout_s = head_timeout_s
        self._active: RequestResponseCycle | None = None  # `cycle` is the newest
        self._max_head_bytes = self.config.h11_max_incomplete_event_size or 64 << 10
        self._head_bytes = 0
        self._opening = b""  # of the head in this read
        self._in_head = True
        self._in_message = False
        self._resting = False  # between a reply and the first byte behind it
        self._unsent = -1  # bytes, while there are more than there should be
        self._unsent_since = 0.0
        self._body_bytes = 0
        self._read_bytes = 0  # in reads since the head, framing included
        self._trailer_bytes = 0
        self._replay: bytes | None = None  # a head to be parsed again, without its upgrade
        self._refused = False
        self._farewell: bytes | None = None  # a refusal that waits until earlier requests are answered

    # -- reading ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; its first head is due."""
        super().connection_made(transport)
        self.deadline = self.loop.time() + self._head_timeout_s

    def data_received(self, data: bytes) -> None:
        """Parse what arrives. One read is at most 256 kB, which bounds what a count can be exceeded by."""
        if self._refused:
            return
        self._begin_head()
        if self._in_head:
            self._head_bytes += len(data)
            self._opening = (self._opening + data[:256])[:256]
        else:
            self._read_bytes += len(data)
        while data:
            data = self._parse(data)
        self._check_counts()

    def _check_counts(self) -> None:
        if self._refused:
            return
        if self._in_head and self._head_bytes > self._max_head_bytes:
            self._refuse_head()
        elif (
            not self._in_head
            and self._read_bytes > READ_BYTES + self._max_head_bytes + (1 + CHUNK_OVERHEAD) * self._body_bytes
        ):
            self._refuse(400, "The chunks of the request's body are nearly empty.", "invalid_http")

    def _parse(self, data: bytes) -> bytes:
        """Hand bytes to the parser; returns those that are to be handed to the next one."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._refused:
                return b""
            if self._replay is None:
                self._in_message = False
                self.deadline = math.inf
                self.handle_websocket_upgrade()
                if rest := data[upgrade.args[0] :]:  # frames from a client that did not wait for the reply
                    self.transport.get_protocol().data_received(rest)  # type: ignore[attr-defined]
                self.parser = None  # type: ignore[assignment]  # it holds the protocol, which is through
                return b""
            head, self._replay = self._replay, None
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            return head + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse_malformed(error)
        return b""

    def on_message_begin(self) -> None:
        """A request begins; its first bytes are counted already."""
        if self._refused:
            return
        self._in_head = self._in_message = True
        self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the target."""
        if not self._refused:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which nobody reads: it must not pass for a header."""
        if self._refused:
            return
        if self._in_head:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > self._max_head_bytes:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """The head is whole: it is judged, and its request begins."""
        if self._refused or not self._is_acceptable():
            return
        if self.parser.should_upgrade() and not self._should_upgrade():
            # A client may offer another protocol, and a server may go on as if it had not (RFC 9110, 7.8).
            # The parser cannot: it takes what follows for the other protocol. So it reads the head again.
            self._replay = self._without_upgrade()
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refused, self._farewell = True, b""
            return
        self._in_head = False
        self._head_bytes = self._body_bytes = self._read_bytes = self._trailer_bytes = 0
        self._opening = b""
        self.deadline = math.inf
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body; after a refusal there is no request that it could belong to."""
        if self._refused:
            return
        self._body_bytes += len(body)
        if self.scope["method"] in WITH_BODY:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        if self._refused or self._replay is not None:
            return
        self._in_message = False
        self._in_head = True
        super().on_message_complete()
        if self._is_idle:
            self._rest()
        else:
            self.deadline = math.inf

    # -- judging ---------------------------------------------------------------------------------------------

    def _is_acceptable(self) -> bool:
        """Whether a head is one of HTTP/1 that can be served; it is refused if not."""
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        method = self.parser.get_method().decode()
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        hosts = [value for name, value in self.headers if name == b"host"]
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._max_head_bytes:
            self._refuse_head()
        elif version not in ("1.0", "1.1"):
            self._refuse(505, "This server speaks HTTP/1.1 (and HTTP/1.0).", "http_version_not_supported")
        elif method not in METHODS:
            self._refuse(501, f"The method {method} is not served here.", "method_not_implemented")
        elif len(hosts) > 1 or (version == "1.1" and not hosts):
            self._refuse(400, "A request must have exactly one Host header.", "invalid_host")
        elif hosts and not _HOST.fullmatch(hosts[0]):
            self._refuse(400, "The Host header is no host name.", "invalid_host")
        elif hosts and not self._is_for(hosts[0]):
            message = "The request's target names another host than the Host header."
            self._refuse(400, message, "invalid_host")
        elif codings and version == "1.0":
            self._refuse(400, "Transfer-Encoding is not part of HTTP/1.0.", "invalid_http")
        elif codings and codings[0].lower() != b"chunked":
            message = "Of transfer codings only 'chunked' is known here."
            self._refuse(501, message, "transfer_coding_not_implemented")
        elif b"expect" in names and not self.expect_100_continue:
            self._refuse(417, "Of expectations only '100-continue' can be met.", "expectation_failed")
        elif self._should_upgrade() and (why := self._no_handshake(method, version)):
            self._refuse(400, f"This cannot become a WebSocket: {why}.", "invalid_handshake")
        elif not self._has_path(method):
            self._refuse(400, "The request's target is no URL of this server.", "invalid_url")
        else:
            return True
        return False

    def _no_handshake(self, method: str, version: str) -> str | None:
        """Why a request that asks for a WebSocket cannot become one, where the protocol that takes over would
        not say so itself."""
        if method != "GET" or version != "1.1":
            return "it takes a GET of HTTP/1.1"
        if not self._is_idle:
            return "earlier requests on this connection have not been answered yet"
        given = dict(self.headers)
        if b"transfer-encoding" in given or given.get(b"content-length", b"0") != b"0":
            return "it has a body"
        if not self.url.isascii():
            return "its target is not ASCII"
        lines = [len(name) + len(value) for name, value in self.headers]
        if len(lines) > MAX_HEADERS or max((*lines, len(self.url))) > MAX_HEADER_LINE:
            return f"it has more than {MAX_HEADERS} headers, or one of more than {MAX_HEADER_LINE} bytes"
        return None

    def _is_for(self, host: bytes) -> bool:
        """Whether the target, where it is in absolute form, names the host that the Host header does."""
        named = _ABSOLUTE.match(self.url)
        if named is None:
            return True
        port = _DEFAULT_PORTS.get(named["scheme"].lower(), b" ")
        target, said = (each.lower().removesuffix(port) for each in (named["host"], host))
        return target == said

    def _has_path(self, method: str) -> bool:
        """Whether the target names something here; one in absolute form without a path names the root."""
        if self.url == b"*":
            return method == "OPTIONS"
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            return False
        path: bytes | None = target.path  # httptools says that there is always one
        if path is None:
            self.url = b"/" + (b"?" + target.query if target.query else b"")
        return True

    def _without_upgrade(self) -> bytes:
        """The head of this request as it would be from a client that offers no other protocol."""
        version = self.parser.get_http_version().encode()
        head = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() != b"upgrade"]
                value = b",".join(kept).strip()
            if name != b"upgrade" and (value or name != b"connection"):
                head.append(b"%s: %s\r\n" % (name, value))
        return b"".join([*head, b"\r\n"])

    def _refuse_malformed(self, error: httptools.HttpParserError) -> None:
        why = str(error)
        if why in _NO_SUCH_VERSION:
            self._refuse(505, "This server speaks HTTP/1.1 (and HTTP/1.0).", "http_version_not_supported")
        elif isinstance(error, httptools.HttpParserInvalidMethodError) and _REQUEST_LINE.match(
            self._opening.lstrip(b"\r\n")
        ):
            self._refuse(501, "The request's method is not served here.", "method_not_implemented")
        else:
            self._refuse(400, f"The request is not valid HTTP: {why}.", "invalid_http")

    def _refuse_head(self) -> None:
        if self._in_head and len(self.url) > self._max_head_bytes - 1024:
            message = f"The request's URL is longer than {self._max_head_bytes - 1024} bytes."
            self._refuse(414, message, "url_too_long")
        else:
            message = f"The request's line and headers are larger than {self._max_head_bytes} bytes."
            self._refuse(431, message, "headers_too_large")

    # -- ending ----------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return not self.pipeline and (self._active is None or self._active.response_complete)

    def _rest(self) -> None:
        """Everything is answered: the next request may take its time."""
        self._resting = True
        self.deadline = self.loop.time() + self.timeout_keep_alive

    def _begin_head(self) -> None:
        """Something has come: if it is the first of a head, that is due now, whatever else comes of it."""
        if self._resting:
            self._resting = False
            self.deadline = self.loop.time() + self._head_timeout_s

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: every request on it hears so, not only the newest."""
        super().connection_lost(exc)
        for cycle in (self._active, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def is_overdue(self, now: float) -> bool:
        """Whether the deadline has passed, or the client takes nothing of what was sent."""
        if self.transport.is_closing() or self.flow.write_paused:
            unsent = self.transport.get_write_buffer_size()
            if unsent != self._unsent:
                self._unsent, self._unsent_since = unsent, now
            patience_s = LINGER_S if self.transport.is_closing() else self._send_timeout_s
            return now >= self._unsent_since + patience_s
        self._unsent = -1
        return now >= self.deadline

    def expire(self) -> None:
        """It is overdue: the connection is closed, with a word where a request has begun."""
        if self._refused or self._unsent >= 0 or not self._in_head:
            self.transport.abort()
        elif self._in_message:
            message = f"The request's line and headers did not arrive within {self._head_timeout_s:g} s."
            self._refuse(408, message, "request_timeout")
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """The reply is out; the body may still be on its way, and so may the next head."""
        super().on_response_complete()
        # That timer ends with the first byte, be it of the old body or an empty line.
        self._unset_keepalive_if_required()
        if self.transport.is_closing() or not self._is_idle:
            return
        if self._farewell is not None:
            self._part(self._farewell)
        elif self._in_message:
            self.deadline = self.loop.time() + (self._head_timeout_s if self._in_head else LINGER_S)
        else:
            self._rest()

    def send_400_response(self, msg: str) -> None:
        """What the parser refuses, in the official shape."""
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer with an error, after what was asked before it, and read no more of this connection."""
        if self._refused:
            return
        # `cycle` belongs to the message at fault only once its head was taken.
        own = self.cycle if not self._in_head else None
        self._refused = True
        error, request_id = ApiError(status, message, code=code), f"req_{uuid.uuid4().hex}"
        scope = {"path": self._path, "headers": self.headers}
        body = messages_error(error, request_id) if is_of_messages(scope) else error.body()
        head = [STATUS_LINE[status], b"content-type: application/json\r\nconnection: close\r\n"]
        named = names_of(request_id, scope)
        head += [b"%s: %s\r\n" % pair for pair in (*self.server_state.default_headers, *named)]
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        # The method is known once the target has begun.
        is_head = bool(self.url) and self.parser.get_method() == b"HEAD"
        farewell = b"".join(head) + (b"" if is_head else body)
        if own is None and self._is_idle:
            self._part(farewell)
        elif own is None:
            self._farewell = farewell
        elif self.pipeline and self.pipeline[0][0] is own:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._active  # type: ignore[assignment]
            self._farewell = farewell
        elif own.response_complete:
            self._part(b"")
        elif own.response_started:
            own.keep_alive = False
        else:
            own.disconnected = True  # the application is told that its client is gone
            own.waiting_for_100_continue = False
            own.message_event.set()
            self._part(farewell)

    @property
    def _path(self) -> str:
        """What is known of the target's path."""
        absolute = _ABSOLUTE.match(self.url)
        path = self.url[absolute.end() if absolute else 0 :].partition(b"?")[0]
        return unquote(path.decode("latin-1"))

    def _part(self, farewell: bytes) -> None:
        """Send the last bytes and the end of the stream; the client's are read and thrown away for a
        while."""
        self._resting = False
        self.transport.write(farewell)
        self.deadline = self.loop.time() + LINGER_S
        if self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self.transport.close()
