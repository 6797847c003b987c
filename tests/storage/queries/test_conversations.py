"""Conversations: the client's verbs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection

from storage import (
    ConversationArchived,
    ConversationChange,
    ItemConflict,
    NewFork,
    NotFound,
    Storage,
    open_storage,
)
from storage.queries import conversations
from tests.support.making import (
    OTHER,
    OWNER,
    RUNNER,
    instructions,
    message,
    new,
    now,
    queries,
    query,
    turn,
    url,
)


async def test_create_read_update_delete(storage: Storage) -> None:
    created = await storage.create_conversation(
        OWNER, "c1", 123, b'{"a":"\\u0000"}', [message("m1"), message("m2")]
    )
    assert (created.id, created.created_at, created.head, created.active_response_id) == ("c1", 123, 2, None)
    assert await storage.get_conversation(OWNER, "c1") == created
    updated = await storage.update_conversation(OWNER, "c1", ConversationChange(b"{}"))
    assert updated.metadata == b"{}" and await storage.get_conversation(OWNER, "c1") == updated
    await storage.delete_conversation(OWNER, "c1", now())
    for verb in (
        storage.get_conversation(OWNER, "c1"),
        storage.update_conversation(OWNER, "c1", ConversationChange(b"{}")),
        storage.delete_conversation(OWNER, "c1", now()),
        storage.add_conversation_items(OWNER, "c1", [message("m3")]),
        storage.list_conversation_places(OWNER, "c1", limit=1),
        storage.get_conversation_item(OWNER, "c1", "m1"),
        storage.delete_conversation_item(OWNER, "c1", "m1", now()),
        storage.history(OWNER, conversation_id="c1"),
        storage.start_response(new("r1", conversation="c1")),
    ):
        with pytest.raises(NotFound) as missing:
            await verb
        assert missing.value.kind == "conversation"
    assert await storage.get_items(OWNER, ["m1"]) == {}


async def test_conversations_are_found_by_metadata(storage: Storage) -> None:
    async def found(**metadata: str) -> list[str]:
        ids: list[str] = []
        while True:
            after = ids[-1] if ids else None
            page = await storage.list_conversations(OWNER, limit=1, after=after, metadata=metadata)
            ids += [one.id for one in page.data]
            if not page.has_more:
                return ids

    for at, (name, owner) in enumerate((("c1", OWNER), ("c2", OWNER), ("c3", OTHER), ("c4", OWNER))):
        await storage.create_conversation(owner, name, at, b'{"user":"1","n":"%d"}' % at)
    assert await found(user="1") == ["c4", "c2", "c1"] and await found(user="1", n="1") == ["c2"]
    await storage.update_conversation(OWNER, "c1", ConversationChange(b'{"user":"2"}'))
    await storage.update_conversation(OWNER, "c2", ConversationChange(archived=True))
    await storage.delete_conversation(OWNER, "c4", now())
    assert await found(user="1") == ["c2"] and await found(user="2") == ["c1"] and await found(n="0") == []
    await storage.fork_conversation(OWNER, "c2", NewFork("f1", 9))
    await storage.fork_conversation(OWNER, "c2", NewFork("f2", 9, metadata=b'{"user":"3"}'))
    assert await found(user="1") == ["f1", "c2"] and await found(user="3") == ["f2"]
    page = await storage.list_conversations(OWNER, limit=5, archived=True, metadata={"user": "1"})
    assert [one.id for one in page.data] == ["c2"]


async def test_titles_and_states_of_conversations(storage: Storage) -> None:
    for number, name in enumerate(("c1", "c2", "c3")):
        await storage.create_conversation(OWNER, name, number + 1, b"{}", title=name.upper())
    archived = await storage.update_conversation(OWNER, "c2", ConversationChange(archived=True), at := now())
    assert (archived.title, archived.archived_at, archived.used_at) == ("C2", at, at)
    for wanted, names in ((None, ["c3", "c2", "c1"]), (True, ["c2"]), (False, ["c3", "c1"])):
        page = await storage.list_conversations(OWNER, limit=5, archived=wanted)
        assert ([one.id for one in page.data], page.has_more) == (names, False)
    page = await storage.list_conversations(OWNER, limit=1, order="asc", after="c1")
    assert ([one.id for one in page.data], page.has_more) == (["c2"], True)
    with pytest.raises(NotFound):
        await storage.list_conversations(OWNER, limit=1, after="c9")
    for add in (
        storage.add_conversation_items(OWNER, "c2", [message("m1")]),
        storage.start_response(new("r1", conversation="c2")),
    ):
        with pytest.raises(ConversationArchived):
            await add
    active = await storage.update_conversation(OWNER, "c2", ConversationChange(archived=False, title=""))
    assert (active.title, active.archived_at) == (None, None)
    assert await storage.add_conversation_items(OWNER, "c2", [message("m1")])


OLD = f"""
INSERT INTO conversations (id, owner, created_at, metadata, head)
WITH RECURSIVE ages (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM ages WHERE n < 3000)
SELECT 'old' || n, '{OWNER}', n, x'7b7d', 0 FROM ages
"""


async def test_a_list_of_archived_ones_does_not_walk_all_others(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    query(storage.url, OLD)
    for id in ("old7", "old8", "old9"):
        await storage.update_conversation(OWNER, id, ConversationChange(archived=True), now())
    await storage.delete_conversation(OWNER, "old8", now())

    def listed(conn: Connection, after: str | None, archived: bool) -> tuple[list[str], int]:
        with instructions(conn) as ticks:
            page = conversations.list_(
                conn, OWNER, limit=3, order="desc", after=after, archived=archived, metadata={}
            )
        return [one.id for one in page.data], len(ticks)

    for after, archived, expected in (
        (None, True, ["old9", "old7"]),
        ("old9", True, ["old7"]),
        (None, False, ["old3000", "old2999", "old2998"]),
    ):
        found, ticks = await storage._read(partial(listed, after=after, archived=archived))
        assert found == expected
        assert ticks < 30, "it is not one instruction for each of the others"
    await storage.close()


LONG = f"""
INSERT INTO items (owner, id, kind, body)
WITH RECURSIVE places (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM places WHERE n < 3000)
SELECT '{OWNER}', 'm' || n, 'message', x'7b7d' FROM places;
"""
LISTED = f"""
INSERT INTO conversation_items (conversation_id, position, owner, item_id, direction)
WITH RECURSIVE places (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM places WHERE n < 3000)
SELECT 'long', n, '{OWNER}', 'm' || n, 'in' FROM places
"""
GROWN = "UPDATE conversations SET head = 3001, num_bytes = num_bytes + 3000 * 130 WHERE id = 'long'"


async def test_what_is_added_is_not_looked_for_in_all_of_a_long_conversation(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.create_conversation(OWNER, "long", now(), b"{}")
    queries(storage.url, [LONG, LISTED, GROWN])
    await storage.fork_conversation(OWNER, "long", NewFork("fork", now()))

    def add(conn: Connection, id: str) -> None:
        assert [
            place.position for place in conversations.add_items(conn, OWNER, id, [message("m7", b"{}")])
        ] == [7]

    def end_turn(conn: Connection, id: str) -> None:
        turn = [("m7", "in"), (f"{id}.out", "out")]
        conversations.unlock(conn, id, "r1", turn, [message(f"{id}.out")], kept=False)

    def get(conn: Connection, id: str) -> None:
        assert conversations.get_item(conn, OWNER, id, "m7").position == 7

    def delete(conn: Connection, id: str) -> None:
        conversations.delete_item(conn, OWNER, id, f"{id}.out", now())

    def counted(conn: Connection, verb: Callable[[Connection, str], None], id: str) -> int:
        with instructions(conn) as ticks:
            verb(conn, id)
        return len(ticks)

    for id in ("long", "fork"):
        for verb in (add, end_turn, get, delete):
            ticks = await storage._write(partial(counted, verb=verb, id=id))
            assert ticks < 30, (id, verb, "it is not one instruction for each of the items")
    await storage.close()


@pytest.mark.parametrize("max_lookups", [3, conversations.MAX_LOOKUPS])
async def test_a_fork_takes_what_its_parent_has_behind_it_as_new(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, max_lookups: int
) -> None:
    monkeypatch.setattr(conversations, "MAX_LOOKUPS", max_lookups)
    first = [message(f"m{n}") for n in range(4)]
    await storage.create_conversation(OWNER, "c1", now(), b"{}", first)
    await storage.fork_conversation(OWNER, "c1", NewFork("c2", now(), "m2"))
    added = await storage.add_conversation_items(OWNER, "c2", [message("m9"), *first])
    assert {place.item.id: place.position for place in added} == {"m0": 0, "m1": 1, "m2": 2, "m9": 3, "m3": 4}
    assert len((await storage.list_conversation_places(OWNER, "c2", limit=9)).data) == 5


async def test_all_items_are_taken_out_also_of_forks(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m1"), message("m2")])
    fork = NewFork("c2", now())
    await storage.fork_conversation(OWNER, "c1", fork)
    await storage.add_conversation_items(OWNER, "c2", [message("m3")])
    await storage.clear_conversation(OWNER, "c2", now())
    assert await storage.conversation_epochs(["c1", "c2"]) == {"c1": 1, "c2": 1}
    for name in ("c1", "c2"):
        assert (await storage.list_conversation_places(OWNER, name, limit=5)).data == ()
    await storage.add_conversation_items(OWNER, "c2", [message("m4")])
    places = await storage.list_conversation_places(OWNER, "c2", limit=5)
    assert [place.item.id for place in places.data] == ["m4"]
    assert await storage.get_items(OWNER, ["m1", "m3"]) == {}


async def test_items_page_both_ways(storage: Storage) -> None:
    names = [f"m{number}" for number in range(7)]
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message(name) for name in names[:4]])
    added = await storage.add_conversation_items(OWNER, "c1", [message(name) for name in names[4:]])
    assert [(place.item.id, place.position) for place in added] == [*zip(names[4:], (4, 5, 6), strict=True)]
    for order, expected in (("asc", names), ("desc", names[::-1])):
        found: list[str] = []
        after = None
        while True:
            page = await storage.list_conversation_places(
                OWNER,
                "c1",
                limit=3,
                order=order,
                after=after,  # type: ignore[arg-type]
            )
            found += [place.item.id for place in page.data]
            if not page.has_more:
                break
            after = found[-1]
        assert found == expected
    with pytest.raises(NotFound) as missing:
        await storage.list_conversation_places(OWNER, "c1", limit=3, after="nope")
    assert missing.value.kind == "item"


async def test_an_item_is_in_a_conversation_once(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m1"), message("m2")])
    begun = (await storage.get_conversation(OWNER, "c1")).created_at
    added = await storage.add_conversation_items(OWNER, "c1", [message("m1"), message("m3")], begun + 5)
    assert [(place.item.id, place.created_at) for place in added] == [("m1", begun), ("m3", begun + 5)]
    assert (await storage.get_conversation_item(OWNER, "c1", "m3")).created_at == begun + 5
    page = await storage.list_conversation_places(OWNER, "c1", limit=10, order="asc")
    assert [place.item.id for place in page.data] == ["m1", "m2", "m3"]
    with pytest.raises(ItemConflict):
        await storage.add_conversation_items(OWNER, "c1", [message("m4"), message("m1", b"other")])
    with pytest.raises(NotFound):
        await storage.get_conversation_item(OWNER, "c1", "m4")
    with pytest.raises(ItemConflict):
        await storage.create_conversation(OWNER, "c2", now(), b"{}", [message("m1", b"other")])
    with pytest.raises(NotFound):
        await storage.get_conversation(OWNER, "c2")


async def test_deleting_items(storage: Storage) -> None:
    await storage.create_conversation(
        OWNER, "c1", now(), b"{}", [message("m1"), message("m2"), message("m3")]
    )
    await turn(storage, "r1", message("m4"), conversation="c1")
    left = await storage.delete_conversation_item(OWNER, "c1", "m2", now())
    assert left.id == "c1"
    await storage.delete_conversation_item(OWNER, "c1", "r1.out", now())
    for verb in (
        storage.get_conversation_item(OWNER, "c1", "m2"),
        storage.delete_conversation_item(OWNER, "c1", "m2", now()),
        storage.list_conversation_places(OWNER, "c1", limit=1, after="m2"),
    ):
        with pytest.raises(NotFound) as missing:
            await verb
        assert missing.value.kind == "item"
    page = await storage.list_conversation_places(OWNER, "c1", limit=10, order="asc")
    assert [place.item.id for place in page.data] == ["m1", "m3", "m4"]
    assert [item.id for item in (await storage.get_response(OWNER, "r1")).output] == ["r1.out"]
    await storage.add_conversation_items(OWNER, "c1", [message("m2")])  # it comes back at the end
    page = await storage.list_conversation_places(OWNER, "c1", limit=1)
    assert [place.item.id for place in page.data] == ["m2"]
    assert (await storage.get_conversation_item(OWNER, "c1", "m2")).item.body == message("m2").body
