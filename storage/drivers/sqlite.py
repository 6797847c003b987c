"""SQLite as storage uses it: the file and its lock, connections, commits, and what its errors mean.

One connection writes and checkpoints (the writer's); all others are read-only and never checkpoint: SQLite
before 3.51.3 has a WAL-reset bug that needs two connections that write or checkpoint
(https://sqlite.org/wal.html, section 11).

Durability: a transaction with a promise in it commits at synchronous=FULL. Others commit at NORMAL (they
survive the death of the process, not of the machine) and the WAL is synced within `SYNC_DELAY_S` of the first
of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from storage.drivers.blob_folder import BlobFolder, blob_folder
from storage.drivers.file_access import why_barred, why_folder_barred
from storage.drivers.hints import Silence
from storage.drivers.interface import ErrorKind, Work, unavailable
from storage.drivers.wal import Wal
from storage.private_files import FILE_MODE, keep_others_out, make_private_file, make_private_folder
from storage.records import LEAST_ROOM, FolderHeld, StorageUnavailable

T = TypeVar("T")

STATEMENTS = 512
"""How many the writer's connection remembers; those of several rows are one for each number of them."""
READ_BUSY_S = 4.0
OPEN_BUSY_S = 4.0
BUSY_MS = 200  # how long SQLite itself waits for a lock before the queue is looked at again
SYNC_DELAY_S = 0.030  # idle moments sync earlier than they must
SYNC_LIMIT_S = 0.045  # under load: the next commit is FULL, so the promise of 50 ms holds
IDLE_CHECKPOINT_S = 0.1  # an empty queue for this long is a good moment
WAL_OPPORTUNE = 4 << 20  # bytes from which an empty queue is reason enough
WAL_LIMIT = 16 << 20  # bytes at which a checkpoint does not wait for an empty queue
WAL_FILE_LIMIT = 64 << 20  # bytes; a WAL that a slow reader made larger is cut back to this
WRITER_CACHE = 8 << 20
"""Bytes of pages that the writer keeps, which is how much memory a growing database takes of the server:
SQLite fills its cache before it lets go of a page. [measured] A turn on 100 MiB takes 0.68 ms of the
processor at this, 0.73 ms with 64 MiB and 0.72 ms with 2 MiB: a page that it lacks is in the kernel's."""
ENOUGH_MORE = 1 << 20  # bytes above these from which there is room again: so that it does not come and go
SUFFIXES = ("", "-wal", "-shm", "-journal", ".lock")  # of the names of the files that a database consists of
CHECKPOINT_STEP = 4 << 20  # bytes between attempts while a reader holds the WAL back


class _Compiler(SQLiteCompiler):
    """SQLAlchemy's, with what `Select.with_hint` says of a table, such as `INDEXED BY`: without statistics,
    SQLite takes every index by which two columns are compared for better than one that holds few rows."""

    def get_from_hint_text(self, table: Any, text: str | None) -> str | None:
        return text


class SQLite:
    """A database file. ValueError for a URL that names no file, `:memory:` included."""

    shared = False

    def __init__(self, url: URL) -> None:
        file = url.database
        if not file or file == ":memory:" or file.startswith("file:") or url.host:
            raise ValueError("the database must be a file: sqlite+aiosqlite:///PATH")
        self.path = Path(file).absolute()
        self.shown = str(self.path)
        self._lock: FolderLock | None = None
        self._read: Engine | None = None

    def exists(self) -> bool:
        return self.path.exists()  # what is no file is told of by `cause`

    def free_bytes(self) -> int | None:
        return free_bytes(self.path)

    def holder(self) -> str | None:
        return FolderLock.holder(self.path)

    def hold(self) -> None:
        """Takes the folder, which is made if need be, and keeps other users out of the files. FolderHeld,
        StorageUnavailable."""
        if (why := self.barred()) is not None:  # before anything is made or changed
            raise StorageUnavailable(f"{self.path} cannot be opened: {why}")
        try:
            make_private_folder(self.path.parent)
            self._lock = FolderLock(self.path)
            make_private_file(self.path)  # SQLite gives the files beside it the same mode
            keep_others_out(self._files())
        except OSError as error:
            self.release()
            raise unavailable(f"{self.path.parent} cannot be used", error, self.cause(error)) from error

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def writing(self, runner: str) -> SQLiteWriting:
        return SQLiteWriting(self.path)

    def end_writer(self, conn: Connection, runner: str) -> None:
        """Nothing: no other process writes."""

    def reading(self) -> SQLiteReading:
        # One engine, which compiles a statement for all of them.
        self._read = self._read or _read_only(self.path, alone=True)
        return SQLiteReading(self._read)

    def looking(self) -> SQLiteReading:
        # Without a WAL nobody writes, and SQLite would make one that it could not remove.
        wal = self.path.with_name(self.path.name + "-wal")
        return SQLiteReading(_read_only(self.path, immutable=not wal.exists()))

    def blobs(self) -> BlobFolder:
        return BlobFolder(blob_folder(self.path))

    def hints(self) -> Silence:
        return Silence()

    def is_unique_violation(self, error: BaseException) -> bool:
        return False

    def meaning(self, error: Exception) -> Exception:
        return error

    def trouble(self, error: BaseException) -> ErrorKind | None:
        return trouble(error)

    def barred(self) -> str | None:
        return why_barred(self._files())

    def closed(self, conn: Connection, *, complete: bool) -> str | None:
        return None  # its files say it

    def cause(self, error: BaseException) -> str | None:
        if isinstance(error, DBAPIError) and error.orig is not None:
            error = error.orig
        if isinstance(error, OSError):
            is_denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR)
        else:
            is_denied = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DENIED
        return (self.barred() or why_folder_barred(self.path.parent)) if is_denied else None

    def _files(self) -> list[Path]:
        return [self.path.with_name(self.path.name + suffix) for suffix in SUFFIXES]


class FolderLock:
    """An exclusive `flock` beside the database: whoever holds it knows that every other owner is dead.

    The file stays behind after the holder; only the kernel's lock counts, so a crash leaves nothing to clean
    up. FolderHeld, with the holder's pid, if another process has it.
    """

    def __init__(self, database: Path) -> None:
        self._fd = os.open(self._path(database), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._holder(self._fd, database)
            os.close(self._fd)
            raise FolderHeld(holder) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)

    @classmethod
    def holder(cls, database: Path) -> str | None:
        """Who holds the database, in words; None where nobody does. Nothing is made or written. OSError."""
        try:
            fd = os.open(cls._path(database), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return cls._holder(fd, database)
        finally:
            os.close(fd)
        return None

    @staticmethod
    def _path(database: Path) -> Path:
        return database.with_name(database.name + ".lock")

    @staticmethod
    def _holder(fd: int, database: Path) -> str:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        return f"another server (pid {pid}) holds {database.parent} ({database.name})"


# ------------------------------------------------------------------------------------------------------------
# Writing


def free_bytes(file: Path) -> int | None:
    """What is free on the disk of a file, be it there or not; None where the file system does not say."""
    try:
        disk = shutil.disk_usage(next(folder for folder in file.parents if folder.exists()))
    except OSError:
        return None
    return disk.free if disk.total else None


def _identity(file: str) -> tuple[int, int] | None:
    """What tells a file from every other that is there: its device and inode. None where it is not there."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


class SQLiteWriting:
    """The one connection that writes, raw and as Core sees it: two faces of the same handle.

    The raw face carries BEGIN, COMMIT, savepoints and pragmas (Core's own cost 20-100 us each); Core never
    begins or ends a transaction on it.
    """

    def __init__(self, path: Path) -> None:
        self._raw = sqlite3.connect(
            path,
            timeout=OPEN_BUSY_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=STATEMENTS,
        )
        try:
            for pragma in (
                "journal_mode=WAL",
                "wal_autocheckpoint=0",
                "synchronous=FULL",
                f"journal_size_limit={WAL_FILE_LIMIT}",
                "temp_store=MEMORY",
                "secure_delete=ON",  # what is deleted is not to be read in the file; a build may leave it off
                f"cache_size=-{WRITER_CACHE >> 10}",  # negative: KiB
            ):
                self._raw.execute(f"PRAGMA {pragma}")
            engine = create_engine(
                "sqlite://", creator=lambda: self._raw, poolclass=StaticPool, isolation_level="AUTOCOMMIT"
            )
            engine.dialect.statement_compiler = _Compiler
            self._connection = engine.connect()
        except BaseException:
            self._raw.close()
            raise
        self._path = path
        self._files: Mapping[str, object] = {}  # those that are to stay, as they were told apart at the start
        self._is_short = False  # of room
        self._wal = Wal(path)
        self._dirty_since: float | None = None  # the oldest commit that no sync has covered
        self._full = True  # the connection's present synchronous setting
        self._uncheckpointed = True
        self._sheds = False  # the log is to be emptied
        self._next_checkpoint_at = 0  # bytes of WAL
        self.num_synced = self.num_checkpoints = 0

    @property
    def wal_bytes(self) -> int:
        return self._wal.num_bytes

    def migrate(self, work: Work[None]) -> None:
        self._transact(work)
        self._raw.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        files = (f"{self._path}{suffix}" for suffix in ("", "-wal", "-shm", ".lock"))
        self._files = {file: known for file in files if (known := _identity(file)) is not None}
        self._wal.measure()  # which opens it, under the name that it has now

    def transact(self, work: Work[T], *, durable: bool) -> T:
        late = self._dirty_since is not None and time.monotonic() - self._dirty_since > SYNC_LIMIT_S
        self._set_full(late or durable)
        value = self._transact(work)
        self._uncheckpointed = True
        if self._full:
            self._dirty_since = None
            self.num_synced += 1
        elif self._dirty_since is None:
            self._dirty_since = time.monotonic()
        return value

    def _transact(self, work: Work[T]) -> T:
        self._require_files()
        self._raw.execute("BEGIN IMMEDIATE")
        try:
            value = work(self._connection)
            self._raw.execute("COMMIT")
        except BaseException:
            if self._raw.in_transaction:
                self._raw.execute("ROLLBACK")
            raise
        return value

    def say(self, sql: str) -> None:
        self._raw.execute(sql)

    def took_place(self) -> bool:
        raise AssertionError("a commit of SQLite takes place or raises")

    def _set_full(self, full: bool) -> None:
        if full != self._full:
            self._raw.execute(f"PRAGMA synchronous={'FULL' if full else 'NORMAL'}")
            self._full = full

    def sync(self) -> bool:
        if self._dirty_since is None:
            return False
        self._wal.sync()
        self._dirty_since = None
        self.num_synced += 1
        return True

    def shed(self) -> None:
        self._sheds = True

    def rest_s(self) -> float | None:
        if self._dirty_since is not None:
            return max(0.0, self._dirty_since + SYNC_DELAY_S - time.monotonic())
        return IDLE_CHECKPOINT_S if self._uncheckpointed or self._sheds else None

    def rest(self) -> None:
        """Syncs if that is due, else checkpoints."""
        if self.sync():
            return
        if self._sheds:
            self._empty_log()
        elif self._uncheckpointed:
            self._checkpoint("PASSIVE")

    def _empty_log(self) -> None:
        """Waits for no reader: where one is in the way, the next rest tries again."""
        self._raw.execute("PRAGMA busy_timeout=0")
        try:
            self._checkpoint("TRUNCATE")
        finally:
            self._raw.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        self._sheds = self.wal_bytes > 0

    def after_commit(self, *, idle: bool) -> None:
        size = self._wal.measure()
        if size + CHECKPOINT_STEP < self._next_checkpoint_at:  # the WAL was begun anew
            self._next_checkpoint_at = 0
        if size >= (WAL_OPPORTUNE if idle else WAL_LIMIT) and size >= self._next_checkpoint_at:
            self._checkpoint("PASSIVE")

    def _checkpoint(self, mode: str) -> None:
        """Moves the WAL into the database file as far as readers allow; SQLite syncs both."""
        try:
            self._raw.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        except sqlite3.Error as error:
            if trouble(error) is ErrorKind.FATAL:
                raise
            # Locked or no room: the WAL keeps everything; another attempt follows the next commit.
            self._uncheckpointed = False
            return
        self.num_checkpoints += 1
        self._uncheckpointed = False
        self._dirty_since = None
        self._next_checkpoint_at = self._wal.measure() + CHECKPOINT_STEP

    def look(self) -> bool:
        self._require_files()
        free = free_bytes(self._path)
        enough = LEAST_ROOM + (ENOUGH_MORE if self._is_short else 0)
        self._is_short = free is not None and free < enough
        if free is not None and self._is_short:
            raise _error(sqlite3.SQLITE_FULL, f"only {free / 1e6:.1f} MB are free where {self._path} is")
        return True

    def _require_files(self) -> None:
        """Raises where a file that SQLite has open has its name no more: it would go on writing to it, and
        all of that would be gone with this process. Without the lock's file another server is let in."""
        for file, known in self._files.items():
            if _identity(file) != known:
                raise _moved_error(file)

    def close(self) -> None:
        self.sync()
        self._checkpoint("TRUNCATE")

    def drop(self) -> None:
        self._wal.close()
        self._connection.close()
        self._raw.close()


# ------------------------------------------------------------------------------------------------------------
# Reading


def _read_only(path: Path, *, alone: bool = False, immutable: bool = False) -> Engine:
    """Connections that only read, each transaction on one snapshot. alone: they are this process's for long,
    and of the file that is there now. immutable: nobody writes while they are open, so that no file is needed
    beside the database."""
    file = str(path)
    known = _identity(file)
    query = {"mode": "ro", "uri": "true", **({"immutable": "1"} if immutable else {})}
    engine = create_engine(
        URL.create("sqlite", database=f"file:{quote(str(path))}", query=query),
        pool_use_lifo=True,
        connect_args={"timeout": READ_BUSY_S, "isolation_level": None, "check_same_thread": False},
    )
    engine.dialect.statement_compiler = _Compiler

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        if alone and _identity(file) != known:
            connection.close()
            raise _moved_error(file)
        connection.execute("PRAGMA query_only=1")
        connection.execute("PRAGMA wal_autocheckpoint=0")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


class SQLiteReading:
    """One that reads; each read is one transaction on a connection of the engine, so one snapshot."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._raw: Any = None  # the connection that `work` has

    def read(self, work: Work[T]) -> T:
        with self._engine.connect() as connection:
            self._raw = connection.connection.driver_connection
            try:
                return work(connection)
            finally:
                self._raw = None

    def interrupt(self) -> None:
        raw = self._raw
        if raw is not None:
            raw.interrupt()

    def close(self) -> None:
        self._engine.dispose()


# ------------------------------------------------------------------------------------------------------------
# Errors

_BLOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_REFUSED = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY}
_DENIED = {
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM),
    sqlite3.SQLITE_IOERR,  # a folder in the place of the file
}
_FATAL = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# The WAL index could not grow: a full disk, seen from another side.
_REFUSED_EXTENDED = {sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_NOMEM}


def _error(code: int, said: str) -> sqlite3.OperationalError:
    """An error as SQLite has it."""
    error = sqlite3.OperationalError(said)
    error.sqlite_errorcode = code
    return error


def _moved_error(file: str) -> sqlite3.OperationalError:
    return _error(
        sqlite3.SQLITE_READONLY_DBMOVED,
        f"{file} was removed or replaced while the server runs: what it stores now would be lost. Put back "
        "the file itself (a deleted one can be copied while the server still runs: docs/running.md), or stop "
        "the server and restore a backup. Where it is a file that ends with .lock, start the server again",
    )


def trouble(error: BaseException) -> ErrorKind | None:
    """The kind of trouble behind an exception; None where the database is not to blame."""
    if isinstance(error, DBAPIError):
        error = error.orig if error.orig is not None else error
    code: int | None = getattr(error, "sqlite_errorcode", None)
    if not isinstance(error, sqlite3.Error) or code is None:
        return None
    if code in _REFUSED_EXTENDED or code & 0xFF in _REFUSED:
        return ErrorKind.REFUSED
    if code & 0xFF in _BLOCKED:
        return ErrorKind.BLOCKED
    return ErrorKind.FATAL if code & 0xFF in _FATAL else None
