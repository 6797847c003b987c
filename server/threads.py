"""Work that would hold up the event loop, done beside it.

What a request costs grows with its body, so whoever reads a large body says so once, and everything that goes
through the whole of it from then on asks here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

THREADED_PARTS = 256
"""Items and parts of items above this are gone through in the thread pool; each takes some 20 us."""

THREADED_TOKENS = 32 * 1024
"""Prompts of more tokens are gone through in the thread pool; a look at each token takes some 0.05 us."""

_large: ContextVar[bool] = ContextVar("large", default=False)


def begin_large_request() -> None:
    """Say that the request of this task has a large body, or goes on from much. The tasks that it begins know
    it, too."""
    _large.set(True)


def in_large_request() -> bool:
    """Whether this task works for a request with a large body."""
    return _large.get()


async def aside(much: bool, work: Callable[..., T], *args: Any) -> T:
    """work(*args), beside the event loop when it is much."""
    return await asyncio.to_thread(work, *args) if much else work(*args)
