"""What is seen of one generation while its chunks pass: when tokens came, how many, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from engine import CallStart, Chunk, Done, Engine, EngineError, GenerateRequest, Timing

Outcome = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A generation that is asked for. model: the name that it is served under.

    response_id: of the run that it is part of; completion_id: of the completion. messages: what it is asked,
    as the chat template is given it; called only where content is to be seen. answered: told how it has
    ended, where its consumer waited for that.
    """

    model: str
    engine: Engine
    request: GenerateRequest
    operation: Literal["chat", "text_completion"] = "chat"
    response_id: str | None = None
    completion_id: str | None = None
    conversation_id: str | None = None
    messages: Callable[[], list[dict[str, Any]]] | None = None
    answered: Callable[[EngineError | None], None] | None = None


@dataclass(slots=True)
class Observation:
    """A generation so far. Times are time.perf_counter seconds; tokens that were replayed do not count."""

    asked: Asked
    began: float
    first: float | None = None  # when its first token came
    last: float = 0.0  # and the latest
    num_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    timing: Timing | None = None
    outcome: Outcome = "cancelled"  # until it has ended in another way
    num_calls: int = 0
    error: str | None = None  # the type of what was raised
    text: list[str] | None = None  # its words, where content is to be seen

    @classmethod
    def of(cls, asked: Asked, *, content: bool) -> Observation:
        """A generation that begins now."""
        return cls(asked, time.perf_counter(), text=[] if content else None)

    def take(self, chunk: Chunk) -> float | None:
        """Take a chunk in; how long its tokens took, in seconds each, where others had come before."""
        if chunk.timing is not None:
            self.timing = chunk.timing
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens
        for delta in chunk.deltas:
            kind = type(delta)
            if kind is CallStart:
                self.num_calls += 1
            elif isinstance(delta, Done):
                calls = self.num_calls and delta.reason == "stop"
                self.outcome = "tool_calls" if calls else delta.reason
            if self.text is not None and (text := getattr(delta, "text", None)):
                self.text.append(text)
        if not chunk.token_ids or chunk.replayed:
            return None
        now = time.perf_counter()
        num = len(chunk.token_ids)
        self.num_tokens += num
        self.reasoning_tokens += chunk.reasoning_tokens
        before, self.last = self.last, now
        if self.first is None:
            self.first = now
            return None
        return (now - before) / num

    @property
    def per_token_s(self) -> float | None:
        """The mean time of a token after the first; None where there was none."""
        if self.first is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)
