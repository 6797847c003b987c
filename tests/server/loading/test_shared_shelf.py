"""Several server processes and the models that another process keeps for them: who is told what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from engine import EngineUnavailable, LoadError
from server.errors import ApiError
from server.loading import Child, FarChild, Held, Shelf, ShelfHost, ShelfLine, State


@dataclass
class Process:
    """Stands for the process of a model, whose socket nobody listens at."""

    socket: Path
    pid: int | None = None
    num_crashes: int = 0
    given_up: str | None = None
    is_kept: bool = False


@dataclass
class Model:
    """A model that loads at once, unless it fails; `host` says whether it is used."""

    name: str
    process: Process
    host: list[ShelfHost] = field(default_factory=list)
    failure: str | None = None

    async def load(self) -> None:
        if self.failure is not None:
            raise LoadError(self.failure)
        self.process.is_kept = True

    async def unload(self) -> None:
        self.host[0].rests(self.name)
        self.process.is_kept = False

    def state(self) -> State:
        return "loaded" if self.process.is_kept else "unloaded"

    def is_busy(self) -> bool:
        return self.host[0].is_used(self.name)

    def memory_bytes(self) -> int:
        return 10


class Server:
    """What a server process knows and does; `using` are the names of models that it uses, `waiting` of those
    that a request waits for there."""

    def __init__(self, path: Path) -> None:
        self.line = ShelfLine(path)
        self.using: set[str] = set()
        self.waiting: set[str] = set()
        self.loaded: list[str] = []
        self.used_at = 0.0
        self.line.uses = lambda: {
            name: (name in self.using, int(name in self.waiting), self.used_at if name in self.using else 0.0)
            for name in ("a", "b")
        }
        self.line.on_loaded = self.loaded.append

    def state(self, name: str) -> State:
        return self.line.standing(name).state

    def child(self, name: str, on_wanted: Callable[[], None] = lambda: None) -> FarChild:
        return self.line.child(name, on_wanted)


@asynccontextmanager
async def shared(folder: Path, **settings: Any) -> AsyncIterator[tuple[dict[str, Model], list[Server]]]:
    """Two models behind two server processes."""
    path, shelf = folder / "shelf.sock", Shelf(**settings)
    models = {name: Model(name, Process(folder / name)) for name in ("a", "b")}
    children = {name: model.process for name, model in models.items()}
    host = ShelfHost(path, shelf, cast("dict[str, Child]", children))
    for name, model in models.items():
        model.host.append(host)
        shelf.add(Held(name, model))
    await host.start()
    servers = [Server(path), Server(path)]
    try:
        for server in servers:
            await server.line.open()
        yield models, servers
    finally:
        for server in servers:
            await server.line.close()
        await shelf.close()
        await host.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.005)


async def test_what_one_has_loaded_the_other_learns_of(tmp_path: Path) -> None:
    async with shared(tmp_path) as (_, [one, other]):
        child = other.child("a")
        assert (one.state("a"), other.state("a"), child.state()) == ("unloaded", "unloaded", "unloaded")
        await one.line.ask("load", "a")
        assert one.state("a") == "loaded", "whoever asked is told at once"
        await until(lambda: other.state("a") == "loaded")
        assert other.loaded == ["a"]
        assert child.state() == "loading", "it is not connected with it yet"
        assert (other.line.standing("a").loads, other.line.standing("a").memory_bytes) == (1, 10)
        assert other.state("b") == "unloaded"


async def test_a_model_that_another_one_uses_is_not_unloaded(tmp_path: Path) -> None:
    async with shared(tmp_path) as (_, [one, other]):
        await one.line.ask("load", "a")
        other.using.add("a")
        other.line.tell_uses()
        await other.line.ask("load", "a")  # behind which the use is known
        with pytest.raises(ApiError, match="in use") as refused:
            await one.line.ask("unload", "a")
        assert (refused.value.status, refused.value.code) == (409, "model_busy")
        other.using.clear()
        other.line.tell_uses()
        await other.line.ask("load", "a")
        await one.line.ask("unload", "a")
        assert one.state("a") == "unloaded"


async def test_room_is_made_of_what_no_process_uses(tmp_path: Path) -> None:
    async with shared(tmp_path, memory_bytes=15) as (models, [one, other]):
        await one.line.ask("load", "a")
        other.using.add("a")
        other.line.tell_uses()
        await other.line.ask("load", "a")
        loading = asyncio.create_task(one.line.ask("load", "b"))
        await until(lambda: one.state("b") == "waiting")
        assert models["a"].state() == "loaded"
        other.using.clear()
        await loading
        assert (one.state("a"), one.state("b")) == ("unloaded", "loaded")


async def test_room_is_waited_for_until_no_process_wants_it_any_more(tmp_path: Path) -> None:
    async with shared(tmp_path, memory_bytes=15, load_s=0.05) as (models, [one, other]):
        await one.line.ask("load", "a")
        other.using.add("a")
        other.line.tell_uses()
        await other.line.ask("load", "a")
        one.waiting.add("b")
        loading = asyncio.create_task(one.line.ask("load", "b"))
        await until(lambda: one.state("b") == "waiting")
        assert models["b"].is_busy(), "a request waits for it there"
        one.waiting.clear()
        with pytest.raises(ApiError, match="has no room yet") as refused:
            await loading
        assert (refused.value.status, refused.value.code) == (503, "model_loading")


async def test_whoever_waits_for_one_that_was_unloaded_wants_it_again(tmp_path: Path) -> None:
    async with shared(tmp_path) as (_, [one, other]):
        await one.line.ask("load", "a")
        await until(lambda: other.state("a") == "loaded")
        wanted: list[State] = []
        child = other.child("a", lambda: wanted.append(child.state()))
        waiting = asyncio.create_task(child.line.open())
        await until(lambda: wanted == ["loading"])
        await one.line.ask("unload", "a")
        await until(lambda: wanted[-1] == "unloaded")
        waiting.cancel()
        await child.close()


async def test_why_a_model_cannot_be_had_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise RuntimeError("a bug")

    async with shared(tmp_path) as (models, [one, other]):
        models["a"].failure = "no weights"
        child = other.child("a")
        waiting = asyncio.create_task(child.line.open())
        await asyncio.sleep(0)
        with pytest.raises(LoadError, match="no weights"):
            await one.line.ask("load", "a")
        with pytest.raises(EngineUnavailable, match="'a' cannot be had now: no weights"):
            await waiting
        assert (one.state("a"), other.line.standing("a").failure) == ("failed", "no weights")
        models["a"].failure = None
        monkeypatch.setattr(models["a"], "load", broken)
        async with asyncio.timeout(20):  # a failure of any other kind is an answer, too
            with pytest.raises(LoadError, match="to load a has failed"):
                await one.line.ask("load", "a")
        assert "a bug" in caplog.text
        monkeypatch.undo()
        await other.line.ask("load", "a")
        assert (other.state("a"), other.line.standing("a").failure) == ("loaded", None)
        await child.close()
