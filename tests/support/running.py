"""A whole server inside a test: over ASGI, or on a real socket.

ASGITransport buffers a reply until it is complete, so tests that look into a stream need the socket.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from engine import Engine, ScriptedEngine
from server.config import Config
from server.http.state import Context
from server.process.app import create_app
from server.process.lifecycle import ServerLifecycle
from server.process.serve import base_url, bind, web_server
from server.process.tls import Tls
from tests.support.described import described
from tests.support.schema import lay_schema
from tools import BUILTIN, Registry

ON_POSTGRESQL = os.environ.get("TEST_WITH_DATABASE") == "postgresql"
"""Whether the servers of tests have their state on PostgreSQL, and not in SQLite."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server at work. `base_url` ends without a slash; over ASGI it is a name that leads nowhere."""

    life: ServerLifecycle
    app: FastAPI
    base_url: str

    @property
    def context(self) -> Context:
        """The server's insides."""
        assert self.life.context is not None
        return self.life.context


async def database(folder: Path) -> dict[str, str]:
    """A server's database: SQLite in its folder, or one on PostgreSQL with TEST_WITH_DATABASE=postgresql.
    That one is named in the folder, for the commands that are given it."""
    if not ON_POSTGRESQL:
        await lay_schema(folder)
        return {}
    from tests.support.postgres import the_server

    if folder not in _databases:
        _databases[folder] = await the_server().fresh()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (named := folder / "antiphon.toml").exists():
            named.write_text(f'db = "{_databases[folder]}"\n')
    return {"db": _databases[folder]}


async def database_url(folder: Path) -> str:
    """The same, by its URL, made if it is not there."""
    await database(folder)
    return used_database(folder)


def used_database(folder: Path) -> str:
    """The URL of the database that a server has, or had, by its folder."""
    return _databases.get(folder) or f"sqlite+aiosqlite:///{folder}/antiphon.db"


_databases: dict[Path, str] = {}


def give_back_databases(folder: Path) -> None:
    """Empties those on PostgreSQL of the servers that had their data in this folder or below it, for the next
    who asks: thousands of them have no room in memory."""
    used = [each for each in _databases if each.is_relative_to(folder)]
    if not used:
        return
    from tests.support.postgres import the_server

    async def give_back() -> None:
        for each in used:
            await the_server().give_back(_databases.pop(each))

    with ThreadPoolExecutor(1) as aside:  # this thread has the event loop of the test
        aside.submit(asyncio.run, give_back()).result()


@asynccontextmanager
async def running_app(
    folder: Path,
    engine: Engine | None = None,
    *,
    registry: Registry | None = BUILTIN,
    watched: bool = True,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A started server over ASGI, its data in `folder`; a second one on the same folder is a restart.

    registry: None for the tools that its settings name. watched: whether what it sends is kept, and held to
    its OpenAPI document at the end.
    """
    config = Config(data=folder, engine="scripted", **{**await database(folder), **settings})
    life = ServerLifecycle(config, engine=engine or ScriptedEngine(), registry=registry)
    try:
        await life.start()
        app = create_app(life)
        with described(app) if watched else nullcontext():
            yield Running(life, app, "http://antiphon.localhost")
    finally:
        await life.close()


@asynccontextmanager
async def live_app(
    folder: Path,
    engine: Engine | None = None,
    *,
    registry: Registry | None = BUILTIN,
    watched: bool = True,
    **settings: Any,
) -> AsyncIterator[Running]:
    """The same on a socket of its own, on this event loop."""
    config = Config(data=folder, engine="scripted", **{**await database(folder), **settings})
    life = ServerLifecycle(config, engine=engine or ScriptedEngine(), registry=registry)
    app = create_app(life)
    tls = Tls(config) if config.ssl_certfile else None
    server = web_server(app, config, tls)
    life.num_connections = lambda: len(server.server_state.connections)
    sock = bind("127.0.0.1", 0)
    url = base_url(sock, tls=tls is not None)
    with described(app) if watched else nullcontext():
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await life.start()
            yield Running(life, app, url)
        finally:
            server.should_exit = True
            await serving
            await life.close()


@asynccontextmanager
async def http_client(running: Running, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a running server, over ASGI where it has no socket."""
    over_asgi = running.base_url.endswith(".localhost")
    transport = httpx.ASGITransport(running.app) if over_asgi else httpx.AsyncHTTPTransport()
    async with httpx.AsyncClient(
        transport=transport, base_url=running.base_url, headers=headers, timeout=30.0
    ) as client:
        yield client
