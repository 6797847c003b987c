"""The audit log: in the order of what was done, and nothing can be taken out of it without a trace."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from storage import AuditFilter, NotFound, Storage, open_storage
from tests.support.making import OTHER, OWNER, entry, key, query

ANY = AuditFilter()


async def ids(storage: Storage, wanted: AuditFilter = ANY, **page: str) -> list[str]:
    return [one.entry.id for one in (await storage.list_audit(wanted, limit=100, **page)).data]


async def test_entries_come_back_newest_first_and_by_what_is_asked(storage: Storage) -> None:
    made = [
        replace(
            entry("api_key.created", "k1", owner=OWNER, details=b'{"a":1}', request_id="r", ip="::1"), at=10
        ),
        replace(entry("api_key.deleted", "k1", owner=OWNER), at=20),
        replace(entry("webhook.created", "w1", owner=OTHER), at=30, actor="key_1"),
    ]
    for one in made:
        await storage.add_audit(one)
    page = await storage.list_audit(ANY, limit=2)
    assert [one.entry for one in page.data] == [made[2], made[1]] and page.has_more
    assert [one.number for one in page.data] == [3, 2]
    everything = [made[2].id, made[1].id, made[0].id]
    assert await ids(storage, after=made[2].id) == everything[1:]
    assert await ids(storage, before=made[0].id) == everything[:2]
    ahead = await storage.list_audit(ANY, limit=1, before=made[0].id)
    assert [one.entry.id for one in ahead.data] == [made[1].id] and ahead.has_more
    assert await ids(storage, AuditFilter(since=20)) == everything[:2]
    assert await ids(storage, AuditFilter(before=20)) == everything[2:]
    assert await ids(storage, AuditFilter(actions=("api_key.created", "webhook.created"))) == [
        made[2].id, made[0].id,
    ]  # fmt: skip
    assert await ids(storage, AuditFilter(actors=("key_1",))) == [made[2].id]
    assert await ids(storage, AuditFilter(targets=("k1",), owners=(OWNER,))) == everything[1:]
    with pytest.raises(NotFound):
        await ids(storage, after="nope")


async def test_a_change_that_fails_leaves_no_entry(storage: Storage) -> None:
    await storage.create_key(key("k1"), entry=entry())
    with pytest.raises(Exception, match=r"(?i)unique"):
        await storage.create_key(key("k1"), entry=entry())
    assert len(await ids(storage)) == 1
    assert (await storage.examine_audit()).broken is None


@pytest.mark.parametrize(
    ("harm", "number"),
    [
        ("DELETE FROM audit WHERE number = 3", 3),
        ("DELETE FROM audit WHERE number = 5", 5),
        ("DELETE FROM audit", 1),
        ("UPDATE audit SET actor = 'somebody' WHERE number = 2", 2),
        ("UPDATE audit SET owner = NULL WHERE number = 4", 4),
        ("UPDATE audit_head SET number = 4", 5),
    ],
)
async def test_harm_is_seen(database_url: str, harm: str, number: int) -> None:
    storage = await open_storage(database_url, runner="one")
    assert (await storage.examine_audit()).number == 0
    for _ in range(5):
        await storage.add_audit(entry(owner=OWNER))
    state = await storage.examine_audit()
    assert (state.number, state.broken) == (5, None) and state.hash == await storage.audit_hash(5)
    assert await storage.audit_hash(6) is None
    await storage.close()
    query(database_url, harm)
    storage = await open_storage(database_url, runner="one")
    assert (await storage.examine_audit()).broken == number
    await storage.close()


async def test_two_processes_append_to_one_chain(database_url: str) -> None:
    both = [await open_storage(database_url, runner=name, lock=False) for name in ("one", "two")]
    await asyncio.gather(*(each.add_audit(entry()) for _ in range(20) for each in both))
    state = await both[0].examine_audit()
    assert (state.number, state.broken) == (40, None)
    for each in both:
        await each.close()
