"""The class `Batches`: every operation on batches, each one a transaction.

What a client asks is scoped by owner. What the process does that carries a batch on is refused (BatchLost)
once another one does, by the number of its claim.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from sqlalchemy import Connection

from storage.batches import batch_rows
from storage.batches.records import BatchCounts, BatchEnd, BatchLine, NewBatch, OwnerShare, StoredBatch
from storage.drivers import Run
from storage.files import Blobs, StoredFile
from storage.records import Cursor, Notice, Order, Page

Announce = Callable[[Connection, Sequence[tuple[str, str, Notice]]], None]
"""Writes down what webhooks are to be told: owner, what has ended, and the notice of it."""


class Batches:
    """The batches of one database. runner: this process. announced: called when notices were written."""

    def __init__(
        self,
        read: Run,
        write: Run,
        blobs: Blobs,
        runner: str,
        *,
        shared: bool,
        announce: Announce,
        announced: Callable[[], None],
    ) -> None:
        self._read, self._write = read, write
        self._announce, self._announced = announce, announced
        self._blobs = blobs
        self._runner = runner
        self._shared = shared

    async def create(self, new: NewBatch, most: int) -> StoredBatch:
        """Stores a batch whose input is there. TooManyBatches where its owner has `most` going."""
        return await self._write(partial(batch_rows.create, new=new, most=most))

    async def get(self, owner: str, id: str) -> StoredBatch:
        """NotFound("batch")."""
        return await self._read(partial(batch_rows.get, owner=owner, id=id))

    async def list(
        self, owner: str, *, limit: int, order: Order = "desc", after: Cursor | None = None
    ) -> Page[StoredBatch]:
        """One page by time. NotFound("batch") for an id in `after`."""
        job = partial(batch_rows.list_, owner=owner, limit=limit, order=order, after=after)
        return await self._read(job)

    async def cancel(self, owner: str, id: str, now: int) -> StoredBatch:
        """Asks for the end of a batch. NotFound("batch"), BatchEnded."""
        return await self._write(partial(batch_rows.cancel, owner=owner, id=id, now=now))

    # -- carrying them on ------------------------------------------------------------------------------------

    async def claim(self, limit: int, held: Sequence[str], now: int) -> Sequence[StoredBatch]:
        """Takes over up to `limit` batches that nobody carries on; owners take turns. held: the ids of those
        that this process has in hand, all others it may claim again."""
        if not await self._read(partial(batch_rows.any_of_others, runner=self._runner, held=held)):
            return ()
        job = partial(
            batch_rows.claim, runner=self._runner, limit=limit, held=held, now=now, shared=self._shared
        )
        return await self._write(job)

    async def shares(self, held: Sequence[str], now: int) -> Sequence[OwnerShare]:
        """What each owner has going, where there is anything that this process does not carry on."""
        if not await self._read(partial(batch_rows.any_of_others, runner=self._runner, held=held)):
            return ()
        job = partial(batch_rows.shares, runner=self._runner, held=held, now=now, shared=self._shared)
        return await self._read(job)

    async def counts(self) -> BatchCounts:
        """Of all batches that have not ended."""
        return await self._read(batch_rows.counts)

    async def free_all(self) -> None:
        """Takes every batch from its process; only for one that knows that it is alone."""
        await self._write(batch_rows.free_all)

    async def release(self) -> None:
        """This process carries no batch on any more."""
        await self._write(partial(batch_rows.release, runner=self._runner))

    async def give_back(self, batch: StoredBatch) -> None:
        """Leaves a batch to whoever claims it next, as if it had not been claimed. BatchLost."""
        await self._write(partial(batch_rows.give_back, batch=batch, runner=self._runner))

    async def set_back(self, batch: StoredBatch, now: int) -> bool:
        """Lets a batch rest whose carrying failed; False where it is not to be tried again. BatchLost."""
        return await self._write(partial(batch_rows.set_back, batch=batch, runner=self._runner, now=now))

    async def clear(self, batch: StoredBatch) -> None:
        """Removes all lines of a batch whose validation is begun anew. BatchLost."""
        while await self._write(partial(batch_rows.clear, batch=batch, runner=self._runner)):
            pass

    async def add_lines(self, batch: StoredBatch, lines: Sequence[BatchLine]) -> None:
        """Stores lines. BatchLost."""
        for at in range(0, len(lines), batch_rows.ROWS):
            part = lines[at : at + batch_rows.ROWS]
            await self._write(partial(batch_rows.add_lines, batch=batch, runner=self._runner, lines=part))

    async def begin(self, batch: StoredBatch, now: int) -> None:
        """All lines are stored. BatchLost."""
        await self._write(partial(batch_rows.begin, batch=batch, runner=self._runner, now=now))

    async def finish_line(
        self,
        batch: StoredBatch,
        position: int,
        status: str,
        result: bytes,
        now: int,
        used: bytes | None = None,
    ) -> bool:
        """Gives a line its result; False where it has one. used: what of it the sums of the batch are made
        of. BatchLost."""
        job = partial(
            batch_rows.finish_line,
            batch=batch,
            runner=self._runner,
            position=position,
            status=status,
            result=result,
            now=now,
            used=used,
        )
        return await self._write(job)

    async def finalize(self, batch: StoredBatch, now: int) -> None:
        """No line is carried out any more. BatchLost."""
        await self._write(partial(batch_rows.finalize, batch=batch, runner=self._runner, now=now))

    async def end(
        self, batch: StoredBatch, ended: BatchEnd, output: StoredFile | None, errors: StoredFile | None
    ) -> None:
        """Ends a batch, stores its files, and has webhooks told, in one transaction. BatchLost."""
        notices = [] if ended.notice is None else [(batch.owner, batch.id, ended.notice)]

        def end(conn: Connection) -> None:
            batch_rows.end(conn, batch, self._runner, ended, output, errors)
            self._announce(conn, notices)

        await self._write(end)
        if notices:
            self._announced()
        self._blobs.let_go()

    async def open_lines(self, batch_id: str, after: int, limit: int) -> Sequence[BatchLine]:
        """The next lines without a result, behind a position."""
        return await self._read(partial(batch_rows.open_lines, batch_id=batch_id, after=after, limit=limit))

    async def results(self, batch_id: str, status: str) -> AsyncGenerator[tuple[bytes, bytes | None]]:
        """The results of lines, each with what `finish_line` was given as used, by the time of their end."""
        place = (-1, 0)
        while found := await self._read(
            partial(batch_rows.results, batch_id=batch_id, status=status, after=place)
        ):
            for _, result, used in found:
                yield result, used
            place = found[-1][0]

    # -- the ends of things ----------------------------------------------------------------------------------

    async def tidy(self, before: int) -> None:
        """Removes what batches that have ended need no more, and those that had ended at `before`."""
        while await self._read(partial(batch_rows.untidy, before=before)):
            await self._write(partial(batch_rows.tidy, before=before))

    async def purge(self, owner: str, now: int) -> AsyncGenerator[int]:
        """Removes the batches that an owner had at `now`; yields how many went after each short
        transaction."""
        while any(gone := await self._write(partial(batch_rows.purge, owner=owner, before=now))):
            yield gone[1]
        self._blobs.let_go()
