"""Sends one signed POST to a webhook, as Standard Webhooks says.

Source: github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md.

Importing this costs 0.1 s; whoever serves meanwhile imports it in a thread (`webhooks.make_sender`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import cast

import httpx
from standardwebhooks import Webhook

from server import __version__

TIMEOUT_S = 15.0
MAX_REPLY_BYTES = 64 * 1024
"""What is read of a reply's body, and thrown away, so that its connection can be used again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a receiver said: an HTTP status, and for how many seconds it wants to be left alone."""

    status: int
    retry_after_s: float = 0.0

    @property
    def accepted(self) -> bool:
        """Whether the receiver has the message."""
        return 200 <= self.status < 300


class Courier:
    """Sends messages. It follows no redirect, keeps no cookie, and shows nobody what a receiver says."""

    def __init__(self) -> None:
        nothing = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        # As many connections as there are receivers: one that is slow must not use up another's.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(cookies=nothing, limits=limits, timeout=TIMEOUT_S)

    async def close(self) -> None:
        """Drops the connections."""
        await self._http.aclose()

    async def send(self, url: str, secret: bytes, message_id: str, body: bytes) -> Answer:
        """Signs and sends `body` as it is.

        Raises TimeoutError and whatever httpx raises.
        """
        seconds = int(time.time())  # as the wall clock is now: receivers refuse what is minutes off by theirs
        signature = Webhook(secret).sign(message_id, datetime.fromtimestamp(seconds, UTC), body.decode())
        headers = {
            "content-type": "application/json",
            "user-agent": f"antiphon/{__version__}",
            "webhook-id": message_id,
            "webhook-timestamp": str(seconds),
            "webhook-signature": signature,
        }
        async with (
            asyncio.timeout(TIMEOUT_S),
            self._http.stream("POST", url, content=body, headers=headers) as reply,
        ):
            num_bytes = 0
            async with aclosing(cast("AsyncGenerator[bytes]", reply.aiter_raw())) as chunks:
                async for chunk in chunks:
                    num_bytes += len(chunk)
                    if num_bytes > MAX_REPLY_BYTES:
                        break
            return Answer(reply.status_code, _seconds(reply.headers.get("retry-after")))


def _seconds(retry_after: str | None) -> float:
    """Retry-After in its form of seconds; the form of a date is not looked at."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
