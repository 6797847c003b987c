"""The messages between the asyncio side and the engine thread, all plain values.

Commands go through one queue; outputs come back as one batch a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from engine.types import GenerateRequest

if TYPE_CHECKING:
    from engine.structured.isolation import Matcher
    from engine.tokenizer import BannedTexts


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request; `handle` names it from here on. The matcher, if any, has read the request's prefix
    already. `banned`: what its output must not say. `at`: when it was asked for, in time.perf_counter
    seconds.
    """

    handle: int
    request: GenerateRequest
    matcher: Matcher | None = None
    banned: BannedTexts | None = None
    at: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request and free its KV; nothing more comes out of it."""

    handle: int


@dataclass(frozen=True, slots=True)
class Credit:
    """The consumer has taken this many more tokens."""

    handle: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Evict the KV of a generation that has ended after what nobody waits for (see `Engine.keep`).

    until: time.monotonic seconds.
    """

    name: str
    request: GenerateRequest
    output: tuple[int, ...]
    until: float


@dataclass(frozen=True, slots=True)
class LetGo:
    """Nobody waits any more for what was kept under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write the KV of a generation that has ended to disk (see `Engine.save`). until: unix seconds."""

    name: str
    request: GenerateRequest
    output: tuple[int, ...]
    until: float | None


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what was saved under these names, or, where one is given, all that is an owner's."""

    names: frozenset[str] = frozenset()
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function on the engine thread, between two steps."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Update:
    """Run a function on the engine thread that changes the books."""

    function: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Close:
    """End the engine thread."""


Command = Submit | Abort | Credit | Keep | LetGo | Save | Forget | Call | Update | Close
Inbox = SimpleQueue[Command]
