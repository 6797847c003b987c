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
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import orjson
from starlette.types import ASGIApp

from server.access import Keys, Principal
from server.batches.carrier import Reply, carry_out, request_body
from server.batches.input_lines import InputLines
from server.batches.objects import UsageSum, expired_line, output_line
from server.clock import now_us
from server.config import THREADED_BYTES
from server.errors import ApiError
from server.http import RUN_ROUTES
from server.limits import Limiter
from server.quota import Quota
from server.telemetry import Reading
from server.threads import aside
from server.webhooks import batch_notice
from storage import (
    MAX_BATCH_ATTEMPTS,
    BatchCounts,
    BatchEnd,
    BatchLine,
    BatchLost,
    NotFound,
    OwnerShare,
    StorageUnavailable,
    StoredBatch,
    StoredFile,
)

if TYPE_CHECKING:
    from server.config import Config
    from storage import Storage

log = logging.getLogger("antiphon.batches")

BATCHES_AT_ONCE = 4
"""Of one process; the others wait for it, or for another process."""
TURN_S = 60.0
"""How long a batch has its place, at least, while a batch waits whose owner has one place less."""
LINES_AT_ONCE = 8
"""Requests of one batch that one process has under way."""
LOOK_S = 1.0
"""How often a process looks for batches that nobody carries on, and for the end of those that it does."""
COUNT_S = 10.0
"""How old what metrics say of batches may be."""
GRACE_S = 10.0
"""How long requests may go on that are under way when their batch is to end."""
TRIES = 3
"""How often a request is made that fails by a fault of the server."""
KEPT_S = 30 * 24 * 3600.0
"""How long a batch can be retrieved after its end. Its files live as long as they are to."""
PAGE = 100


@dataclass(slots=True)
class _Going:
    """A batch that this process carries on. since: as the clock of the loop has it."""

    batch: StoredBatch
    since: float
    task: asyncio.Task[None] | None = None
    carried: _Carried | None = None
    leaving: bool = False  # its place is to be another batch's

    def leave(self) -> None:
        """Begin no more requests, and give the batch back when those under way have ended."""
        self.leaving = True
        if self.carried is not None:
            self.carried.leave()


@dataclass(slots=True)
class _Ends:
    """What this process has brought to its end since it started: lines and batches, by status."""

    lines: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)


class BatchWorker:
    """The batches that one process carries on. quota, limiter: what the results of requests count against."""

    def __init__(self, storage: Storage, keys: Keys, quota: Quota, limiter: Limiter, config: Config) -> None:
        self._storage = storage
        self._keys = keys
        self._quota = quota
        self._limiter = limiter
        self._config = config
        self._app: ASGIApp | None = None
        self._stirred = asyncio.Event()
        self._going: dict[tuple[str, int], _Going] = {}  # by batch and claim
        self._looking: asyncio.Task[None] | None = None
        self._leaving = False  # this process is to end
        self._counts = BatchCounts({}, 0)
        self._ends = _Ends()

    async def start(self, app: ASGIApp | None = None) -> None:
        """Carry on what is there, from now on, or, without an application to do it, from `serve` on."""
        self._app = app
        if not self._storage.shared:
            await self._storage.batches.free_all()
        self._looking = asyncio.create_task(self._look_around(), name="batches")

    def leave(self) -> None:
        """Take no more batches; those that are carried on are given back when their requests under way have
        ended, each for another process to go on with."""
        self._leaving = True
        for going in self._going.values():
            going.leave()

    async def close(self) -> None:
        """Leave all batches as they stand to the next process, or to another one."""
        if self._looking is None:
            return
        self.leave()
        tasks = [self._looking, *(going.task for going in self._going.values() if going.task is not None)]
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

    def readings(self) -> Iterator[Reading]:
        """Numbers for metrics: of the whole database as they were lately, and of this process."""
        for status in ("validating", "in_progress", "finalizing", "cancelling"):
            yield Reading("batches", {"open": self._counts.by_status.get(status, 0)}, {"status": status})
        for status in ("completed", "failed", "expired", "cancelled"):
            yield Reading("batches", {"ended_total": self._ends.batches[status]}, {"status": status})
        yield Reading("batches", {"lines_waiting": self._counts.lines_waiting})
        for status in ("completed", "failed"):
            yield Reading("batches", {"lines_total": self._ends.lines[status]}, {"status": status})

    # -- which are carried on --------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        tidied_at = counted_at = float("-inf")
        clock = asyncio.get_running_loop().time
        while True:
            try:
                if self._app is not None and not self._leaving:
                    await self._claim()
                if clock() - counted_at > COUNT_S:
                    counted_at = clock()
                    self._counts = await self._storage.batches.counts()
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

    async def _claim(self) -> None:
        """Take what there is room for; where there is none, make room for owners that have less."""
        held = [id for id, _ in self._going]
        room = BATCHES_AT_ONCE - len(held)
        if not room:
            if not any(going.leaving for going in self._going.values()):
                shares = await self._storage.batches.shares(held, now_us())
                if (least := self._least(shares)) is not None:
                    least.leave()
            return
        for batch in await self._storage.batches.claim(room, held, now_us()):
            going = _Going(batch, asyncio.get_running_loop().time(), leaving=self._leaving)
            claim = (batch.id, batch.fence)
            self._going[claim] = going
            going.task = asyncio.create_task(self._carry(going), name=f"batch {batch.id}")
            going.task.add_done_callback(partial(self._over, claim))

    def _least(self, shares: Sequence[OwnerShare]) -> _Going | None:
        """The batch whose place another owner should rather have; None where all have what is theirs."""
        waiting = [share.carried for share in shares if share.waiting]
        if not waiting:
            return None
        carried = {share.owner: share.carried for share in shares}
        going = max(self._going.values(), key=lambda each: (carried.get(each.batch.owner, 0), -each.since))
        more = carried.get(going.batch.owner, 0) - min(waiting)
        had_turn = asyncio.get_running_loop().time() - going.since >= TURN_S
        return going if more > 1 or (more == 1 and had_turn) else None

    def _over(self, claim: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._going.pop(claim, None)
        self._stirred.set()

    async def _carry(self, going: _Going) -> None:
        """Carry a batch on to its end, until it is another process's, or until it is to rest."""
        batch = going.batch
        if batch.attempts > MAX_BATCH_ATTEMPTS:
            await self._give_up(batch)
            return
        known = True
        while True:
            try:
                if not known:  # how it stands now, under the claim that this task has
                    batch = replace(await self._storage.batches.get(batch.owner, batch.id), fence=batch.fence)
                known = False
                going.carried = self._carried(batch)
                if going.leaving:
                    going.carried.leave()
                await going.carried.run()
                return
            except BatchLost:
                return
            except NotFound as error:  # the batch, or what it reads
                log.warning("batch %s is not carried on: %s", batch.id, error)
                await self._rest(batch)
                return
            except StorageUnavailable as error:
                log.warning("batch %s waits: %s", batch.id, error)
                if now_us() >= batch.expires_at:
                    await self._give_up(batch)
                    return
                await asyncio.sleep(LOOK_S)
            except Exception:  # it must not keep the others, or the server, down
                log.exception("batch %s cannot be carried on now", batch.id)
                await self._rest(batch)
                return

    def _carried(self, batch: StoredBatch) -> _Carried:
        assert self._app is not None
        known = (self._storage, self._keys, self._quota, self._limiter, self._config)
        return _Carried(*known, self._app, batch, self._ends)

    async def _rest(self, batch: StoredBatch) -> None:
        """Have a batch tried again later that could not be carried on, or else end it."""
        with suppress(
            BatchLost, StorageUnavailable
        ):  # unless that is known, its claim has run out for itself
            if not await self._storage.batches.set_back(batch, now_us()):
                await self._give_up(batch)

    async def _give_up(self, batch: StoredBatch) -> None:
        """End a batch that cannot be carried on to its end: with what is done of it, where that can be."""
        message = f"The server could not carry this batch on, at {MAX_BATCH_ATTEMPTS} attempts in a row."
        if expired := now_us() >= batch.expires_at:
            message = "The server could not carry this batch on when its completion window was over."
        fault = {"code": "server_error", "message": message, "param": None, "line": None}
        status, errors = "expired" if expired else "failed", orjson.dumps([fault])
        log.error("batch %s ends: %s", batch.id, message)
        try:
            try:
                await self._carried(batch).end(status, errors)
            except (BatchLost, StorageUnavailable):
                raise
            except Exception:  # then without files
                log.exception("the results of batch %s cannot be written", batch.id)
                await self._carried(batch).end(status, errors, files=False)
        except (BatchLost, StorageUnavailable) as error:
            log.warning("batch %s is not ended now: %r", batch.id, error)


class _Carried:
    """One batch in the hands of this process."""

    def __init__(
        self,
        storage: Storage,
        keys: Keys,
        quota: Quota,
        limiter: Limiter,
        config: Config,
        app: ASGIApp,
        batch: StoredBatch,
        ends: _Ends,
    ) -> None:
        self._storage = storage
        self._keys = keys
        self._quota = quota
        self._limiter = limiter
        self._config = config
        self._app = app
        self._batch = batch
        self._ends = ends
        self._batches = storage.batches
        self._leaving = False  # the batch is to be given back
        self._ending = False  # no request is begun any more

    def leave(self) -> None:
        """Begin no more requests; `run` ends when those under way have."""
        self._leaving = self._ending = True

    async def run(self) -> None:
        """Validate, carry out, and end; or give the batch back. Raises BatchLost and StorageUnavailable."""
        batch = self._batch
        if batch.status == "validating" and not await self._validate():
            return
        if batch.status != "finalizing":
            await self._carry_out()
            if self._leaving and not await self._is_over():
                await self._batches.give_back(batch)
                return
            await self._batches.finalize(batch, now_us())
        await self._end()

    async def _is_over(self) -> bool:
        """Whether no line of the batch is to be carried out any more."""
        batch = await self._batches.get(self._batch.owner, self._batch.id)
        over = batch.cancelling_at is not None or now_us() >= batch.expires_at
        return over or not await self._batches.open_lines(batch.id, 0, 1)

    async def _validate(self) -> bool:
        """Store the input's lines; False where the batch has failed for them."""
        batch = self._batch
        assert batch.digest is not None
        checked = InputLines(batch.endpoint, self._config.max_json_values)
        await checked.read(self._storage.blobs.open(batch.digest))
        if checked.faults:
            errors = orjson.dumps(checked.faults)
            await self.end("failed", errors, files=False)
            return False
        await self._batches.clear(batch)
        await self._batches.add_lines(batch, checked.lines)
        await self._batches.begin(batch, now_us())
        return True

    # -- the requests ----------------------------------------------------------------------------------------

    async def _carry_out(self) -> None:
        """Have the open lines carried out, until there is none, or the batch is to end or be given back."""
        if await self._is_over():
            return
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
        failures = failed_runs = 0
        while True:
            who, reply = await self._reply(line, failed_runs)
            failures += reply.by_server and not reply.again
            failed_runs += reply.failure is not None
            if not reply.again and (not reply.by_server or failures >= TRIES):
                break
            if self._ending:
                return
            if not reply.replayed:  # an attempt from before this process took the batch over
                await asyncio.sleep(reply.wait_s)
        status, result, used = await self._stored(line, who, reply)
        if await self._batches.finish_line(self._batch, line.position, status, result, now_us(), used):
            self._ends.lines[status] += 1

    async def _principal(self) -> Principal:
        """Who makes the requests. Anew each time: what a key may do can change while a batch is under way.
        ApiError."""
        return replace(await self._keys.of(self._batch.owner, self._batch.key_id), batch=True)

    async def _reply(self, line: BatchLine, failed_runs: int) -> tuple[Principal | None, Reply]:
        """Who makes a request now, and what comes of it; None where nobody may. failed_runs: responses to it
        that have failed. The next attempt has an idempotency key of its own, or it would be answered with the
        failed one; a process that takes the batch over comes by all of them again."""
        batch = self._batch
        assert batch.digest is not None
        principal = None
        try:
            principal = await self._principal()
            await self._require_room(principal, 0)  # before anything is computed in vain
        except ApiError as error:
            return principal, Reply(error.status, error.headers, error.body())
        parts = [part async for part in self._storage.blobs.open(batch.digest, line.start, line.stop)]
        asked, large = b"".join(parts), line.stop - line.start > THREADED_BYTES
        body = await aside(large, request_body, asked, batch.endpoint, principal)
        key = None
        if batch.endpoint in RUN_ROUTES:
            key = f"{batch.id}:{line.position}{f':{failed_runs}' if failed_runs else ''}"
        return principal, await carry_out(self._app, batch.endpoint, body, principal, key=key)

    async def _stored(self, line: BatchLine, who: Principal | None, reply: Reply) -> tuple[str, bytes, bytes]:
        """The status of a line, its result, and what that used; where there is no room for an answer, that is
        the result. who: made the request; what was answered is kept also where their key has ended since."""
        large = len(reply.body) > THREADED_BYTES
        result, used = await aside(large, output_line, self._batch.id, line, reply)
        if who is None or reply.failed:
            return "failed", result, used
        try:
            await self._require_room(who, len(result))
        except ApiError as error:
            refused, _ = output_line(self._batch.id, line, Reply(error.status, error.headers, error.body()))
            return "failed", refused, used
        return "completed", result, used

    async def _require_room(self, who: Principal, num_bytes: int) -> None:
        """ApiError where the owner may not store so many bytes more."""
        await self._quota.require(who.owner, num_bytes, self._limiter.stored_bytes(who.subjects))

    # -- the end ---------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        batch = await self._batches.get(self._batch.owner, self._batch.id)
        left = bool(await self._batches.open_lines(batch.id, 0, 1))
        cancelled = batch.cancelling_at is not None
        await self.end("cancelled" if cancelled else "expired" if left else "completed", None)

    async def end(self, status: str, errors: bytes | None, *, files: bool = True) -> None:
        """Write the files, and end the batch with them. errors: why it has failed, a JSON list. Raises
        BatchLost and StorageUnavailable."""
        batch, usage = self._batch, UsageSum()
        output = failed = None
        async with AsyncExitStack() as held:
            if files:
                results = usage.counting(self._batches.results(batch.id, "completed"))
                output = await self._file("output", results, held)
                failed = await self._file("error", self._errors(usage, expired=status == "expired"), held)
            at = now_us()
            notice = batch_notice(batch.id, status, at)
            told = orjson.dumps(usage.json()) if files else None
            ended = BatchEnd(status, at, errors, told, usage.model, notice)
            await self._batches.end(batch, ended, output, failed)
            self._ends.batches[status] += 1

    async def _errors(self, usage: UsageSum, *, expired: bool) -> AsyncGenerator[bytes]:
        async for result in usage.counting(self._batches.results(self._batch.id, "failed")):
            yield result
        if expired:
            async for line in self._open_lines():
                yield expired_line(self._batch.id, line)

    async def _file(
        self, what: str, content: AsyncGenerator[bytes], held: AsyncExitStack
    ) -> StoredFile | None:
        """A file, whose content is put, and stays for as long as `held` is open; None where it would be
        empty."""
        batch, now = self._batch, now_us()
        blob = await held.enter_async_context(self._storage.blobs.incoming(content))
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
