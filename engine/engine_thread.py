"""`EngineThread`: the thread that an engine computes on, from the loading of its model to its end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from engine.types import DeadlineExceeded, EngineDead, EngineError, LoadError

T = TypeVar("T")

NICENESS = 15
"""Added to that of the process: a thread that generates gets some thirty times as much of a busy core."""


class EngineThread:
    """A thread that loads a model and then computes with it. What asyncio waits for ends with it: when it is
    closed, and when it dies. All methods are called on one asyncio loop, but for `post`.

    name: of the thread. engine: what dies with it, as errors call it. stop: has the thread return from its
    work; any thread may call it. ended: told why nothing more comes, when it has died or is closed.
    gives_way: whether its priority is low.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        stop: Callable[[], object],
        *,
        ended: Callable[[EngineDead], object] = lambda failure: None,
        gives_way: bool = False,
    ) -> None:
        self._name = name
        self._engine = engine
        self._stop = stop
        self._ended = ended
        self._gives_way = gives_way
        self._waiting: set[asyncio.Future[Any]] = set()
        self._thread: threading.Thread | None = None
        self._loaded = self._closed = False

    async def start(self, model: str | Path, load: Callable[[], T], work: Callable[[T], None]) -> T:
        """Have the thread call `load`, and return what that returns; then the thread calls `work` with it,
        which returns when `stop` was called. model: what is loaded. Raises LoadError, and other errors of
        engines that `load` raises."""
        self._asyncio = asyncio.get_running_loop()
        self._death: asyncio.Future[BaseException] = self._asyncio.create_future()
        loaded: asyncio.Future[T] = self._asyncio.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(model, load, work, loaded), name=self._name, daemon=True
        )
        self._thread.start()
        made = await loaded
        self._loaded = True
        return made

    def _run(
        self, model: str | Path, load: Callable[[], T], work: Callable[[T], None], loaded: asyncio.Future[T]
    ) -> None:
        if self._gives_way:
            give_way()
        try:
            made = load()
        except BaseException as error:
            self.post(resolve, loaded, _load_error(model, error))
            return
        self.post(resolve, loaded, made)
        try:
            work(made)
        except BaseException as error:  # whatever ends the thread ends the engine, for every caller
            self.post(self.die, error)

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Have the asyncio loop call something; for the thread."""
        try:
            self._asyncio.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._stop()  # the asyncio loop is gone, and with it every caller

    # -- its end ---------------------------------------------------------------------------------------------

    def die(self, cause: BaseException) -> None:
        """Nothing more is expected of the thread, because of this."""
        if self._death.done():
            return
        self._death.set_result(cause)
        failure = self._died(cause)
        for future in self._waiting:
            resolve(future, failure)
        self._ended(failure)

    def _died(self, cause: BaseException) -> EngineDead:
        failure = EngineDead(f"{self._engine} died: {type(cause).__name__}: {cause}")
        failure.__cause__ = cause
        return failure

    @property
    def is_dead(self) -> bool:
        """Whether it has died."""
        return self._thread is not None and self._death.done()

    async def dead(self) -> BaseException:
        """Wait until it has died; returns why."""
        return await asyncio.shield(self._death)

    async def close(self, wait_s: float = 10.0) -> None:
        """Have the thread end, and wait up to `wait_s` seconds for that; what is asked of it ends with
        EngineDead."""
        if self._closed:
            return
        self._closed = True
        self._stop()
        if not self._loaded or self._death.done():  # everything has ended with it, and it may hang
            return
        failure = EngineDead("the engine was closed")
        for future in self._waiting:
            resolve(future, failure)
        assert self._thread is not None
        await self._asyncio.run_in_executor(None, self._thread.join, wait_s)
        if not self._death.done():
            self._ended(failure)

    def require_alive(self) -> None:
        """Raise EngineDead where nothing can be asked of it."""
        if self._closed or not self._loaded:
            raise EngineDead("the engine was closed" if self._closed else "the engine was not started")
        if self._death.done():
            raise self._died(self._death.result())

    # -- what is asked of it ---------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Questions that have no answer yet."""
        return len(self._waiting)

    async def answer(self, ask: Callable[[asyncio.Future[T]], object], deadline: float | None = None) -> T:
        """Ask the thread something; the answer is what it has `resolve` make of the future that `ask` is
        given. deadline: time.monotonic seconds. Raises DeadlineExceeded, and EngineDead."""
        self.require_alive()
        future: asyncio.Future[T] = self._asyncio.create_future()
        self._waiting.add(future)
        try:
            ask(future)
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await future
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed") from None
        finally:
            self._waiting.discard(future)


def resolve(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    """Give a future its value or exception, unless nobody waits for it any more."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def give_way() -> None:
    """Lower the priority of the calling thread, and of those that it begins, where the system can."""
    with suppress(AttributeError, OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS))


def _load_error(model: str | Path, error: BaseException) -> EngineError:
    """Whatever kept a model from loading, as an error of one line."""
    if isinstance(error, EngineError):
        return error
    line = (str(error).strip().splitlines() or [""])[0]
    failure = LoadError(f"{model} cannot be loaded: {type(error).__name__}: {line}")
    failure.__cause__ = error
    return failure
