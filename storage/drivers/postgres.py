"""PostgreSQL as storage uses it: its connections and their settings, commits, and what its errors mean.

It also finds out whether a commit took place when the connection broke during it.

asyncpg is asynchronous and jobs are not: each connection has an event loop of its own, which runs only while
its thread, the writer's or a reader's, waits for an answer. So the thread of the server's own loop has no
part in it, and writer and readers are the same for every database.

Every commit is on the disk when it returns (synchronous_commit=on). A session that is told nothing for
IDLE_MS in the midst of a transaction is ended by the server: a replica that is stopped there does not hold
its rows for longer. Whoever takes another process for dead ends its writing session at once (`end_writer`),
because the locks of that session would be in the way. All this belongs to sessions: a pooler in between has
to leave each connection its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar
from urllib.parse import urlencode

import asyncpg
from sqlalchemy import Connection, bindparam, select, text
from sqlalchemy.dialects.postgresql.asyncpg import dialect
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only, greenlet_spawn

from storage.drivers.blob_rows import BlobRows
from storage.drivers.interface import CommitUnknown, ErrorKind, Work
from storage.drivers.notifications import Notifications
from storage.records import BadText
from storage.tables import commits, metadata

T = TypeVar("T")

CONNECT_S = 2.0
COMMAND_S = 6.0  # without an answer for this long the connection counts as lost
STATEMENT_MS = 5000
LOCK_MS = 500  # below the usual deadlock_timeout: who waits in a circle is let go sooner than it is found
IDLE_MS = 4000
END_MS = 1000  # that a session may take to end
BLOB_PATIENCE_S = 4.0
RETRY_S = 0.1
MIGRATION_IDLE_MS = 60_000
MIGRATION_LOCK = 0x616E_7469_7068_6F6E  # "antiphon"
FORGET_COMMITS_S = 86_400
PROBE_ROWS = 2000  # some 150 KB with their index
READ_ONLY = "25006"  # read_only_sql_transaction


class PostgreSQL:
    """A database on a server. ValueError for a URL with another driver, or with parameters of no use."""

    shared = True

    def __init__(self, url: URL) -> None:
        if url.drivername not in ("postgresql", "postgresql+asyncpg"):
            raise ValueError(f"PostgreSQL is reached by postgresql+asyncpg://, not by {url.drivername}://")
        self._url = url.set(drivername="postgresql+asyncpg", query=_as_taken(url.query))
        self.shown = url.set(query={}).render_as_string(hide_password=True)  # a query may hold one too

    def exists(self) -> bool:
        return True

    def free_bytes(self) -> int | None:
        return None

    def holder(self) -> str | None:
        return None

    def hold(self) -> None:
        """Nothing: several processes may write."""

    def release(self) -> None:
        """Nothing."""

    def writing(self, runner: str) -> PostgreSQLWriting:
        return PostgreSQLWriting(self._line(), partial(self._line, migrates=True), runner)

    def end_writer(self, conn: Connection, runner: str) -> None:
        # The session's rows are free when it has ended, which takes some milliseconds.
        end = f"SELECT pg_terminate_backend(pid, {END_MS}) FROM pg_locks WHERE {_lock(_name_of(runner))}"
        conn.execute(text(f"{end} AND pid <> pg_backend_pid()")).all()

    def reading(self) -> PostgreSQLReading:
        return PostgreSQLReading(self._line())

    def looking(self) -> PostgreSQLReading:
        return self.reading()

    def blobs(self) -> BlobRows:
        return BlobRows(lambda: RepeatingLine(self._line()))

    def hints(self) -> Notifications:
        arguments: dict[str, Any] = dialect().create_connect_args(self._url)[1]  # type: ignore[no-untyped-call]
        return Notifications(arguments | {"timeout": CONNECT_S, "command_timeout": COMMAND_S})

    def is_unique_violation(self, error: BaseException) -> bool:
        return sqlstate(error) == "23505"  # unique_violation

    def meaning(self, error: Exception) -> Exception:
        if sqlstate(error) != "22021":  # character_not_in_repertoire
            return error
        bad = BadText(str(root(error)))
        bad.__cause__ = error
        return bad

    def trouble(self, error: BaseException) -> ErrorKind | None:
        return trouble(error)

    def barred(self) -> None:
        """Nothing: its files are its server's."""

    def closed(self, conn: Connection, *, complete: bool) -> str | None:
        found = conn.execute(text(_STANDING)).one()
        if found.is_standby:
            return "it is a standby, which can be read alone: give --db its primary server"
        if found.is_read_only:
            return "it can be read alone: its setting default_transaction_read_only is on"
        if not complete and not found.may_create:
            return _lacking(found.role, found.schema)
        if not complete and found.owner is not None and not found.has_owner:
            return (
                f"its tables belong to {found.owner}, and only that role can alter them: give --db that one"
            )
        return _denied(conn, found.role, found.schema) if complete else None

    def cause(self, error: BaseException) -> str | None:
        met: BaseException | None = error
        while isinstance(met, ConnectionLost):  # also a session that has just begun meets it
            met = met.__cause__
        if met is not None and sqlstate(met) in _POOLED:
            return (
                "a pooler in between gives each transaction another session of PostgreSQL's: have it leave "
                "each connection its own (in pgbouncer pool_mode = session), or give --db the server itself"
            )
        if sqlstate(error) not in _DENIED:
            return None  # the driver's words say it
        said, role = str(root(error)).partition("\n")[0], self._url.username or "ROLE"
        if sqlstate(error) == "3F000":
            return f"{said}: {_lacking(role, None)}"
        if (schema := said.partition(" for schema ")[2]) != "":
            return f"{said}: {_lacking(role, schema)}"
        return f"{said}: the role {role} has to own the tables; if another one does, give --db that one"

    def _line(self, *, migrates: bool = False) -> Line:
        settings = {
            "synchronous_commit": "on",
            "default_transaction_isolation": "read committed",
            "lock_timeout": "0" if migrates else str(LOCK_MS),
            "statement_timeout": "0" if migrates else str(STATEMENT_MS),
            "idle_in_transaction_session_timeout": str(MIGRATION_IDLE_MS if migrates else IDLE_MS),
            # A machine that is gone frees its sessions within half a minute.
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
        }
        return Line(self._url, settings, None if migrates else COMMAND_S)


_TLS_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
_TLS = ("sslmode", *_TLS_FILES, "sslpassword", "ssl_min_protocol_version", "ssl_max_protocol_version")
_OTHERS = (
    *("host", "port", "user", "password", "database", "passfile"),
    *("target_session_attrs", "krbsrvname", "gsslib"),
)


def _as_taken(query: Mapping[str, str | Sequence[str]]) -> dict[str, Any]:
    """The parameters of a URL as asyncpg takes them, which knows those of TLS in a `dsn` alone. ValueError
    for one that is unknown, and for a file that cannot be read, or is not what it is to be."""
    given = {"sslmode" if name == "ssl" else name: value for name, value in query.items()}
    for name in given:
        if name not in (*_TLS, *_OTHERS):
            known = ", ".join((*_OTHERS, *_TLS))
            raise ValueError(f"unknown parameter {name} of the database's URL: it may have {known}")
    tls = dict[str, str]()
    for name in [each for each in _TLS if each in given]:
        value = given.pop(name)
        if not isinstance(value, str):
            raise ValueError(f"{name} is given twice in the database's URL")
        tls[name] = value
        if name in _TLS_FILES and not os.access(value, os.R_OK):
            raise ValueError(f"{name} of the database's URL: {value} cannot be read, or is not there")
    _check_certificates(tls)
    return {**given, "dsn": f"postgresql:?{urlencode(tls)}"} if tls else given


def _check_certificates(tls: Mapping[str, str]) -> None:
    """ValueError where a file holds no certificate, or a key of another one: OpenSSL does not say which file
    it means."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    root, certificate, key = (tls.get(name) for name in ("sslrootcert", "sslcert", "sslkey"))
    try:
        if root is not None:
            context.load_verify_locations(root)
    except ssl.SSLError:
        raise ValueError(
            f"sslrootcert of the database's URL: {root} holds no certificate in the form of PEM"
        ) from None
    try:
        if certificate is not None and key is not None:
            context.load_cert_chain(certificate, key, lambda: tls.get("sslpassword", ""))
    except ssl.SSLError as error:
        raise ValueError(
            f"sslkey of the database's URL: {key} cannot be used with the certificate {certificate}: "
            f"{error.reason or 'it is not in the form of PEM, or its password is missing'}"
        ) from None


# Whether a role can write, and who owns the tables that are there.
_STANDING = """
SELECT
    pg_is_in_recovery() AS is_standby,
    current_setting('default_transaction_read_only') = 'on' AS is_read_only,
    quote_ident(current_user) AS role,
    quote_ident(current_schema()) AS schema,
    has_schema_privilege(current_schema(), 'CREATE') AS may_create,
    quote_ident(tableowner) AS owner,
    pg_has_role(tableowner, 'USAGE') AS has_owner
FROM (SELECT current_schema() AS name) AS ours
LEFT JOIN pg_tables ON schemaname = ours.name AND tablename = 'alembic_version'
"""


# What a role lacks on the tables of a complete schema, and on the sequences that number their rows. A list of
# privileges with commas would ask for any of them, so each is asked for alone.
_DENIALS = """
SELECT relname AS name, string_agg(privilege, ', ' ORDER BY place) AS lacked
FROM pg_class JOIN pg_namespace AS ours ON ours.oid = relnamespace AND nspname = current_schema(),
unnest(CASE relkind WHEN 'S' THEN ARRAY['USAGE'] ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END)
    WITH ORDINALITY AS asked (privilege, place)
WHERE relkind IN ('r', 'S') AND relname = ANY(CAST(:names AS text[])) AND NOT
    CASE relkind WHEN 'S' THEN has_sequence_privilege(pg_class.oid, privilege)
    ELSE has_table_privilege(pg_class.oid, privilege) END
GROUP BY relname ORDER BY relname
"""


def _denied(conn: Connection, role: str, schema: str) -> str | None:
    """Why a role cannot use all of a complete schema; None where it can."""
    numbered = ((table.name, table.autoincrement_column) for table in metadata.tables.values())
    sequences = [f"{name}_{column.name}_seq" for name, column in numbered if column is not None]
    denials = conn.execute(text(_DENIALS), {"names": [*metadata.tables, *sequences]}).all()
    if not denials:
        return None
    told = "; ".join(f"{found.lacked} on {found.name}" for found in denials[:3])
    others = f", and more on {len(denials) - 3} others" if len(denials) > 3 else ""
    return (
        f"the role {role} lacks {told}{others}: have their owner run "
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}; "
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}"
    )


def _lacking(role: str, schema: str | None) -> str:
    """What is told of a role that may not make tables in a schema. None: it has none, because there is none
    by a name of its search_path, or because it may not use those that there are."""
    if schema is None:
        return (
            f"the role {role} has no schema to make tables in: have the database's owner run "
            f"CREATE SCHEMA public AUTHORIZATION {role} or, where there is that schema, "
            f"GRANT CREATE, USAGE ON SCHEMA public TO {role}"
        )
    return (
        f"the role {role} may not make tables in the schema {schema}: have its owner run GRANT CREATE, USAGE "
        f"ON SCHEMA {schema} TO {role}"
    )


# ------------------------------------------------------------------------------------------------------------
# Connections


class ConnectionLost(Exception):
    """There is no connection, or no longer; whatever was not committed is undone."""

    def __init__(self, cause: BaseException, socket: str | None = None) -> None:
        """socket: the path of the Unix socket that was tried, which the driver's own words do not have."""
        why = " ".join(str(root(cause)).split()) or f"no answer ({type(cause).__name__})"
        if socket is not None and isinstance(cause, FileNotFoundError | ConnectionRefusedError):
            why = f"nothing listens at the socket {socket}: PostgreSQL does not run there"
        super().__init__(why)


class _Loop(asyncio.SelectorEventLoop):
    """The event loop of a connection; it remembers what speaks TLS.

    The driver parts from a server that refuses it with TLS's farewell, and then waits for the server's. This
    loop does not run for that, so whoever gives the connection up has to end what the driver left.
    """

    tls: asyncio.Transport | None = None

    async def start_tls(self, *args: Any, **options: Any) -> asyncio.Transport | None:
        self.tls = await super().start_tls(*args, **options)
        return self.tls


class Line:
    """A connection and the event loop that it lives on, for one thread at a time.

    Core never begins or ends a transaction on it: `say` does.
    """

    def __init__(self, url: URL, settings: dict[str, str], command_s: float | None) -> None:
        """settings: of each session, by their names. They are made once it is there, because a pooler takes
        few of them with the connection itself."""
        engine = create_async_engine(
            url,
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
            connect_args={
                "timeout": CONNECT_S,
                "command_timeout": command_s,
                "server_settings": {"application_name": "antiphon"},
                "prepared_statement_cache_size": 500,
            },
        )
        self._engine = engine.sync_engine
        made = (f"set_config('{name}', '{value}', false)" for name, value in settings.items())
        self._settings = f"SELECT {', '.join(made)}"
        self._socket = _socket(url)
        self._loop = _Loop()
        self._connection: Connection | None = None
        self._raw: Any = None  # asyncpg's
        self.on_connect: Callable[[], None] = lambda: None

    def run(self, work: Work[T]) -> T:
        """`work` with the connection, which is made if there is none. ConnectionLost."""
        value: T = self._loop.run_until_complete(greenlet_spawn(self._run, work))
        return value

    def _run(self, work: Work[T]) -> T:
        try:
            return work(self._connection or self._connect())
        except CommitUnknown:
            self._drop()
            raise
        except Exception as error:
            if not self.has_lost(error):
                if sqlstate(error) == READ_ONLY:
                    self._drop()  # the next session may be on the server that took this one's place
                raise
            self._drop()
            raise ConnectionLost(error) from error

    def _connect(self) -> Connection:
        try:
            self._connection = self._engine.connect()
            self._raw = self._connection.connection.driver_connection
            self.say(self._settings)
            self.on_connect()
        except Exception as error:
            self._drop()
            raise ConnectionLost(error, self._socket) from error
        return self._connection

    def has_lost(self, error: BaseException) -> bool:
        """Whether, after this error, the connection is of no more use."""
        if self._raw is None or self._raw.is_closed() or isinstance(error, (OSError, TimeoutError)):
            return True
        state = sqlstate(error)
        return state.startswith(("08", "57P")) or state in ("25P03", "25P04")

    def say(self, sql: str) -> None:
        """A statement, or several, without parameters and results; only within `work`."""
        await_only(self._raw.execute(sql))

    def transact(self, begin: str, work: Work[T], connection: Connection, commit: Callable[[T], None]) -> T:
        """`begin`, `work`, `commit`; undone if one of them raises. Only within `work` of `run`."""
        self.say(begin)
        try:
            value = work(connection)
            commit(value)
        except BaseException as error:
            if not isinstance(error, CommitUnknown) and not self.has_lost(error):
                self.say("ROLLBACK")
            raise
        return value

    @property
    def server_pid(self) -> int:
        pid: int = self._raw.get_server_pid()
        return pid

    def _drop(self) -> None:
        """Lets go of the connection without a word to the server."""
        if self._raw is not None:
            self._raw.terminate()
            self._raw = None
        if self._loop.tls is not None:
            self._loop.tls.abort()
            self._loop.tls = None
        if self._connection is not None:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Ends the connection and the loop."""
        if self._connection is not None:
            self._loop.run_until_complete(greenlet_spawn(self._drop))
            self._loop.run_until_complete(asyncio.sleep(0))  # the transport's farewell
        self._loop.close()


class PostgreSQLWriting:
    """The connection that writes.

    If it breaks during a COMMIT, nobody has told us whether that took place. So every transaction leaves its
    number in this writer's row of `commits`, in the same message as its COMMIT. Whoever connects next for
    this writer first takes its advisory lock, which the earlier session held: then that session is over,
    with everything that was still on its way, and the row tells.
    """

    num_checkpoints = 0
    wal_bytes = 0

    def __init__(self, line: Line, migrating: Callable[[], Line], runner: str) -> None:
        self._line = line
        self._name = _name_of(runner)
        self._line.on_connect = self._take_name
        self._migrating = migrating
        self._id = secrets.randbits(62)
        self._number = 0  # of the latest transaction
        self._earlier: int | None = None  # the server process of the latest session
        self._was_refused = False  # and `look` has not found since that writes go through
        self.num_synced = 0

    def _take_name(self) -> None:
        if self._earlier is not None:
            found = f"SELECT pid FROM pg_locks WHERE {_lock(self._id)} AND pid = {self._earlier}"
            self._line.say(f"SELECT pg_terminate_backend(pid) FROM ({found}) AS earlier")
        self._line.say(f"SELECT pg_advisory_lock({self._id}), pg_advisory_lock_shared({self._name})")
        self._earlier = self._line.server_pid

    def migrate(self, work: Work[None]) -> None:
        line = self._migrating()
        begin = f"BEGIN; SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"

        def commit(_: None) -> None:
            line.say(f"DELETE FROM commits WHERE at < {_NOW} - {FORGET_COMMITS_S}; COMMIT")

        try:
            line.run(lambda connection: line.transact(begin, work, connection, commit))
        finally:
            line.close()

    def transact(self, work: Work[T], *, durable: bool) -> T:
        try:
            value = self._line.run(
                lambda connection: self._line.transact("BEGIN", work, connection, self._commit)
            )
        except Exception as error:
            self._was_refused = self._was_refused or trouble(error) is ErrorKind.REFUSED
            raise
        self.num_synced += 1
        return value

    def _commit(self, value: object) -> None:
        self._number += 1
        mark = (
            f"INSERT INTO commits (writer, number, at) VALUES ({self._id}, {self._number}, {_NOW})"
            " ON CONFLICT (writer) DO UPDATE SET number = excluded.number, at = excluded.at"
        )
        try:
            self._line.say(f"{mark}; COMMIT")
        except Exception as error:
            if self._line.has_lost(error):
                raise CommitUnknown(value, error) from error
            raise

    def say(self, sql: str) -> None:
        self._line.say(sql)

    def took_place(self) -> bool:
        query = select(commits.c.number).where(commits.c.writer == bindparam("writer"))
        return self._line.run(
            lambda connection: connection.execute(query, {"writer": self._id}).scalar() == self._number
        )

    def sync(self) -> bool:
        return False

    def shed(self) -> None:
        """The server's log is its own."""

    def rest_s(self) -> float | None:
        return None

    def rest(self) -> None:
        """Nothing is ever put off."""

    def after_commit(self, *, idle: bool) -> None:
        """The server looks after itself."""

    def look(self) -> bool:
        # Only after a refusal: writes cost, and a server that does its work has written just now.
        if not self._was_refused:
            return False
        self._line.run(
            lambda connection: self._line.transact(
                "BEGIN",
                lambda _: self._line.say(self._probe),
                connection,
                lambda _: self._line.say("ROLLBACK"),
            )
        )
        self._was_refused = False
        return True

    @property
    def _probe(self) -> str:
        """A write of rows that nobody looks for and that are never committed. It needs pages of its own: a
        single row may find a place also where the disk is full."""
        rows = f"generate_series(1, {PROBE_ROWS}) AS row"
        return f"INSERT INTO commits (writer, number, at) SELECT -({self._id} + row), 0, 0 FROM {rows}"

    def close(self) -> None:
        forget = text(f"DELETE FROM commits WHERE writer = {self._id}")
        with suppress(ConnectionLost):  # then it is forgotten with age
            self._line.run(lambda connection: connection.execute(forget))

    def drop(self) -> None:
        self._line.close()


def _socket(url: URL) -> str | None:
    """The path of the Unix socket that a URL leads to; None where it leads elsewhere, or to several hosts."""
    arguments: dict[str, Any] = dialect().create_connect_args(url)[1]  # type: ignore[no-untyped-call]
    folder = arguments.get("host") or os.environ.get("PGHOST")
    port = arguments.get("port") or os.environ.get("PGPORT") or 5432
    is_socket = isinstance(folder, str) and folder.startswith("/") and not isinstance(port, list)
    return f"{folder}/.s.PGSQL.{port}" if is_socket else None


_NOW = "extract(epoch FROM now())::bigint"


def _name_of(runner: str) -> int:
    """The number of the advisory lock by which others find the writing session of a process. Commands of
    operators may have one name and run at once: they share it."""
    return int.from_bytes(blake2b(runner.encode(), digest_size=8).digest(), "big") >> 1


def _lock(number: int) -> str:
    """The condition on rows of pg_locks for an advisory lock of this database."""
    return (
        f"locktype = 'advisory' AND classid = {number >> 32} AND objid = {number & 0xFFFF_FFFF}"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )


class RepeatingLine:
    """A connection for what may be done twice: it is tried again if the connection breaks."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def run(self, work: Work[T]) -> T:
        until = time.monotonic() + BLOB_PATIENCE_S
        while True:
            try:
                return self._line.run(work)
            except ConnectionLost:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)

    def close(self) -> None:
        self._line.close()


class PostgreSQLReading:
    """A connection that reads: each read sees one moment."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def read(self, work: Work[T]) -> T:
        try:
            return self._line.run(partial(self._read, work))
        except ConnectionLost:  # perhaps it broke long ago, and nobody has used it since
            return self._line.run(partial(self._read, work))

    def _read(self, work: Work[T], connection: Connection) -> T:
        begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
        return self._line.transact(begin, work, connection, lambda _: self._line.say("COMMIT"))

    def interrupt(self) -> None:
        """Nothing: the server ends a statement after STATEMENT_MS."""

    def close(self) -> None:
        self._line.close()


# ------------------------------------------------------------------------------------------------------------
# Errors


def root(error: BaseException) -> BaseException:
    """The driver's own error behind the ones that Core makes of it."""
    while isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
    cause = error.__cause__
    return cause if isinstance(cause, asyncpg.PostgresError | asyncpg.InterfaceError) else error


def sqlstate(error: BaseException) -> str:
    """PostgreSQL's code for an error, or "" (https://www.postgresql.org/docs/current/errcodes-appendix.html)."""
    return getattr(root(error), "sqlstate", None) or ""


# lock_not_available, deadlock_detected, serialization_failure, query_canceled (by a timeout)
_CONTENDED = ("55P03", "40P01", "40001", "57014")
# insufficient_privilege; invalid_schema_name: there is none that the role may use
_DENIED = ("42501", "3F000")
# invalid_sql_statement_name, duplicate_prepared_statement: what a session was told, another one is asked for
_POOLED = ("26000", "42P05")
# insufficient_resources; a server that gave its place to another; system_error
_REFUSED = ("53", READ_ONLY, "58", *_DENIED, *_POOLED)


def trouble(error: BaseException) -> ErrorKind | None:
    """The kind of trouble behind an exception; None where the database is not to blame."""
    if isinstance(error, (ConnectionLost, CommitUnknown)):
        return ErrorKind.LOST
    state = sqlstate(error)
    if state in _CONTENDED:
        return ErrorKind.CONTENDED
    return ErrorKind.REFUSED if state.startswith(_REFUSED) else None
