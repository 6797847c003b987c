"""Webhooks in storage: a notice is written with the end that it tells of, and settled once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, insert

from storage import (
    ClosedItem,
    Delivery,
    Finish,
    NotFound,
    Notice,
    Park,
    RunAppend,
    Storage,
    StoredWebhook,
    open_storage,
)
from storage.queries import webhooks
from storage.tables import deliveries, metadata
from tests.support.making import OTHER, OWNER, RUNNER, call, entry, new, now, output, record

FAR = 10**18
ALL = ("response.completed", "response.failed")


def hook(id: str, *, owner: str = OWNER, types: tuple[str, ...] = ALL) -> StoredWebhook:
    return StoredWebhook(id, owner, f"https://{id}.test/", b"s" * 32, types, now())


async def end(storage: Storage, id: str, *, status: str = "completed", owner: str = OWNER) -> None:
    """A whole run that ends with a notice `evt_<id>`, due at once."""
    started = await storage.start_response(new(id, owner=owner))
    notice = Notice(f"evt_{id}", f"response.{status}", b'{"of":"%s"}' % id.encode(), now())
    finish = Finish(status, now(), append=False, notice=notice)
    assert not await storage.append([RunAppend(id, started.fence, records=(record(2),), finish=finish)])


async def claim(storage: Storage, id: str, *, at: int = FAR, limit: int = 10) -> tuple[Delivery, ...]:
    return await storage.claim_deliveries(id, at, until=at + 1, limit=limit)


async def test_an_end_is_announced_to_the_webhooks_that_want_it(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await storage.add_webhook(hook("b", types=("response.failed",)), entry=entry())
    await storage.add_webhook(hook("theirs", owner=OTHER), entry=entry())
    assert not storage.announced.is_set()
    await end(storage, "r1")
    assert storage.announced.is_set()
    due = await storage.due_deliveries(FAR)
    assert (due.webhook_ids, due.next_at, due.num_pending) == (("a",), None, 1)
    [delivery] = await claim(storage, "a")
    assert (delivery.event_id, delivery.body, delivery.attempt) == ("evt_r1", b'{"of":"r1"}', 1)
    assert (delivery.url, delivery.secret) == ("https://a.test/", b"s" * 32)
    await end(storage, "r2", status="failed")
    assert set((await storage.due_deliveries(FAR)).webhook_ids) == {"a", "b"}
    await end(storage, "r3", owner=OTHER)
    assert [each.event_id for each in await claim(storage, "theirs")] == ["evt_r3"]


async def test_a_wait_is_announced_in_the_commit_that_parks(storage: Storage) -> None:
    """Each one once, and none that is not durable."""
    await storage.add_webhook(hook("a", types=("response.waiting",)), entry=entry())
    await storage.add_webhook(hook("ends"), entry=entry())

    async def park(fence: int, call_id: str) -> None:
        notice = Notice(f"evt_r1_{fence}", "response.waiting", b"{}", now())
        closed = (ClosedItem(fence, call(f"fc_{call_id}", call_id)),)
        refused = await storage.append([RunAppend("r1", fence, closed=closed, park=Park(FAR, 0, notice))])
        assert (await storage.get_response(OWNER, "r1")).waiting or refused

    await storage.start_response(new("r1"))
    await park(7, "stale")
    assert (await storage.due_deliveries(FAR)).num_pending == 0
    storage.announced.clear()
    await park(1, "x")
    assert storage.announced.is_set()
    assert [each.event_id for each in await claim(storage, "a")] == ["evt_r1_1"]
    await storage.add_tool_outputs(OWNER, "r1", [output("x")], now())
    assert await storage.claim("r1") is not None
    await park(2, "y")
    due = await storage.due_deliveries(FAR)
    assert (due.webhook_ids, due.num_pending) == (("a",), 2), "the first is still to be settled"
    await storage.delete_response(OWNER, "r1", now())
    assert (await storage.due_deliveries(FAR)).num_pending == 0


async def test_an_end_that_is_not_committed_is_not_announced(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await storage.start_response(new("r1"))
    notice = Notice("evt_r1", "response.completed", b"{}", now())
    stale = RunAppend("r1", 7, records=(record(2),), finish=Finish("completed", 1, False, notice=notice))
    assert await storage.append([stale])
    assert (await storage.due_deliveries(FAR)).num_pending == 0


async def test_what_nobody_can_read_is_not_announced(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    claimed = await storage.start_response(new("r1", store=False, conversation="c1"))
    notice = Notice("evt_r1", "response.completed", b"{}", now())
    finish = Finish("completed", 1, False, notice=notice)
    assert not await storage.append([RunAppend("r1", claimed.fence, finish=finish)])
    assert (await storage.due_deliveries(FAR)).num_pending == 0


async def test_many_runs_that_end_together(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await storage.add_webhook(hook("theirs", owner=OTHER), entry=entry())
    batch = []
    for owner in (OWNER, OTHER):
        for n in range(3):
            id = f"{owner}-{n}"
            started = await storage.start_response(new(id, owner=owner))
            notice = Notice(f"evt_{id}", "response.completed", b"{}", now())
            finish = Finish("completed", 1, False, notice=notice)
            batch.append(RunAppend(id, started.fence, records=(record(2),), finish=finish))
    assert not await storage.append(batch)
    assert [each.event_id for each in await claim(storage, "a")] == [f"evt_{OWNER}-{n}" for n in range(3)]
    assert len(await claim(storage, "theirs")) == 3


async def test_a_claim_is_nobody_elses_until_it_lapses(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    for n in range(3):
        await end(storage, f"r{n}")
    at = now()
    first = await storage.claim_deliveries("a", at, until=at + 100, limit=2)
    rest = await storage.claim_deliveries("a", at, until=at + 100, limit=2)
    assert [each.event_id for each in (*first, *rest)] == ["evt_r0", "evt_r1", "evt_r2"]
    due = await storage.due_deliveries(at)
    assert (due.webhook_ids, due.next_at, due.num_pending) == ((), at + 100, 3)
    again = await storage.claim_deliveries("a", at + 100, until=at + 200, limit=9)
    assert {each.attempt for each in again} == {2} and len(again) == 3


async def test_only_the_latest_attempt_settles(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await end(storage, "r1")
    [early] = await claim(storage, "a", at=FAR)
    [late] = await claim(storage, "a", at=FAR + 1)
    await storage.settle_delivery(early, None)
    assert (await storage.due_deliveries(FAR)).num_pending == 1
    await storage.settle_delivery(late, FAR + 50)
    assert (await storage.due_deliveries(FAR)).next_at == FAR + 50
    [last] = await claim(storage, "a", at=FAR + 50)
    await storage.settle_delivery(last, None)
    assert (await storage.due_deliveries(FAR)).num_pending == 0


async def test_what_is_too_old_goes_with_an_attempt_that_fails(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "DROPPED_AT_ONCE", 2)
    for id in "ab":
        await storage.add_webhook(hook(id), entry=entry())
    for n in range(5):
        await end(storage, f"r{n}")
    at = now()
    [failed] = await storage.claim_deliveries("a", at, until=at + 100, limit=1)
    assert await storage.put_off_delivery(failed, at + 50, at, before=0) == 0
    for dropped in (2, 2, 0):
        assert await storage.put_off_delivery(failed, at + 50, at, before=at + 1) == dropped
    assert (await storage.due_deliveries(at)).next_at == at + 50
    assert [each.event_id for each in await claim(storage, "a")] == [failed.event_id]
    assert len(await claim(storage, "b")) == 5


def test_a_look_at_what_is_due_does_not_go_through_all_of_it() -> None:
    steps: list[int] = []
    with create_engine("sqlite://").connect() as conn:
        metadata.create_all(conn)
        for id in "ab":
            webhooks.add(conn, hook(id))
        row = {"webhook_id": "a", "owner": OWNER, "response_id": "r", "body": b"", "attempt": 0}
        at = {"created_at": 1, "due_at": 1}
        conn.execute(insert(deliveries), [{**row, **at, "event_id": str(n)} for n in range(5000)])
        driver = conn.connection.driver_connection
        assert driver is not None
        driver.set_progress_handler(lambda: steps.append(1), 100)
        found = webhooks.due(conn, FAR)
    assert (found.webhook_ids, found.num_pending) == (("a",), 5000)
    assert len(steps) < 10, "thousands of instructions"


async def test_a_removed_webhook_takes_its_notices_with_it(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await storage.add_webhook(hook("b"), entry=entry())
    await end(storage, "r1")
    [delivery] = await claim(storage, "a")
    await storage.remove_webhook("a", entry=entry())
    await storage.settle_delivery(delivery, FAR)
    assert (await storage.due_deliveries(FAR)).webhook_ids == ("b",)
    assert [each.id for each in await storage.list_webhooks()] == ["b"]
    for missing in (storage.remove_webhook("a", entry=entry()), storage.get_webhook("a")):
        with pytest.raises(NotFound):
            await missing


async def test_a_disabled_webhook_is_told_nothing_until_it_is_enabled(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await end(storage, "r1")
    assert await storage.disable_webhook("a", 77, entry=entry()) == 1
    assert await storage.disable_webhook("a", 78, entry=entry()) is None
    await end(storage, "r2")
    due = await storage.due_deliveries(FAR)
    assert (due.webhook_ids, due.num_pending) == ((), 1)
    assert not await claim(storage, "a")
    seen = await storage.get_webhook("a")
    assert (seen.disabled_at, seen.pending, seen.attempts) == (77, 1, 0)
    assert await storage.enable_webhook("a", now(), entry=entry()) == 1
    await end(storage, "r3")
    assert [each.event_id for each in await claim(storage, "a")] == ["evt_r1", "evt_r3"]
    with pytest.raises(NotFound):
        await storage.enable_webhook("b", now(), entry=entry())


async def test_a_deleted_response_is_not_told_of(storage: Storage) -> None:
    await storage.add_webhook(hook("a"), entry=entry())
    await end(storage, "r1")
    await end(storage, "r2")
    await storage.delete_response(OWNER, "r1", now())
    assert [each.event_id for each in await claim(storage, "a")] == ["evt_r2"]


async def test_notices_outlive_the_process(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER)
    added = hook("a")
    await storage.add_webhook(added, entry=entry())
    await end(storage, "r1")
    await storage.close()
    storage = await open_storage(database_url, runner="another")
    try:
        assert await storage.list_webhooks() == (replace(added, pending=1),)
        assert [each.event_id for each in await claim(storage, "a")] == ["evt_r1"]
    finally:
        await storage.close()


async def test_of_two_processes_one_gets_each_delivery(database_url: str) -> None:
    one = await open_storage(database_url, runner="one", lock=False)
    two = await open_storage(database_url, runner="two", lock=False)
    try:
        await one.add_webhook(hook("a"), entry=entry())
        for n in range(20):
            await end(one, f"r{n}")
        at = now()
        claims = [
            storage.claim_deliveries("a", at, until=FAR, limit=3) for _ in range(10) for storage in (one, two)
        ]
        claimed = [each.event_id for some in await asyncio.gather(*claims) for each in some]
        assert sorted(claimed) == sorted(f"evt_r{n}" for n in range(20))
    finally:
        await one.close()
        await two.close()


async def test_a_webhook_that_is_removed_while_runs_end_leaves_nothing(database_url: str) -> None:
    one = await open_storage(database_url, runner="one", lock=False)
    two = await open_storage(database_url, runner="two", lock=False)
    try:
        for n in range(10):
            await one.add_webhook(hook(f"h{n}"), entry=entry())
            await asyncio.gather(end(two, f"r{n}"), one.remove_webhook(f"h{n}", entry=entry()))
        assert (await one.due_deliveries(FAR)).num_pending == 0
    finally:
        await one.close()
        await two.close()


def test_a_secret_is_not_printed() -> None:
    assert "ssss" not in repr(hook("a"))
    assert "ssss" not in repr(Delivery("a", "evt", "https://a.test/", b"ssss", b"{}", 1))
