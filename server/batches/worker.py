"""Carries batches on: checks their inputs, has their requests carried out, and writes their files.

A batch is in the hands of one process at a time, which has claimed it; one that has died loses its batches
to whoever looks next. A line has one result, whoever wrote it. A request that a kill cuts short is made
again: on Responses with the same idempotency key, so that the response which it began goes on; on the
stateless endpoints nothing was kept of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import orjson
from starlette.types import ASGIApp

from server.access import Keys
from server.batches.carrier import Reply, carry_out, request_body
from server.batches.input_lines import InputLines
from server.batches.objects import UsageSum, expired_line, output_line
from server.clock import now_us
from server.errors import ApiError
from server.http import RUN_ROUTES
from storage import BatchEnd, BatchLine, BatchLost, NotFound, StorageUnavailable, StoredBatch, StoredFile

if TYPE_CHECKING:
    from storage import Storage

log = logging.getLogger("antiphon.batches")

BATCHES_AT_ONCE = 4
"""Of one process; the others wait for it, or for another process."""
LINES_AT_ONCE = 8
"""Requests of one batch that one process has under way."""
LOOK_S = 1.0
"""How often a process looks for batches that nobody carries on, and for the end of those that it does."""
GRACE_S = 10.0
"""How long requests may go on that are under way when their batch is to end."""
TRIES = 3
"""How often a request is made that fails by a fault of the server."""
AGAIN_S = 60.0
"""How long a batch rests whose carrying failed by a fault of the server."""
KEPT_S = 30 * 24 * 3600.0
"""How long a batch can be retrieved after its end. Its files live as long as they are to."""
PAGE = 100


class BatchWorker:
    """The batches that one process carries on."""

    def __init__(self, storage: Storage, keys: Keys) -> None:
        self._storage = storage
        self._keys = keys
        self._app: ASGIApp | None = None
        self._stirred = asyncio.Event()
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}  # by batch and claim
        self._looking: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp | None = None) -> None:
        """Carry on what is there, from now on, or, without an application to do it, from `serve` on."""
        self._app = app
        if not self._storage.shared:
            await self._storage.batches.free_all()
        self._looking = asyncio.create_task(self._look_around(), name="batches")

    async def close(self) -> None:
        """Leave all batches as they stand to the next process, or to another one."""
        if self._looking is None:
            return
        tasks = [self._looking, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._looking = None
        with suppress(StorageUnavailable):
            await self._storage.batches.release()

    def serve(self, app: ASGIApp) -> None:
        """Have requests carried out by this application."""
        self._app = app
        self.stir()

    def stir(self) -> None:
        """There is a batch to be carried on, or one to be ended."""
        self._stirred.set()

    async def _look_around(self) -> None:
        tidied_at = 0.0
        clock = asyncio.get_running_loop().time
        while True:
            try:
                room = 0 if self._app is None else BATCHES_AT_ONCE - len(self._tasks)
                for batch in await self._storage.batches.claim(room) if room else ():
                    task = asyncio.create_task(self._carry(batch), name=f"batch {batch.id}")
                    claim = (batch.id, batch.fence)
                    self._tasks[claim] = task
                    task.add_done_callback(partial(self._over, claim))
                if clock() - tidied_at > 60:
                    tidied_at = clock()
                    await self._storage.batches.tidy(now_us() - int(KEPT_S * 1e6))
            except StorageUnavailable as error:
                log.warning("batches wait: %s", error)
            except Exception:  # nobody else would look after them
                log.exception("batches could not be looked after now")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stirred.wait()
            self._stirred.clear()

    def _over(self, claim: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._tasks.pop(claim, None)
        self._stirred.set()

    async def _carry(self, batch: StoredBatch) -> None:
        """Carry a batch on to its end, or until it is another process's."""
        known = True
        while True:
            try:
                if not known:  # how it stands now, under the claim that this task has
                    batch = replace(await self._storage.batches.get(batch.owner, batch.id), fence=batch.fence)
                known = False
                await _Carried(self._storage, self._keys, self._app, batch).run()
                return
            except (BatchLost, NotFound):
                return
            except StorageUnavailable as error:
                log.warning("batch %s waits: %s", batch.id, error)
                await asyncio.sleep(LOOK_S)
            except Exception:  # it must not keep the others, or the server, down
                log.exception("batch %s cannot be carried on now", batch.id)
                await asyncio.sleep(AGAIN_S)


class _Carried:
    """One batch in the hands of this process."""

    def __init__(
        self,
        storage: Storage,
        keys: Keys,
        app: ASGIApp | None,
        batch: StoredBatch,
    ) -> None:
        assert app is not None
        self._storage = storage
        self._keys = keys
        self._app = app
        self._batch = batch
        self._batches = storage.batches
        self._ending = False  # no request is begun any more

    async def run(self) -> None:
        """Validate, carry out, and end. Raises BatchLost, NotFound and StorageUnavailable."""
        batch = self._batch
        if batch.status == "validating" and not await self._validate():
            return
        if batch.status != "finalizing":
            await self._carry_out()
            await self._batches.finalize(batch, now_us())
        await self._end()

    async def _validate(self) -> bool:
        """Store the input's lines; False where the batch has failed for them."""
        batch = self._batch
        assert batch.digest is not None
        checked = InputLines(batch.endpoint)
        await checked.read(self._storage.blobs.open(batch.digest))
        if checked.faults:
            errors = orjson.dumps(checked.faults)
            await self._batches.end(batch, BatchEnd("failed", now_us(), errors), None, None)
            return False
        await self._batches.clear(batch)
        await self._batches.add_lines(batch, checked.lines)
        await self._batches.begin(batch, now_us())
        return True

    # -- the requests ----------------------------------------------------------------------------------------

    async def _carry_out(self) -> None:
        """Have the open lines carried out, until there is none, or the batch is to end."""
        lines, turn = self._open_lines(), asyncio.Lock()

        async def one_after_another() -> None:
            while not self._ending:
                async with turn:
                    line = await anext(lines, None)
                if line is None:
                    return
                await self._line(line)

        tasks = [asyncio.create_task(one_after_another()) for _ in range(LINES_AT_ONCE)]
        working = asyncio.gather(*tasks)
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            else:
                await watching
                with suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        await asyncio.shield(working)
        finally:
            for task in (*tasks, watching):
                task.cancel()
            await asyncio.gather(*tasks, working, watching, return_exceptions=True)
            await lines.aclose()

    async def _open_lines(self) -> AsyncGenerator[BatchLine]:
        after = 0
        while found := await self._batches.open_lines(self._batch.id, after, PAGE):
            for line in found:
                yield line
            after = found[-1].position

    async def _watch(self) -> None:
        """Wait until the batch is cancelled, or its time is up."""
        while True:
            now = now_us()
            batch = await self._batches.get(self._batch.owner, self._batch.id)
            if batch.cancelling_at is not None or now >= batch.expires_at:
                self._ending = True
                return
            await asyncio.sleep(min(LOOK_S, (batch.expires_at - now) / 1e6))

    async def _line(self, line: BatchLine) -> None:
        """Carry one request out, and store what came of it."""
        failures = 0
        while True:
            reply = await self._reply(line)
            failures += reply.status >= 500 and not reply.again
            if not reply.again and (reply.status < 500 or failures >= TRIES):
                break
            if self._ending:
                return
            await asyncio.sleep(reply.wait_s)
        status = "completed" if reply.status < 300 else "failed"
        result = output_line(self._batch.id, line, reply)
        await self._batches.finish_line(self._batch, line.position, status, result, now_us())

    async def _reply(self, line: BatchLine) -> Reply:
        batch = self._batch
        assert batch.digest is not None
        parts = [part async for part in self._storage.blobs.open(batch.digest, line.start, line.stop)]
        try:
            # Anew each time: what a key may do can change while a batch is under way.
            principal = replace(await self._keys.of(batch.owner, batch.key_id), batch=True)
        except ApiError as error:
            return Reply(error.status, {}, error.body())
        body = request_body(b"".join(parts), principal)
        key = f"{batch.id}:{line.position}" if batch.endpoint in RUN_ROUTES else None
        return await carry_out(self._app, batch.endpoint, body, principal, key=key)

    # -- the end ---------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Write the files, and end the batch with them."""
        batch = await self._batches.get(self._batch.owner, self._batch.id)
        left = bool(await self._batches.open_lines(batch.id, 0, 1))
        cancelled = batch.cancelling_at is not None
        status = "cancelled" if cancelled else "expired" if left else "completed"
        usage = UsageSum()
        output = await self._file("output", usage.counting(self._batches.results(batch.id, "completed")))
        errors = await self._file("error", self._errors(expired=status == "expired"))
        ended = BatchEnd(status, now_us(), None, orjson.dumps(usage.json()), usage.model)
        await self._batches.end(self._batch, ended, output, errors)

    async def _errors(self, *, expired: bool) -> AsyncGenerator[bytes]:
        async for result in self._batches.results(self._batch.id, "failed"):
            yield result
        if expired:
            async for line in self._open_lines():
                yield expired_line(self._batch.id, line)

    async def _file(self, what: str, content: AsyncGenerator[bytes]) -> StoredFile | None:
        """A file, whose content is put; None where it would be empty."""
        batch, now = self._batch, now_us()
        blob = await self._storage.blobs.put(content)
        if not blob.num_bytes:
            return None
        expires_at = None if batch.output_lifetime is None else now + batch.output_lifetime
        return StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            owner=batch.owner,
            filename=f"{batch.id}_{what}.jsonl",
            purpose="batch_output",
            num_bytes=blob.num_bytes,
            digest=blob.digest,
            created_at=now,
            expires_at=expires_at,
        )
