"""How a completion ends that somebody else than its client cancels, wherever it stands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from server.errors import ApiError
from server.stateless.cancellation import Cancellation


async def parts(cancellation: Cancellation, engine: asyncio.Event) -> AsyncGenerator[int]:
    """Two parts of a completion, the second when the engine has it."""
    with cancellation.at_work():
        cancellation.rest()
        yield 1
        cancellation.wait()
        await engine.wait()
        yield 2


async def test_a_completion_whose_client_is_slow_ends_when_the_client_reads_on() -> None:
    cancellation = Cancellation()
    stream = parts(cancellation, asyncio.Event())
    assert await anext(stream) == 1
    assert not cancellation.cancel(), "nothing breaks off the part that is on its way"
    with pytest.raises(ApiError) as caught:
        await anext(stream)
    assert (caught.value.status, caught.value.code) == (503, "response_interrupted")
    assert cancellation.over.is_set() and cancellation.cancel()


@pytest.mark.parametrize(("by_administrator", "seen"), [(True, ApiError), (False, asyncio.CancelledError)])
async def test_only_an_administrators_cancellation_is_told(
    by_administrator: bool, seen: type[BaseException]
) -> None:
    cancellation = Cancellation()
    stream = parts(cancellation, asyncio.Event())
    assert await anext(stream) == 1
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # it waits for the engine now
    if by_administrator:
        assert cancellation.cancel()
    else:
        waiting.cancel()
    with pytest.raises(seen):
        await waiting
    assert cancellation.over.is_set()
