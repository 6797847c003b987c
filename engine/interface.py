"""What every engine offers: the local one, one over other servers, and the scripted one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from engine.admission import Admission, Place
from engine.types import (
    Chunk,
    Constraint,
    EngineStats,
    GenerateRequest,
    ModelInfo,
    Prompt,
    RenderInput,
)


class Engine(Protocol):
    """Tokens in, deltas out. All methods are called on one asyncio loop; none blocks it."""

    async def start(self) -> ModelInfo:
        """Load the model and start the engine thread; raises EngineError when it cannot serve."""
        ...

    @property
    def info(self) -> ModelInfo:
        """The model served; only after `start`."""
        ...

    async def render(self, messages: RenderInput) -> Prompt:
        """Render messages by the chat template; raises RenderError (template refused the messages)."""
        ...

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Encode text."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Decode ids, special tokens included."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token's text, for log probabilities and token lists."""
        ...

    async def check(self, constraint: Constraint, owner: str = "") -> None:
        """Compile a constraint ahead of time; raises ConstraintError naming what cannot be honoured. Owners
        take turns."""
        ...

    async def prepare(self) -> None:
        """Start what a constraint would otherwise be the first to need; for whoever serves, once it does."""
        ...

    @property
    def admission(self) -> Admission:
        """The places of its queue; only after `start`."""
        ...

    def generate(self, request: GenerateRequest, place: Place | None = None) -> AsyncGenerator[Chunk]:
        """Generate; closing the generator aborts the request and frees its KV within a step.

        place: one that the caller took in the queue, and gives back; the request is not refused then. Without
        it one is taken at the first step, which raises QueueFull.

        Raises PromptTooLong, ConstraintError, DeadlineExceeded, RequestFailed
        (only this request), EngineDead (the engine is gone for all).
        """
        ...

    def keep(self, name: str, request: GenerateRequest, output: Sequence[int], seconds: float) -> None:
        """A generation that has ended is gone on from soon: evict its KV after what nobody waits for.

        output: the token ids that it made. For so many seconds, until `let_go`, or until the same name is
        given again. It is no promise: running sequences need room, and half of the cache at most is kept.
        """
        ...

    def let_go(self, name: str) -> None:
        """Nobody goes on from what was kept under this name, if anything was."""
        ...

    def stats(self) -> EngineStats:
        """Counters for metrics."""
        ...

    def gpu(self) -> Mapping[str, float]:
        """What the GPU that it computes on does, for metrics; empty without one. It asks the driver."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when free + cached + used blocks do not add up."""
        ...

    async def dead(self) -> BaseException:
        """Wait until the engine has died; returns why."""
        ...

    async def close(self) -> None:
        """Stop the engine thread; requests still running end with EngineDead."""
        ...
