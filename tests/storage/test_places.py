"""The places of queued responses: ranked once for all who ask, and a new one's own known at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from storage import Storage, open_storage, places
from storage.queries import responses
from tests.support.making import OTHER, OWNER, new, url

Pair = tuple[Storage, Storage]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Two processes' views of a database."""
    async with AsyncExitStack() as stack:
        opened = []
        for runner in ("runner-a", "runner-b"):
            storage = await open_storage(url(tmp_path), runner=runner, lock=False)
            stack.push_async_callback(storage.close)
            opened.append(storage)
        yield opened[0], opened[1]


async def queue(storage: Storage, id: str, owner: str = OWNER, priority: int = 0) -> None:
    run = replace(new(id, owner=owner, runner=None, status="queued"), cost=100, priority=priority)
    await storage.start_response(run)


async def place(storage: Storage, id: str, owner: str = OWNER) -> int | None:
    run = (await storage.get_response(owner, id)).run
    return None if run is None else run.place


async def test_all_who_ask_within_a_second_are_told_from_one_ranking(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(places, "FRESH_S", 600.0)
    for number in range(10):
        await queue(a, f"a{number}")
    looks: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "runs_queued" in statement:
            looks.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        told = await asyncio.gather(*(place(a, f"a{number}") for number in range(10) for _ in range(5)))
        listed = await a.list_responses(OWNER, limit=20)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert told == [number + 1 for number in range(10) for _ in range(5)]
    assert [one.run.place for one in listed.data if one.run] == list(range(10, 0, -1))
    assert len(looks) == len(set(looks)) > 0


async def test_a_new_response_is_told_its_own_place_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among those of its owner and of others, and whatever this process has taken since."""
    a, b = pair
    monkeypatch.setattr(places, "FRESH_S", 600.0)
    await queue(a, "a0")
    assert await place(a, "a0") == 1
    for number in (1, 2):
        await queue(a, f"a{number}")
        assert await place(a, f"a{number}") == number + 1
    await queue(a, "b0", OTHER)
    assert await place(a, "b0", OTHER) == 2  # after a0, which is older, and before its owner's other ones
    await queue(a, "flex", OTHER, priority=1)
    assert await place(a, "flex", OTHER) == 5
    await queue(a, "urgent", priority=-1)
    assert await place(a, "urgent") == 1 and await place(a, "flex", OTHER) == 6
    assert [claim.response_id for claim in await a.take(2)] == ["urgent", "a0"]
    await queue(a, "b1", OTHER)
    assert await place(a, "b1", OTHER) == 3
    # What another process takes has no place at once, though the ranking has not heard of it.
    assert [claim.response_id for claim in await b.take(1)] == ["b0"]
    assert await place(a, "b0", OTHER) is None and await place(a, "b1", OTHER) == 3


async def test_one_that_is_taken_while_it_is_read_was_next(pair: Pair) -> None:
    a, _ = pair
    await queue(a, "a0")
    read = await a._read(partial(responses.get, owner=OWNER, id="a0"))
    await a.take(1)
    [told] = await a._places.placed(OWNER, [read])
    assert told.run is not None and told.run.place == 1


async def test_what_others_have_done_is_told_with_the_next_ranking(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr(places, "FRESH_S", 0.0)
    await queue(a, "a0")
    await queue(a, "a1")
    assert await place(a, "a1") == 2
    await b.take(1)
    assert await place(a, "a1") == 1
