"""What a form brings into storage before its request is judged, until the request is over.

Its bytes have room reserved among those of their owner before they are written, and its content goes at once
where no row names it in the end. So refused requests, however many at once, leave nothing on the disk.
"""

from __future__ import annotations

from collections.abc import AsyncIterable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.request import context, principal
from storage import UNSURE, Blob


class Intake:
    """The contents that one request brings."""

    def __init__(self, request: Request) -> None:
        here, who = context(request), principal(request)
        self._blobs = here.storage.blobs
        self._room = here.quota.reservation(who.owner, here.limiter.stored_bytes(who.subjects))
        self._held: list[Blob] = []

    async def reserve(self, num_bytes: int) -> None:
        """Room for so many bytes more. ApiError 429 `insufficient_quota`."""
        await self._room.more(num_bytes)

    async def put(self, stream: AsyncIterable[bytes], *, limit: int) -> Blob:
        """Stores a content, which stays at least until the request is over. See `storage.blobs.put`."""
        blob = await self._blobs.put(stream, limit=limit)
        self._held.append(blob)
        return blob

    async def end(self, *, unsure: bool) -> None:
        """The request is over: what no row names goes. unsure: a row may still be on its way, so that a sweep
        is to look later."""
        num_stored = 0
        try:
            for blob in self._held:
                if unsure or not await self._blobs.release(blob.digest):
                    num_stored += blob.num_bytes
        finally:
            self._room.end(num_stored)


def intake(request: Request) -> Intake:
    """That of a request; ended by `EndsIntake`."""
    made: Intake = request.scope["state"].setdefault("intake", Intake(request))
    return made


class EndsIntake:
    """ASGI, around everything that reads forms: ends a request's intake."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what the application raises."""
        unsure = False
        try:
            await self._app(scope, receive, send)
        except UNSURE:
            unsure = True
            raise
        finally:
            taken_in: Intake | None = scope.get("state", {}).get("intake")
            if taken_in is not None:
                await taken_in.end(unsure=unsure)
