"""Ties what is done for a request to its client: it is cancelled when the client leaves.

Most of it is over before it has waited for anything, and costs no task then: an `Eager` coroutine has taken
its first step already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

T = TypeVar("T")

Interrupt = Callable[[BaseException], None]
"""Cancels work, which then raises this error; the first one counts."""


class Eager(Generic[T]):
    """A coroutine that has begun: it is over, or `waits`. Its result is had by awaiting it, in the task that
    began it; that may be done again once it is over."""

    def __init__(self, begun: Awaitable[T]) -> None:
        self._steps = begun.__await__()
        self._result: T | None = None
        self.waits = True
        try:
            self._awaited = next(self._steps)
        except StopIteration as end:
            self.waits = False
            self._result = end.value

    def __await__(self) -> Generator[Any, Any, T]:
        while self.waits:
            try:
                told = yield self._awaited
            except BaseException as error:
                step = partial(self._steps.throw, error)
            else:
                step = partial(self._steps.send, told)
            try:
                self._awaited = step()
            except StopIteration as end:
                self.waits = False
                self._result = end.value
            finally:
                del step  # an error that it holds leads back here
        return cast("T", self._result)


@asynccontextmanager
async def interruptible() -> AsyncIterator[Interrupt]:
    """Held around work that somebody else may end."""
    why: BaseException | None = None
    held = True

    def interrupt(error: BaseException) -> None:
        nonlocal why
        if held and why is None:
            why = error
            scope.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as scope:
            try:
                yield interrupt
            finally:
                held = False
    except TimeoutError:
        if why is None or not scope.expired():  # of the work itself
            raise
        try:
            raise why from None
        finally:
            why = None  # it leads back here


@asynccontextmanager
async def connected(receive: Receive) -> AsyncIterator[Interrupt]:
    """Held around work whose client's body was read: ClientDisconnect, in place of the rest of it, when the
    client leaves. What it yields ends the work for another reason."""
    async with interruptible() as interrupt:
        watch = asyncio.create_task(_until_gone(receive, interrupt))
        try:
            yield interrupt
        finally:
            watch.cancel()


async def _until_gone(receive: Receive, interrupt: Interrupt) -> None:
    try:
        with suppress(OSError):  # of its connection
            while (await receive())["type"] != "http.disconnect":
                pass
    except Exception as error:
        interrupt(error)
    else:
        interrupt(ClientDisconnect())


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but only for as long as the client is there: when it leaves, `work` is cancelled.

    For replies that are not streamed; call it after the body was read. Raises ClientDisconnect when it left.
    """
    begun = Eager(work)
    if begun.waits:
        async with connected(request.receive):
            return await begun
    return await begun
