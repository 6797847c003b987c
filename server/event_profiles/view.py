"""How one stream shows events: in which profile, and padded or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import orjson

from server.event_profiles.logprobs import without_logprobs
from server.event_profiles.obfuscation import padded
from server.event_profiles.older import Json, Older, Rates, older_response
from server.sse_frame import event_type

Profile = Literal["openai", "legacy", "legacy-string"]
PROFILES: tuple[str, ...] = get_args(Profile)
"""`legacy-string` is `legacy` with the JSON of `response.tool_call.delta` as a text."""

PING_S = 15.0
"""Silence on an older stream before a ping, which it has in the place of comments."""

LARGE = 32 * 1024
"""Events and responses of so many bytes are parsed whole, which takes less than a millisecond."""

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

    async def shown(self, first_seq: int, bodies: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Consecutive events as they are sent, with their numbers. Those up to `after` are not sent."""
        if self._older is None and self._key is None:
            self.last = first_seq + len(bodies) - 1
            return [*enumerate(bodies, first_seq)]
        told: list[tuple[int, bytes]] = []
        for number, body in enumerate(bodies, first_seq):
            events = [body] if self._older is None else await _rewritten(body, self._older.shown)
            told += [(number, event) for event in events if number > self.after]
        self.last = max(self.after, first_seq + len(bodies) - 1)
        if (key := self._key) is None:
            return told
        return [
            (number, padded(event, number, key) if event_type(event).endswith(b".delta") else event)
            for number, event in told
        ]

    async def response(self, body: bytes) -> bytes:
        """A Response object as this profile has it."""
        if self._older is None:
            return body
        (told,) = await _rewritten(body, lambda response: [older_response(response)])
        return told

    @property
    def end(self) -> bytes:
        """What is sent behind the last event."""
        return b"" if self._older is None else _DONE

    def error(self, sequence_number: int, code: str | None, message: str) -> bytes:
        """The JSON of an event that is in no log: why the stream ends behind those before that number."""
        told = {"code": code, "message": message, "param": None}
        return orjson.dumps({"type": "error", "sequence_number": sequence_number, **told})

    @property
    def ping(self) -> Callable[[], bytes] | None:
        """What makes the event that keeps a silent stream open; None where a comment does."""
        return None if self._older is None else self._ping

    def _ping(self) -> bytes:
        told = {"sequence_number": max(0, self.last), "timestamp": int(time.time()), "response": {}}
        return orjson.dumps({"type": "response.ping", **told})


async def _rewritten(body: bytes, work: Callable[[Json], Sequence[Json]]) -> list[bytes]:
    """What is made of JSON, as JSON."""
    if len(body) <= LARGE:
        return [orjson.dumps(told) for told in work(orjson.loads(body))]
    rest, put_back = await asyncio.to_thread(without_logprobs, body)
    return [put_back(orjson.dumps(told)) for told in work(orjson.loads(rest))]


def _writer(profile: str) -> Callable[[Any], Any]:
    if profile == "legacy-string":
        return lambda content: orjson.dumps(content).decode()
    return lambda content: content
