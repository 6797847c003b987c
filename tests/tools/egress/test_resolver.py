"""Names whose servers do not answer: the system's resolver waits for them, and nobody else may."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.blocking import until
from tools import Caps, Egress, EgressError, guarded_client
from tools.egress.resolver import MOST, MOST_OF_DOMAIN, Lookups


class Silence:
    """In the place of the system's resolver: it knows `NAME.good.test`, and waits for all other names until
    it is let go."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.over = threading.Event()

    def __call__(self, host: str, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host)
        if host.endswith(".good.test"):
            return [(None, None, None, None, ("192.0.2.1", 0))] * 2
        self.over.wait()
        raise socket.gaierror("timed out")


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silence]:
    resolver = Silence()
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    yield resolver
    resolver.over.set()


@asynccontextmanager
async def waiting(
    lookups: Lookups, names: list[str], silence: Silence
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Lookups of names that are not answered before the end."""
    tasks = [asyncio.create_task(lookups.resolve(name, 80)) for name in names]
    await until(lambda: set(names) <= set(silence.asked))
    yield tasks
    silence.over.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_names_of_silent_servers_keep_nobody_from_the_threads_of_the_loop(silence: Silence) -> None:
    """More requests than the loop has threads, each of which has given up before its lookup is over."""
    num_requests = min(32, (os.cpu_count() or 1) + 4)
    async with guarded_client(Egress("public"), Caps(connect_s=0.05)) as client:
        urls = [f"http://a.silent{number}.test/" for number in range(num_requests)]
        errors = await asyncio.gather(*map(client.get, urls), return_exceptions=True)
        assert all(isinstance(error, EgressError) for error in errors)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 10) == "done"
        finally:
            silence.over.set()


async def test_one_domain_has_a_few_lookups_and_each_name_one(silence: Silence) -> None:
    lookups = Lookups()
    names = [f"h{number}.bad.test" for number in range(MOST_OF_DOMAIN)]
    async with waiting(lookups, [*names, names[0]], silence) as (*tasks, patient):
        with pytest.raises(EgressError, match=r"too many names of bad\.test are being looked up") as raised:
            await lookups.resolve("more.bad.test", 80)
        assert raised.value.kind == "unreachable"
        assert await lookups.resolve("www.good.test", 80) == ["192.0.2.1"]
        for task in tasks:  # who waited has given up; the lookups go on
            task.cancel()
        await asyncio.wait(tasks)
        with pytest.raises(EgressError):
            await lookups.resolve("more.bad.test", 80)
        silence.over.set()
        assert await patient == []
    await until(lambda: not lookups._running)
    assert silence.asked.count(names[0]) == 1
    assert await lookups.resolve("more.bad.test", 80) == []


async def test_all_domains_together_have_so_many_lookups_and_addresses_need_none(silence: Silence) -> None:
    lookups = Lookups()
    async with waiting(lookups, [f"bad{number}.test" for number in range(MOST)], silence):
        with pytest.raises(EgressError, match="too many names are being looked up"):
            await lookups.resolve("www.good.test", 80)
        assert await lookups.resolve("::1", 80) == ["::1"]
