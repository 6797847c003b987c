"""The SQLite file: its path, its lock, its connections, and what its errors mean.

Owns: the URL, the `flock`, every pragma, and the sorting of database errors into passing and fatal ones.
Refuses to know: tables, transactions, jobs.

One connection writes and checkpoints (the writer's); all others are read-only and never checkpoint: SQLite
before 3.51.3 has a WAL-reset bug that needs two connections that write or checkpoint
(https://sqlite.org/wal.html, section 11).
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import StaticPool

from .records import FolderHeld

READ_BUSY_S = 4.0
OPEN_BUSY_S = 4.0
WAL_FILE_LIMIT = 64 << 20  # bytes; a WAL that a slow reader made larger is cut back to this


def sqlite_path(url: str) -> Path:
    """The database file of `sqlite+aiosqlite:///PATH`. ValueError for anything else, `:memory:` included."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ValueError(f"not a database URL: {url!r}") from error
    if parsed.get_backend_name() != "sqlite":
        raise ValueError(f"only sqlite+aiosqlite:///PATH is supported, not {parsed.drivername!r}")
    if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
        raise ValueError("the database must be a file: sqlite+aiosqlite:///PATH")
    return Path(parsed.database).absolute()


class FolderLock:
    """An exclusive `flock` beside the database: whoever holds it knows that every other owner is dead.

    The file stays behind after the holder; only the kernel's lock counts, so a crash leaves nothing to clean
    up. FolderHeld, with the holder's pid, if another process has it.
    """

    def __init__(self, database: Path) -> None:
        path = database.with_name(database.name + ".lock")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise FolderHeld(
                f"another server (pid {pid}) holds {database.parent} ({database.name})"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def write_connection(path: Path) -> tuple[sqlite3.Connection, Connection]:
    """The one connection that writes, raw and as Core sees it: two faces of the same handle.

    The raw face carries BEGIN, COMMIT, savepoints and pragmas (Core's own cost 20-100 us each); Core never
    begins or ends a transaction on it.
    """
    raw = sqlite3.connect(path, timeout=OPEN_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (
            "journal_mode=WAL",
            "wal_autocheckpoint=0",
            "synchronous=FULL",
            f"journal_size_limit={WAL_FILE_LIMIT}",
            "temp_store=MEMORY",
            "cache_size=-65536",
        ):
            raw.execute(f"PRAGMA {pragma}")
        engine = create_engine(
            "sqlite://", creator=lambda: raw, poolclass=StaticPool, isolation_level="AUTOCOMMIT"
        )
        return raw, engine.connect()
    except BaseException:
        raw.close()
        raise


def read_engine(path: Path, num_connections: int) -> Engine:
    """Read-only connections; each checkout is one transaction, so one snapshot."""
    engine = create_engine(
        URL.create("sqlite", database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"}),
        pool_size=num_connections,
        max_overflow=0,
        connect_args={"timeout": READ_BUSY_S, "isolation_level": None, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA query_only=1")
        connection.execute("PRAGMA wal_autocheckpoint=0")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


class Trouble(Enum):
    """What a database error asks for."""

    BLOCKED = "blocked"  # somebody else holds a lock: wait
    REFUSED = "refused"  # no room, no memory, not writable now: nothing was written, it may pass
    FATAL = "fatal"  # the disk or the file cannot be trusted any more: stop acknowledging


_BLOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_REFUSED = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY}
_FATAL = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# The WAL index could not grow: a full disk, seen from another side.
_REFUSED_EXTENDED = {sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_NOMEM}


def trouble(error: BaseException) -> Trouble | None:
    """The kind of trouble behind an exception; None where the database is not to blame."""
    if isinstance(error, DBAPIError):
        error = error.orig if error.orig is not None else error
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if not isinstance(error, sqlite3.Error) or code is None:
        return None
    if code in _REFUSED_EXTENDED or code & 0xFF in _REFUSED:
        return Trouble.REFUSED
    if code & 0xFF in _BLOCKED:
        return Trouble.BLOCKED
    return Trouble.FATAL if code & 0xFF in _FATAL else None
