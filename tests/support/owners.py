"""Clients of several owners of one server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from tests.support.running import Running, http_client


@asynccontextmanager
async def two_owners(running: Running) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """A client each of two owners, who have a key of their own."""
    headers = []
    async with http_client(running, authorization=f"Bearer {running.life.admin_token}") as admin:
        for owner in ("ann", "bob"):
            made = (await admin.post("/admin/keys", json={"owner": owner})).json()
            headers.append({"authorization": f"Bearer {made['key']}"})
    async with http_client(running, **headers[0]) as first, http_client(running, **headers[1]) as second:
        yield first, second
