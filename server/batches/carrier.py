"""Carries out one request of a batch: through the server's own door, as if its client had sent it now."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import orjson
from starlette.types import ASGIApp, Message

from server.access import Principal
from server.http import INSIDE, Outcome

LONGEST_WAIT_S = 60.0
"""So long a request rests at most before it is tried again: limits may be raised meanwhile."""


@dataclass(frozen=True)
class Reply:
    """What came of a request. headers: by their names in small letters. outcome: what the route has told of
    one that was carried out, which may be a response that has failed; the body itself may be large."""

    status: int
    headers: dict[str, str]
    body: bytes
    outcome: Outcome | None = None

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """The error of a response that ended as `failed`; None for any other reply."""
        return None if self.outcome is None else self.outcome.failure

    @property
    def failed(self) -> bool:
        """Whether the request was refused, or has failed."""
        return self.status >= 300 or self.failure is not None

    @property
    def by_server(self) -> bool:
        """Whether it has failed by a fault of the server, or ran past its deadline (408), as a response says
        by the same code. What is not to be tried again, such as a cancelled completion, is no fault."""
        if self.failure is not None:
            return self.failure.get("code") == "server_error"
        return (self.status == 408 or self.status >= 500) and self.headers.get("x-should-retry") != "false"

    @property
    def replayed(self) -> bool:
        """Whether this is the reply to an earlier request with the same idempotency key."""
        return "idempotent-replayed" in self.headers

    @property
    def again(self) -> bool:
        """Whether the same request may succeed later: what the server is short of, or that it is ending. A
        limit of a day tells clients not to try again, because nobody waits so long; a batch does."""
        if self.failure is not None:
            return "retry_after" in self.failure
        if self.status == 429 and "retry-after" in self.headers:
            return True
        if self.headers.get("x-should-retry") == "false":
            return False
        return self.status in (429, 503) or self.headers.get("x-should-retry") == "true"

    @property
    def wait_s(self) -> float:
        """How long to wait before that."""
        told = self.headers.get("retry-after", "1")
        if self.failure is not None:
            told = self.failure.get("retry_after", told)
        return min(LONGEST_WAIT_S, float(told))


def request_body(line: bytes, path: str, principal: Principal) -> bytes:
    """The body of a line's request: served in the flex tier, where its owner may use that. Vectors have no
    tiers."""
    body: dict[str, Any] = orjson.loads(line)["body"]
    if path == "/v1/embeddings":
        return orjson.dumps(body)
    body.pop("priority", None)
    if "flex" in principal.service.tiers:
        body["service_tier"] = "flex"
    return orjson.dumps(body)


async def carry_out(app: ASGIApp, path: str, body: bytes, principal: Principal, *, key: str | None) -> Reply:
    """Have a request carried out. key: its idempotency key, where it is to be done at most once."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(body)).encode()))
    if key is not None:
        headers.append((b"idempotency-key", key.encode()))
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "https",  # nothing of it is on any network, so a server for HTTPS only takes it, too
        "path": path,
        "raw_path": quote(path).encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 443),
        "state": {},
        INSIDE: principal,
    }
    reply = _Collected(body)
    await app(scope, reply.receive, reply.send)
    # What a route has told before it was refused is no outcome.
    outcome = scope["state"].get("outcome") if reply.status < 300 else None
    return Reply(reply.status, reply.headers, bytes(reply.body), outcome)


class _Collected:
    """The client's side of a request: it sends its body, stays, and keeps the reply."""

    def __init__(self, body: bytes) -> None:
        self._sent: bytes | None = body
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()

    async def receive(self) -> Message:
        """The body, and after it nothing for as long as the request is under way."""
        if self._sent is None:
            await asyncio.get_running_loop().create_future()
        body, self._sent = self._sent, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Take a part of the reply."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self.body += message.get("body", b"")
