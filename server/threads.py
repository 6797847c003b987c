"""Work that would hold up the event loop, done beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

THREADED_PARTS = 256
"""Items and parts of items above this are gone through in the thread pool; each takes some 20 us."""


async def aside(much: bool, work: Callable[..., T], *args: Any) -> T:
    """work(*args), beside the event loop when it is much."""
    return await asyncio.to_thread(work, *args) if much else work(*args)
