"""Responses: lists, input items, deletion and what it leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from storage import (
    ClosedItem,
    ConversationLocked,
    NewResponseFork,
    NotFound,
    Park,
    RunAppend,
    RunLost,
    Storage,
    open_storage,
    pairs,
)
from storage.queries import responses
from tests.support.making import (
    OTHER,
    OWNER,
    RUNNER,
    call,
    claim_all,
    counts,
    finish,
    instructions,
    message,
    new,
    now,
    output,
    query,
    record,
    turn,
    url,
)


async def ids_of(storage: Storage, **filters: object) -> list[str]:
    """All pages of a list, put together; each page is checked on the way."""
    found: list[str] = []
    after = None
    while True:
        page = await storage.list_responses(OWNER, limit=2, after=after, **filters)  # type: ignore[arg-type]
        found += [response.id for response in page.data]
        assert len(page.data) == 2 or not page.has_more
        if not page.has_more:
            return found
        after = found[-1]


async def test_lists(storage: Storage) -> None:
    # Two share a microsecond: then the id decides.
    for id, at in (("a", 10), ("d", 20), ("b", 20), ("c", 30), ("e", 40)):
        await storage.start_response(new(id, message(f"{id}.in"), created_at=at, model=f"model-{id}"))
    out = (ClosedItem(0, message("c.out")),)
    assert not await storage.append([RunAppend("c", 1, records=(record(2),), closed=out, finish=finish())])
    asks = RunAppend("a", 1, closed=(ClosedItem(0, call("fc", "c")),), park=Park(2**62, 0))
    assert not await storage.append([asks])
    await storage.start_response(new("foreign", owner=OTHER))
    await storage.create_conversation(OWNER, "conv", now(), b"{}")
    await storage.start_response(new("unstored", store=False, conversation="conv"))
    await storage.start_response(new("gone"))
    await storage.delete_response(OWNER, "gone", now())

    assert await ids_of(storage) == ["e", "c", "d", "b", "a"]
    assert await ids_of(storage, order="asc") == ["a", "b", "d", "c", "e"]
    assert await ids_of(storage, status="completed") == ["c"]
    assert await ids_of(storage, status="waiting") == ["a"]
    assert await ids_of(storage, status="in_progress", order="asc") == ["a", "b", "d", "e"]
    assert await ids_of(storage, status="in_progress", created_after=20, model="model-e") == ["e"]
    assert await ids_of(storage, status="completed", model="model-d") == []
    assert await ids_of(storage, model="model-d") == ["d"]
    assert await ids_of(storage, created_after=10, created_before=40) == ["c", "d", "b"]
    assert await ids_of(storage, conversation_id="conv") == []
    page = await storage.list_responses(OWNER, limit=2, after="e")
    assert [[item.id for item in response.output] for response in page.data] == [["c.out"], []]
    for unknown in ("foreign", "unstored", "gone", "nope"):
        with pytest.raises(NotFound):
            await storage.list_responses(OWNER, limit=2, after=unknown)


async def test_lists_by_metadata(storage: Storage) -> None:
    async def start(id: str, at: int, metadata: dict[str, str], **fields: Any) -> None:
        made = replace(new(id, owner=fields.pop("owner", OWNER), created_at=at), metadata=metadata)
        await storage.start_response(replace(made, **fields))

    both = {"user": "1", "team": "\N{SNOWMAN}"}
    await start("a", 10, both)
    await start("d", 20, {"user": "1"}, model="other")
    await start("b", 20, both | {"more": "x"})
    await start("c", 30, {"user": "2", "team": "1"})
    await start("long", 40, {"k" * 64: "\N{SNOWMAN}" * 512})
    await start("none", 50, {})
    await start("hidden", 60, both, hidden=True)
    await start("foreign", 70, both, owner=OTHER)
    await start("gone", 80, both)
    await storage.delete_response(OWNER, "gone", now())
    assert await ids_of(storage, metadata={"user": "1"}) == ["d", "b", "a"]
    assert await ids_of(storage, metadata={"user": "1"}, order="asc") == ["a", "b", "d"]
    for wanted in (both, dict(reversed(both.items()))):
        assert await ids_of(storage, metadata=wanted) == ["b", "a"]
    assert await ids_of(storage, metadata={"team": "1"}) == ["c"]
    assert await ids_of(storage, metadata={"user": "\N{SNOWMAN}"}) == []
    assert await ids_of(storage, metadata={"k" * 64: "\N{SNOWMAN}" * 512}) == ["long"]
    assert await ids_of(storage, metadata={"user": "1"}, model="other") == ["d"]
    assert await ids_of(storage, metadata={"user": "1"}, created_after=10, status="in_progress") == ["d", "b"]
    page = await storage.list_responses(OWNER, limit=5, after="none", metadata=both)
    assert [one.id for one in page.data] == ["b", "a"], "the page before may have ended with any response"
    await storage.fork_response(
        OWNER, "a", NewResponseFork("fork", 90, b"{}", b"", b"", input_only=True, metadata={"user": "1"})
    )
    assert (await ids_of(storage, metadata={"user": "1"}))[0] == "fork"


LONG_AGO = f"""
INSERT INTO responses
  (id, owner, created_at, completed_at, status, model, background, store, head, echo, plan)
WITH RECURSIVE ages (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM ages WHERE n < 3000)
SELECT 'old' || n, '{OWNER}', n, n, 'completed', 'm', 0, 1, x'', x'', x'' FROM ages
"""


async def test_a_list_reads_no_more_of_a_long_history_than_it_shows(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    await storage.create_conversation(OWNER, "conv", now(), b"{}")
    await storage.start_response(new("waits", model="rare"))
    closed = (ClosedItem(0, call("fc", "c")),)
    assert not await storage.append([RunAppend("waits", 1, closed=closed, park=Park(2**62, 0))])
    await storage.start_response(new("queues", runner=None, status="queued"))
    await turn(storage, "fails", status="failed", conversation="conv")
    query(storage.url, LONG_AGO)

    def label(conn: Connection) -> None:
        for n in range(1, 3001):
            pairs.add(conn, OWNER, "response", f"old{n}", n, {"all": "1"} | ({"few": "1"} if n < 4 else {}))

    await storage._write(label)

    def listed(conn: Connection, filters: dict[str, Any]) -> tuple[list[str], int]:
        """A page's ids, and how many hundreds of instructions SQLite carried out for it."""
        names = ("after", "status", "conversation_id", "model")
        others = {"limit": 3, "order": "desc", "created_within": (None, None), "metadata": {}}
        asked = dict.fromkeys(names) | others | filters
        with instructions(conn) as ticks:
            page = responses.list_(conn, OWNER, **asked)
        return [one.id for one in page.data], len(ticks)

    for filters, expected in (
        ({"status": "waiting"}, ["waits"]),
        ({"status": "in_progress"}, ["waits"]),
        ({"status": "queued"}, ["queues"]),
        ({"status": "failed"}, ["fails"]),
        ({"status": "failed", "model": "m"}, ["fails"]),
        ({"status": "incomplete", "created_within": (5, None)}, []),
        ({"model": "rare"}, ["waits"]),
        ({"model": "rare", "status": "waiting"}, ["waits"]),
        ({"model": "unknown", "created_within": (None, 2000)}, []),
        ({"conversation_id": "conv"}, ["fails"]),
        ({"conversation_id": "conv", "status": "completed"}, []),
        ({"after": "old4"}, ["old3", "old2", "old1"]),
        ({"after": "old2999", "order": "asc"}, ["old3000", "waits", "queues"]),
        ({"after": "old4", "status": "completed", "model": "m"}, ["old3", "old2", "old1"]),
        ({"metadata": {"all": "2"}}, []),
        ({"metadata": {"few": "1"}}, ["old3", "old2", "old1"]),
        ({"metadata": {"few": "1", "all": "1"}, "after": "old3"}, ["old2", "old1"]),
        ({"metadata": {"all": "1", "few": "1"}}, ["old3", "old2", "old1"]),
        ({"metadata": {"all": "1"}, "conversation_id": "conv"}, []),
        ({"metadata": {"all": "1"}, "after": "old4"}, ["old3", "old2", "old1"]),
        ({"metadata": {"few": "1"}, "status": "failed", "model": "m"}, []),
    ):
        found, ticks = await storage._read(partial(listed, filters=filters))
        assert found == expected, filters
        assert ticks < 30, (filters, "it is not one instruction for each of the old ones")
    await storage.close()


async def test_input_items_page_both_ways(storage: Storage) -> None:
    await storage.start_response(new("r1", *(message(f"m{n}") for n in range(5)), message("m1")))
    page = await storage.input_items(OWNER, "r1", limit=2)
    assert ([item.id for item in page.data], page.has_more) == (["m1", "m4"], True)
    page = await storage.input_items(OWNER, "r1", limit=10, after="m3")
    assert ([item.id for item in page.data], page.has_more) == (["m2", "m1", "m0"], False)
    page = await storage.input_items(OWNER, "r1", limit=3, order="asc", after="m0")
    assert ([item.id for item in page.data], page.has_more) == (["m1", "m2", "m3"], True)
    # Listed twice, an item is a cursor at its last place: paging ends.
    page = await storage.input_items(OWNER, "r1", limit=3, order="asc", after="m1")
    assert ([item.id for item in page.data], page.has_more) == ([], False)
    with pytest.raises(NotFound) as missing:
        await storage.input_items(OWNER, "r1", limit=2, after="nope")
    assert missing.value.kind == "item"


async def test_a_deleted_response_is_gone(storage: Storage) -> None:
    await turn(storage, "r1", message("m1"))
    assert await storage.delete_response(OWNER, "r1", now()) is False
    for verb in (
        storage.get_response(OWNER, "r1"),
        storage.delete_response(OWNER, "r1", now()),
        storage.input_items(OWNER, "r1", limit=1),
        storage.history(OWNER, previous_response_id="r1"),
        storage.start_response(new("r2", previous="r1")),
        storage.request_cancel(OWNER, "r1"),
    ):
        with pytest.raises(NotFound):
            await verb
    assert await storage.records("r1", after=-1) == ()
    assert await storage.get_items(OWNER, ["m1", "r1.out"]) == {}
    assert counts(storage.url) == {}


async def test_descendants_keep_answering(storage: Storage) -> None:
    await turn(storage, "r1", message("m1"))
    await turn(storage, "r2", message("m2"), previous="r1")
    await turn(storage, "r3", message("m3"), previous="r2")
    await turn(storage, "fork", message("m4"), previous="r1")
    before = await storage.history(OWNER, previous_response_id="r3")
    assert [h.item.id for h in before] == ["m1", "r1.out", "m2", "r2.out", "m3", "r3.out"]

    await storage.delete_response(OWNER, "r1", now())
    await storage.delete_response(OWNER, "r2", now())
    assert await storage.history(OWNER, previous_response_id="r3") == before
    assert counts(storage.url)["responses"] == 4 and await storage.records("r1", after=-1) == ()
    # What only the dead refer to can no longer be named.
    assert set(await storage.get_items(OWNER, ["m1", "m2", "m3"])) == {"m3"}
    await turn(storage, "r4", message("m5"), previous="r3")

    await storage.delete_response(OWNER, "r4", now())
    await storage.delete_response(OWNER, "r3", now())  # r2 goes with it, r1 stays for the fork
    assert counts(storage.url)["responses"] == 2
    assert [h.item.id for h in await storage.history(OWNER, previous_response_id="fork")] == [
        "m1",
        "r1.out",
        "m4",
        "fork.out",
    ]
    await storage.delete_response(OWNER, "fork", now())
    assert counts(storage.url) == {}


async def test_deleting_a_run_in_flight(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    await storage.start_response(new("r1", message("m1"), conversation="c1"))
    with pytest.raises(ConversationLocked):
        await storage.start_response(new("r2", conversation="c1"))
    assert await storage.delete_response(OWNER, "r1", now()) is True
    assert isinstance((await storage.append([RunAppend("r1", 1, records=(record(2),))]))["r1"], RunLost)
    assert await storage.claim("r1") is None and await claim_all(storage) == ()
    await storage.start_response(new("r2", message("m2"), conversation="c1"))
    assert await storage.claim("unknown") is None


async def test_deleting_a_waiting_run(storage: Storage) -> None:
    await storage.start_response(new("r1"))
    closed = (ClosedItem(0, call("fc1", "a")), ClosedItem(1, call("fc2", "b")))
    assert not await storage.append([RunAppend("r1", 1, closed=closed, park=Park(5, 0))])
    await storage.add_tool_outputs(OWNER, "r1", [output("a")], now())
    assert await storage.delete_response(OWNER, "r1", now()) is True
    assert not (await storage.list_processes(10**17)).has_due
    assert counts(storage.url) == {}


async def test_items_stay_while_somebody_lists_them(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "c1", now(), b"{}")
    await turn(storage, "r1", message("m1"), message("shared"), conversation="c1")
    await turn(storage, "r2", message("shared"))
    await storage.delete_response(OWNER, "r1", now())
    page = await storage.list_conversation_places(OWNER, "c1", limit=10, order="asc")
    assert [place.item.id for place in page.data] == ["m1", "shared", "r1.out"]
    await storage.delete_conversation(OWNER, "c1", now())
    assert set(await storage.get_items(OWNER, ["m1", "shared", "r1.out"])) == {"shared"}
    await storage.delete_response(OWNER, "r2", now())
    assert counts(storage.url) == {}
