"""An HTTP transport whose replies have a greatest size, also those that are streamed or come compressed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import httpx2


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Passes requests on to another transport, and refuses a reply that is too large while it is read.

    note: told the status of each reply.
    """

    def __init__(self, inner: httpx2.AsyncBaseTransport, most: int, note: Callable[[int], None]) -> None:
        self._inner = inner
        self._most = most
        self._note = note

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The reply, whose body is counted as it is read."""
        response = await self._inner.handle_async_request(request)
        self._note(response.status_code)
        body = response.stream
        assert isinstance(body, httpx2.AsyncByteStream), "an asynchronous transport answers so"
        coded = response.headers.get("content-encoding", "identity").strip().lower()
        if coded not in ("", "identity"):  # it was asked not to; unpacked, a small reply can be a huge one
            await body.aclose()
            raise httpx2.ReadError(f"the reply is compressed ({coded[:20]})", request=request)
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_Counted(body, self._most),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        """Close the other transport."""
        await self._inner.aclose()


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream, most: int) -> None:
        self._body = body
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._most
        async for data in self._body:
            left -= len(data)
            if left < 0:
                raise httpx2.ReadError(f"the reply has more than {self._most} bytes")
            yield data

    async def aclose(self) -> None:
        await self._body.aclose()
