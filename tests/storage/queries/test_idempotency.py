"""Keyed requests: one of two equal ones is the first, whoever asks, and what came of it is found again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sqlalchemy import Connection, insert

from storage import (
    ClosedItem,
    Finish,
    KeyedRequest,
    KnownRequest,
    Limits,
    NewResponse,
    NotFound,
    RequestKnown,
    RunAppend,
    Storage,
)
from storage.tables import runners
from tests.support.making import OTHER, OWNER, message, new, now, record

LATER = 10**9


def request(
    key: str = "k", *, owner: str = OWNER, route: str = "/v1/things", body: bytes = b"a"
) -> KeyedRequest:
    return KeyedRequest(owner, route, key, body, now())


def started(id: str, asked: KeyedRequest, *, hidden: bool = False, **fields: str) -> NewResponse:
    return replace(new(id, message(f"{id}.in"), **fields), request=asked, hidden=hidden)  # type: ignore[arg-type]


@contextmanager
def as_another(storage: Storage, runner: str = "runner-2") -> Iterator[None]:
    """What follows is done by another process."""
    mine, storage.runner = storage.runner, runner
    yield
    storage.runner = mine


async def end(storage: Storage, id: str, *, append: bool = False) -> None:
    closed = (ClosedItem(0, message(f"{id}.out")),)
    finish = Finish("completed", now(), append)
    ended = RunAppend(id, 1, records=(record(2),), closed=closed, head=b"{}", finish=finish)
    assert not await storage.append([ended])


async def sweep(storage: Storage, age: int = 0) -> int:
    """Lets go of requests that are this many microseconds old an age later; returns how many went."""
    limits = Limits(request_age=age)
    return sum([swept.requests async for swept in storage.sweep(limits, now() + LATER)])


async def announce(storage: Storage, runner: str) -> None:
    """A process says that it lives."""

    def beat(conn: Connection) -> None:
        conn.execute(insert(runners).values(id=runner, beat=1))

    await storage._write(beat)


# ------------------------------------------------------------------------------------------------------------
# Requests that start a run


async def test_of_two_starts_with_one_key_the_second_writes_nothing(storage: Storage) -> None:
    await storage.start_response(started("resp_1", request()))
    with pytest.raises(RequestKnown):
        await storage.start_response(started("resp_2", request()))
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "resp_2")
    assert await storage.find_request(request()) == KnownRequest(b"a", "resp_1", None, None, None)
    await end(storage, "resp_1")


async def test_a_start_that_fails_leaves_its_key_free(storage: Storage) -> None:
    with pytest.raises(NotFound):
        await storage.start_response(started("resp_1", request(), previous="resp_0"))
    assert await storage.find_request(request()) is None


async def test_a_key_stands_for_one_request_of_one_owner_to_one_route(storage: Storage) -> None:
    asked = [request(), request(owner=OTHER), request(route="/v1/others"), request("other")]
    for number, each in enumerate(asked):
        assert await storage.find_request(each) is None
        await storage.start_response(started(f"resp_{number}", each, owner=each.owner))
        await end(storage, f"resp_{number}")


async def test_what_a_process_has_begun_becomes_the_run_that_it_starts(storage: Storage) -> None:
    assert await storage.begin_request(request()) is None
    await storage.start_response(started("resp_1", request()))
    found = await storage.find_request(request())
    assert found is not None and found.response_id == "resp_1"
    await storage.release_request(request())
    assert await storage.find_request(request()) == found, "a run is a result"
    await end(storage, "resp_1")


async def test_what_another_process_has_begun_does_not(storage: Storage) -> None:
    with as_another(storage):
        assert await storage.begin_request(request()) is None
    with pytest.raises(RequestKnown):
        await storage.start_response(started("resp_1", request()))


async def test_with_a_response_goes_what_its_request_is_known_by(storage: Storage) -> None:
    await storage.start_response(started("resp_1", request()))
    await storage.delete_response(OWNER, "resp_1", now())
    assert await storage.find_request(request()) is None


# ------------------------------------------------------------------------------------------------------------
# Other requests


async def test_a_reply_is_kept_and_found(storage: Storage) -> None:
    assert await storage.begin_request(request()) is None
    await storage.complete_request(request(), 200, b"[]", b"done")
    reply = KnownRequest(b"a", None, 200, b"[]", b"done")
    assert await storage.find_request(request()) == reply
    assert await storage.begin_request(request()) == reply
    await storage.release_request(request())
    with as_another(storage):
        assert await storage.begin_request(request()) == reply


async def test_a_key_that_is_given_back_is_free(storage: Storage) -> None:
    assert await storage.begin_request(request()) is None
    await storage.release_request(request())
    assert await storage.find_request(request()) is None


async def test_what_a_living_process_is_at_is_left_to_it(storage: Storage) -> None:
    await announce(storage, "runner-2")
    with as_another(storage):
        assert await storage.begin_request(request()) is None
    assert await storage.begin_request(request()) == KnownRequest(b"a", None, None, None, None)
    await storage.release_request(request())
    await storage.complete_request(request(), 200, b"[]", b"not mine")
    assert await storage.find_request(request()) == KnownRequest(b"a", None, None, None, None)


async def test_the_place_of_a_dead_process_is_taken_and_its_late_reply_is_nothing(storage: Storage) -> None:
    with as_another(storage):
        assert await storage.begin_request(request()) is None
    assert await storage.begin_request(request()) is None
    with as_another(storage):
        await storage.complete_request(request(), 200, b"[]", b"late")
        await storage.release_request(request())
    await storage.complete_request(request(), 200, b"[]", b"done")
    found = await storage.find_request(request())
    assert found is not None and found.body == b"done"


async def test_a_process_may_take_its_own_place(storage: Storage) -> None:
    assert await storage.begin_request(request()) is None
    assert await storage.begin_request(request()) is None


async def test_another_body_never_takes_a_place(storage: Storage) -> None:
    with as_another(storage):
        assert await storage.begin_request(request()) is None
    known = await storage.begin_request(request(body=b"b"))
    assert known is not None and known.body_hash == b"a"


# ------------------------------------------------------------------------------------------------------------
# Responses that are kept for repeats alone


async def test_a_hidden_response_is_found_by_nobody_who_does_not_ask_for_it(storage: Storage) -> None:
    await storage.start_response(started("resp_1", request(), hidden=True))
    await end(storage, "resp_1")
    for reading in (
        storage.get_response(OWNER, "resp_1"),
        storage.history(OWNER, previous_response_id="resp_1"),
        storage.input_items(OWNER, "resp_1", limit=1),
        storage.delete_response(OWNER, "resp_1", now()),
        storage.request_cancel(OWNER, "resp_1"),
        storage.start_response(new("resp_2", previous="resp_1")),
    ):
        with pytest.raises(NotFound):
            await reading
    assert (await storage.list_responses(OWNER, limit=10)).data == ()
    assert await storage.get_items(OWNER, ["resp_1.in", "resp_1.out"]) == {}
    found = await storage.get_response(OWNER, "resp_1", hidden=True)
    assert [item.id for item in found.output] == ["resp_1.out"]
    history = await storage.history(OWNER, previous_response_id="resp_1", hidden=True)
    assert [entry.item.id for entry in history] == ["resp_1.in", "resp_1.out"]


async def test_its_turn_belongs_to_its_conversation_alone(storage: Storage) -> None:
    await storage.create_conversation(OWNER, "conv_1", now(), b"{}")
    await storage.start_response(started("resp_1", request(), hidden=True, conversation="conv_1"))
    await end(storage, "resp_1", append=True)
    for _ in range(2):
        history = await storage.history(OWNER, conversation_id="conv_1")
        assert [(entry.item.id, entry.response_id) for entry in history] == [
            ("resp_1.in", None),
            ("resp_1.out", None),
        ]
        await sweep(storage)
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "resp_1", hidden=True)


# ------------------------------------------------------------------------------------------------------------
# The end


async def test_requests_are_forgotten_with_what_was_kept_for_their_repeats(storage: Storage) -> None:
    for number in range(40):
        await storage.start_response(started(f"resp_{number}", request(f"k{number}"), hidden=number % 2 == 0))
        await end(storage, f"resp_{number}")
    assert await storage.begin_request(request()) is None
    await storage.complete_request(request(), 200, b"[]", b"done")
    assert await sweep(storage, age=2 * LATER) == 0
    assert await sweep(storage) == 41
    assert await sweep(storage) == 0
    assert await storage.find_request(request()) is None
    assert len((await storage.list_responses(OWNER, limit=100)).data) == 20
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "resp_0", hidden=True)


async def test_a_run_in_flight_keeps_its_request(storage: Storage) -> None:
    await storage.start_response(started("resp_1", request(), hidden=True))
    assert await sweep(storage) == 0
    await end(storage, "resp_1")
    assert await sweep(storage) == 1
