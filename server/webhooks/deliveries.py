"""Delivers notices to webhooks, and tries again where that fails: of the ends of runs and batches, and of the
waits of runs for their client.

A notice has the shape of the official `WebhookResponse*`.

What is still to be told lives in storage, so every process with the same database can go on with it. An
attempt that dies with its process is made anew when its lease has passed: a receiver may hear of an event
twice, under the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import orjson

from server.access import SERVER
from server.clock import now_us
from storage import TERMINAL_STATUSES, Delivery, Notice, StorageUnavailable

if TYPE_CHECKING:
    from server.telemetry import Telemetry
    from server.webhooks.sender import Answer, Courier
    from storage import Storage

log = logging.getLogger("antiphon.webhooks")

BATCH_ENDS = ("completed", "failed", "expired", "cancelled")

EVENT_TYPES = (
    *(f"response.{status}" for status in TERMINAL_STATUSES),
    "response.waiting",  # an extension: it waits for outputs of its client's tools, or for an approval
    *(f"batch.{status}" for status in BATCH_ENDS),
)

BACKOFF_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Pauses after the first failed attempt, the second, and so on: ten attempts over three days. Standard
Webhooks, "Deliverability and reliability"."""

MAX_AGE_S = 345_600.0
"""What is due for a webhook that fails is given up when it is older: ten attempts take less. Of a receiver
that takes requests and answers none so few attempts can be made that not every notice comes to its tenth."""

JITTER = 0.1
MAX_RETRY_AFTER_S = 86_400.0
LONGEST_PAUSE_S = (1 + JITTER) * max(*BACKOFF_S, MAX_RETRY_AFTER_S)
PARALLEL = 4  # attempts at one webhook at a time
LEASE_S = 30.0  # an attempt and the news of it take no longer than this
POLL_S = 10.0  # how late the notices of a process that died are found; also the pause after trouble
CLOSING_S = 1.0  # how long attempts in flight are waited for at the end
GONE = 410


def notice(response_id: str, status: str, ended_at: int) -> Notice:
    """What is told of a run's end. A run ends once, so its event's id follows from the response's."""
    return event(f"evt_{response_id.removeprefix('resp_')}", f"response.{status}", response_id, ended_at)


def waiting_notice(response_id: str, fence: int, at: int) -> Notice:
    """What is told of a run that waits. fence: of the claim that parks it, which parks it once; so each wait
    has an event of its own."""
    event_id = f"evt_{response_id.removeprefix('resp_')}_{fence}"
    return event(event_id, "response.waiting", response_id, at)


def batch_notice(batch_id: str, status: str, ended_at: int) -> Notice:
    """What is told of a batch's end, which comes once, too."""
    return event(f"evt_{batch_id.removeprefix('batch_')}", f"batch.{status}", batch_id, ended_at)


def event(event_id: str, type: str, of: str, at: int) -> Notice:
    """An event of the official shape. of: the id of the response or batch."""
    body = {
        "id": event_id,
        "object": "event",
        "created_at": at // 1_000_000,
        "type": type,
        "data": {"id": of},
    }
    return Notice(event_id, type, orjson.dumps(body), at)


def make_sender() -> Courier:
    """A courier. Its imports and certificates take 0.1 s and more: not on a loop that serves."""
    courier: Courier = import_module("server.webhooks.sender").Courier()
    return courier


class Lane:
    """The attempts at one webhook that are under way. news: one has ended, or there may be more to make."""

    task: asyncio.Task[None]

    def __init__(self, webhook_id: str) -> None:
        self.webhook_id = webhook_id
        self.tried = False
        self.under_way: set[asyncio.Task[None]] = set()
        self.news = asyncio.Event()

    def add(self, attempt: asyncio.Task[None]) -> None:
        self.tried = True
        self.under_way.add(attempt)
        attempt.add_done_callback(self._ended)

    def _ended(self, attempt: asyncio.Task[None]) -> None:
        self.under_way.discard(attempt)
        self.news.set()


class Deliveries:
    """Brings notices to webhooks, from `start` to `close`. Each webhook has a lane of its own.

    num_pending: deliveries that were still to be made when this last looked.
    """

    def __init__(self, storage: Storage, telemetry: Telemetry, *, clock: Callable[[], int] = now_us) -> None:
        self.num_pending = 0
        self._storage = storage
        self._telemetry = telemetry
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._courier: Courier | None = None
        self._hiring = asyncio.Lock()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin, with what an earlier process left. Raises StorageUnavailable."""
        await self._storage.hasten_deliveries(self._clock(), int(LONGEST_PAUSE_S * 1e6))
        self._task = asyncio.create_task(self._watch(), name="webhooks")

    async def close(self) -> None:
        """Begin no further attempt; those in flight have CLOSING_S to end, others are made again later."""
        if self._task is None:
            return
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        lanes = [lane.task for lane in self._lanes.values()]
        for lane in self._lanes.values():
            lane.news.set()
        if lanes:
            await asyncio.wait(lanes, timeout=CLOSING_S)
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        if self._courier is not None:
            await self._courier.close()

    async def _watch(self) -> None:
        while True:
            self._storage.announced.clear()
            wait_s = POLL_S
            try:
                now = self._clock()
                due = await self._storage.due_deliveries(now)
            except StorageUnavailable as error:
                log.warning("deliveries could not be looked at: %s", error)
            else:
                self.num_pending = due.num_pending
                for webhook_id in due.webhook_ids:
                    self._open_lane(webhook_id)
                if due.next_at is not None:
                    wait_s = min(wait_s, (due.next_at - now) / 1e6)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._storage.announced.wait()

    # -- lanes -----------------------------------------------------------------------------------------------

    def _open_lane(self, webhook_id: str) -> None:
        if webhook_id not in self._lanes:
            self._lanes[webhook_id] = lane = Lane(webhook_id)
            lane.task = asyncio.create_task(self._run(lane), name=f"webhook {webhook_id}")
        self._lanes[webhook_id].news.set()

    async def _run(self, lane: Lane) -> None:
        try:
            async with self._hiring:
                if self._courier is None:
                    self._courier = await asyncio.to_thread(make_sender)
            async with asyncio.TaskGroup() as attempts:
                await self._attempt_all(lane, self._courier, attempts)
        except Exception as error:
            log.error("deliveries to webhook %s are held up", lane.webhook_id, exc_info=error)
        else:
            # There is less to do now, or it is due later. After a lane that did nothing this would go on as
            # long as somebody else holds the rows.
            if lane.tried:
                self._storage.announced.set()
        finally:
            del self._lanes[lane.webhook_id]

    async def _attempt_all(self, lane: Lane, courier: Courier, attempts: asyncio.TaskGroup) -> None:
        """Attempts at one webhook until none is due and none under way, at most PARALLEL at a time."""
        while not self._closing:
            lane.news.clear()
            if room := PARALLEL - len(lane.under_way):
                now = self._clock()
                until = now + int(LEASE_S * 1e6)
                for delivery in await self._storage.claim_deliveries(
                    lane.webhook_id, now, until=until, limit=room
                ):
                    lane.add(attempts.create_task(self._attempt(courier, delivery)))
            if not lane.under_way and not lane.news.is_set():
                return
            await lane.news.wait()

    async def _attempt(self, courier: Courier, delivery: Delivery) -> None:
        answer, why = None, ""
        # Whatever goes wrong at a receiver, or on the way there, is a failed attempt and nothing else.
        try:
            answer = await courier.send(delivery.url, delivery.secret, delivery.event_id, delivery.body)
        except Exception as error:
            why = type(error).__name__
        if answer is not None and answer.accepted:
            self._telemetry.webhook_attempt("delivered")
            await self._storage.settle_delivery(delivery, None)
            return
        if answer is not None:
            why = f"status {answer.status}"
        await self._failed(delivery, answer, why)

    async def _failed(self, delivery: Delivery, answer: Answer | None, why: str) -> None:
        told = (delivery.event_id, delivery.webhook_id, delivery.attempt, why)
        if answer is not None and answer.status == GONE:
            self._telemetry.webhook_attempt("failed")
            gone = SERVER.did("webhook.disabled", delivery.webhook_id, status_code=GONE)
            kept = await self._storage.disable_webhook(delivery.webhook_id, self._clock(), entry=gone)
            if kept is not None:
                log.warning(
                    "webhook %s is gone (status 410) and is told nothing any more; %d notices are kept until "
                    "`antiphon webhooks enable` or `remove`",
                    *(delivery.webhook_id, kept),
                )
        elif delivery.attempt > len(BACKOFF_S):
            self._telemetry.webhook_attempt("given_up")
            log.warning("%s to webhook %s: attempt %d failed (%s), given up", *told)
            await self._storage.settle_delivery(delivery, None)
        else:
            self._telemetry.webhook_attempt("failed")
            pause_s = BACKOFF_S[delivery.attempt - 1] * random.uniform(1 - JITTER, 1 + JITTER)
            if answer is not None:
                pause_s = max(pause_s, min(answer.retry_after_s, MAX_RETRY_AFTER_S))
            now = self._clock()
            due_at, before = now + int(pause_s * 1e6), now - int(MAX_AGE_S * 1e6)
            old = await self._storage.put_off_delivery(delivery, due_at, now, before=before)
            log.info("%s to webhook %s: attempt %d failed (%s), not tried again for %.0f s", *told, pause_s)
            if old:
                told_late = (delivery.webhook_id, old, MAX_AGE_S / 86_400)
                log.warning("webhook %s: %d notices are given up, which are older than %.0f days", *told_late)
