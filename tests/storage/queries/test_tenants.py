"""Tenants whole: an export is all of one owner's and nothing else, and a purge leaves nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, insert, text

from storage import (
    ClosedItem,
    KeyedRequest,
    NotFound,
    Notice,
    Park,
    Purged,
    RunAppend,
    RunLost,
    Storage,
    StoredWebhook,
    metadata,
)
from storage.queries.retention import RESPONSES, SEGMENTS
from storage.queries.tenants import ROWS, naming
from tests.support.making import (
    OTHER,
    OWNER,
    call,
    entry,
    finish,
    instructions,
    key,
    message,
    new,
    now,
    output,
    record,
    rows,
    turn,
)

Rows = dict[str, list[tuple[object, ...]]]


async def fill(storage: Storage, owner: str) -> None:
    """Some of everything, in flight and ended, under names of the owner's own."""
    p = owner
    await storage.create_key(key(f"{p}.key", owner), entry=entry())
    hook = StoredWebhook(f"{p}.wh", owner, "https://example.com", b"s", ("response.completed",), now())
    await storage.add_webhook(hook, entry=entry())
    await storage.create_conversation(owner, f"{p}.c1", now(), b"{}", [message("seed"), message("shared")])
    await turn(storage, f"{p}.t1", message("m1"), owner=owner, conversation=f"{p}.c1")
    await storage.delete_conversation_item(owner, f"{p}.c1", "seed", now())
    await turn(storage, f"{p}.r1", message("shared"), owner=owner)
    await turn(storage, f"{p}.r2", message("m3"), owner=owner, previous=f"{p}.r1")
    await storage.delete_response(owner, f"{p}.r1", now())
    claim = await storage.start_response(new(f"{p}.waits", owner=owner))
    closed = (ClosedItem(0, call(f"{p}.fc", "a")), ClosedItem(1, call(f"{p}.fd", "b")))
    park = Park(10**16, 0)
    assert not await storage.append([RunAppend(f"{p}.waits", claim.fence, closed=closed, park=park)])
    await storage.add_tool_outputs(owner, f"{p}.waits", [output("a")], now())
    await storage.start_response(new(f"{p}.t2", message("m4"), owner=owner, conversation=f"{p}.c1"))
    request = KeyedRequest(owner, "/v1/responses", "key", b"hash", now())
    keyed = new(f"{p}.keyed", message("m5"), owner=owner)
    claim = await storage.start_response(replace(keyed, request=request, metadata={"k": "v"}))
    notice = Notice(f"{p}.evt", "response.completed", b"{}", now())
    end = replace(finish(), notice=notice)
    assert not await storage.append([RunAppend(f"{p}.keyed", claim.fence, finish=end)])
    await storage.begin_request(KeyedRequest(owner, "/v1/completions", "key", b"hash", now()))
    await storage.start_response(new(f"{p}.unstored", owner=owner, store=False))


async def everything(storage: Storage) -> Rows:
    """Every row of every table, apart from what the processes know of each other and from the audit log."""
    names = metadata.tables.keys() - {"commits", "runners", "audit", "audit_head"}
    return await storage._read(
        lambda conn: {name: sorted(map(tuple, conn.execute(text(f"SELECT * FROM {name}")))) for name in names}
    )


async def purge(storage: Storage, owner: str = OWNER, **options: bool) -> Purged:
    total = Purged()
    async for step in storage.purge(owner, now(), entry=entry(), **options):
        total += step
    return total


async def test_a_purge_leaves_nothing_of_an_owner_and_everything_of_the_others(storage: Storage) -> None:
    await fill(storage, OTHER)
    before = await everything(storage)
    await fill(storage, OWNER)
    would_go = await storage.purgeable(OWNER, now())
    went = await purge(storage, with_keys=True)
    assert replace(would_go, runs=()) == replace(went, runs=()) and {*would_go.runs} == {*went.runs}
    in_flight = {f"{OWNER}.waits", f"{OWNER}.t2", f"{OWNER}.unstored"}
    assert set(went.runs) == in_flight
    assert replace(went, runs=()) == Purged(responses=7, conversations=1, webhooks=1, keys=1)
    after = await everything(storage)
    [key] = set(after.pop("api_keys")) - set(before.pop("api_keys"))
    assert OWNER in key  # revoked, not forgotten
    [tenant] = set(after.pop("owners")) - set(before.pop("owners"))
    assert OWNER in tenant
    assert [k.revoked_at is None for k in await storage.list_keys()] == [True, False]
    assert after == before
    assert await purge(storage) == Purged()


async def test_a_purge_that_is_killed_is_begun_again(storage: Storage) -> None:
    await fill(storage, OWNER)
    await storage.revoke_key(f"{OWNER}.key", now(), entry=entry())
    kills = 0
    while (await rows(storage)).keys() != {"api_keys", "owners"}:
        async with aclosing(storage.purge(OWNER, now(), entry=entry())) as steps:
            await anext(steps)
        kills += 1
    assert 3 < kills < 20


async def test_a_run_in_flight_writes_nothing_after_the_purge(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    claim = await storage.start_response(new("r1", message("m1"), conversation="c1"))
    assert (await purge(storage)).runs == ("r1",)
    append = RunAppend("r1", claim.fence, records=(record(2),), finish=finish(append=True))
    assert isinstance((await storage.append([append]))["r1"], RunLost)
    assert await rows(storage) == {}


async def test_what_comes_while_a_purge_is_at_work_stays(storage: Storage) -> None:
    await turn(storage, "old", message("m1"))
    async with aclosing(storage.purge(OWNER, now(), entry=entry())) as steps:
        await turn(storage, "new", message("m1"), message("m2"), previous="old")
        await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m3")])
        async for _ in steps:
            pass
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "old")
    history = await storage.history(OWNER, previous_response_id="new")
    assert [h.item.id for h in history] == ["m1", "m2", "new.out"]
    assert len(await storage.history(OWNER, conversation_id="c1")) == 1


async def test_a_run_that_starts_while_others_are_removed_goes_like_them(storage: Storage) -> None:
    """It was asked for before the purge began, and planned for a while."""
    await turn(storage, "old", message("m1"))
    late, went, claim = new("late", message("m2")), Purged(), None
    async for step in storage.purge(OWNER, now(), entry=entry()):
        went += step
        if step.responses and claim is None:
            claim = await storage.start_response(late)
    assert claim is not None
    assert (went.responses, went.runs) == (2, ("late",))
    assert isinstance(
        (await storage.append([RunAppend("late", claim.fence, records=(record(2),))]))["late"], RunLost
    )
    assert await rows(storage) == {}


async def test_a_step_of_a_purge_does_not_walk_over_what_those_before_it_have_hidden(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if storage.shared:
        pytest.skip("counts what SQLite does")
    columns = {"owner": OWNER, "model": "m", "background": False, "store": True, "status": "completed"}
    columns |= {"head": b"{}", "echo": b"", "plan": b"", "completed_at": 1}
    many = [columns | {"id": f"r{number}", "created_at": number} for number in range(40 * RESPONSES)]
    await storage._write(lambda conn: conn.execute(insert(metadata.tables["responses"]), many))
    read, ticks = storage._read, []

    async def counted(job: Callable[[Connection], Any]) -> Any:
        def count(conn: Connection) -> Any:
            with instructions(conn) as hundreds:
                found = job(conn)
            ticks.append(len(hundreds))
            return found

        return await read(count)

    monkeypatch.setattr(storage, "_read", counted)
    hiding = [step async for step in storage.purge(OWNER, now(), entry=None) if not step.responses]
    assert len(hiding) == 40 and max(ticks) == ticks[0]  # the first also learns what tables there are


async def test_much_goes_in_short_steps(storage: Storage) -> None:
    many = [message(f"i{n}") for n in range(2 * ROWS + 1)]
    await storage.create_conversation(OWNER, "c1", now(), b"{}", many)
    claim = await storage.start_response(new("long"))
    for begin in range(2, 2 + 40 * 2 * SEGMENTS, 40):
        log = tuple(record(seq) for seq in range(begin, begin + 40))
        assert not await storage.append([RunAppend("long", claim.fence, records=log)])
    for number in range(RESPONSES):
        await turn(storage, f"r{number}")
    steps = [step async for step in storage.purge(OWNER, now(), entry=entry())]
    assert len(steps) > 8
    assert max(step.responses for step in steps) <= RESPONSES
    assert await rows(storage) == {}


async def test_whether_an_owner_is_known_is_asked_of_indexes(storage: Storage) -> None:
    """But for two short tables: chunks and notices, of which there may be millions, are not gone through."""
    without = set()
    for column in naming():
        table = metadata.tables[column.table.name]
        whole = [index for index in table.indexes if index.dialect_options["sqlite"]["where"] is None]
        firsts = [next(iter(table.primary_key.columns)), *(next(iter(index.columns)) for index in whole)]
        if not any(first is column for first in firsts):
            without.add(table.name)
    assert without == {"audit", "queue_shares"}
    await fill(storage, OWNER)
    assert [await storage.owner_known(owner) for owner in (OWNER, OTHER)] == [True, False]
    # What is left of an owner who was purged is what the audit log tells.
    await storage.add_audit(entry(owner=OTHER))
    assert await storage.owner_known(OTHER)


# ------------------------------------------------------------------------------------------------------------
# Export


async def test_an_export_is_what_its_owner_can_read(storage: Storage) -> None:
    await fill(storage, OWNER)
    await fill(storage, OTHER)
    seen = []
    after = None
    while page := await storage.export_responses(OWNER, after=after, limit=2):
        for each in page:
            assert each.response == await storage.get_response(OWNER, each.response.id)
            own = await storage.input_items(OWNER, each.response.id, limit=99, order="asc")
            assert each.input == own.data
            seen.append(each.response.id)
        after = (page[-1].response.created_at, page[-1].response.id)
    assert seen == [r.id for r in (await storage.list_responses(OWNER, limit=99, order="asc")).data]
    assert seen == [f"{OWNER}.{name}" for name in ("t1", "r2", "waits", "t2", "keyed")]
    [conversation] = await storage.export_conversations(OWNER, after=None, limit=9)
    assert conversation == await storage.get_conversation(OWNER, f"{OWNER}.c1")
    found = await storage.export_conversation_items(OWNER, conversation.id, after=-1, limit=99)
    listed = await storage.list_conversation_places(OWNER, conversation.id, limit=99, order="asc")
    assert [each.item for each in found] == [place.item for place in listed.data]
    assert await storage.export_conversation_items(OTHER, conversation.id, after=-1, limit=99) == ()


async def test_an_export_goes_on_behind_what_was_deleted_meanwhile(storage: Storage) -> None:
    at = now()
    for name in ("a", "b", "c"):
        claim = await storage.start_response(new(name, created_at=at))
        assert not await storage.append([RunAppend(name, claim.fence, finish=finish())])
        await storage.create_conversation(OWNER, name, at, b"{}", [message(f"{name}{n}") for n in range(3)])
    [first] = await storage.export_responses(OWNER, after=None, limit=1)
    assert first.response.id == "a"
    await storage.delete_response(OWNER, "a", now())
    assert [r.response.id for r in await storage.export_responses(OWNER, after=(at, "a"), limit=9)] == [
        "b",
        "c",
    ]
    [position] = await storage.export_conversation_items(OWNER, "a", after=-1, limit=1)
    await storage.delete_conversation_item(OWNER, "a", "a0", now())
    rest = await storage.export_conversation_items(OWNER, "a", after=position.position, limit=9)
    assert [each.item.id for each in rest] == ["a1", "a2"]
    await storage.delete_conversation(OWNER, "a", now())
    assert await storage.export_conversation_items(OWNER, "a", after=0, limit=9) == ()
    assert [c.id for c in await storage.export_conversations(OWNER, after=(at, "a"), limit=9)] == ["b", "c"]
