"""What is known of one request: its ids, its trace, and what it came to.

A record is the current one in every task that works for the request, so log lines and spans find it without
being handed it. A run that is taken up from the database has a record of its own, with the trace that its
plan has kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_VERSION_00 = 55
"""Length of a `traceparent` of the version that is known; later ones may be longer."""


def read_traceparent(value: str) -> str | None:
    """A `traceparent` header's value, unless it is none (W3C Trace Context, 3.2). It is told in the version
    that is known: what later ones have behind that may be any text, and goes no further."""
    if _TRACEPARENT.fullmatch(value) is None or (value.startswith("00") and len(value) != _VERSION_00):
        return None
    return f"00{value[2:_VERSION_00]}"


def end_user(owner: str, said: str | None) -> str | None:
    """What the log, usage and the audit log call a person whom a client names: it can be found again by who
    knows the identifier, and nobody else learns it there. Persons of two owners are two; None where nobody is
    named."""
    if not said:
        return None
    return blake2b(said.encode(), digest_size=8, key=blake2b(owner.encode()).digest()).hexdigest()


@dataclass(slots=True)
class RequestRecord:
    """One request, or one run that no request of this process has started.

    traceparent: of the span that the server made of it, or, without tracing, of the client. trace_state and
    request_trace: the headers `tracestate` and `X-Request-Trace` as they came. span: where spans are made.

    The rest is what it came to. Tokens are those of all its generations so far; finish_reason is the last
    one's. first_token_s: seconds from the request of a generation to its first token. error_code: of the
    refusal. end_user: see `end_user`.
    """

    request_id: str
    traceparent: str | None = None
    trace_state: str = ""
    request_trace: str = ""
    span: Any = None
    owned: bool = False  # by a run that no request of this process has started
    model: str | None = None
    response_id: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    first_token_s: float | None = None
    error_code: str | None = None
    end_user: str | None = None

    @property
    def trace_id(self) -> str | None:
        """The id of its trace: 32 hexadecimal digits."""
        return self.traceparent[3:35] if self.traceparent else None

    @property
    def trace_headers(self) -> tuple[tuple[str, str], ...]:
        """Headers that carry the trace on to another server."""
        if self.traceparent is None:
            return ()
        state = self.trace_state.strip()  # blanks at its end are none of it, and cannot be sent
        return (("traceparent", self.traceparent), *((("tracestate", state),) if state else ()))

    def dump(self) -> dict[str, str]:
        """What a plan keeps of it."""
        kept = {
            "request_id": self.request_id,
            "traceparent": self.traceparent or "",
            "tracestate": self.trace_state,
            "request_trace": self.request_trace,
        }
        return {name: value for name, value in kept.items() if value}

    @classmethod
    def load(cls, kept: Mapping[str, str]) -> RequestRecord:
        """What a plan has kept, back; nothing of it for a plan of an earlier version."""
        return cls(
            kept.get("request_id", ""),
            kept.get("traceparent"),
            kept.get("tracestate", ""),
            kept.get("request_trace", ""),
            owned=True,
        )

    def fields(self) -> dict[str, Any]:
        """What a log line says of what it came to."""
        found: dict[str, Any] = {
            "model": self.model,
            "response_id": self.response_id,
            "finish_reason": self.finish_reason,
            "error_code": self.error_code,
            "request_trace": self.request_trace or None,
            "safety_identifier": self.end_user,
        }
        if self.finish_reason is not None:
            found["prompt_tokens"] = self.prompt_tokens
            found["cached_tokens"] = self.cached_tokens
            found["output_tokens"] = self.output_tokens
        if self.first_token_s is not None:
            found["first_token_ms"] = round(self.first_token_s * 1000, 3)
        return {name: value for name, value in found.items() if value is not None}


current: ContextVar[RequestRecord | None] = ContextVar("current", default=None)
"""The record of the request that this task works for; None where it works for none."""


def note_end_user(owner: str, said: str | None) -> str | None:
    """Have the log of the current request tell for whom its client asks; returns the digest (`end_user`)."""
    person = end_user(owner, said)
    if (record := current.get()) is not None:
        record.end_user = person
    return person
