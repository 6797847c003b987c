"""Shows responses: as they stand, at their end, and to readers of their events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.errors import ApiError
from server.runs.events import Feed, Reader, Snapshot, snapshot
from server.runs.execution import Run, RunTasks, as_it_stands, at_its_end
from server.runs.planning import TERMINAL
from storage import NotFound, Page, StoredResponse

if TYPE_CHECKING:
    from storage import Storage


class Views:
    """The responses of one database, as this process shows them."""

    def __init__(self, storage: Storage, tasks: RunTasks, feed: Feed) -> None:
        self._storage = storage
        self._tasks = tasks
        self._feed = feed

    async def get(
        self, owner: str, response_id: str, *, wait_s: float = 0.0, include: Sequence[str] = ()
    ) -> Snapshot:
        """The Response object; one that is not stored can be had where it is made, until it has ended. Raises
        NotFound.

        wait_s: how long to wait, in seconds, for it to end, or to need the outputs of its client's tools.
        include: what its items are to say besides.
        """
        if (run := self.unkept(owner, response_id)) is not None:
            return await at_its_end(run, self._feed, wait_s) if wait_s > 0 else as_it_stands(run)
        hidden = self._is_at_work(owner, response_id)
        if wait_s <= 0:
            stored = await self._storage.get_response(owner, response_id, hidden=hidden)
            return await self._snapshot(stored, include)
        reader, stored = await self.follow(owner, response_id, hidden=hidden)
        try:
            async with asyncio.timeout(wait_s):
                stored = await self.at_rest(reader, stored, patient=True)
        except TimeoutError:
            stored = await self._storage.get_response(owner, response_id, hidden=hidden)
        finally:
            reader.close()
        return await self._snapshot(stored, include)

    def unkept(self, owner: str, response_id: str) -> Run | None:
        """A run of an owner that is at work here, and that is not stored."""
        run = self._tasks.get(response_id)
        return run if run is not None and run.plan.owner == owner and not run.plan.store else None

    def _is_at_work(self, owner: str, response_id: str) -> bool:
        """Whether a run of an owner is at work here: as long as it is, it is shown, though it may be stored
        for the repeats of its request alone."""
        run = self._tasks.get(response_id)
        return run is not None and run.plan.owner == owner

    async def rejoin(self, owner: str, response_id: str) -> tuple[Reader, StoredResponse]:
        """The same as `follow`, for a client that comes back to a response."""
        return await self.follow(owner, response_id, hidden=self._is_at_work(owner, response_id))

    async def answer(self, owner: str, response_id: str) -> Snapshot:
        """What the request that started a response is answered with, once more: it at its end, or, in the
        background, as it stands. Raises NotFound, and ApiError 503 where this server stops before its end,
        or the response is removed.
        """
        reader, stored = await self.follow(owner, response_id, hidden=True)
        try:
            if not stored.background:
                stored = await self.at_rest(reader, stored)
                if stored.status not in TERMINAL:
                    raise interrupted(reader)
        except NotFound as gone:
            raise (interrupted(reader) if reader.removed else gone) from None
        finally:
            reader.close()
        return await self._snapshot(stored)

    async def at_rest(
        self, reader: Reader, stored: StoredResponse, *, patient: bool = False
    ) -> StoredResponse:
        """A response once nothing happens to it any more without its client, or once its stream is cut.
        ApiError 503, unless patient, while nothing can be stored."""
        while not (stored.waiting or stored.status in TERMINAL or reader.cut):
            await reader.rested(patient=patient)
            stored = await self._storage.get_response(stored.owner, stored.id, hidden=True)
        return stored

    async def bodies(self, page: Page[StoredResponse]) -> list[bytes]:
        """The Response objects of a page."""
        return [(await self._snapshot(stored)).body for stored in page.data]

    async def _snapshot(self, stored: StoredResponse, include: Sequence[str] = ()) -> Snapshot:
        waits = await self._storage.pending_calls(stored.owner, stored.id) if stored.waiting else None
        return snapshot(stored, waits, include)

    async def follow(
        self, owner: str, response_id: str, *, hidden: bool = False
    ) -> tuple[Reader, StoredResponse]:
        """A reader of a stored response, and its state, read after the reader had joined. Raises NotFound.

        hidden: it may be one that is stored for the repeats of its request alone.
        """
        # An unknown id is refused here, before a feed is opened for it.
        stored = await self._storage.get_response(owner, response_id, hidden=hidden)
        reader = self._feed.join(response_id, stored.echo)
        try:
            return reader, await self._storage.get_response(owner, response_id, hidden=hidden)
        except BaseException:
            reader.close()
            raise


def interrupted(reader: Reader) -> ApiError:
    """503 `response_interrupted`: this server stops before a run that is read here has ended, or the run was
    removed together with all that its owner had."""
    if reader.removed:
        message = f"Response '{reader.response_id}' was removed before it was done."
        return ApiError(503, message, code="response_interrupted", headers={"x-should-retry": "false"})
    message = f"The server stopped before response '{reader.response_id}' was done."
    return ApiError(503, message, code="response_interrupted", headers={"retry-after": "5"})
