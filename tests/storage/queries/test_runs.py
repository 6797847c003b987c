"""Runs: start, append, fences, claims, tool outputs, cancel."""

from __future__ import annotations

import pytest

from storage import (
    ECHO_MARK,
    PROGRESS_EVENTS,
    ClosedItem,
    ConversationLocked,
    ConversationMoved,
    Finish,
    ItemConflict,
    NotFound,
    NotWaiting,
    OutputConflict,
    Park,
    Record,
    RunAppend,
    RunLost,
    Storage,
    UnknownCall,
)
from tests.support.making import (
    OTHER,
    OWNER,
    RUNNER,
    call,
    claim_all,
    finish,
    message,
    new,
    now,
    output,
    record,
    rows,
    turn,
)


async def test_a_run_from_start_to_end(storage: Storage) -> None:
    claim = await storage.start_response(new("r1", message("m1")))
    assert (claim.fence, claim.next_seq, claim.attempt, claim.state) == (1, 2, 1, "running")
    stored = await storage.get_response(OWNER, "r1")
    assert (stored.status, stored.output, stored.waiting) == ("in_progress", (), False)

    closed = ClosedItem(0, message("o1"))
    assert not await storage.append(
        [RunAppend("r1", 1, records=(record(2, tokens=[5, 6]),), closed=(closed,), head=b"h2")]
    )
    stored = await storage.get_response(OWNER, "r1")
    assert [item.id for item in stored.output] == ["o1"] and stored.head == b"h2"

    end = RunAppend("r1", 1, records=(record(3),), head=b"h3", finish=Finish("completed", 77, False))
    assert not await storage.append([end])
    stored = await storage.get_response(OWNER, "r1")
    assert (stored.status, stored.completed_at, stored.head) == ("completed", 77, b"h3")
    assert isinstance((await storage.append([RunAppend("r1", 1, records=(record(4),))]))["r1"], RunLost)
    assert await storage.claim("r1") is None
    assert [r.first_seq for r in await storage.records("r1", after=-1)] == [0, 2, 3]


async def test_bytes_come_back_as_they_went_in(storage: Storage) -> None:
    body = '{"text":"\\u0000 \\ud83d\\ude00 😀 é\u2028","n":1.10e5}'.encode() + bytes(range(256))
    event = b'{"type":"response.created","response":{"id":"r1",' + ECHO_MARK + b"}}"
    first = Record(0, 2, event + b"\n" + body, 1, 7, (0, 1, 2**32 - 1), body, body, 2**50)
    start = new("r1", message("m1", body))
    start = type(start)(
        **{name: getattr(start, name) for name in start.__slots__}
        | {"record": first, "echo": body, "plan": body, "head": body}
    )
    await storage.start_response(start)
    assert await storage.records("r1", after=-1) == (first,)
    stored = await storage.get_response(OWNER, "r1")
    assert (stored.head, stored.echo, stored.plan) == (body, body, body)
    assert (await storage.response_input("r1"))[0].body == body
    second = Record(2, 1, body, 0, 0, (), None, None)
    assert not await storage.append([RunAppend("r1", 1, records=(second,), head=b"\x00")])
    assert await storage.records("r1", after=1) == (second,)
    assert (await storage.get_response(OWNER, "r1")).head == b"\x00"


async def test_the_log_is_read_from_any_number(storage: Storage) -> None:
    await storage.start_response(new("r1"))
    log = [record(0, 2)]
    sizes = [1, 3, 1, 1, 5, 2, 40, 1] * 30
    for size in sizes:
        log.append(record(log[-1].first_seq + log[-1].num_events, size))
    for begin in range(1, len(log), 7):
        assert not await storage.append([RunAppend("r1", 1, records=tuple(log[begin : begin + 7]))])
    end = log[-1].first_seq + log[-1].num_events
    assert await storage.records("r1", after=-1, limit_bytes=1 << 30) == tuple(log)
    for after in [*range(0, 120), end - 2, end - 1, end, end + 5]:
        expected = tuple(r for r in log if r.first_seq + r.num_events - 1 > after)
        assert await storage.records("r1", after=after, limit_bytes=1 << 30) == expected
    read: list[Record] = []
    after = -1
    while part := await storage.records("r1", after=after, limit_bytes=1000):
        assert sum(len(r.events) for r in part[:-1]) < 1000
        read += part
        after = part[-1].first_seq + part[-1].num_events - 1
    assert read == log
    assert await storage.records("unknown", after=-1) == ()


async def test_a_stale_fence_writes_nothing_and_the_others_commit(storage: Storage) -> None:
    for id in ("r1", "r2", "r3"):
        await storage.start_response(new(id, runner=None))
    stale = await storage.claim("r1")
    assert stale is not None and (stale.fence, stale.attempt, stale.state) == (2, 1, "queued")
    assert await storage.claim("r1") is None  # this process has it already
    [claim] = [claim for claim in await claim_all(storage) if claim.response_id == "r1"]
    assert (claim.fence, claim.attempt, claim.state) == (4, 1, "running")
    refused = await storage.append(
        [
            RunAppend("r1", stale.fence, records=(record(2),), finish=finish()),
            RunAppend("r2", 2, records=(record(2),)),
            RunAppend("r3", 2, records=(record(3),)),  # a gap
            RunAppend("gone", 1, records=(record(2),)),
        ]
    )
    assert {id: type(error) for id, error in refused.items()} == {
        "r1": RunLost,
        "r3": ValueError,
        "gone": RunLost,
    }
    assert len(await storage.records("r1", after=1)) == 0
    assert len(await storage.records("r2", after=1)) == 1
    assert not await storage.append([RunAppend("r1", claim.fence, records=(record(2),), finish=finish())])
    assert (await storage.get_response(OWNER, "r1")).status == "completed"


async def test_a_bad_row_fails_its_run_only(storage: Storage) -> None:
    for id in ("r1", "r2", "r3"):
        await storage.start_response(new(id, message(f"{id}.in")))
    taken = ClosedItem(0, message("r1.in", b"another body"))
    refused = await storage.append(
        [
            RunAppend("r1", 1, records=(record(2),), closed=(ClosedItem(0, message("o1")),)),
            RunAppend("r2", 1, records=(record(2),), closed=(taken,)),
            RunAppend("r3", 1, records=(record(2),), finish=finish()),
        ]
    )
    assert list(refused) == ["r2"] and isinstance(refused["r2"], ItemConflict)
    assert len(await storage.records("r1", after=1)) == len(await storage.records("r3", after=1)) == 1
    assert len(await storage.records("r2", after=1)) == 0
    assert not await storage.append([RunAppend("r2", 1, records=(record(2),))])
    assert isinstance((await storage.append([RunAppend("r2", 1, closed=(taken,))]))["r2"], ItemConflict)


async def test_a_status_never_leaves_its_end(storage: Storage) -> None:
    await storage.start_response(new("r1", status="queued"))
    assert not await storage.append([RunAppend("r1", 1, status="in_progress")])
    assert (await storage.get_response(OWNER, "r1")).status == "in_progress"
    assert not await storage.append([RunAppend("r1", 1, status="in_progress", finish=finish("cancelled"))])
    for late in (RunAppend("r1", 1, status="in_progress"), RunAppend("r1", 1, finish=finish("completed"))):
        assert isinstance((await storage.append([late]))["r1"], RunLost)
    assert (await storage.get_response(OWNER, "r1")).status == "cancelled"


async def test_start_refuses_what_is_not_there(storage: Storage) -> None:
    await turn(storage, "foreign", owner=OTHER)
    await storage.create_conversation(OTHER, "conv-b", now(), b"{}")
    for bad, kind in (
        (new("r1", previous="unknown"), "response"),
        (new("r1", previous="foreign"), "response"),
        (new("r1", conversation="unknown"), "conversation"),
        (new("r1", conversation="conv-b"), "conversation"),
    ):
        with pytest.raises(NotFound) as missing:
            await storage.start_response(bad)
        assert missing.value.kind == kind
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r1")


async def test_items_are_stored_once(storage: Storage) -> None:
    await storage.start_response(new("r1", message("m1"), message("m2"), message("m1")))
    assert [item.id for item in await storage.response_input("r1")] == ["m1", "m2", "m1"]
    await storage.start_response(new("r2", message("m2"), message("m3")))
    with pytest.raises(ItemConflict) as conflict:
        await storage.start_response(new("r3", message("m4"), message("m2", b"other")))
    assert conflict.value.item_id == "m2"
    with pytest.raises(ItemConflict):
        await storage.start_response(new("r3", message("m5"), message("m5", b"other")))
    await storage.start_response(new("r3", message("m2", b"other"), owner=OTHER))  # ids are a tenant's own
    assert set(await storage.get_items(OWNER, ["m1", "m2", "m3", "m4", "nope"])) == {"m1", "m2", "m3"}
    assert (await storage.get_items(OTHER, ["m1", "m2"]))["m2"].body == b"other"


async def test_claims_after_a_restart(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    await storage.start_response(new("running", created_at=30))
    await storage.start_response(new("queued", runner=None, created_at=20))
    await storage.start_response(new("unstored", store=False, conversation="c1"))
    claim = await storage.start_response(new("waiting", created_at=10))
    park = RunAppend("waiting", claim.fence, closed=(ClosedItem(0, call("fc1", "c1")),), park=Park(0, 500))
    assert not await storage.append([park])
    assert isinstance(
        (await storage.append([RunAppend("waiting", 1, records=(record(2),))]))["waiting"], RunLost
    )

    claims = await claim_all(storage)
    assert [(c.response_id, c.state, c.fence, c.attempt) for c in claims] == [
        ("running", "running", 3, 1),
        ("queued", "queued", 2, 1),
    ]
    assert (await storage.get_conversation(OWNER, "c1")).active_response_id is None
    assert await storage.claim("unstored") is None
    assert [c.attempt for c in await claim_all(storage)] == [1, 1]

    assert (await storage.list_processes(500)).has_due
    [due] = await storage.claim_due(500)
    assert (due.response_id, due.state, due.attempt) == ("waiting", "waiting", 2)
    assert not (await storage.list_processes(10**9)).has_due and await storage.claim_due(10**9) == ()
    await storage.request_cancel(OWNER, "queued")
    [queued, *_] = sorted(await claim_all(storage), key=lambda c: c.response_id)
    assert queued.cancel_requested


async def test_a_strike_is_an_end_behind_which_a_run_got_nowhere(storage: Storage) -> None:
    """Each claim stands for a process that ended; what a run wrote in it tells whether it may be to blame."""
    await storage.start_response(new("r1"))
    seen = []
    written = 2
    for num_records, admitted in ((0, True), (0, False), (3, True), (PROGRESS_EVENTS, True), (0, True)):
        [claim] = await claim_all(storage)
        if admitted:
            await storage.admit(claim)
        for _ in range(num_records):
            assert not await storage.append([RunAppend("r1", claim.fence, records=(record(written),))])
            written += 1
        seen.append((claim.attempt, claim.strikes))
    assert seen == [(1, 1), (2, 2), (2, 2), (3, 3), (4, 1)]
    await storage.release()
    [claim] = await claim_all(storage)
    assert (claim.attempt, claim.strikes, claim.state) == (5, 0, "running")
    [newer] = await claim_all(storage)
    with pytest.raises(RunLost):
        await storage.admit(claim)
    await storage.admit(newer)


async def park(storage: Storage, id: str, *calls: tuple[str, str]) -> None:
    claim = await storage.start_response(new(id, message(f"{id}.in")))
    closed = tuple(
        ClosedItem(position, call(f"{id}.fc{position}", call_id, name))
        for position, (call_id, name) in enumerate(calls)
    )
    append = RunAppend(id, claim.fence, records=(record(2),), closed=closed, park=Park(10**16, 0))
    assert not await storage.append([append])


async def test_tool_outputs_wake_a_waiting_run(storage: Storage) -> None:
    await park(storage, "r1", ("a", "look_up"), ("b", "weigh"), ("c", "look_up"))
    assert (await storage.get_response(OWNER, "r1")).waiting
    assert dict((await storage.pending_calls(OWNER, "r1")).pending) == {
        "a": "look_up",
        "b": "weigh",
        "c": "look_up",
    }

    waiting = await storage.add_tool_outputs(OWNER, "r1", [output("c"), output("c")], now())
    assert (list(waiting.pending), waiting.runnable) == (["a", "b"], False)
    assert await storage.add_tool_outputs(OWNER, "r1", [output("c")], now()) == waiting
    with pytest.raises(OutputConflict):
        await storage.add_tool_outputs(OWNER, "r1", [output("a"), output("c", b"43")], now())
    with pytest.raises(OutputConflict):
        await storage.add_tool_outputs(OWNER, "r1", [output("a"), output("a", b"43")], now())
    with pytest.raises(UnknownCall):
        await storage.add_tool_outputs(OWNER, "r1", [output("a"), output("nope")], now())
    for owner, id in ((OTHER, "r1"), (OWNER, "unknown")):
        with pytest.raises(NotFound):
            await storage.add_tool_outputs(owner, id, [output("a")], now())
    assert list((await storage.pending_calls(OWNER, "r1")).pending) == ["a", "b"]  # all or none

    waiting = await storage.add_tool_outputs(OWNER, "r1", [output("b"), output("a")], now())
    assert (dict(waiting.pending), waiting.runnable) == ({}, True)
    assert not (await storage.get_response(OWNER, "r1")).waiting
    assert await storage.claim_due(10**17) == ()
    assert [item.call_id for item in await storage.waiting_inputs("r1")] == ["a", "b", "c"]
    assert (await storage.waiting_inputs("r1"))[0].body == output("a").body

    claim = await storage.claim("r1")
    assert claim is not None and (claim.state, claim.fence, claim.attempt) == ("queued", 2, 2)
    again = await storage.add_tool_outputs(OWNER, "r1", [output("b"), output("a")], now())
    assert (dict(again.pending), again.runnable) == ({}, False)

    taken = tuple(
        ClosedItem(3 + position, message(item.id, item.body))
        for position, item in enumerate(await storage.waiting_inputs("r1"))
    )
    taken = tuple(
        ClosedItem(c.position, type(c.item)(c.item.id, "function_call_output", c.item.body, call_id))
        for c, call_id in zip(taken, "abc", strict=True)
    )
    assert not await storage.append([RunAppend("r1", claim.fence, records=(record(3, 3),), closed=taken)])
    assert await storage.waiting_inputs("r1") == ()

    second = ClosedItem(6, call("r1.fc6", "d"))
    append = RunAppend("r1", claim.fence, records=(record(6),), closed=(second,), park=Park(10**16, 0))
    assert not await storage.append([append])
    waiting = await storage.add_tool_outputs(OWNER, "r1", [output("a")], now())
    assert list(waiting.pending) == ["d"] and not waiting.runnable
    assert await storage.claim("r1") is None  # whose claim comes late does not end what waits anew
    assert (await storage.get_response(OWNER, "r1")).waiting


async def test_the_last_output_survives_a_crash_before_the_claim(storage: Storage) -> None:
    await park(storage, "r1", ("a", "look_up"))
    await storage.add_tool_outputs(OWNER, "r1", [output("a")], now())
    [claim] = await claim_all(storage)
    assert (claim.response_id, claim.state, claim.attempt) == ("r1", "queued", 2)


async def test_outputs_for_a_run_that_does_not_wait(storage: Storage) -> None:
    await turn(storage, "r1", outputs=[call("fc1", "a")])
    with pytest.raises(NotWaiting):
        await storage.add_tool_outputs(OWNER, "r1", [output("a")], now())
    assert not (await storage.pending_calls(OWNER, "r1")).pending
    await park(storage, "r2", ("a", "look_up"))
    await storage.request_cancel(OWNER, "r2")
    claim = await storage.claim("r2")
    assert claim is not None and (claim.state, claim.cancel_requested) == ("waiting", True)
    with pytest.raises(NotWaiting):
        await storage.add_tool_outputs(OWNER, "r2", [output("a")], now())


async def test_a_repeated_output_is_known_after_the_end(storage: Storage) -> None:
    await park(storage, "r1", ("a", "look_up"))
    await storage.add_tool_outputs(OWNER, "r1", [output("a")], now())
    claim = await storage.claim("r1")
    assert claim is not None
    assert not await storage.append([RunAppend("r1", claim.fence, finish=finish())])
    assert not (await storage.add_tool_outputs(OWNER, "r1", [output("a")], now())).runnable
    with pytest.raises(OutputConflict):
        await storage.add_tool_outputs(OWNER, "r1", [output("a", b"43")], now())


async def test_cancel_is_a_mark(storage: Storage) -> None:
    await storage.start_response(new("r1"))
    for owner, id in ((OTHER, "r1"), (OWNER, "unknown")):
        with pytest.raises(NotFound):
            await storage.request_cancel(owner, id)
    await storage.request_cancel(OWNER, "r1")
    await storage.request_cancel(OWNER, "r1")
    [claim] = await claim_all(storage)
    assert claim.cancel_requested
    assert not await storage.append([RunAppend("r1", claim.fence, finish=finish("cancelled"))])
    await storage.request_cancel(OWNER, "r1")


async def test_the_conversation_is_locked_and_pinned(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m0")])
    with pytest.raises(ConversationMoved):
        await storage.start_response(new("r0", conversation="c1", conversation_head=0))
    claim = await storage.start_response(new("r1", message("m1"), conversation="c1", conversation_head=1))
    with pytest.raises(ConversationLocked) as locked:
        await storage.start_response(new("r2", message("m2"), conversation="c1"))
    assert locked.value.holder == "r1"
    stored = await storage.get_response(OWNER, "r1")
    assert (stored.conversation_id, stored.conversation_head) == ("c1", 1)
    assert (await storage.get_conversation(OWNER, "c1")).active_response_id == "r1"
    closed = (ClosedItem(0, message("o1")), ClosedItem(1, message("o2")))
    await storage.add_conversation_items(OWNER, "c1", [message("late")])
    assert not await storage.append([RunAppend("r1", claim.fence, closed=closed, finish=finish(append=True))])
    page = await storage.list_conversation_places(OWNER, "c1", limit=10, order="asc")
    assert [place.item.id for place in page.data] == ["m0", "late", "m1", "o1", "o2"]
    assert (await storage.get_conversation(OWNER, "c1")).active_response_id is None
    # A turn that is not to be kept leaves the lock free and the items as they were.
    claim = await storage.start_response(new("r2", message("m2"), conversation="c1"))
    assert not await storage.append([RunAppend("r2", claim.fence, finish=finish("failed"))])
    assert (await storage.get_conversation(OWNER, "c1")).head == 5


async def test_an_unstored_turn_leaves_its_items_only(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    claim = await storage.start_response(new("r1", message("m1"), conversation="c1", store=False))
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r1")
    with pytest.raises(ConversationLocked):
        await storage.start_response(new("r2", conversation="c1"))
    end = Finish("completed", now(), True, inputs=(message("m1"),), outputs=(message("o1"),))
    assert not await storage.append([RunAppend("r1", claim.fence, finish=end)])
    history = await storage.history(OWNER, conversation_id="c1")
    assert [(h.item.id, h.direction, h.response_id) for h in history] == [
        ("m1", "in", None),
        ("o1", "out", None),
    ]
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r1")
    with pytest.raises(NotFound):
        await storage.start_response(new("r2", previous="r1"))


async def test_an_unstored_turn_leaves_nothing_where_its_conversation_was_deleted(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m0")])
    claim = await storage.start_response(new("r1", message("m1"), conversation="c1", store=False))
    await storage.delete_conversation(OWNER, "c1", now())
    end = Finish("completed", now(), True, inputs=(message("m1"),), outputs=(message("o1"),))
    assert not await storage.append([RunAppend("r1", claim.fence, finish=end)])
    assert await rows(storage) == {}


async def test_many_runs_in_one_commit(storage: Storage) -> None:
    ids = [f"r{number}" for number in range(64)]
    for id in ids:
        await storage.start_response(new(id, message(f"{id}.in")))
    before = storage.commit_stats().commits
    for step in range(40):
        assert not await storage.append(
            [RunAppend(id, 1, records=(record(2 + step, tokens=[step]),)) for id in ids]
        )
    assert storage.commit_stats().commits == before + 40
    ends = [
        RunAppend(
            id,
            1,
            records=(record(42),),
            closed=(ClosedItem(0, message(f"{id}.out")),),
            head=b"h",
            finish=finish(),
        )
        for id in ids
    ]
    assert not await storage.append(ends)
    assert storage.commit_stats().commits == before + 41
    for id in ids:
        log = await storage.records(id, after=-1)
        assert [r.first_seq for r in log] == [0, *range(2, 43)]
        assert [r.token_ids for r in log[1:-1]] == [(step,) for step in range(40)]
    assert storage.runner == RUNNER
