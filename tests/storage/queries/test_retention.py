"""Retention: what goes by itself goes in order, in short steps, and takes nothing with it that is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from storage import (
    CONVERSATION_BYTES,
    ClosedItem,
    ConversationChange,
    ConversationFull,
    EventsExpired,
    Limits,
    NewFork,
    NewItem,
    NotFound,
    Notice,
    Park,
    Record,
    RunAppend,
    Storage,
    StoredWebhook,
    Swept,
    Usage,
    open_storage,
)
from storage.queries import conversations, garbage, responses, retention
from storage.queries.retention import RESPONSES, SEGMENTS
from tests.support.making import (
    OTHER,
    OWNER,
    RUNNER,
    call,
    check,
    entry,
    finish,
    instructions,
    message,
    new,
    now,
    output,
    plans,
    queries,
    query,
    record,
    rows,
    turn,
    url,
)

SECOND = 1_000_000


async def sweep(storage: Storage, at: int | None = None, **limits: int) -> Swept:
    """A whole sweep; what went."""
    total = Swept()
    async for step in storage.sweep(Limits(**limits), now() if at is None else at):
        total += step
    return total


async def alive(storage: Storage, owner: str = OWNER) -> list[str]:
    return [r.id for r in (await storage.list_responses(owner, limit=1000, order="asc")).data]


async def ended_at(storage: Storage, id: str) -> int:
    at = (await storage.get_response(OWNER, id)).completed_at
    assert at is not None
    return at


async def sizes(storage: Storage) -> dict[str, int]:
    """What retention measured of each response."""
    query = text("SELECT id, num_bytes FROM responses")
    return await storage._read(lambda conn: {id: size for id, size in conn.execute(query)})


async def write_log(storage: Storage, id: str, num_segments: int) -> None:
    """A whole run whose log has about so many segments."""
    claim = await storage.start_response(new(id))
    for begin in range(2, 2 + 40 * num_segments, 40):
        log = tuple(record(seq) for seq in range(begin, begin + 40))
        assert not await storage.append([RunAppend(id, claim.fence, records=log)])
    assert not await storage.append([RunAppend(id, claim.fence, finish=finish())])


# ------------------------------------------------------------------------------------------------------------
# Responses


async def test_responses_go_at_their_age_counted_from_their_end(storage: Storage) -> None:
    claim = await storage.start_response(new("slow"))
    for id in ("r1", "r2", "r3"):
        await turn(storage, id, message(f"{id}.in"))
    await storage.start_response(new("running"))
    assert not await storage.append([RunAppend("slow", claim.fence, finish=finish("failed"))])
    at = await ended_at(storage, "r2")
    assert await sweep(storage, at + SECOND, age=SECOND) == Swept(responses=2)
    assert await alive(storage) == ["slow", "r3", "running"]
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r2")
    assert await sweep(storage, at + SECOND, age=SECOND) == Swept()
    assert await sweep(storage, now() + 3600 * SECOND, age=SECOND) == Swept(responses=2)
    assert await alive(storage) == ["running"]


async def test_no_limit_lets_nothing_go(storage: Storage) -> None:
    await turn(storage, "r1")
    assert await sweep(storage, now() + 10**15) == Swept()
    assert await alive(storage) == ["r1"]


async def test_the_oldest_go_beyond_an_owners_number(storage: Storage) -> None:
    await storage.start_response(new("running"))
    for number in range(2 * RESPONSES + 5):
        await turn(storage, f"r{number}", message(f"m{number}"))
        await turn(storage, f"o{number}", message(f"m{number}"), owner=OTHER)
    await storage.delete_response(OTHER, "o0", now())
    assert await sweep(storage, max_responses=3) == Swept(responses=4 * RESPONSES + 3)
    last = 2 * RESPONSES + 4
    assert await alive(storage) == ["running", *(f"r{n}" for n in range(last - 2, last + 1))]
    assert await alive(storage, OTHER) == [f"o{n}" for n in range(last - 2, last + 1)]


async def test_the_oldest_go_beyond_an_owners_bytes(storage: Storage) -> None:
    for number in range(20):
        await turn(storage, f"r{number:02}", message(f"m{number:02}", b"x" * 10_000))
    await turn(storage, "other", message("m", b"x" * 50_000), owner=OTHER)
    assert await sweep(storage, max_bytes=1 << 30) == Swept()
    [size] = {num for id, num in (await sizes(storage)).items() if id.startswith("r")}
    assert 10_000 < size < 10_200
    assert await sweep(storage, max_bytes=6 * size) == Swept(responses=14)
    assert await alive(storage) == [f"r{number}" for number in range(14, 20)]
    assert await alive(storage, OTHER) == ["other"]
    # What comes later is measured later.
    await turn(storage, "r20", message("m20", b"x" * 10_000))
    assert await sweep(storage, max_bytes=6 * size) == Swept(responses=1)


async def test_a_size_is_that_of_request_items_and_log_and_shrinks_with_the_log(storage: Storage) -> None:
    first = new("r1", message("m1", b"i" * 100))
    claim = await storage.start_response(replace(first, head=b"h" * 10, echo=b"e" * 20, plan=b"p" * 30))
    log = (Record(2, 1, b"v" * 1000, token_ids=(1, 2, 3)),)
    assert not await storage.append([RunAppend("r1", claim.fence, records=log, finish=finish())])
    await sweep(storage, max_bytes=1 << 30)
    opening = len(record(0, 2).events)
    assert await sizes(storage) == {"r1": 10 + 20 + 30 + 100 + opening + 1000 + 12}
    await sweep(storage, now() + SECOND, log_age=1, max_bytes=1 << 30)
    await sweep(storage, max_bytes=1 << 30)
    assert await sizes(storage) == {"r1": 10 + 20 + 30 + 100}


async def test_what_an_owner_stores_is_what_its_responses_and_conversations_take(storage: Storage) -> None:
    big = b"x" * 10_000
    assert await storage.usage(OWNER) == Usage(0, 0)
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("seed", big)])
    assert (await storage.usage(OWNER)).held == 10_000 + 128 + 256 + 2
    await storage.add_conversation_items(OWNER, "c1", [message("more", big), message("seed", big)])
    await storage.update_conversation(OWNER, "c1", ConversationChange(b'{"a":"b"}'))
    in_c1 = 2 * (10_000 + 128) + 256 + 9
    assert (await storage.usage(OWNER)).held == in_c1
    await turn(storage, "t1", message("m1", big), conversation="c1", outputs=[])
    await turn(storage, "r1", message("m2", big), outputs=[])
    await turn(storage, "r2", message("m3", big), previous="r1", outputs=[])
    await sweep(storage, max_bytes=1 << 30)
    in_c1 += 10_000 + 128
    usage = await storage.usage(OWNER)
    # The turn's item counts where it stands, in the conversation, and not once more for its response.
    assert usage.held == in_c1 and 20_000 < usage.total - usage.held < 21_000
    # What a later response needs of a deleted one is held; and then it is not.
    await storage.delete_response(OWNER, "r1", now())
    assert (await storage.usage(OWNER)).held == in_c1 + 10_000
    await storage.delete_response(OWNER, "r2", now())
    assert (await storage.usage(OWNER)).held == in_c1
    # Where the conversation is gone, its turns' responses are measured with their items.
    await storage.delete_conversation_item(OWNER, "c1", "more", now())
    assert (await storage.usage(OWNER)).held == in_c1 - 10_128
    await storage.delete_conversation(OWNER, "c1", now())
    await storage.delete_response(OWNER, "t1", now())
    assert await storage.usage(OWNER) == Usage(0, 0)
    assert await storage.usage(OTHER) == Usage(0, 0)


async def test_what_is_stored_is_counted_by_indexes_alone(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    columns = retention._held_columns()

    def planned(conn: Connection) -> list[str]:
        with plans(conn) as steps:
            retention.num_bytes(conn)
            retention.num_bytes_by_owner(conn)
            retention.usage(conn, OWNER)
            retention._owners_beyond(conn, Limits(max_bytes=1), None, None)
        return [step for step in steps if step.startswith(("SCAN ", "SEARCH ")) and " ROW" not in step]

    steps = await storage._read(planned)
    assert len(steps) > 4 * len(columns) > 0
    assert [step for step in steps if " USING COVERING INDEX " not in step] == [], "these read whole rows"
    await storage.close()


MEASURED = f"""
INSERT INTO responses
  (id, owner, created_at, completed_at, status, model, background, store, head, echo, plan, num_bytes)
WITH RECURSIVE ages (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM ages WHERE n < 3000)
SELECT 'old' || n, '{OWNER}', n, n, 'completed', 'm', 0, 1, x'', x'', x'', CASE WHEN n <= 3 THEN 0 ELSE 9 END
FROM ages
"""


async def test_what_is_still_to_be_measured_is_found_behind_all_that_is_younger(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    query(storage.url, MEASURED)

    def found(conn: Connection) -> tuple[list[str], set[str], int]:
        with instructions(conn) as ticks:
            owners = retention._unmeasured_owners(conn, None)
            ids = set(retention._measure(conn, OWNER))
        return list(owners), ids, len(ticks)

    owners, ids, ticks = await storage._read(found)
    assert (owners, ids) == ([OWNER], {"old1", "old2", "old3"})
    assert ticks < 30, "it is not one instruction for each of the others"
    await storage.close()


IN_FLIGHT = f"""
INSERT INTO runs
  (response_id, owner, fence, state, attempt, next_seq, segment_end, cancel_requested, priority, created_at)
WITH RECURSIVE ages (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM ages WHERE n < 1000)
SELECT 'run' || n, '{OWNER}', 1, 'queued', 0, 0, 0, 0, 0, n FROM ages
"""
THEIR_RESPONSES = """
INSERT INTO responses (id, owner, created_at, status, model, background, store, head, echo, plan)
SELECT response_id, owner, created_at, 'queued', 'm', 1, 1, x'', x'', x'' FROM runs
"""
TAKEN_OUT = f"""
INSERT INTO conversation_items (conversation_id, position, owner, item_id, direction, deleted_at)
WITH RECURSIVE places (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM places WHERE n < 1000)
SELECT 'c1', n, '{OWNER}', 'm' || n, 'in', 9 FROM places
"""


async def test_deleted_items_are_not_compared_with_each_run_in_flight(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    queries(storage.url, [IN_FLIGHT, THEIR_RESPONSES, TAKEN_OUT])

    def counted(conn: Connection) -> tuple[int, int]:
        with instructions(conn) as at_a_sweep:
            assert retention._with_deleted_items(conn, "") == []
        with instructions(conn) as at_a_turns_end:
            assert garbage.collect_conversation(conn, "c1") is None
        return len(at_a_sweep), len(at_a_turns_end)

    at_a_sweep, at_a_turns_end = await storage._write(counted)
    assert at_a_sweep < 500, "it is some ten instructions for each item"
    assert at_a_turns_end < 30, "it is not one instruction for each item, or each run"
    await storage.close()


async def test_responses_go_for_what_conversations_leave_them(storage: Storage) -> None:
    big = b"x" * 10_000
    for number in range(6):
        await turn(storage, f"r{number}", message(f"m{number}", big))
        await turn(storage, f"o{number}", message(f"m{number}", big), owner=OTHER)
    items = [message(f"c{number}", big) for number in range(3)]
    await storage.create_conversation(OWNER, "c1", now(), b"{}", items)
    assert await sweep(storage, max_bytes=65_000) == Swept(responses=3)
    assert await alive(storage) == ["r3", "r4", "r5"] and len(await alive(storage, OTHER)) == 6
    total = Swept()
    async for step in storage.sweep(Limits(max_bytes=55_000), now(), OWNER):
        total += step
    assert total == Swept(responses=1) and len(await alive(storage, OTHER)) == 6
    assert await sweep(storage, max_bytes=30_000) == Swept(responses=2 + 4)
    assert await alive(storage) == [] and len(await alive(storage, OTHER)) == 2


async def test_idle_conversations_go_and_those_in_use_stay(storage: Storage) -> None:
    def at(seconds: int) -> int:
        return begun + seconds * SECOND

    begun = now()
    for number in range(2 * RESPONSES):
        await storage.create_conversation(OWNER, f"c{number}", begun, b"{}", [message("shared")])
    for id in ("busy", "added", "renamed", "old"):
        await storage.create_conversation(OWNER, id, begun, b"{}", [message(f"in {id}")])
    await storage.start_response(new("r1", conversation="busy", created_at=begun))
    await storage.add_conversation_items(OWNER, "added", [message("late")], at(50))
    await storage.update_conversation(OWNER, "renamed", ConversationChange(b'{"a":"b"}'), at(60))
    assert await sweep(storage, at(100)) == Swept()
    assert await sweep(storage, at(99), conversation_age=100 * SECOND) == Swept()
    assert await sweep(storage, at(100), conversation_age=100 * SECOND) == Swept(
        conversations=2 * RESPONSES + 1
    )
    for id in ("busy", "added", "renamed"):
        assert (await storage.get_conversation(OWNER, id)).id == id
    with pytest.raises(NotFound):
        await storage.get_conversation(OWNER, "old")
    assert await sweep(storage, at(155), conversation_age=100 * SECOND) == Swept(conversations=1)
    assert await storage.get_items(OWNER, ["shared", "in old", "late"]) == {}


async def test_a_conversation_holds_so_many_items(storage: Storage) -> None:
    def named(*ids: str) -> list[NewItem]:
        return [message(id) for id in ids]

    await storage.create_conversation(OWNER, "c1", now(), b"{}", named("a", "b"))
    await storage.add_conversation_items(OWNER, "c1", named("c"), limit=3)
    with pytest.raises(ConversationFull):
        await storage.add_conversation_items(OWNER, "c1", named("d"), limit=3)
    with pytest.raises(ConversationFull):
        await storage.start_response(replace(new("r1", conversation="c1"), conversation_limit=3))
    await storage.delete_conversation_item(OWNER, "c1", "a", now())
    await storage.add_conversation_items(OWNER, "c1", named("d"), limit=3)
    held = await storage.list_conversation_places(OWNER, "c1", limit=9, order="asc")
    assert [place.item.id for place in held.data] == ["b", "c", "d"]


async def test_what_lives_keeps_its_history(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("seed")])
    await turn(storage, "t1", message("m1"), conversation="c1")
    await turn(storage, "t2", message("m2"), conversation="c1", status="incomplete")
    await turn(storage, "r1", message("m3"))
    await turn(storage, "r2", message("m4"), previous="r1")
    running = new("r3", message("m5"), previous="r2")
    await storage.start_response(running)
    await storage.start_response(new("t3", message("m6"), conversation="c1"))
    before = await storage.history(OWNER, conversation_id="c1")
    assert await sweep(storage, now() + SECOND, age=1) == Swept(responses=4)
    assert await storage.history(OWNER, conversation_id="c1") == before
    assert [h.response_status for h in before][1:] == ["completed"] * 2 + ["incomplete"] * 2
    pinned = await storage.history(OWNER, previous_response_id="r3", as_of=running.created_at)
    assert [h.item.id for h in pinned] == ["m3", "r1.out", "m4", "r2.out", "m5"]
    assert await alive(storage) == ["r3", "t3"]


async def test_a_chain_is_gone_when_its_last_response_goes(storage: Storage) -> None:
    previous = None
    for number in range(60):
        await turn(storage, f"r{number}", message(f"m{number}"), previous=previous)
        previous = f"r{number}"
    await turn(storage, "fork", message("f"), previous="r20")
    await sweep(storage, max_responses=2)
    assert await alive(storage) == ["r59", "fork"]
    assert len(await storage.history(OWNER, previous_response_id="fork")) == 44
    await storage.delete_response(OWNER, "r59", now())
    assert len(await storage.history(OWNER, previous_response_id="fork")) == 44
    assert (await rows(storage))["responses"] == 22
    await sweep(storage, now() + SECOND, age=1)
    assert await rows(storage) == {}


# ------------------------------------------------------------------------------------------------------------
# Logs


async def test_a_log_goes_after_its_own_time_and_the_response_stays(storage: Storage) -> None:
    await turn(storage, "r1", message("m1"))
    running = await storage.start_response(new("running"))
    await turn(storage, "r2", message("m2"))
    at = await ended_at(storage, "r1")
    stored = await storage.get_response(OWNER, "r1")
    assert await sweep(storage, at + SECOND, log_age=SECOND) == Swept(logs=1)
    with pytest.raises(EventsExpired) as expired:
        await storage.records("r1", after=-1)
    assert (expired.value.response_id, expired.value.erased_at) == ("r1", at + SECOND)
    with pytest.raises(EventsExpired):
        await storage.records("r1", after=2)  # whether something would follow is not known any more
    assert await storage.get_response(OWNER, "r1") == replace(stored, log_erased_at=at + SECOND)
    assert [i.id for i in (await storage.input_items(OWNER, "r1", limit=9)).data] == ["m1"]
    await turn(storage, "r3", message("m3"), previous="r1")
    history = await storage.history(OWNER, previous_response_id="r3")
    assert [h.item.id for h in history] == ["m1", "r1.out", "m3", "r3.out"]
    assert await storage.records("r2", after=-1)
    # A run in flight has a log for as long as it takes.
    assert await sweep(storage, now() + 3600 * SECOND, log_age=SECOND) == Swept(logs=2)
    assert len(await storage.records("running", after=-1)) == 1
    assert not await storage.append(
        [RunAppend("running", running.fence, records=(record(2),), finish=finish())]
    )
    assert await sweep(storage, now() + 7200 * SECOND, log_age=SECOND) == Swept(logs=1)


async def test_a_long_log_goes_in_short_steps_and_a_cut_sweep_is_taken_up(storage: Storage) -> None:
    await write_log(storage, "long", 3 * SEGMENTS)
    await turn(storage, "short")
    async with aclosing(storage.sweep(Limits(log_age=1), now() + SECOND)) as steps:
        assert await anext(steps) == Swept(logs=1)
    assert (await rows(storage))["segments"] > SEGMENTS
    for after in (-1, 50):
        with pytest.raises(EventsExpired):
            await storage.records("long", after=after)
    # Whoever has got that far already is not stopped.
    assert (await storage.records("long", after=80 * SEGMENTS))[0].first_seq == 80 * SEGMENTS + 1
    assert await sweep(storage, now() + SECOND, log_age=1) == Swept(logs=1)
    assert not (await rows(storage)).keys() & {"segments", "records"}


async def test_a_response_with_a_long_log_goes_in_short_steps_too(storage: Storage) -> None:
    await write_log(storage, "long", 3 * SEGMENTS)
    async with aclosing(storage.sweep(Limits(age=1), now() + SECOND)) as steps:
        assert await anext(steps) == Swept(responses=1)
        with pytest.raises(NotFound):
            await storage.get_response(OWNER, "long")
        assert await anext(steps) == Swept()
    assert (await rows(storage))["segments"] > SEGMENTS
    assert await sweep(storage) == Swept()
    assert await rows(storage) == {}


async def chain(storage: Storage, length: int) -> str:
    """Responses of which each continues the one before it, the first one with a long log, and all but the
    last one deleted; the last one's id."""
    await write_log(storage, "t0", 2 * SEGMENTS)
    for number in range(1, length):
        await turn(storage, f"t{number}", message(f"m{number}"), previous=f"t{number - 1}")
    for number in range(length - 1):
        await storage.delete_response(OWNER, f"t{number}", now())
    return f"t{length - 1}"


def noted_steps(storage: Storage, monkeypatch: pytest.MonkeyPatch, *tables: str) -> list[tuple[int, ...]]:
    """By how many rows each transaction from now on shrinks these tables, noted as they are committed."""
    count = text("SELECT " + ", ".join(f"(SELECT count(*) FROM {table})" for table in tables))
    steps, submit = list[tuple[int, ...]](), storage._writer.submit

    def noted(call: Callable[[Connection], object], **how: bool) -> asyncio.Future[object]:
        def counted(conn: Connection) -> object:
            before = conn.execute(count).one()
            result = call(conn)
            steps.append(
                tuple(was - left for was, left in zip(before, conn.execute(count).one(), strict=True))
            )
            return result

        return submit(counted, **how)

    monkeypatch.setattr(storage._writer, "submit", noted)
    return steps


async def test_a_deletion_goes_in_short_steps(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others write in between, however long a log or a chain of deleted responses is."""
    monkeypatch.setattr(garbage, "TOMBSTONES", 10, raising=False)
    steps = noted_steps(storage, monkeypatch, "segments", "responses")
    last = await chain(storage, 35)
    before = (await rows(storage))["responses"]
    await storage.delete_response(OWNER, last, now())
    assert before == 35 and await rows(storage) == {}
    most = [max(each) for each in zip(*steps, strict=True)]
    assert most == [SEGMENTS, 10]


async def test_what_a_crash_leaves_of_a_deletion_is_taken_up(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "TOMBSTONES", 4, raising=False)
    cut, whole = 0, False
    while not whole:
        last = await chain(storage, 10)
        await storage._write(partial(responses.delete_one, owner=OWNER, id=last, now=now()))
        async with aclosing(retention.erase(storage._read, storage._write, [last])) as steps:
            for _ in range(cut):
                whole = await anext(steps, "over") == "over"
        with pytest.raises(NotFound):
            await storage.get_response(OWNER, last)
        assert await sweep(storage) == Swept()
        assert await rows(storage) == {}
        cut += 1
    assert cut > 3


@pytest.mark.parametrize("verb", ["delete_conversation", "clear_conversation"])
async def test_a_conversation_goes_in_short_steps(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Others write in between, however many or large its items are; an item that is as large as a step may
    be is the last one of its step."""
    monkeypatch.setattr(garbage, "STEP_BYTES", 10 * 4096, raising=False)
    bodies = [b'"small"'] * 12 + [b'"%s"' % (b"x" * 40960)] * 3 + [b'"small"'] * 20
    items = [message(f"m{number}", body) for number, body in enumerate(bodies)]
    await storage.create_conversation(OWNER, "c1", now(), b"{}", items)
    steps = noted_steps(storage, monkeypatch, "conversation_items", "items")
    await getattr(storage, verb)(OWNER, "c1", now())
    assert [places for places, _ in steps] == [0, 10, 3, 1, 1, 10, 10, 0]
    assert all(places == num_items for places, num_items in steps)
    if verb == "clear_conversation":
        assert (await storage.usage(OWNER)).total == CONVERSATION_BYTES + 2
        await storage.delete_conversation(OWNER, "c1", now())
    assert await rows(storage) == {} and (await storage.usage(OWNER)).total == 0


async def test_what_a_crash_leaves_of_a_conversation_is_taken_up(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that was deleted before goes with its last fork, in steps as well."""
    monkeypatch.setattr(garbage, "STEP_BYTES", 3 * 4096, raising=False)
    cut, whole = 0, False
    while not whole:
        names = [f"m{number}" for number in range(10)]
        await storage.create_conversation(OWNER, "c1", now(), b"{}", [message(name) for name in names])
        await storage.fork_conversation(OWNER, "c1", NewFork("c2", now(), "m7"))
        await storage.add_conversation_items(OWNER, "c2", [message(f"n{number}") for number in range(4)])
        await storage.delete_conversation(OWNER, "c1", now())
        assert set(await storage.get_items(OWNER, names)) == set(names[:8])
        await storage._write(partial(conversations.delete, owner=OWNER, id="c2", now=now()))
        async with aclosing(retention.collect(storage._write, ["c2"])) as steps:
            for _ in range(cut):
                whole = await anext(steps, "over") == "over"
        assert await storage.get_items(OWNER, [*names, "n0", "n3"]) == {}
        with pytest.raises(NotFound):
            await storage.get_conversation(OWNER, "c2")
        assert await sweep(storage) == Swept()
        assert await rows(storage) == {}
        cut += 1
    assert cut > 4


async def test_a_deletion_that_was_cut_stands_in_no_other_ones_way(storage: Storage) -> None:
    """What is left of a log when the last response goes that needs its own goes with both."""
    await write_log(storage, "long", 2 * SEGMENTS)
    await turn(storage, "next", message("m1"), previous="long")
    await storage._write(partial(responses.delete_one, owner=OWNER, id="long", now=now()))
    assert (await rows(storage))["segments"] > 2 * SEGMENTS
    await storage.delete_response(OWNER, "next", now())
    assert await rows(storage) == {}


async def test_a_log_that_is_being_erased_has_no_gap(storage: Storage) -> None:
    await write_log(storage, "long", 3 * SEGMENTS)
    await turn(storage, "next", previous="long")
    whole = await storage.records("long", after=-1, limit_bytes=1 << 30)
    await storage._write(partial(responses.delete_one, owner=OWNER, id="long", now=now()))
    lengths = []
    async for _ in retention.erase(storage._read, storage._write, ["long"]):
        found = await storage.records("long", after=-1, limit_bytes=1 << 30)
        assert found == whole[: len(found)]
        lengths.append(len(found))
    assert len(whole) > lengths[0] > lengths[1] > lengths[-1] == 0


async def test_what_later_responses_need_of_deleted_ones_is_measured_again(storage: Storage) -> None:
    """A conversation counts its items itself, for as long as it lists them."""
    big = b"x" * 10_000
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    await turn(storage, "t1", message("m1", big), conversation="c1", outputs=[])
    await turn(storage, "r1", message("m2"), previous="t1", outputs=[])
    await storage.delete_response(OWNER, "t1", now())
    await storage.delete_conversation_item(OWNER, "c1", "m1", now())
    await sweep(storage)
    assert (await storage.usage(OWNER)).held == 10_000 + 256 + 2


async def test_the_walk_over_logs_ends_at_the_first_that_is_too_young(storage: Storage) -> None:
    old = [f"a{n}" for n in range(SEGMENTS + 5)]
    for id in old:
        await turn(storage, id)
    waiting = new("waiting")
    await storage.start_response(waiting)
    at = now()
    for number in range(3 * SEGMENTS):
        await turn(storage, f"b{number}")
    num_reads = 0
    read = storage._read

    async def counted(job: object) -> object:
        nonlocal num_reads
        num_reads += 1
        return await read(job)

    storage._read = counted
    assert await sweep(storage, at + SECOND, log_age=SECOND) == Swept(logs=len(old))
    assert num_reads <= 6


async def test_posted_outputs_go_with_the_log(storage: Storage) -> None:
    claim = await storage.start_response(new("r1"))
    calls = (ClosedItem(0, call("i1", "call_1")),)
    assert not await storage.append([RunAppend("r1", claim.fence, closed=calls, park=Park(0, now()))])
    await storage.add_tool_outputs(OWNER, "r1", [output("call_1")], now())
    again = await storage.claim("r1")
    assert again is not None
    assert await sweep(storage, now() + SECOND, log_age=1, age=1) == Swept()
    assert (await rows(storage))["run_inputs"] == 1
    assert not await storage.append([RunAppend("r1", again.fence, finish=finish())])
    assert await sweep(storage, now() + SECOND, log_age=1) == Swept(logs=1)
    assert "run_inputs" not in (await rows(storage))


# ------------------------------------------------------------------------------------------------------------
# Together


async def test_two_sweepers_do_each_other_no_harm(storage: Storage) -> None:
    for number in range(50):
        await turn(
            storage, f"r{number}", message(f"m{number}"), previous=f"r{number - 1}" if number % 5 else None
        )
    both = await asyncio.gather(*(sweep(storage, log_age=10**12, max_responses=7) for _ in range(2)))
    assert both[0].responses + both[1].responses == 43
    assert len(await alive(storage)) == 7


async def test_nothing_is_left_of_what_an_owner_has_deleted(storage: Storage) -> None:
    hook = StoredWebhook("wh_1", OWNER, "https://example.com", b"s", ("response.completed",), now())
    await storage.add_webhook(hook, entry=entry())
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("seed")])
    await turn(storage, "t1", message("m1"), conversation="c1")
    await turn(storage, "r1", message("m2"))
    await turn(storage, "r2", message("m3"), previous="r1")
    claim = await storage.start_response(new("r3", message("m4"), previous="t1"))
    notice = Notice("evt_1", "response.completed", b"{}", now())
    end = replace(finish(), notice=notice)
    assert not await storage.append([RunAppend("r3", claim.fence, records=(record(2),), finish=end)])
    await storage.start_response(new("r4", message("m5"), previous="r2"))
    await storage.start_response(new("t2", message("m6"), conversation="c1"))
    assert (await rows(storage))["deliveries"] == 1
    await storage.delete_conversation(OWNER, "c1", now())
    for id in ("r1", "t1", "r4", "r2", "r3", "t2"):
        await storage.delete_response(OWNER, id, now())
    await storage.remove_webhook("wh_1", entry=entry())
    assert await rows(storage) == {}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ("chain", "turn", "start", "finish", "drop", "drop_conversation", "count", "age", "logs", "bytes")
        ),
        st.integers(0, 30),
    ),
    max_size=25,
)


@pytest.mark.long
@given(operations=OPERATIONS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_sweeps_never_change_what_lives(
    operations: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    storage = await open_storage(url(tmp_path_factory.mktemp("swept")), runner=RUNNER)
    histories: dict[str, list[str]] = {}
    held: dict[str, list[str]] = {}
    running: dict[str, int] = {}

    async def history(id: str) -> list[str]:
        return [h.item.id for h in await storage.history(OWNER, previous_response_id=id)]

    for number, (operation, choice) in enumerate(operations):
        id, known = f"r{number}", sorted(histories)
        ends = [end for r in known if (end := (await storage.get_response(OWNER, r)).completed_at)]
        match operation:
            case "chain":
                await turn(storage, id, message(id), previous=known[choice % len(known)] if known else None)
            case "turn":
                name = f"c{number}" if choice % 2 or not held else sorted(held)[-1]
                if name not in held:
                    await storage.create_conversation(OWNER, name, now(), b"{}")
                    held[name] = []
                await turn(storage, id, message(id), conversation=name)
                held[name] += [id, f"{id}.out"]
            case "start":
                previous = known[choice % len(known)] if known else None
                running[id] = (await storage.start_response(new(id, message(id), previous=previous))).fence
            case "finish" if running:
                ending = sorted(running)[choice % len(running)]
                assert not await storage.append([RunAppend(ending, running.pop(ending), finish=finish())])
            case "drop" if known:
                gone = known[choice % len(known)]
                await storage.delete_response(OWNER, gone, now())
                running.pop(gone, None)
            case "drop_conversation" if held:
                name = sorted(held)[choice % len(held)]
                await storage.delete_conversation(OWNER, name, now())
                del held[name]
            case "count":
                await sweep(storage, max_responses=choice + 1)
                assert len(set(await alive(storage)) - running.keys()) <= choice + 1
            case "age" if ends:
                at = ends[choice % len(ends)]
                await sweep(storage, at, age=1)
            case "logs":
                await sweep(storage, now() + SECOND, log_age=1)
            case "bytes":
                await sweep(storage, max_bytes=1 + choice * 100)
        living = await alive(storage)
        assert running.keys() <= set(living)
        for response in living:
            assert await history(response) == histories.setdefault(response, await history(response))
        histories = {response: histories[response] for response in living}
        for name, items in held.items():
            assert [h.item.id for h in await storage.history(OWNER, conversation_id=name)] == items
        for response in running:
            assert await storage.records(response, after=-1)
    await storage.close()
    check(storage.url)
