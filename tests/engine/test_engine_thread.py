"""The life of an engine's thread: what is asked of it ends with an answer, in time, or with the thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from engine import DeadlineExceeded, EngineDead, LoadError
from engine.engine_thread import EngineThread, resolve

Work = Callable[[], object]


class Doing:
    """A thread that does what it is given, until it is given nothing."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Work | None] = SimpleQueue()
        self.told: list[str] = []
        self.thread = EngineThread(
            "doing", "the doer", lambda: self.inbox.put(None), ended=lambda why: self.told.append(str(why))
        )

    async def start(self, load: Callable[[], str] = lambda: "made") -> str:
        return await self.thread.start("a/model", load, self._work)

    def _work(self, made: str) -> None:
        while (work := self.inbox.get()) is not None:
            work()

    async def ask(self, work: Work, deadline: float | None = None) -> object:
        def submit(future: asyncio.Future[object]) -> None:
            self.inbox.put(lambda: self.thread.post(resolve, future, work()))

        return await self.thread.answer(submit, deadline)

    async def never(self) -> object:
        return await self.thread.answer(lambda future: None)


async def test_it_answers_until_it_is_closed() -> None:
    doing = Doing()
    with pytest.raises(EngineDead, match="not started"):
        await doing.ask(lambda: 1)
    assert await doing.start() == "made"
    assert await doing.ask(lambda: 41 + 1) == 42
    with pytest.raises(DeadlineExceeded):
        await doing.ask(lambda: time.sleep(0.01), time.monotonic() - 1)
    waiting = asyncio.create_task(doing.never())
    await asyncio.sleep(0)
    assert doing.thread.num_waiting == 1
    await doing.thread.close()
    await doing.thread.close()
    for asked in (waiting, doing.ask(lambda: 1)):
        with pytest.raises(EngineDead, match="closed"):
            await asked
    assert doing.told == ["the engine was closed"] and not doing.thread.num_waiting


async def test_whoever_waits_learns_of_its_death() -> None:
    doing = Doing()
    await doing.start()
    waiting = asyncio.create_task(doing.never())
    await asyncio.sleep(0)

    def burn() -> None:
        raise RuntimeError("on fire")

    doing.inbox.put(burn)
    for asked in (waiting, doing.ask(lambda: 1)):
        with pytest.raises(EngineDead, match="the doer died: RuntimeError: on fire"):
            await asked
    assert str(await doing.thread.dead()) == "on fire" and doing.thread.is_dead
    await doing.thread.close()
    assert len(doing.told) == 1, "it is told once"


async def test_what_cannot_be_loaded_is_told_in_one_line() -> None:
    def missing() -> str:
        raise OSError("no such file\nand much more")

    doing = Doing()
    with pytest.raises(LoadError, match=r"^a/model cannot be loaded: OSError: no such file$"):
        await doing.start(missing)
    await doing.thread.close()
    with pytest.raises(EngineDead):
        await doing.ask(lambda: 1)
