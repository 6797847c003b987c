"""An HTTP client that resolves, judges and connects in one step, and counts what comes back.

The judged address is the one that is connected to, so a name cannot change its address between the two.
Certificates, the header `host` and the reuse of connections go by the name, as without a guard.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any, Literal, TypeVar

import httpcore2
import httpx2

from tools.egress.policy import Caps, Egress, EgressError, host_of
from tools.egress.resolver import Resolver

MAX_REDIRECTS = 5

_DEADLINE = "antiphon_deadline"
"""The extension of a request that holds when its last redirect must have been read, on the loop's clock."""

_CODINGS = {"identity", "gzip", "deflate"}
"""One of these at a time: packed twice, a short body would take a long time to be found empty."""

_EVENT_END = re.compile(rb"\n\n|\r\r|\r\n\r\n")
"""What ends an event of a stream of events."""

_BYTES_PER_VALUE, _VALUES_PER_LINE = 50, 50
"""What bytes, and lines of a stream of events, cost their reader, next to a value of JSON: some 1 us."""

_ENDED = re.compile(r"disconnected|closed connection")
"""What httpcore2 and h11 say in the error of a connection that the other side has closed too early."""

T = TypeVar("T")


@cache
def system_certificates() -> ssl.SSLContext:
    """What the system trusts. The first call takes a tenth of a second."""
    return httpx2.create_ssl_context(trust_env=False)


class _JudgedConnections(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that were judged, and to no others."""

    def __init__(self, egress: Egress, caps: Caps, resolver: Resolver) -> None:
        self._egress = egress
        self._connect_s = caps.connect_s
        self._resolver = resolver
        self._tcp = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        host = host.lower().rstrip(".")
        try:
            async with asyncio.timeout(self._connect_s):
                addresses = await self._resolver(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise EgressError(f"{host} has no address that could be found.", "unreachable")
        self._egress.judge(host, port, addresses)
        for address in addresses:
            try:
                return await self._tcp.connect_tcp(
                    address, port, self._connect_s, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        raise EgressError(f"{host} accepts no connection at port {port}.", "unreachable")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Pace:
    """How fast the replies of one client are read: max_values of the Caps at once, then values_per_s."""

    def __init__(self, caps: Caps) -> None:
        self._at_once, self._per_s = caps.max_values or 0, caps.values_per_s
        self._num_owed, self._since = 0.0, 0.0

    def delay(self, count: float) -> float:
        """Seconds until what has so many values may be read on."""
        if self._per_s is None:
            return 0.0
        now = asyncio.get_running_loop().time()
        self._num_owed = max(0.0, self._num_owed - (now - self._since) * self._per_s) + count
        self._since = now
        return max(0.0, self._num_owed - self._at_once) / self._per_s


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Carries requests out under an Egress and Caps. Redirects come back as requests and are judged anew."""

    def __init__(
        self, egress: Egress, caps: Caps, *, ssl_context: ssl.SSLContext | None, resolver: Resolver
    ) -> None:
        self._egress = egress
        self._caps = caps
        self._pace = _Pace(caps)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl_context or system_certificates(),
            max_connections=100,
            max_keepalive_connections=20,
            keepalive_expiry=30.0,
            network_backend=_JudgedConnections(egress, caps, resolver),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises EgressError, whatever goes wrong."""
        self._egress.check(request.url)
        host = host_of(request.url)
        exchange = _Exchange(host, self._caps, self._pace, self._deadline(request))
        # The name of the URL, whoever wants another one: a server behind it goes by this header.
        request.headers["host"] = request.url.netloc.decode("ascii")
        request.headers["accept-encoding"] = "gzip, deflate"
        sent = httpcore2.Request(
            method=request.method,
            url=httpcore2.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        reply = await exchange.wait_for(self._pool.handle_async_request(sent))
        try:
            return exchange.response(reply, bodiless=request.method == "HEAD")
        except BaseException:
            await reply.aclose()
            raise

    def _deadline(self, request: httpx2.Request) -> float | None:
        if self._caps.total_s is None:
            return None
        end = asyncio.get_running_loop().time() + self._caps.total_s
        deadline: float = request.extensions.setdefault(_DEADLINE, end)  # a redirect has that of its origin
        return deadline

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.aclose()


class _Exchange:
    """One request and its reply: holds both to the caps, and turns every fault into an EgressError."""

    def __init__(self, host: str, caps: Caps, pace: _Pace, deadline: float | None) -> None:
        self._host = host
        self._caps = caps
        self._pace = pace
        self._deadline = deadline
        self._num_arrived = 0
        self._num_unpacked = 0
        self._num_values = 0

    async def wait_for(self, step: Awaitable[T]) -> T:
        """The result of a step, if it comes in time."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await step
        except (TimeoutError, httpcore2.TimeoutException):
            message = f"{self._host} took longer than {self._caps.total_s or 0:g} s to reply."
            raise EgressError(message, "too_slow") from None
        except httpcore2.NetworkError as error:
            if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)):
                message = f"{self._host} shows no certificate that this server trusts."
                raise EgressError(message, "unreachable") from None
            kind: Literal["unreachable", "broken"] = (
                "unreachable" if isinstance(error, httpcore2.ConnectError) else "broken"
            )
            raise EgressError(f"The connection to {self._host} broke.", kind) from None
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol) as error:
            if _ENDED.search(str(error)):  # its process died, say
                message = f"{self._host} closed the connection before it had answered."
                raise EgressError(message, "broken") from None
            raise EgressError(f"{self._host} does not keep to HTTP: {error}", "broken") from None

    def response(self, reply: httpcore2.Response, *, bodiless: bool) -> httpx2.Response:
        """The reply with its body unpacked; raises EgressError where its headers promise too much."""
        headers = httpx2.Headers(reply.headers)
        codings = [word.strip().lower() for word in headers.get_list("content-encoding", split_commas=True)]
        if len(codings) > 1 or not _CODINGS.issuperset(codings):
            raise EgressError(f"{self._host} packs its reply in a way that was not asked for.", "broken")
        promised = headers.get("content-length", "")
        if not bodiless and promised.isdecimal() and int(promised) > self._caps.max_bytes:
            raise self._too_large()
        packed = httpx2.Response(
            reply.status, headers={"content-encoding": ", ".join(codings)}, stream=_Body(self._arrive(reply))
        )
        if codings and not bodiless:
            for name in ("content-encoding", "content-length"):
                headers.pop(name, None)
        is_stream = headers.get("content-type", "").lower().startswith("text/event-stream")
        body = _Body(self._unpack(packed, is_stream), reply)
        return httpx2.Response(reply.status, headers=headers, stream=body, extensions=reply.extensions)

    async def _arrive(self, reply: httpcore2.Response) -> AsyncIterator[bytes]:
        async with aclosing(reply.aiter_stream()) as parts:
            while (part := await self.wait_for(anext(parts, None))) is not None:
                self._num_arrived += len(part)
                if self._num_arrived > self._caps.max_bytes:
                    raise self._too_large()
                yield part

    async def _unpack(self, packed: httpx2.Response, is_stream: bool) -> AsyncIterator[bytes]:
        try:
            before = b""
            async with aclosing(packed.aiter_bytes()) as parts:
                async for part in parts:  # of at most 1 MiB, however small they were packed
                    self._num_unpacked += len(part)
                    if self._num_unpacked > self._caps.max_bytes:
                        raise self._too_large()
                    pieces = _EVENT_END.split(before + part) if self._caps.per_event else [part]
                    if self._caps.max_values is not None:
                        self._count_values(pieces, self._caps.max_values)
                        await self._keep_pace(part, is_stream)
                    if len(pieces) > 1:
                        self._num_arrived = self._num_unpacked = 0
                    before = part[-3:]
                    yield part
        except httpx2.DecodingError:
            raise EgressError(f"{self._host} sends a reply that cannot be unpacked.", "broken") from None

    def _count_values(self, pieces: Sequence[bytes], most: int) -> None:
        """pieces: of what has come, each but the first one the beginning of an event."""
        for begun, piece in enumerate(pieces):
            self._num_values = _num_values(piece) + (0 if begun else self._num_values)
            if self._num_values > most:
                message = f"The reply of {self._host} has more than {most} brackets, commas and quotes."
                raise EgressError(message, "too_large")

    async def _keep_pace(self, part: bytes, is_stream: bool) -> None:
        num_lines = part.count(b"\n") + part.count(b"\r") if is_stream else 0
        work = _num_values(part) + len(part) / _BYTES_PER_VALUE + num_lines * _VALUES_PER_LINE
        if (delay := self._pace.delay(work)) > 0:
            await self.wait_for(asyncio.sleep(delay))

    def _too_large(self) -> EgressError:
        message = f"The reply of {self._host} is larger than {self._caps.max_bytes} bytes."
        return EgressError(message, "too_large")


def _num_values(part: bytes) -> int:
    """How many brackets, commas and quotes there are: a value of JSON has one at least. Quotes inside of
    strings, which are escaped, count for nothing."""
    return sum(map(part.count, (b"[", b"{", b",", b'"'))) - part.count(b'\\"')


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class _Body(httpx2.AsyncByteStream):
    """Bytes as they come, and what is closed behind them."""

    def __init__(self, parts: AsyncIterator[bytes], reply: httpcore2.Response | None = None) -> None:
        self._parts = parts
        self._reply = reply

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts

    async def aclose(self) -> None:
        if self._reply is not None:
            await self._reply.aclose()


class GuardedClient(httpx2.AsyncClient):
    """An `httpx2.AsyncClient` whose requests, and the reading of whose replies, raise EgressError alone."""

    def build_request(self, method: str, url: httpx2.URL | str, **options: Any) -> httpx2.Request:
        """As its parent's; EgressError for a URL that is none."""
        try:
            return super().build_request(method, url, **options)
        except httpx2.InvalidURL as error:
            raise EgressError(f"The URL is not valid ({str(error)[:200]}).", "refused") from None

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """As its parent's; EgressError where redirects are too many, or lead to what is no URL."""
        try:
            return await super().send(request, **options)
        except EgressError as error:
            error.extensions = request.extensions
            raise
        except httpx2.TooManyRedirects:
            message = f"{request.url.host} redirects more than {MAX_REDIRECTS} times."
            raise EgressError(message, "broken") from None
        except httpx2.HTTPError as error:
            raise EgressError(f"{request.url.host}: {error}", "broken") from None
