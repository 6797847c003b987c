"""How one stream shows events: in which profile, and padded or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import orjson

from server.event_profiles.obfuscation import padded
from server.event_profiles.older import Older, Rates, older_response
from server.sse_frame import event_type

Profile = Literal["openai", "legacy", "legacy-string"]
PROFILES: tuple[str, ...] = get_args(Profile)
"""`legacy-string` is `legacy` with the JSON of `response.tool_call.delta` as a text."""

PING_S = 15.0
"""Silence on an older stream before a ping, which it has in the place of comments."""

_DONE = b"data: [DONE]\n\n"


class View:
    """One stream of one response's events. after: the event behind which it begins. key: of the padding, None
    where nothing is padded. rates: what is left of rate limits, of which an older stream tells before its
    end."""

    def __init__(
        self,
        profile: str,
        *,
        after: int = -1,
        key: bytes | None = None,
        rates: Callable[[], Rates] = list,
    ) -> None:
        self._older = None if profile == "openai" else Older(_writer(profile), rates)
        self._key = key
        self.after = after
        self.last = after
        # What is said of a call's arguments needs the name of the call, which an earlier event has told.
        self.reads_after = after if self._older is None else -1

    def shown(self, first_seq: int, bodies: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Consecutive events as they are sent, with their numbers. Those up to `after` are not sent."""
        if self._older is None and self._key is None:
            self.last = first_seq + len(bodies) - 1
            return [*enumerate(bodies, first_seq)]
        told: list[tuple[int, bytes]] = []
        for number, body in enumerate(bodies, first_seq):
            events = [body] if self._older is None else map(_dump, self._older.shown(orjson.loads(body)))
            told += [(number, event) for event in events if number > self.after]
        self.last = max(self.after, first_seq + len(bodies) - 1)
        if (key := self._key) is None:
            return told
        return [
            (number, padded(event, number, key) if event_type(event).endswith(b".delta") else event)
            for number, event in told
        ]

    def response(self, body: bytes) -> bytes:
        """A Response object as this profile has it."""
        return body if self._older is None else orjson.dumps(older_response(orjson.loads(body)))

    @property
    def end(self) -> bytes:
        """What is sent behind the last event."""
        return b"" if self._older is None else _DONE

    @property
    def ping(self) -> Callable[[], bytes] | None:
        """What makes the event that keeps a silent stream open; None where a comment does."""
        return None if self._older is None else self._ping

    def _ping(self) -> bytes:
        told = {"sequence_number": max(0, self.last), "timestamp": int(time.time()), "response": {}}
        return _dump({"type": "response.ping", **told})


def _dump(event: dict[str, Any]) -> bytes:
    return orjson.dumps({"type": event["type"], **event})


def _writer(profile: str) -> Callable[[Any], Any]:
    if profile == "legacy-string":
        return lambda content: orjson.dumps(content).decode()
    return lambda content: content
