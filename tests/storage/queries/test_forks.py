"""Forks of conversations and responses: what they share, and what is left of it when something is deleted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import asyncpg
import pytest
from sqlalchemy import Connection, delete

from storage import (
    ClosedItem,
    ConversationFull,
    Kept,
    KeyedRequest,
    Limits,
    NewFork,
    NewResponseFork,
    NotFound,
    RequestKnown,
    RunAppend,
    Storage,
    StoredConversation,
    TooManyForks,
    open_storage,
)
from storage.queries import conversations, garbage
from storage.tables import responses as response_rows
from tests.support.making import (
    OTHER,
    OWNER,
    RUNNER,
    call,
    finish,
    instructions,
    is_sqlite,
    message,
    new,
    now,
    query,
    record,
    rows,
    turn,
    url,
)


async def talk(storage: Storage, id: str, *names: str) -> None:
    await storage.create_conversation(
        OWNER, id, now(), b'{"of":"%s"}' % id.encode(), [message(n) for n in names]
    )


async def fork(storage: Storage, id: str, into: str, after: str | None = None) -> StoredConversation:
    return await storage.fork_conversation(OWNER, id, NewFork(into, now(), after))


async def branch(storage: Storage, id: str, into: str, after: str | None = None, **fields: bool) -> None:
    made = NewResponseFork(into, now(), b'{"head":3}', b'"echo":3', b"plan", after, **fields)
    await storage.fork_response(OWNER, id, made)


async def add(storage: Storage, id: str, *names: str) -> None:
    await storage.add_conversation_items(OWNER, id, [message(name) for name in names], now())


async def shown(
    storage: Storage, id: str, *, order: Literal["asc", "desc"] = "asc", limit: int = 2
) -> list[str]:
    """All items of a conversation, page by page."""
    found: list[str] = []
    more, after = True, None
    while more:
        page = await storage.list_conversation_places(OWNER, id, limit=limit, order=order, after=after)
        found += [place.item.id for place in page.data]
        more, after = page.has_more, found[-1] if found else None
    return found


async def told(storage: Storage, **of: str) -> list[str]:
    """What a run is told that goes on from somewhere."""
    return [entry.item.id for entry in await storage.history(OWNER, **of)]  # type: ignore[arg-type]


async def left(storage: Storage, *names: str) -> set[str]:
    return set(await storage.get_items(OWNER, names))


# ------------------------------------------------------------------------------------------------------------
# Conversations


async def test_a_fork_begins_as_its_parent_and_goes_its_own_way(storage: Storage) -> None:
    await talk(storage, "c1", "a", "b", "c")
    made = await fork(storage, "c1", "c2", "b")
    assert (made.metadata, made.parent_id, made.parent_item, made.head) == (b'{"of":"c1"}', "c1", "b", 2)
    await add(storage, "c1", "d")
    await add(storage, "c2", "x", "y")
    assert await shown(storage, "c1") == ["a", "b", "c", "d"]
    for order, expected in (("asc", ["a", "b", "x", "y"]), ("desc", ["y", "x", "b", "a"])):
        for limit in (1, 2, 3, 9):
            assert await shown(storage, "c2", order=order, limit=limit) == expected  # type: ignore[arg-type]
    assert await told(storage, conversation_id="c2") == ["a", "b", "x", "y"]
    assert (await storage.get_conversation_item(OWNER, "c2", "a")).item.id == "a"
    for missing in (
        storage.get_conversation_item(OWNER, "c2", "c"),
        storage.list_conversation_places(OWNER, "c2", limit=3, after="c"),
        fork(storage, "c2", "c3", "c"),
        storage.delete_conversation_item(OWNER, "c2", "c", now()),
    ):
        with pytest.raises(NotFound) as what:
            await missing
        assert what.value.kind == "item"
    with pytest.raises(NotFound) as what:
        await storage.fork_conversation(OTHER, "c1", NewFork("c3", now()))
    assert what.value.kind == "conversation"


async def test_forks_of_forks_and_of_nothing(storage: Storage) -> None:
    await talk(storage, "c0")
    await fork(storage, "c0", "c1")
    await add(storage, "c1", "a", "b")
    await fork(storage, "c1", "c2")
    await fork(storage, "c2", "c3", "a")  # before the beginning of its parent
    await add(storage, "c2", "c")
    await add(storage, "c3", "d")
    await fork(storage, "c3", "c4")
    await add(storage, "c4", "b", "a")  # one that it shows already keeps its place
    assert [await shown(storage, f"c{n}") for n in range(5)] == [
        [],
        ["a", "b"],
        ["a", "b", "c"],
        ["a", "d"],
        ["a", "d", "b"],
    ]
    assert (await storage.get_conversation(OWNER, "c1")).parent_item is None
    assert await shown(storage, "c4", order="desc") == ["b", "d", "a"]
    exported = await storage.export_conversation_items(OWNER, "c4", after=-1, limit=2)
    exported += await storage.export_conversation_items(OWNER, "c4", after=exported[-1].position, limit=9)
    assert [place.item.id for place in exported] == ["a", "d", "b"]
    listed = await storage.export_conversations(OWNER, after=None, limit=9)
    assert [one.parent_id for one in listed] == [None, "c0", "c1", "c2", "c3"]


async def test_branches_are_so_many_and_so_deep(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_LEVELS", 3)
    monkeypatch.setattr(conversations, "MAX_BRANCHES", 5)
    await talk(storage, "c0", "a")
    await fork(storage, "c0", "c1")
    await fork(storage, "c1", "c2")
    with pytest.raises(TooManyForks, match="3 levels"):
        await fork(storage, "c2", "c3")
    await fork(storage, "c1", "b1")
    await fork(storage, "c0", "b2")
    for id in ("c0", "c1"):  # they count together, wherever one is made
        with pytest.raises(TooManyForks, match="'c0' has 5"):
            await fork(storage, id, "c3")
    await storage.delete_conversation(OWNER, "b2", now())
    await fork(storage, "c1", "c3")
    await storage.delete_conversation(OWNER, "c0", now())
    with pytest.raises(TooManyForks):  # others have something of it
        await fork(storage, "c1", "c4")
    with pytest.raises(NotFound):
        await fork(storage, "c0", "c4")


async def test_a_turn_in_a_fork_and_one_that_is_at_work_in_its_parent(storage: Storage) -> None:
    await talk(storage, "c1", "a")
    claim = await storage.start_response(new("r1", message("b"), conversation="c1"))
    await fork(storage, "c1", "c2")
    await turn(storage, "r2", message("x"), conversation="c2")  # the parent's lock is not its own
    await storage.append(
        [
            RunAppend(
                "r1",
                claim.fence,
                closed=(ClosedItem(0, message("r1.out")),),
                head=b"{}",
                finish=finish(append=True),
            )
        ]
    )
    assert await shown(storage, "c1") == ["a", "b", "r1.out"]
    assert await shown(storage, "c2") == ["a", "x", "r2.out"]
    await turn(storage, "r3", message("y"), previous="r2")
    assert await told(storage, previous_response_id="r3") == ["a", "x", "r2.out", "y", "r3.out"]


async def test_a_deleted_parent_keeps_what_its_branches_share_and_no_more(storage: Storage) -> None:
    await talk(storage, "c1", "a", "b", "c", "d")
    await fork(storage, "c1", "c2", "c")
    await add(storage, "c2", "x")
    await fork(storage, "c2", "c3", "b")
    await add(storage, "c3", "y")
    await storage.delete_conversation(OWNER, "c1", now())
    with pytest.raises(NotFound):
        await storage.get_conversation(OWNER, "c1")
    assert await left(storage, "a", "b", "c", "d") == {"a", "b", "c"}
    assert await shown(storage, "c2") == ["a", "b", "c", "x"]
    await storage.delete_conversation(OWNER, "c2", now())  # itself kept for c3, which has nothing of it
    assert await left(storage, "a", "b", "c", "x", "y") == {"a", "b", "y"}
    assert await shown(storage, "c3", order="desc") == ["y", "b", "a"]
    assert await told(storage, conversation_id="c3") == ["a", "b", "y"]
    await storage.delete_conversation(OWNER, "c3", now())
    assert await left(storage, "a", "b", "c", "x", "y") == set()
    assert not await rows(storage)
    assert (await storage.usage(OWNER)).total == 0


async def test_an_item_is_deleted_from_all_branches(storage: Storage) -> None:
    await talk(storage, "c1", "a", "b", "c")
    await fork(storage, "c1", "c2", "b")
    await fork(storage, "c2", "c3")
    claim = await storage.start_response(new("r1", message("x"), conversation="c3"))
    pinned = (await storage.get_response(OWNER, "r1")).created_at
    await storage.delete_conversation_item(OWNER, "c3", "a", now())
    assert [await shown(storage, id) for id in ("c1", "c2", "c3")] == [["b", "c"], ["b"], ["b"]]
    assert await left(storage, "a") == set()
    assert await storage.conversation_epochs(["c1", "c2", "c3"]) == {"c1": 1, "c2": 1, "c3": 1}
    await storage.delete_conversation_item(OWNER, "c1", "c", now())  # which no fork has
    assert (await storage.conversation_epochs(["c1"]))["c1"] == 2
    seen = await storage.history(OWNER, conversation_id="c3", conversation_head=2, as_of=pinned)
    assert [entry.item.id for entry in seen] == ["a", "b"]  # the run that was at work goes on
    with pytest.raises(NotFound):
        await storage.delete_conversation_item(OWNER, "c1", "a", now())
    await storage.append([RunAppend("r1", claim.fence, head=b"{}", finish=finish(append=True))])
    assert (await rows(storage))["items"] == 4
    async for _ in storage.sweep(Limits(), now()):
        pass
    assert (await rows(storage))["items"] == 2  # they went with the next sweep
    await storage.add_conversation_items(OWNER, "c3", [message("a")], now())
    assert await shown(storage, "c3") == ["b", "x", "a"]


async def test_an_epoch_grows_in_all_forks_and_in_no_other_branch(storage: Storage) -> None:
    await talk(storage, "c0")
    await fork(storage, "c0", "c1")
    await add(storage, "c1", "a", "b")
    await fork(storage, "c1", "c2")
    await fork(storage, "c1", "c3")
    await add(storage, "c3", "c")
    for id, item, expected in (
        ("c3", "c", {"c1": 0, "c2": 0, "c3": 1}),
        ("c3", "a", {"c1": 1, "c2": 1, "c3": 2}),
    ):
        await storage.delete_conversation_item(OWNER, id, item, now())
        assert await storage.conversation_epochs(["c1", "c2", "c3"]) == expected
    await add(storage, "c0", "d")
    await storage.delete_conversation_item(OWNER, "c0", "d", now())  # of which c1 has nothing
    for id in ("c0", "c1"):  # what goes of them takes no epoch back
        await storage.delete_conversation(OWNER, id, now())
        assert await storage.conversation_epochs(["c2", "c3", id]) == {"c2": 1, "c3": 2}


async def test_a_deletion_writes_no_more_for_many_branches(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await talk(storage, "c1", "a", "b")
    query(
        storage.url,
        f"""
        INSERT INTO conversations (id, owner, created_at, metadata, head, num_bytes, parent_id, parent_head)
        WITH RECURSIVE forks (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM forks WHERE n < 2000)
        SELECT 'fork' || n, '{OWNER}', 1, x'7b7d', 2, 258, 'c1', 2 FROM forks
        """,
    )

    def written(conn: Connection) -> int:
        raw: Any = conn.connection.driver_connection
        before = raw.total_changes
        conversations.delete_item(conn, OWNER, "c1", "a", now())
        return int(raw.total_changes - before)

    assert 0 < await storage._write(written) < 10
    assert await storage.conversation_epochs(["c1", "fork1", "fork2000"]) == {
        "c1": 1,
        "fork1": 1,
        "fork2000": 1,
    }
    await storage.close()


async def test_what_is_read_as_it_was_has_the_epoch_of_then(storage: Storage) -> None:
    await talk(storage, "c1", "a", "b")
    await fork(storage, "c1", "c2")
    await storage.start_response(new("r1"))  # as long as it is at work, what is deleted can be read
    await storage.delete_conversation_item(OWNER, "c1", "a", now())
    then = now()
    await storage.delete_conversation_item(OWNER, "c1", "b", then)
    for id, first, items in (("c1", 0, ["b"]), ("c2", 0, ["b"]), ("c2", 2, [])):
        read = await storage.conversation_history(OWNER, id, first=first, as_of=then)
        assert [entry.item.id for entry in read.items] == items and read.epoch == 1
        read = await storage.conversation_history(OWNER, id, as_of=then + 1)
        assert (read.items, read.epoch) == ((), 2)


async def test_responses_that_ran_in_a_deleted_fork_keep_its_past(storage: Storage) -> None:
    await talk(storage, "c1", "a", "b")
    await fork(storage, "c1", "c2", "a")
    await turn(storage, "r1", message("x"), conversation="c2")
    await storage.delete_conversation(OWNER, "c2", now())
    await storage.delete_conversation(OWNER, "c1", now())
    assert await told(storage, previous_response_id="r1") == ["a", "x", "r1.out"]
    assert await left(storage, "a", "b") == set()  # no conversation shows them
    await storage.delete_response(OWNER, "r1", now())
    assert not await rows(storage)


async def test_a_full_conversation_has_full_forks(storage: Storage) -> None:
    await talk(storage, "c1", "a", "b")
    await fork(storage, "c1", "c2")
    await storage.add_conversation_items(OWNER, "c2", [message("c")], now(), limit=3)
    with pytest.raises(ConversationFull):
        await storage.add_conversation_items(OWNER, "c2", [message("d")], now(), limit=3)
    await storage.delete_conversation_item(OWNER, "c2", "a", now())
    await storage.add_conversation_items(OWNER, "c2", [message("d")], now(), limit=3)


async def test_a_fork_takes_a_row_and_what_it_adds(storage: Storage) -> None:
    await talk(storage, "c1", *(f"m{number}" for number in range(100)))
    before, listed = await storage.usage(OWNER), (await rows(storage))["conversation_items"]
    await fork(storage, "c1", "c2")
    after = await storage.usage(OWNER)
    assert 0 < after.held - before.held < 300
    assert (await rows(storage))["conversation_items"] == listed
    await storage.delete_conversation(OWNER, "c1", now())
    assert before.held * 0.9 < (await storage.usage(OWNER)).held < after.held  # what is shared still counts


async def test_an_owner_is_purged_with_all_branches(storage: Storage) -> None:
    await talk(storage, "c1", "a", "b")
    await fork(storage, "c1", "c2", "a")
    await storage.delete_conversation(OWNER, "c1", now())
    await turn(storage, "r1", message("x"), conversation="c2")
    await branch(storage, "r1", "r2", "x")
    await storage.delete_response(OWNER, "r1", now())
    async for _ in storage.purge(OWNER, now(), entry=None):
        pass
    assert not await rows(storage)


async def test_idle_parents_are_let_go_and_their_forks_stay(storage: Storage) -> None:
    await talk(storage, "c1", "a")
    await fork(storage, "c1", "c2")
    await add(storage, "c2", "b")
    used = now()
    await add(storage, "c2", "c")
    async for _ in storage.sweep(Limits(conversation_age=1), used + 1):
        pass
    with pytest.raises(NotFound):
        await storage.get_conversation(OWNER, "c1")
    assert await shown(storage, "c2") == ["a", "b", "c"]


async def test_a_fork_and_its_request_are_one_transaction(storage: Storage) -> None:
    await talk(storage, "c1", "a")
    request = KeyedRequest(OWNER, "/v1/conversations/c1/fork", "once", b"hash", now())

    kept: Kept[StoredConversation] = Kept(request, lambda: b"[]", lambda stored: stored.id.encode(), "c2")
    assert await storage.begin_request(request) is None
    await storage.fork_conversation(OWNER, "c1", NewFork("c2", now()), kept=kept)
    known = await storage.find_request(request)
    assert known is not None and (known.status, known.body) == (200, b"c2")
    with pytest.raises(RequestKnown):  # another process has taken its place meanwhile
        await storage.fork_conversation(OWNER, "c1", NewFork("c3", now()), kept=kept)
    with pytest.raises(NotFound):
        await storage.get_conversation(OWNER, "c3")


# ------------------------------------------------------------------------------------------------------------
# Responses


async def test_a_response_is_forked_at_any_of_its_items(storage: Storage) -> None:
    await turn(storage, "r1", message("a"))
    outputs = [message("o1"), call("o2", "k"), message("o3")]
    await turn(storage, "r2", message("b1"), message("b2"), outputs=outputs, previous="r1")
    at = {
        None: ["b1", "b2", "o1", "o2", "o3"],
        "b1": ["b1"],
        "b2": ["b1", "b2"],
        "o1": ["b1", "b2", "o1"],
        "o3": ["b1", "b2", "o1", "o2", "o3"],
    }
    for number, (after, expected) in enumerate(at.items()):
        id = f"f{number}"
        await branch(storage, "r2", id, after)
        assert await told(storage, previous_response_id=id) == ["a", "r1.out", *expected]
        stored = await storage.get_response(OWNER, id)
        assert [item.id for item in stored.output] == [name for name in expected if name[0] == "o"]
        assert (stored.status, stored.fork_of, stored.previous_response_id) == ("completed", "r2", "r1")
        page = await storage.input_items(OWNER, id, limit=9, order="asc")
        said = [name for name in expected if name[0] == "b"]
        assert [item.id for item in page.data] == said
        assert [item.id for item in await storage.response_input(id)] == said
        await turn(storage, f"{id}.next", message(f"n{number}"), previous=id)
        going_on = await told(storage, previous_response_id=f"{id}.next")
        assert going_on == ["a", "r1.out", *expected, f"n{number}", f"{id}.next.out"]
    await branch(storage, "r2", "input", input_only=True)
    assert await told(storage, previous_response_id="input") == ["a", "r1.out", "b1", "b2"]
    listed = (await storage.list_responses(OWNER, limit=20)).data
    assert {len(one.output) for one in listed if one.id in ("f1", "f4", "input")} == {0, 3}
    exported = await storage.export_responses(OWNER, after=None, limit=20)
    assert {e.response.id: [i.id for i in e.input] for e in exported}["f1"] == ["b1"]


async def test_a_fork_of_a_fork_has_no_more_than_that(storage: Storage) -> None:
    await turn(storage, "r1", message("a"), outputs=[message("o1"), message("o2")])
    await branch(storage, "r1", "f1", "o1")
    for id, after in (("f2", None), ("f3", "a"), ("f4", "o1")):
        await branch(storage, "f1", id, after)
    await branch(storage, "f1", "f5", input_only=True)
    assert [await told(storage, previous_response_id=f"f{n}") for n in range(2, 6)] == [
        ["a", "o1"],
        ["a"],
        ["a", "o1"],
        ["a"],
    ]
    for unknown in ("o2", "b"):
        with pytest.raises(NotFound) as what:
            await branch(storage, "f1", "f6", unknown)
        assert what.value.kind == "item"
    with pytest.raises(NotFound) as what:
        await storage.fork_response(OTHER, "r1", NewResponseFork("f7", now(), b"{}", b"", b""))
    assert what.value.kind == "response"


async def test_a_running_response_is_forked_where_it_is_finished(storage: Storage) -> None:
    claim = await storage.start_response(new("r1", message("a")))
    closing = [RunAppend("r1", claim.fence, closed=(ClosedItem(n, message(f"o{n}")),)) for n in (0, 2, 1)]
    await storage.append(closing[:1])
    await branch(storage, "r1", "f1", "o0")
    await storage.append(closing[1:2])
    with pytest.raises(NotFound):  # what is to stand before it is not there yet
        await branch(storage, "r1", "f2", "o2")
    await storage.append([replace(closing[2], records=(record(2),))])
    assert await told(storage, previous_response_id="f1") == ["a", "o0"]
    await branch(storage, "r1", "f2", "o2")
    await storage.delete_response(OWNER, "r1", now())
    assert await told(storage, previous_response_id="f1") == ["a", "o0"]
    assert await told(storage, previous_response_id="f2") == ["a", "o0", "o1", "o2"]


async def test_a_deleted_response_keeps_what_its_forks_share_and_no_more(storage: Storage) -> None:
    await turn(storage, "r1", message("a"), outputs=[message("o1"), message("o2"), message("o3")])
    await branch(storage, "r1", "f1", "o2")
    await branch(storage, "r1", "f2", "o1")
    await storage.delete_response(OWNER, "r1", now())
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r1")
    assert await left(storage, "a", "o1", "o2", "o3") == {"a", "o1", "o2"}
    await turn(storage, "n1", message("b"), previous="f1")
    await storage.delete_response(OWNER, "f1", now())
    assert await told(storage, previous_response_id="n1") == ["a", "o1", "o2", "b", "n1.out"]
    await storage.delete_response(OWNER, "n1", now())
    assert await left(storage, "a", "o1", "o2", "b") == {"a", "o1"}
    await storage.delete_response(OWNER, "f2", now())
    assert not await rows(storage)


async def test_what_forks_share_is_found_without_asking_each_of_them(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await turn(storage, "r1", message("a"), outputs=[message("o1"), message("o2"), message("o3")])
    await branch(storage, "r1", "f1", "o2")
    many = f"""
        INSERT INTO responses (id, owner, created_at, completed_at, status, model, background, store, head,
          echo, plan, fork_of, fork_direction, fork_position)
        WITH RECURSIVE forks (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM forks WHERE n < 3000)
        SELECT 'fork' || n, '{OWNER}', n, n, 'completed', 'm', 0, 1, x'', x'', x'', 'r1', 'in', 0 FROM forks
        """
    query(storage.url, many)
    await storage.delete_response(OWNER, "r1", now())
    assert await left(storage, "a", "o1", "o2", "o3") == {"a", "o1", "o2"}

    def cut(conn: Connection) -> int:
        conn.execute(delete(response_rows).where(response_rows.c.id == "f1"))
        with instructions(conn) as ticks:
            assert garbage._cut_to_forks(conn, ["r1"]) == {"r1"}
        return len(ticks)

    assert await storage._write(cut) < 30, "it is not one instruction for each fork"
    assert await left(storage, "a", "o1", "o2") == {"a"}
    await storage.close()


async def test_a_response_that_is_gone_on_from_and_forked_is_cut_later(storage: Storage) -> None:
    await turn(storage, "r1", message("a"), outputs=[message("o1"), message("o2")])
    await turn(storage, "r2", message("b"), previous="r1")
    await branch(storage, "r1", "f1", "o1")
    await storage.delete_response(OWNER, "r1", now())
    assert await told(storage, previous_response_id="r2") == ["a", "o1", "o2", "b", "r2.out"]
    await storage.delete_response(OWNER, "r2", now())
    assert (await rows(storage))["items"] == 2
    assert await told(storage, previous_response_id="f1") == ["a", "o1"]


async def test_a_fork_of_a_turn_in_a_conversation_stands_on_it(storage: Storage) -> None:
    await talk(storage, "c1", "a")
    await turn(storage, "r1", message("b"), outputs=[message("o1"), message("o2")], conversation="c1")
    await branch(storage, "r1", "f1", "o1")
    assert await told(storage, previous_response_id="f1") == ["a", "b", "o1"]
    assert await shown(storage, "c1") == ["a", "b", "o1", "o2"]
    await storage.delete_response(OWNER, "r1", now())
    await storage.delete_conversation(OWNER, "c1", now())
    assert await told(storage, previous_response_id="f1") == ["a", "b", "o1"]
    await storage.delete_response(OWNER, "f1", now())
    assert not await rows(storage)


async def test_a_keyed_fork_is_known_by_its_request(storage: Storage) -> None:
    await turn(storage, "r1", message("a"))
    request = KeyedRequest(OWNER, "/v1/responses/r1/fork", "once", b"hash", now())
    assert await storage.begin_request(request) is None
    await storage.fork_response(OWNER, "r1", NewResponseFork("f1", now(), b"{}", b"", b""), request)
    known = await storage.find_request(request)
    assert known is not None and known.response_id == "f1"
    with pytest.raises(RequestKnown):
        await storage.fork_response(OWNER, "r1", NewResponseFork("f2", now(), b"{}", b"", b""), request)
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "f2")


# ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_depth_costs_next_to_nothing(storage: Storage) -> None:
    """9,000 items in one piece and at the end of 50 forks: what either takes, in milliseconds."""
    names = [f"m{number:04}" for number in range(9000)]
    await talk(storage, "flat", *names)
    await talk(storage, "c0", *names[:180])
    for depth in range(1, 50):
        await fork(storage, f"c{depth - 1}", f"c{depth}")
        await add(storage, f"c{depth}", *names[depth * 180 : (depth + 1) * 180])
    if not is_sqlite(storage.url):  # it counts its rows a minute later, and reads badly until then
        database = await asyncpg.connect(storage.url.replace("+asyncpg", ""))
        await database.execute("ANALYZE")
        await database.close()
    assert await told(storage, conversation_id="c49") == names

    async def took(id: str, verb: str) -> float:
        best = 1e9
        for attempt in range(9):
            begun = time.perf_counter()
            if verb == "page":
                await storage.list_conversation_places(OWNER, id, limit=20, after="m4500")
            elif verb == "item":
                await storage.get_conversation_item(OWNER, id, "m0007")
            elif verb == "fork":
                await fork(storage, id, f"{id}.{attempt}", "m4500")
            else:
                await storage.history(OWNER, conversation_id=id)
            best = min(best, time.perf_counter() - begun)
        return best * 1000

    times = {verb: (await took("flat", verb), await took("c49", verb)) for verb in ("page", "item", "fork")}
    whole = (await took("flat", "history"), await took("c49", "history"))
    assert all(deep < 10 * flat + 20 for flat, deep in times.values()), times
    assert whole[1] < whole[0] * 2 + 60, whole  # all of it is read either way
