"""Pieces of work on threads for several owners."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from engine.turns import Turns
from tests.support.blocking import until


async def test_owners_take_turns_at_the_places_and_a_place_is_free_when_its_work_has_ended() -> None:
    gate, began = threading.Event(), list[str]()

    def work(name: str) -> str:
        began.append(name)
        gate.wait(60)
        return name

    with ThreadPoolExecutor(4) as threads:
        turns = Turns(threads, 2)
        names = ["a1", "a2", "a3", "a4", "b1", "c1"]
        asked = [asyncio.create_task(turns.do(name[0], partial(work, name))) for name in names]
        try:
            await until(lambda: sorted(began) == ["a1", "a2"])
            asked[0].cancel()  # it goes on, and nobody has its place
            asked[3].cancel()
            await asyncio.wait([asked[0], asked[3]])
            assert sorted(began) == ["a1", "a2"]
        finally:
            gate.set()
            found = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(began[2:4]) == ["a3", "b1"] and began[4:] == ["c1"]
    assert [each for each in found if isinstance(each, str)] == ["a2", "a3", "b1", "c1"]


async def test_threads_that_were_shut_down_are_told_to_whoever_waits() -> None:
    gate, threads = threading.Event(), ThreadPoolExecutor(1)
    turns = Turns(threads)
    first, second = (asyncio.create_task(turns.do("a", work)) for work in (gate.wait, bool))
    await asyncio.sleep(0)
    threads.shutdown(wait=False)
    gate.set()
    assert await first
    with pytest.raises(RuntimeError, match="shutdown"):
        await second
