"""Which models are in memory: loading, waiting, room, rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from engine import LoadError
from server.errors import ApiError
from server.loading import Held, Shelf, State, shelf


@dataclass
class Model:
    """One that loads when its gate opens."""

    size: int = 10
    busy: bool = False
    up: bool = False
    failure: str | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    log: list[str] = field(default_factory=list)

    async def load(self) -> None:
        self.log.append("load")
        await self.gate.wait()
        if self.failure is not None:
            raise LoadError(self.failure)
        self.up = True

    async def unload(self) -> None:
        self.log.append("unload")
        self.up = False

    def state(self) -> State:
        return "loaded" if self.up else "unloaded"

    def is_busy(self) -> bool:
        return self.busy

    def memory_bytes(self) -> int:
        return self.size


def quick(**fields: int) -> Model:
    model = Model(**fields)
    model.gate.set()
    return model


@asynccontextmanager
async def shelved(
    *models: Model, memory_bytes: int | None = None, load_s: float = 5, max_waiting: int = 64
) -> AsyncIterator[tuple[Shelf, list[Held]]]:
    found = Shelf(memory_bytes=memory_bytes, load_s=load_s, max_waiting=max_waiting)
    held = [Held(f"m{index}", model) for index, model in enumerate(models)]
    for each in held:
        found.add(each)
    try:
        yield found, held
    finally:
        await found.close()


async def until(shelf: Shelf, held: Held, state: str) -> None:
    async with asyncio.timeout(5):
        while held.state != state:
            await asyncio.sleep(0)


async def test_those_who_want_one_at_once_share_one_load() -> None:
    model = Model()
    async with shelved(model) as (shelf, [held]):
        waiting = [asyncio.create_task(shelf.ready(held)) for _ in range(3)]
        await until(shelf, held, "loading")
        model.gate.set()
        await asyncio.gather(*waiting)
        await shelf.ready(held)
        assert (model.log, held.num_loads, held.state, held.num_waiting) == (["load"], 1, "loaded", 0)


async def test_too_many_and_too_long_waits_are_503_with_a_time_to_come_back() -> None:
    model = Model()
    async with shelved(model, load_s=0.05, max_waiting=1) as (shelf, [held]):
        first = asyncio.create_task(shelf.ready(held))
        await until(shelf, held, "loading")
        with pytest.raises(ApiError, match="too many requests wait") as full:
            await shelf.ready(held)
        with pytest.raises(ApiError, match="takes long") as late:
            await first
        for refused in (full.value, late.value):
            assert (refused.status, refused.code) == (503, "model_loading")
            assert int(refused.headers["retry-after"]) >= 1
        model.gate.set()
        await shelf.ready(held)
        assert held.num_loads == 1, "the load went on, though nobody waited for it"


async def test_room_is_made_by_those_that_were_idle_for_longest_and_are_not_pinned() -> None:
    models = [quick(), quick(), quick(), quick()]
    async with shelved(*models, memory_bytes=30) as (shelf, held):
        held[0].pinned = True
        for each in held[:3]:
            await shelf.ready(each)
        held[1].use()
        held[2].used_at -= 5
        held[0].used_at -= 9
        await shelf.ready(held[3])
        assert [each.state for each in held] == ["loaded", "loaded", "unloaded", "loaded"]
        assert shelf.memory_used == 30


async def test_a_model_waits_for_room_until_another_is_not_busy_any_more() -> None:
    models = [quick(busy=True), quick()]
    async with shelved(*models, memory_bytes=15) as (shelf, [one, other]):
        await shelf.ready(one)
        waiting = asyncio.create_task(shelf.ready(other))
        await until(shelf, other, "waiting")
        assert models[0].up
        models[0].busy = False
        await waiting
        assert (one.state, other.state) == ("unloaded", "loaded")


async def test_one_that_never_fits_is_refused_at_the_start_where_it_is_needed() -> None:
    with pytest.raises(LoadError, match=r"takes about 3.0 GiB, and models_memory_bytes is 2.0 GiB"):
        Shelf(memory_bytes=2 << 30).add(Held("one", quick(size=3 << 30), needed=True))


async def test_one_that_never_fits_is_not_loaded_and_moves_no_other() -> None:
    models = quick(size=5), quick(size=10)
    async with shelved(*models, memory_bytes=5) as (shelf, [small, large]):
        await shelf.ready(small)
        with pytest.raises(LoadError, match="models_memory_bytes"):
            await shelf.ready(large)
        assert (small.state, large.state) == ("loaded", "failed")
        assert not models[1].log


async def test_a_failure_is_told_and_the_next_request_tries_again() -> None:
    model = quick()
    model.failure = "no weights"
    async with shelved(model) as (shelf, [held]):
        with pytest.raises(LoadError, match="no weights"):
            await shelf.ready(held)
        assert (held.state, held.failure, held.num_failures) == ("failed", "no weights", 1)
        model.failure = None
        await shelf.ready(held)
        assert (held.state, held.failure) == ("loaded", None)


async def test_idle_ones_go_and_used_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "LOOK_S", 0.005)
    models = [quick(), quick(busy=True)]
    async with shelved(*models) as (found, held):
        for each in held:
            each.idle_s = 0.02
            await found.ready(each)
        found.start()
        await until(found, held[0], "unloaded")
        assert held[1].state == "loaded"
        with pytest.raises(ApiError, match="is in use"):
            await found.unload_idle(held[1])
        models[1].busy = False
        await until(found, held[1], "unloaded")
        assert models[1].log == ["load", "unload"]


async def test_a_model_that_waits_for_room_holds_up_none_that_fits() -> None:
    models = [quick(size=6, busy=True), quick(size=6), quick(size=2)]
    async with shelved(*models, memory_bytes=10) as (shelf, [one, large, small]):
        await shelf.ready(one)
        waiting = asyncio.create_task(shelf.ready(large))
        await until(shelf, large, "waiting")
        await shelf.ready(small)
        assert [each.state for each in (one, large, small)] == ["loaded", "waiting", "loaded"]
        models[0].busy = False
        await waiting
        assert one.state == "unloaded"


async def test_nothing_is_unloaded_for_one_that_would_not_fit_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shelf, "LOOK_S", 0.005)
    models = [quick(size=6, busy=True), quick(size=3), quick(size=6)]
    async with shelved(*models, memory_bytes=10, load_s=0.05) as (found, held):
        for each in held[:2]:
            await found.ready(each)
            each.used_at -= 5
        with pytest.raises(ApiError, match="has no room yet"):
            await found.ready(held[2])
        assert models[1].log == ["load"]


async def test_one_that_pinned_models_leave_no_room_is_refused_at_once() -> None:
    models = [quick(size=6), quick(size=6), quick(size=2)]
    async with shelved(*models, memory_bytes=10) as (shelf, [pinned, large, small]):
        pinned.pinned = True
        await shelf.ready(pinned)
        with pytest.raises(LoadError, match=r"m1 takes about .*, and pinned models take"):
            await shelf.ready(large)
        await shelf.ready(small)
        assert (pinned.state, large.state, small.state) == ("loaded", "failed", "loaded")
        await shelf.unload_idle(pinned)
        await shelf.ready(large)
        assert large.state == "loaded"


async def test_room_is_not_waited_for_any_more_once_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "LOOK_S", 0.005)
    models = [quick(busy=True), quick()]
    async with shelved(*models, memory_bytes=15, load_s=0.05) as (found, [one, other]):
        await found.ready(one)
        patient = asyncio.create_task(found.loaded(other))
        with pytest.raises(ApiError, match="has no room yet"):
            await found.ready(other)
        other.used_at -= 5
        async with asyncio.timeout(5):
            while time.monotonic() - other.used_at > 1:  # until it has looked for room again
                await asyncio.sleep(0)
        assert other.state == "waiting", "somebody waits for it still"
        patient.cancel()
        await until(found, other, "unloaded")
        models[0].busy = False
        one.used_at -= 5
        await found.ready(other)
        assert (one.state, other.state, other.num_failures) == ("unloaded", "loaded", 0)
