"""Two processes on one database: each pair of verbs that meet on the same rows leaves nothing in the air.

The first of a pair is held just before its commit, until the second waits for it or is done.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from storage import (
    ClosedItem,
    ConversationLocked,
    NotFound,
    Park,
    RunAppend,
    Storage,
    WaitingInputs,
    open_storage,
)
from storage.queries import conversations, events, garbage, responses, runs, waiting
from tests.support.blocking import until
from tests.support.making import OWNER, call, check, counts, finish, message, new, now, output, query, turn
from tests.support.postgres import Postgres


@pytest.fixture
async def where(postgres: Postgres) -> AsyncIterator[str]:
    """An empty database, by its URL; checked at the end."""
    fresh = await postgres.fresh()
    yield fresh
    check(fresh)
    await postgres.give_back(fresh)


@pytest.fixture
async def a(where: str) -> AsyncIterator[Storage]:
    opened = await open_storage(where, runner="a")
    yield opened
    await opened.close()


@pytest.fixture
async def b(where: str) -> AsyncIterator[Storage]:
    opened = await open_storage(where, runner="b")
    yield opened
    await opened.close()


async def meet(
    a: Storage, first: Callable[[Connection], Any], second: Coroutine[Any, Any, Any]
) -> tuple[Any, Any]:
    """What comes of a job of `a` and of another process's verb that begins before the job has committed."""
    reached, go_on = threading.Event(), threading.Event()

    def held(conn: Connection) -> Any:
        value = first(conn)
        reached.set()
        assert go_on.wait(10)
        return value

    one = a._writer.submit(held, durable=True, retry_until_available=True)
    await until(reached.is_set)
    two = asyncio.create_task(second)
    blocked = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with asyncio.timeout(10):
        while not two.done() and not await asyncio.to_thread(query, a.url, blocked):
            await asyncio.sleep(0)
    go_on.set()
    return tuple(await asyncio.gather(one, two, return_exceptions=True))  # type: ignore[return-value]


def appending(storage: Storage, *batch: RunAppend) -> Callable[[Connection], Any]:
    return partial(runs.append, batch=batch, counting=storage._counting)


def starting(id: str, **fields: Any) -> Callable[[Connection], Any]:
    return partial(runs.start, new=new(id, message(f"{id}.in"), **fields), runner="a")


def deleting(id: str) -> Callable[[Connection], Any]:
    """All steps of a deletion as one, which holds all that any of them holds."""

    def delete(conn: Connection) -> bool:
        ran = responses.delete_one(conn, OWNER, id, now())
        events.erase(conn, [id])
        garbage.collect_responses(conn, [id])
        return ran

    return delete


async def test_a_parent_goes_while_a_child_begins(a: Storage, b: Storage) -> None:
    await turn(a, "parent", message("m1"))
    _, refused = await meet(a, deleting("parent"), b.start_response(new("child", previous="parent")))
    assert isinstance(refused, NotFound)
    await turn(a, "parent", message("m2"))
    _, deleted = await meet(
        a, starting("child", previous="parent"), b.delete_response(OWNER, "parent", now())
    )
    assert deleted is False
    history = await b.history(OWNER, previous_response_id="child")
    assert [h.item.id for h in history] == ["m2", "parent.out", "child.in"]


async def test_the_last_two_children_go_at_once(a: Storage, b: Storage, where: str) -> None:
    await turn(a, "parent", message("m1"))
    await turn(a, "c1", message("m2"), previous="parent")
    await turn(a, "c2", message("m3"), previous="parent")
    await a.delete_response(OWNER, "parent", now())
    await meet(a, deleting("c1"), b.delete_response(OWNER, "c2", now()))
    assert counts(where) == {}


async def test_the_last_two_turns_of_a_deleted_conversation_go_at_once(
    a: Storage, b: Storage, where: str
) -> None:
    await a.create_conversation(OWNER, "conv", now(), b"{}")
    await turn(a, "t1", message("m1"), conversation="conv")
    await turn(a, "t2", message("m2"), conversation="conv")
    await a.delete_conversation(OWNER, "conv", now())
    await meet(a, deleting("t1"), b.delete_response(OWNER, "t2", now()))
    assert counts(where) == {}


async def test_an_item_is_taken_up_while_its_last_list_goes(a: Storage, b: Storage) -> None:
    await turn(a, "r1", message("shared"))
    await meet(a, deleting("r1"), b.start_response(new("r2", message("shared"))))
    assert set(await a.get_items(OWNER, ["shared"])) == {"shared"}
    again = partial(runs.start, new=new("r3", message("shared")), runner="a")
    await b.append([RunAppend("r2", 1, finish=finish())])
    await meet(a, again, b.delete_response(OWNER, "r2", now()))
    assert [item.id for item in await a.response_input("r3")] == ["shared"]


async def test_two_turns_of_one_conversation(a: Storage, b: Storage) -> None:
    await a.create_conversation(OWNER, "conv", now(), b"{}")
    _, locked = await meet(
        a, starting("t1", conversation="conv"), b.start_response(new("t2", conversation="conv"))
    )
    assert isinstance(locked, ConversationLocked) and locked.holder == "t1"
    ending = appending(a, RunAppend("t1", 1, finish=finish(append=True)))
    ended, claim = await meet(a, ending, b.start_response(new("t2", conversation="conv")))
    assert not ended.refused and claim.state == "running"
    assert (await a.get_response(OWNER, "t2")).conversation_head == 1


async def test_a_conversation_goes_while_a_turn_begins(a: Storage, b: Storage) -> None:
    await a.create_conversation(OWNER, "conv", now(), b"{}", [message("m1")])
    dropping = partial(conversations.delete, owner=OWNER, id="conv", now=now())
    _, refused = await meet(a, dropping, b.start_response(new("t1", conversation="conv")))
    assert isinstance(refused, NotFound)
    await a.create_conversation(OWNER, "conv2", now(), b"{}", [message("m1")])
    await meet(a, starting("t2", conversation="conv2"), b.delete_conversation(OWNER, "conv2", now()))
    history = await b.history(OWNER, previous_response_id="t2")
    assert [h.item.id for h in history] == ["m1", "t2.in"]


async def test_items_added_to_one_conversation_from_two_sides(a: Storage, b: Storage) -> None:
    await a.create_conversation(OWNER, "conv", now(), b"{}")
    both = [(storage, f"{storage.runner}{number}") for number in range(10) for storage in (a, b)]
    await asyncio.gather(*(s.add_conversation_items(OWNER, "conv", [message(id)]) for s, id in both))
    page = await a.list_conversation_places(OWNER, "conv", limit=100)
    assert {place.item.id for place in page.data} == {id for _, id in both}
    adding = partial(conversations.add_items, owner=OWNER, id="conv", new=[message("twice")])
    await meet(a, adding, b.add_conversation_items(OWNER, "conv", [message("twice"), message("last")]))
    page = await a.list_conversation_places(OWNER, "conv", limit=2, order="desc")
    assert [place.item.id for place in page.data] == ["last", "twice"]


async def test_outputs_that_come_from_two_sides(a: Storage, b: Storage) -> None:
    claim = await a.start_response(new("r1"))
    calls = tuple(ClosedItem(n, call(f"fc{n}", id)) for n, id in enumerate("xy"))
    assert not await a.append([RunAppend("r1", claim.fence, closed=calls, park=Park(10**16, 0))])
    posting = partial(
        waiting.add_tool_outputs, owner=OWNER, response_id="r1", outputs=[output("x")], now=now()
    )
    first, second = await meet(a, posting, b.add_tool_outputs(OWNER, "r1", [output("x"), output("y")], now()))
    assert (first.pending, first.runnable) == ({"y": "look_up"}, False) and second == WaitingInputs({}, True)
    assert [item.call_id for item in await a.waiting_inputs("r1")] == ["x", "y"]


async def test_a_run_is_deleted_while_it_ends(a: Storage, b: Storage, where: str) -> None:
    await a.start_response(new("r1", message("m1")))
    ending = appending(a, RunAppend("r1", 1, closed=(ClosedItem(0, message("o1")),), finish=finish()))
    ended, was_running = await meet(a, ending, b.delete_response(OWNER, "r1", now()))
    assert not ended.refused and was_running is False
    assert counts(where) == {}
    await a.start_response(new("r2", message("m1")))
    late = RunAppend("r2", 1, closed=(ClosedItem(0, message("o1")),), finish=finish())
    was_running, refused = await meet(a, deleting("r2"), b.append([late]))
    assert was_running is True and list(refused) == ["r2"]
    assert counts(where) == {}


async def test_two_delete_one_response(a: Storage, b: Storage, where: str) -> None:
    await turn(a, "r1", message("m1"))
    await turn(a, "r2", message("m2"), previous="r1")
    first, second = await meet(a, deleting("r1"), b.delete_response(OWNER, "r1", now()))
    assert first is False and (second is False or isinstance(second, NotFound))
    assert len(await a.history(OWNER, previous_response_id="r2")) == 4
    await a.delete_response(OWNER, "r2", now())
    assert counts(where) == {}
