"""The interface that SQLite (`sqlite`) and PostgreSQL (`postgres`) share: connections, errors, inserts.

All of it is synchronous: a connection belongs to one thread at a time, the writer's or a reader's.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from sqlalchemy import BigInteger, ColumnElement, Connection, Insert, Table, case, cast, func, literal
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from storage.drivers.hints import Hints
from storage.records import StorageUnavailable

T = TypeVar("T")

Work = Callable[[Connection], T]


class ErrorKind(Enum):
    """What a database error asks for."""

    BLOCKED = "blocked"  # somebody else holds the whole database: wait
    CONTENDED = "contended"  # somebody else holds a row: whoever does not need it may go on
    REFUSED = "refused"  # no room, no memory, not writable now: nothing was written, it may pass
    LOST = "lost"  # no connection: nothing was written, try another one
    FATAL = "fatal"  # the disk or the file cannot be trusted any more: stop acknowledging


class CommitUnknown(Exception):
    """The connection broke during a commit: only `Writing.took_place` can tell whether it took place."""

    def __init__(self, value: Any, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.value = value


class Writing(Protocol):
    """A connection that writes. Any verb may raise the database's trouble."""

    num_synced: int  # times that all commits so far were put on the disk
    num_checkpoints: int

    @property
    def wal_bytes(self) -> int:
        """Bytes of a write-ahead log beside the database, if it has one."""

    def migrate(self, work: Work[None]) -> None:
        """One transaction at the start, in which the schema may change; no two openers are in it at once."""

    def transact(self, work: Work[T], *, durable: bool) -> T:
        """One transaction: `work` and the commit. durable: it must survive power loss.

        What `work` raises is raised, and nothing of it is committed. CommitUnknown, with what `work`
        returned.
        """

    def say(self, sql: str) -> None:
        """A statement of the transaction's own, such as a savepoint; only within `work`."""

    def took_place(self) -> bool:
        """After CommitUnknown: whether that commit took place. Before anything else is written."""

    def sync(self) -> bool:
        """Puts on the disk what is not yet there; False if nothing was missing."""

    def shed(self) -> None:
        """Empties a write-ahead log beside the database, which holds what was deleted since, as soon as no
        reader is in the way. May be called from any thread."""

    def rest_s(self) -> float | None:
        """How long the connection may be left alone (None: for ever) before `rest` is due."""

    def rest(self) -> None:
        """Nobody waits for a commit: do what was put off."""

    def after_commit(self, *, idle: bool) -> None:
        """Upkeep between two transactions. idle: nobody waits."""

    def look(self) -> bool:
        """Raises the trouble that only an operator can mend. True if there is none, False where only the next
        transaction can tell. Commits nothing. May be called every second."""

    def close(self) -> None:
        """After the last transaction; what is to be done at the end is done first."""

    def drop(self) -> None:
        """Lets go at once."""


class Reading(Protocol):
    """A connection that reads."""

    def read(self, work: Work[T]) -> T:
        """What `work` returns or raises, on one snapshot of what was committed before."""

    def interrupt(self) -> None:
        """Has a statement that takes long fail, from another thread than the one that reads."""

    def close(self) -> None: ...


PART_BYTES = 1 << 20
"""The bytes that one call writes to a blob or reads of it."""


class IncomingBlob(Protocol):
    """A blob whose bytes are coming in. Nobody can open it before it is finished."""

    def write(self, data: bytes) -> None:
        """The next PART_BYTES; fewer for the last ones."""

    def finish(self, digest: str) -> None:
        """All of it is there: puts it on the disk, under its digest, and holds it until `BlobStore.release`.
        Where the same bytes stand already, they count as put now."""

    def abandon(self) -> None:
        """Removes what came in; does nothing after `finish`."""


class OpenBlob(Protocol):
    """A blob that can be read."""

    num_bytes: int

    def read(self, start: int, length: int) -> bytes:
        """At most so many bytes from there, and at most to the end of their part; none behind the end."""

    def close(self) -> None: ...


class BlobStore(Protocol):
    """Where blobs are: bytes under their SHA-256, in hexadecimal. Its verbs are for threads, any number at
    once; they raise OSError or the database's errors. Ages are by the clock of wherever the blobs are."""

    def begin(self) -> IncomingBlob: ...

    def open(self, digest: str) -> OpenBlob | None:
        """None where there is none."""

    def touch(self, digest: str) -> bool:
        """Makes a blob count as put now, and holds it; False where there is none."""

    def release(self, digests: Sequence[str]) -> None:
        """One hold less of each: the row that was on its way is committed, or will never be."""

    def condemn(self, digests: Sequence[str]) -> Mapping[str, object]:
        """Those that nobody holds, each with a mark that the next put or touch of it makes void. Whether a
        row names them is to be looked at after this."""

    def remove_condemned(self, marks: Mapping[str, object], named: AbstractSet[str]) -> int:
        """Removes condemned blobs but those that are named and those whose mark is void; returns how many
        went."""

    def untouched(self, grace_s: float, limit: int) -> Iterator[list[str]]:
        """The digests of blobs that nobody has put for so long, in pages of at most `limit`."""

    def remove(self, digests: Sequence[str], grace_s: float) -> int:
        """Removes blobs, held or not, but those that somebody has put meanwhile; returns how many went."""

    def remove_unfinished(self, grace_s: float) -> int:
        """Removes what came in of blobs that were never finished, and have stood still for so long."""

    def close(self) -> None: ...


class Run(Protocol):
    """Runs a job in a transaction: that of a reader, or of the writer."""

    def __call__(self, job: Work[T], /) -> Awaitable[T]: ...


class Database(Protocol):
    """One database, by its URL."""

    shown: str  # for messages: no password
    shared: bool  # other processes may write to it too

    def exists(self) -> bool:
        """Whether there is anything to open. False for a file that is not there yet."""

    def free_bytes(self) -> int | None:
        """What is free on its disk; None where that is not this machine's. OSError."""

    def holder(self) -> str | None:
        """The server that holds it for itself, in words for a message; None where nobody does."""

    def hold(self) -> None:
        """Takes it for this process alone, where it is not shared. FolderHeld."""

    def release(self) -> None:
        """Gives it back."""

    def writing(self, runner: str) -> Writing:
        """runner: the name of this process."""

    def end_writer(self, conn: Connection, runner: str) -> None:
        """Ends the connection that another process writes by, and the transaction that it may be in the midst
        of: so that the rows of a process that stands still are free."""

    def reading(self) -> Reading: ...

    def looking(self) -> Reading:
        """A connection for a single look, which leaves no file behind."""

    def blobs(self) -> BlobStore:
        """Its blobs; nothing is made before one comes in."""

    def hints(self) -> Hints:
        """What other processes let this one know; on the running loop."""

    def is_unique_violation(self, error: BaseException) -> bool:
        """Whether a job failed because another process was faster with one and the same row."""

    def meaning(self, error: Exception) -> Exception:
        """What a job's error is to its caller."""

    def trouble(self, error: BaseException) -> ErrorKind | None:
        """The kind of trouble behind an exception; None where the database is not to blame."""

    def barred(self) -> str | None:
        """Why this user cannot read and write the files that it consists of, of those that are there; None
        where nothing is in the way."""

    def closed(self, conn: Connection, *, complete: bool) -> str | None:
        """Why this user cannot write to it, by what it says of itself; None where nothing is in the way.
        complete: it has all of its tables."""

    def cause(self, error: BaseException) -> str | None:
        """What this user is denied, and by whom, where an error's own words do not say it; None where they
        do, and where nothing is denied."""


def insert_unless_taken(conn: Connection, table: Table, values: dict[str, Any]) -> bool:
    """Inserts a row; False where its key is taken: decided by the table's key, so by no race."""
    return conn.execute(_insert_or_leave(conn.dialect.name, table), values).rowcount == 1


@lru_cache
def _insert_or_leave(dialect: str, table: Table) -> Insert:
    return _INSERT[dialect](table).on_conflict_do_nothing()


@lru_cache
def insert_or_add(dialect: str, table: Table, sums: tuple[str, ...], highest: tuple[str, ...] = ()) -> Insert:
    """An INSERT for `many` that, where a row's key is taken, adds its `sums` to those that are there, and of
    `highest` leaves the higher ones."""
    statement = _INSERT[dialect](table)
    added = {name: table.c[name] + statement.excluded[name] for name in sums}
    for name in highest:
        there, given = table.c[name], statement.excluded[name]
        added[name] = case((given > there, given), else_=there)
    return statement.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=added)


# The same clause on both, but SQLAlchemy has it in their dialects only.
_INSERT: Mapping[str, Callable[[Table], postgresql.Insert | sqlite.Insert]] = {
    "postgresql": postgresql.insert,
    "sqlite": sqlite.insert,
}


def shared_clock(dialect: str, now: int) -> ColumnElement[int]:
    """The time by the one clock of all that write to a database, in microseconds since the epoch: the
    database's own, or, where one process has the database alone, that of this process, which is `now`."""
    if dialect == "sqlite":
        return literal(now, BigInteger)
    return cast(func.extract("epoch", func.statement_timestamp()) * 1_000_000, BigInteger)


def earlier_clock(dialect: str, now: int) -> ColumnElement[int]:
    """The earlier of `now`, the time of this process, and the one by the database's clock: for what goes at
    its age, of which a clock that is ahead must not take anything."""
    if dialect == "sqlite":
        return literal(now, BigInteger)
    return func.least(literal(now, BigInteger), shared_clock(dialect, now))


def look(database: Database, work: Work[T]) -> T:
    """What `work` returns of a database that is there; it changes nothing. Raises the database's errors."""
    reading = database.looking()
    try:
        return reading.read(work)
    finally:
        reading.close()


def unavailable(what: str, error: BaseException, cause: str | None = None) -> StorageUnavailable:
    """The error for whoever cannot wait for a trouble to pass. cause: told in the place of its words."""
    said = error
    if isinstance(said, DBAPIError) and said.orig is not None:
        said = said.orig.__cause__ or said.orig  # asyncpg's own, behind the one that Core makes of it
    # SQLite's code, and PostgreSQL's: `disk_full`, `read_only_sql_transaction`.
    codes = getattr(said, "sqlite_errorcode", None), getattr(said, "sqlstate", None)
    if isinstance(said, OSError):
        full = said.errno in (errno.ENOSPC, errno.EDQUOT)
    else:
        full = sqlite3.SQLITE_FULL in codes or "53100" in codes
    why = cause or str(said).partition("\n")[0]  # PostgreSQL's hints are lines of their own
    if sqlite3.SQLITE_IOERR_SHMSIZE in codes:
        full, why = True, "there is no room on its disk"  # SQLite calls it an I/O error
    told = StorageUnavailable(
        f"{what}: {why}",
        full=full,
        moved=sqlite3.SQLITE_READONLY_DBMOVED in codes,
        read_only=sqlite3.SQLITE_READONLY in codes or "25006" in codes,
    )
    told.__cause__ = error
    return told
