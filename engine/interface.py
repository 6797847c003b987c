"""What every engine offers: the local one, one over other servers, and the scripted one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
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

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, owner: str = ""
    ) -> tuple[int, ...]:
        """Encode text. Owners of long ones take turns, and so do those of `render` and `detokenize`."""
        ...

    async def detokenize(self, token_ids: Sequence[int], *, owner: str = "") -> str:
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

    def save(
        self, name: str, request: GenerateRequest, output: Sequence[int], until: float | None = None
    ) -> None:
        """Write the KV of a generation that has ended to disk, as far as it is still in the cache.

        output: the token ids that it made. A later request that begins with the same tokens finds it there,
        also after a restart. The name is that of a response or conversation, and belongs to the request's
        owner; given again, it stands for what was saved last. until: unix seconds. It is no promise: what
        computes in a moment is not saved, and what is worth least goes when there is no room.
        `GenerateRequest.saved_as` does the same when a request ends.
        """
        ...

    def forget(self, names: Collection[str]) -> None:
        """Remove from disk what was saved under these names and under no other, and let nothing that still
        runs save under them. It is done in the background; whoever has to know asks `saved_names`, or does it
        again after a crash.
        """
        ...

    def forget_owner(self, owner: str) -> None:
        """The same with all names of an owner."""
        ...

    async def saved_names(self) -> frozenset[str]:
        """The names under which something is on disk; what was to be saved or forgotten before this call has
        been.
        """
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
