"""PostgreSQL: a server that goes away, commits of which nobody heard, rows that another process holds."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Connection, select, text
from sqlalchemy.engine import make_url

from storage import (
    PATIENCE_S,
    BadText,
    ConversationChange,
    NotFound,
    RunAppend,
    Storage,
    StorageUnavailable,
    check_url,
    inspect_database,
    open_storage,
    patience_s,
)
from storage.drivers import postgres, writer
from storage.drivers.interface import CommitUnknown, ErrorKind
from storage.drivers.postgres import ConnectionLost, Line, trouble
from storage.tables import conversations, runs
from tests.support.blocking import gathered, is_unready, note, notes, until
from tests.support.certificates import make_certificate
from tests.support.making import OWNER, check, entry, finish, key, message, new, now, put_bytes, query, record
from tests.support.postgres import Postgres


@pytest.fixture
async def where(postgres: Postgres) -> AsyncIterator[str]:
    """An empty database, by its URL; checked at the end."""
    fresh = await postgres.fresh()
    yield fresh
    check(fresh)
    await postgres.give_back(fresh)


@pytest.fixture
async def pair(where: str) -> AsyncIterator[tuple[Storage, Storage]]:
    """Two processes' views of one database."""
    async with AsyncExitStack() as stack:
        opened = [await open_storage(where, runner=name) for name in ("a", "b")]
        for storage in opened:
            stack.push_async_callback(storage.close)
        yield opened[0], opened[1]


@pytest.fixture
def a(pair: tuple[Storage, Storage]) -> Storage:
    return pair[0]


@pytest.fixture
def b(pair: tuple[Storage, Storage]) -> Storage:
    return pair[1]


def session(storage: Storage) -> int:
    """The server's process behind the connection that writes."""
    pid = storage._writer._writing._earlier  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


def busy(storage: Storage, since: int) -> bool:
    return storage.commit_stats().commits > since + 5


# ------------------------------------------------------------------------------------------------------------
# The server goes away


async def test_a_crash_of_the_server_loses_nothing(postgres: Postgres, a: Storage) -> None:
    claim = await a.start_response(new("r1"))
    stop = asyncio.Event()

    async def write() -> int:
        seq = 2
        while not stop.is_set():
            assert not await a.append([RunAppend("r1", claim.fence, records=(record(seq),))])
            seq += 1
        return seq

    writing = asyncio.create_task(write())
    for _ in range(3):
        before = a.commit_stats().commits
        await until(partial(busy, a, before))
        await asyncio.to_thread(postgres.control, "restart", "-m", "immediate")
    before = a.commit_stats().commits
    await until(partial(busy, a, before))
    stop.set()
    end = await writing
    assert [r.first_seq for r in await a.records("r1", after=-1)] == [0, *range(2, end)]
    await a.ready()


async def test_new_work_is_refused_and_streams_wait_while_it_is_away(postgres: Postgres, a: Storage) -> None:
    """The impatient are told soon, also behind more of the patient than there are threads that read."""
    claim = await a.start_response(new("r1"))
    await asyncio.to_thread(postgres.control, "stop", "-m", "fast")
    try:
        patience_s.set(60.0)
        stream = asyncio.create_task(a.append([RunAppend("r1", claim.fence, records=(record(2),))]))
        reads = [asyncio.create_task(a.get_response(OWNER, "r1")) for _ in range(8)]
        write = asyncio.create_task(a.start_response(new("r3")))
        await asyncio.sleep(0)  # each has begun with the patience that it was given
        patience_s.set(0.3)
        since = time.monotonic()
        with pytest.raises(StorageUnavailable):
            await a.start_response(new("r2"))
        with pytest.raises(StorageUnavailable):
            await a.get_response(OWNER, "r1")
        assert time.monotonic() - since < 3.0
        patience_s.set(PATIENCE_S)
        assert not any(task.done() for task in (*reads, write))
        await until(lambda: is_unready(a))
        assert not stream.done()
    finally:
        await asyncio.to_thread(postgres.start)
    async with asyncio.timeout(5):
        assert await stream == {}
        assert {one.id for one in await asyncio.gather(*reads)} == {"r1"} and (await write).fence
    await a.ready()
    with pytest.raises(NotFound):  # who was told of a failure finds nothing done later
        await a.get_response(OWNER, "r2")
    assert [r.first_seq for r in await a.records("r1", after=-1)] == [0, 2]


async def test_close_does_not_wait_for_a_server_that_is_away(
    postgres: Postgres, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.2)
    storage = await open_storage(where, runner="x")
    await storage.start_response(new("r1"))
    await asyncio.to_thread(postgres.control, "stop", "-m", "fast")
    try:
        stream = asyncio.create_task(storage.append([RunAppend("r1", 1, records=(record(2),))]))
        await until(lambda: storage._writer._blocked_since is not None)
        await storage.close()
        with pytest.raises(StorageUnavailable):
            await stream
    finally:
        await asyncio.to_thread(postgres.start)


# ------------------------------------------------------------------------------------------------------------
# Commits of which nobody heard


def breaking(
    monkeypatch: pytest.MonkeyPatch, *, sent: bool, meanwhile: Callable[[], None] = lambda: None
) -> list[str]:
    """The connection breaks once at a COMMIT: before the server has it (sent=False), or before its answer."""
    said: list[str] = []
    say = Line.say

    def breaks(line: Line, sql: str) -> None:
        if said or not sql.endswith("; COMMIT"):
            return say(line, sql)
        said.append(sql)
        if sent:
            say(line, sql)
        line._raw.terminate()
        meanwhile()
        raise ConnectionResetError("injected")

    monkeypatch.setattr(Line, "say", breaks)
    return said


@pytest.mark.parametrize("sent", [False, True])
async def test_a_commit_without_an_answer_happens_once(
    a: Storage, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    await a.start_response(new("r1"))
    commits = a.commit_stats().commits
    said = breaking(monkeypatch, sent=sent)
    assert not await a.append([RunAppend("r1", 1, records=(record(2),))])
    assert said and a.commit_stats().commits == commits + 1
    said.clear()
    assert not await a.append([RunAppend("r1", 1, records=(record(3),), finish=finish())])
    assert said and [r.first_seq for r in await a.records("r1", after=-1)] == [0, 2, 3]
    said.clear()
    assert (await a.create_key(key("k1"), entry=entry())).id == "k1"
    assert said and await notes(a) == ["k1"]


async def test_a_commit_that_is_still_on_its_way_is_waited_for_or_stopped(
    a: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the COMMIT but has not read it: it must not take place behind a second try's back."""
    await a.start_response(new("r1"))
    pid = session(a)
    monkeypatch.setattr("storage.drivers.postgres.LOCK_MS", 100)
    said: list[str] = []
    say = Line.say

    def late(line: Line, sql: str) -> None:
        if said or not sql.endswith("; COMMIT"):
            return say(line, sql)
        said.append(sql)
        os.kill(pid, signal.SIGSTOP)
        line._raw._transport.write(b"Q" + (len(sql) + 5).to_bytes(4, "big") + sql.encode() + b"\0")
        raise TimeoutError

    monkeypatch.setattr(Line, "say", late)
    append = asyncio.create_task(a.append([RunAppend("r1", 1, records=(record(2),))]))
    try:
        await until(lambda: is_unready(a))
        assert not append.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await append == {}
    assert session(a) != pid
    assert [r.first_seq for r in await a.records("r1", after=-1)] == [0, 2]


async def test_nobody_is_told_of_a_commit_until_it_is_known(
    postgres: Postgres, a: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.0)
    breaking(monkeypatch, sent=True, meanwhile=lambda: postgres.control("stop", "-m", "immediate"))
    starting = asyncio.create_task(a.start_response(new("r1")))
    try:
        await until(lambda: a._writer._unsure)
        with pytest.raises(StorageUnavailable):
            await a.start_response(new("r2"))
        assert not starting.done()
    finally:
        await asyncio.to_thread(postgres.start)
    assert (await starting).response_id == "r1"
    assert (await a.get_response(OWNER, "r1")).status == "in_progress"


async def test_a_write_whose_session_ended_is_tried_on_a_new_one(a: Storage) -> None:
    """However long ago it was asked for: a process that was stopped for seconds comes back to such a one."""
    await a.create_key(key("k1"), entry=entry())
    sessions = [session(a)]

    def stop_once(conn: Connection) -> str:
        if len(sessions) == 1:
            sessions.append(0)
            conn.execute(text("SELECT pg_terminate_backend(pg_backend_pid())")).all()
        return "written"

    before = patience_s.set(0.0)
    try:
        assert await a._writer.submit(stop_once, durable=True) == "written"
    finally:
        patience_s.reset(before)
    assert session(a) != sessions[0]


# ------------------------------------------------------------------------------------------------------------
# Rows that another process holds


async def test_a_process_that_stops_in_a_transaction_does_not_hold_the_others(
    a: Storage, b: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a.create_conversation(OWNER, "c1", now(), b"{}")
    stopped, go_on = threading.Event(), threading.Event()

    def stop(conn: Connection) -> None:
        conn.execute(select(conversations).where(conversations.c.id == "c1").with_for_update()).all()
        stopped.set()
        assert go_on.wait(20)

    late = a._writer.submit(stop, durable=True, retry_until_available=True)
    try:
        await until(stopped.is_set)
        free = [asyncio.create_task(b.start_response(new(f"free{number}"))) for number in range(4)]
        held = asyncio.create_task(b.start_response(new("held", conversation="c1")))
        await asyncio.gather(*free)
        async with asyncio.timeout(5):
            assert (await held).state == "running"
    finally:
        go_on.set()
    await late  # it began anew, on another connection
    await b.append([RunAppend("held", 1, finish=finish())])


async def test_the_runs_of_a_process_that_stands_still_in_a_transaction_are_free_at_once(
    a: Storage, b: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "IDLE_MS", 60_000)
    await a.beat()
    await a.start_response(new("r1", runner=a.runner))
    await b.beat()
    stopped, go_on = threading.Event(), threading.Event()

    def stop(conn: Connection) -> None:
        conn.execute(select(runs).with_for_update()).all()
        stopped.set()
        assert go_on.wait(20)

    late = a._writer.submit(stop, durable=True, retry_until_available=True)
    try:
        await until(stopped.is_set)
        before = session(b)
        view = await b.list_processes(now())
        async with asyncio.timeout(2):
            assert await b.release_runs(a.runner, view.beats[a.runner]) == 1
        assert session(b) == before
        assert [claim.response_id for claim in await b.take(9)] == ["r1"]
    finally:
        go_on.set()
    await late  # it began anew, on another connection
    assert await a.append([RunAppend("r1", 1, records=(record(2),))])
    await b.append([RunAppend("r1", 3, finish=finish())])


async def test_a_row_that_is_held_stops_only_who_needs_it(where: str, a: Storage) -> None:
    await a.create_conversation(OWNER, "c1", now(), b"{}")
    holder = await asyncpg.connect(where.replace("+asyncpg", ""))
    try:
        async with holder.transaction():
            await holder.execute("SELECT * FROM conversations FOR UPDATE")
            held = asyncio.create_task(a.update_conversation(OWNER, "c1", ConversationChange(b'{"a":1}')))
            others = [asyncio.create_task(a.start_response(new(f"r{number}"))) for number in range(8)]
            await asyncio.gather(*others)
            assert not held.done()
        assert (await held).metadata == b'{"a":1}'
    finally:
        await holder.close()


async def test_waiting_in_a_circle_ends(where: str, a: Storage, b: Storage) -> None:
    def both(first: str, second: str) -> Callable[[Connection], None]:
        def job(conn: Connection) -> None:
            for id in (first, second):
                conn.execute(text(f"UPDATE api_keys SET name = name || 'x' WHERE id = '{id}'"))
                met.append(first)
                if len(met) < 2:
                    both_began.wait(5)
                both_began.set()

        return job

    met: list[str] = []
    both_began = threading.Event()
    for name in ("k1", "k2"):
        await a._write(partial(note, name=name))
    await asyncio.gather(
        a._writer.submit(both("k1", "k2"), durable=True, retry_until_available=True),
        b._writer.submit(both("k2", "k1"), durable=True, retry_until_available=True),
    )
    assert [key.name for key in await a.list_keys()] == ["xx", "xx"]


async def test_who_was_overtaken_sees_by_whom(a: Storage, b: Storage) -> None:
    """Both store one and the same item at once: its second writer finds it, or finds a conflict."""
    first_wrote, second_waits = threading.Event(), threading.Event()
    put = a._writer.submit

    def slow(conn: Connection) -> None:
        note(conn, "k1")
        first_wrote.set()
        second_waits.wait(0.2)

    def careful(conn: Connection) -> str:
        found = conn.execute(text("SELECT hint FROM api_keys WHERE id = 'k1'")).scalar()
        return "found" if found is not None else note(conn, "k1")

    one = put(slow, durable=True)
    await until(first_wrote.is_set)
    assert await b._writer.submit(careful, durable=True) == "found"
    await one
    claims = await asyncio.gather(
        *(s.start_response(new(f"{s.runner}{n}", message("same"))) for n in range(20) for s in (a, b))
    )
    assert len(claims) == 40


# ------------------------------------------------------------------------------------------------------------
# Opening


@pytest.mark.parametrize("number", range(3))
async def test_two_that_start_at_once_on_an_empty_database(postgres: Postgres, number: int) -> None:
    blank = await postgres.blank()
    opened = await asyncio.gather(*(open_storage(blank, runner=f"r{n}") for n in range(3)))
    await opened[0].start_response(new("r1"))
    assert [(await s.get_response(OWNER, "r1")).id for s in opened] == ["r1"] * 3
    for storage in opened:
        assert storage.shared
        await storage.close()
    assert query(blank, "SELECT * FROM commits") == []
    await postgres.drop(blank)


async def test_a_server_that_does_not_let_us_in(postgres: Postgres) -> None:
    for url, why in (
        (postgres.url("nowhere"), 'database "nowhere" does not exist'),
        (postgres.url("postgres").replace("postgres@", "nobody:secret@"), 'role "nobody" does not exist'),
        ("postgresql+asyncpg://me:secret@127.0.0.1:9/db", "127.0.0.1"),
        ("postgresql://me:secret@/db?host=/nowhere", "listens at the socket /nowhere/.s.PGSQL.5432"),
    ):
        with pytest.raises(StorageUnavailable, match=why) as refused:
            await open_storage(url, runner="x")
        assert "secret" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.fixture
async def tls_port(tmp_path: Path) -> AsyncIterator[int]:
    """Of a server that speaks TLS by tmp_path/server.pem, and lets nobody in. It is in no haste to close."""
    certfile, keyfile, _ = make_certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certfile, keyfile)
    serving = set[asyncio.Task[Any] | None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with suppress(OSError, EOFError):
            await reader.readexactly(8)  # SSLRequest
            writer.write(b"S")
            await writer.start_tls(context)
            await reader.readexactly(4)  # a StartupMessage
            fields = b"SFATAL\0C28000\0Mit came by TLS\0\0"
            writer.write(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
            await reader.read()
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*(task for task in serving if task is not None))


async def test_the_servers_certificate_is_verified_as_the_url_says(tmp_path: Path, tls_port: int) -> None:
    other, _, _ = make_certificate(tmp_path, "other")
    own = tmp_path / "server.pem"
    for host, parameters, told in (
        ("localhost", f"sslmode=verify-full&sslrootcert={own}", "it came by TLS"),
        ("127.0.0.1", f"sslmode=verify-ca&sslrootcert={own}", "it came by TLS"),
        ("127.0.0.1", f"ssl=verify-full&sslrootcert={own}", "certificate is not valid for '127.0.0.1'"),
        ("localhost", f"sslmode=verify-full&sslrootcert={other}", "CERTIFICATE_VERIFY_FAILED"),
        ("localhost", "sslmode=some", "`sslmode` parameter must be one of"),
    ):
        with pytest.raises(StorageUnavailable, match=told):
            await inspect_database(f"postgresql+asyncpg://me@{host}:{tls_port}/db?{parameters}")


async def test_a_server_that_refuses_by_tls_leaves_no_socket_open(tmp_path: Path, tls_port: int) -> None:
    """Whether or not it has ended TLS by the time that its refusal is told."""
    with pytest.raises(StorageUnavailable, match="it came by TLS"):
        await inspect_database(
            f"postgresql+asyncpg://me@localhost:{tls_port}/db?sslmode=verify-full"
            f"&sslrootcert={tmp_path / 'server.pem'}"
        )
    gc.collect()  # a socket that is still open warns


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("connect_timeout=3", "unknown parameter connect_timeout of the database's URL: it may have host, "),
        ("sslmode=verify-full&sslrootcert=/nowhere/ca.pem", "sslrootcert of the database's URL: /nowhere/ca"),
        ("sslmode=require&sslmode=prefer", "sslmode is given twice"),
    ],
)
def test_parameters_of_the_url_that_are_of_no_use_are_named(parameters: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_url(f"postgresql+asyncpg://me:secret@db/db?{parameters}")


def test_a_file_of_tls_that_is_not_what_it_is_to_be_is_named(tmp_path: Path) -> None:
    (one, key, _), (other, _, _) = (make_certificate(tmp_path, name) for name in ("one", "other"))
    url = "postgresql+asyncpg://me:secret@db/db?sslmode=verify-full&"
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate")
    for parameters, told in (
        (f"sslrootcert={empty}", f"sslrootcert of .* {empty} holds no certificate in the form of PEM"),
        (f"sslcert={other}&sslkey={key}", f"sslkey of .* {key} cannot .* {other}: KEY_VALUES_MISMATCH"),
        (
            f"sslcert={one}&sslkey={empty}",
            f"sslkey of .* {empty} cannot be used with .*: it is not in the form",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            check_url(url + parameters)
    check_url(f"{url}sslrootcert={one}&sslcert={one}&sslkey={key}")


async def test_a_socket_that_nobody_listens_at_is_named(tmp_path: Path) -> None:
    url = f"postgresql+asyncpg://postgres@:5433/postgres?host={tmp_path}"
    for opening in (open_storage(url, runner="test"), inspect_database(url)):
        with pytest.raises(
            StorageUnavailable, match=f"nothing listens at the socket {tmp_path}/.s.PGSQL.5433"
        ):
            await opening


async def test_a_wrong_password(postgres: Postgres) -> None:
    admin = await postgres.connect()
    await admin.execute("CREATE ROLE guest LOGIN PASSWORD 'right'")
    rules = postgres.socket_folder / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text("local all guest scram-sha-256\n" + before)
    postgres.control("reload")
    try:
        url = postgres.url("postgres").replace("postgres@", "guest:wrong@")
        with pytest.raises(StorageUnavailable, match="password authentication failed") as refused:
            await open_storage(url, runner="x")
        assert "wrong" not in str(refused.value) and "guest:***@" in str(refused.value)
    finally:
        rules.write_text(before)
        postgres.control("reload")
        await admin.execute("DROP ROLE guest")
        await admin.close()


async def test_a_role_without_privileges_is_told_which_it_needs(postgres: Postgres) -> None:
    blank = await postgres.blank()
    url = blank.replace("//postgres@", "//modest@")
    admin = await postgres.connect(make_url(blank).database or "")
    try:
        await admin.execute("CREATE ROLE modest LOGIN")
        wanted = "GRANT CREATE, USAGE ON SCHEMA public TO modest$"
        with pytest.raises(StorageUnavailable, match=f"permission denied for schema public: .*{wanted}"):
            await open_storage(url, runner="test")
        state = await inspect_database(url)
        assert state.schema == "absent" and re.search(wanted, state.barred or "")
        await admin.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
        with pytest.raises(StorageUnavailable, match=wanted):
            await open_storage(url, runner="test")
        assert re.search(wanted, (await inspect_database(url)).barred or "")
        await (await open_storage(blank, runner="test")).close()
        await admin.execute("GRANT CREATE, USAGE ON SCHEMA public TO modest")
        for opening in (open_storage(url, runner="test"), inspect_database(url)):
            with pytest.raises(StorageUnavailable, match="table alembic_version: the role modest has to own"):
                await opening
        await admin.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO modest")
        assert "modest lacks INSERT, UPDATE, DELETE on api_keys; " in (
            (await inspect_database(url)).barred or ""
        )
        for kind, rights in (("TABLES", "SELECT, INSERT, UPDATE, DELETE"), ("SEQUENCES", "USAGE")):
            await admin.execute(f"GRANT {rights} ON ALL {kind} IN SCHEMA public TO modest")
        assert (await inspect_database(url)).barred is None
        await admin.execute("REVOKE INSERT ON responses FROM modest")
        barred = (await inspect_database(url)).barred or ""
        assert barred.startswith(
            "the role modest lacks INSERT on responses: have their owner run GRANT SELECT"
        )
        await admin.execute(
            "GRANT INSERT ON responses TO modest; REVOKE USAGE ON segments_id_seq FROM modest"
        )
        assert "lacks USAGE on segments_id_seq: " in ((await inspect_database(url)).barred or "")
        await admin.execute("UPDATE alembic_version SET version_num = '0033'")
        assert "belong to postgres" in ((await inspect_database(url)).barred or "")
        await admin.execute("DROP OWNED BY modest; DROP ROLE modest")
    finally:
        await admin.close()
        await postgres.drop(blank)


async def test_a_process_has_no_more_connections_than_operators_are_told(
    postgres: Postgres, where: str
) -> None:
    storage = await open_storage(where, runner="a")
    outside = await postgres.connect(make_url(where).database or "")
    try:
        await storage.start_response(new("r1"))
        reads = [storage._read(lambda conn: conn.execute(text("SELECT pg_sleep(0.05)"))) for _ in range(16)]
        contents = [put_bytes(storage.blobs, b"x" * number) for number in range(1, 17)]
        await asyncio.gather(*reads, *contents)
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        assert 6 < await outside.fetchval(f"SELECT count(*) {others}") <= 10
    finally:
        await outside.close()
        await storage.close()
    page = Path(__file__).parents[3] / "docs" / "several-servers.md"
    assert "A server process opens at most\n10 connections" in page.read_text()


async def test_every_session_says_what_it_needs(a: Storage) -> None:
    def settings(conn: Connection) -> dict[str, Any]:
        names = ("synchronous_commit", "lock_timeout", "idle_in_transaction_session_timeout")
        return {name: conn.execute(text(f"SHOW {name}")).scalar() for name in names}

    assert await a._write(settings) == {
        "synchronous_commit": "on",
        "lock_timeout": "500ms",
        "idle_in_transaction_session_timeout": "4s",
    }


async def test_a_connection_is_made_with_nothing_that_a_pooler_refuses(a: Storage) -> None:
    """https://www.pgbouncer.org/config.html#ignore_startup_parameters"""
    given = "SELECT name FROM pg_settings WHERE source = 'client'"
    names = await a._read(lambda conn: set(conn.execute(text(given)).scalars()))
    assert names <= {"application_name", "client_encoding", "DateStyle", "TimeZone"}


@pytest.mark.parametrize(
    "kind", [asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError]
)
async def test_a_pooler_that_mixes_sessions_is_told(a: Storage, kind: type[Exception]) -> None:
    """Another session does not know what this one has prepared, or knows something else by its name."""

    met = kind("prepared statement")

    def read(_: Connection) -> None:
        raise met

    before = patience_s.set(0.0)
    try:
        for work in (a._read, a._write):
            with pytest.raises(StorageUnavailable, match="pool_mode = session"):
                await work(read)
    finally:
        patience_s.reset(before)
    lost = ConnectionLost(met)  # a session that had just begun
    lost.__cause__ = met
    assert "pool_mode = session" in (postgres.PostgreSQL(make_url("postgresql://h/x")).cause(lost) or "")


# ------------------------------------------------------------------------------------------------------------
# Hints


async def test_hints(postgres: Postgres, a: Storage, b: Storage) -> None:
    async with asyncio.timeout(10):
        seen = await b.hinted(0, 10)  # it listens
        own = await a.hinted(0, 10)
        await a.start_response(new("r1"))
        seen = await b.hinted(seen, 10)
        for seq in range(2, 40):
            assert not await a.append([RunAppend("r1", 1, records=(record(seq),))])
        heard = await b.hinted(seen, 10)
        assert seen < heard < seen + 38  # not one for each commit
        assert await a.hinted(own, 0.05) == own  # its own are none
        heard = await b.hinted(heard, 0.05)
        await asyncio.to_thread(postgres.control, "restart", "-m", "fast")
        heard = await b.hinted(heard, 10)  # it listens again, and may have missed something
        waiting = asyncio.create_task(b.hinted(heard + 1, 10))
        await a.touch_keys({"none": 1})
        await waiting


# ------------------------------------------------------------------------------------------------------------
# The rest


@pytest.mark.long
async def test_more_keys_than_a_statement_has_parameters(a: Storage) -> None:
    many = [message(f"m{number}") for number in range(33_000)]
    await a.create_conversation(OWNER, "c1", now(), b"{}", many)
    assert len(await a.history(OWNER, conversation_id="c1")) == 33_000
    assert len(await a.get_items(OWNER, [item.id for item in many])) == 33_000
    refused = await a.append([RunAppend(f"r{number}", 1) for number in range(33_000)])
    assert len(refused) == 33_000
    await a.delete_conversation(OWNER, "c1", now())


async def test_text_that_it_cannot_hold(a: Storage) -> None:
    await a.create_conversation(OWNER, "c1", now(), b"{}")
    for verb in (
        a.get_response(OWNER, "r\0"),
        a.start_response(new("r1", message("m\0"))),
        a.add_conversation_items(OWNER, "c1", [message("m\0")]),
    ):
        with pytest.raises(BadText):
            await verb
    await a.add_conversation_items(OWNER, "c1", [message("m1", b"\0")])


FULL_DISK = """
CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full';
END $$;
CREATE TRIGGER full_disk BEFORE INSERT ON commits FOR EACH STATEMENT EXECUTE FUNCTION full_disk();
"""


@pytest.mark.parametrize(
    ("begin", "end", "says"),
    [
        (FULL_DISK, "DROP FUNCTION full_disk CASCADE", "No space left on device"),
        (
            "ALTER DATABASE {} SET default_transaction_read_only = on",
            "ALTER DATABASE {} RESET default_transaction_read_only",
            "read-only transaction",
        ),
    ],
    ids=["full", "read-only"],
)
async def test_a_database_that_takes_no_writes_is_told_and_waited_for(
    postgres: Postgres,
    where: str,
    a: Storage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    begin: str,
    end: str,
    says: str,
) -> None:
    """By the beat of a server, too, which is given up at once. What was begun goes on afterwards."""
    monkeypatch.setattr(writer, "LOOK_S", 0.01)
    name = make_url(where).database
    assert name is not None
    claim = await a.start_response(new("r1"))
    outside = await postgres.connect(name)
    try:
        await outside.execute(begin.format(name))
        await outside.execute(f"SELECT pg_terminate_backend({session(a)})")  # settings are a session's
        with pytest.raises(StorageUnavailable, match=says) as refused:
            await a.touch_keys({"k1": 1})
        with pytest.raises(StorageUnavailable, match=says) as unready:
            await a.ready()
        with pytest.raises(StorageUnavailable, match=says):
            await a.start_response(new("r2"))
        for error in (refused.value, unready.value):
            assert (error.full, error.read_only) == ("space" in says, "read-only" in says)
        stream = asyncio.create_task(a.append([RunAppend("r1", claim.fence, records=(record(2),))]))
        assert (await a.get_response(OWNER, "r1")).status == "in_progress"
        assert is_unready(a) and not stream.done()
    finally:
        await outside.execute(end.format(name))
        await outside.close()
    async with asyncio.timeout(10):
        assert await stream == {}
    await until(lambda: not is_unready(a))
    await a.start_response(new("r2"))
    said = [each.message for each in caplog.records if each.name == "antiphon.storage"]
    assert len(said) == 2 and says in said[0], said
    assert said[1].startswith("the database can be written again")


async def test_a_database_that_is_written_again_is_noticed_without_a_write(
    postgres: Postgres, where: str, a: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOOK_S", 0.01)
    outside = await postgres.connect(make_url(where).database or "")
    try:
        await outside.execute(FULL_DISK)
        with pytest.raises(StorageUnavailable):
            await a.touch_keys({"k1": 1})
        assert is_unready(a)
        await outside.execute("DROP FUNCTION full_disk CASCADE")
    finally:
        await outside.close()
    await until(lambda: not is_unready(a))
    assert query(where, "SELECT writer FROM commits WHERE writer < 0") == []


async def test_one_write_that_is_refused_is_no_obstacle_to_others(
    postgres: Postgres, where: str, a: Storage
) -> None:
    outside = await postgres.connect(make_url(where).database or "")
    try:
        await outside.execute(FULL_DISK.replace("ON commits", "ON responses"))
        with pytest.raises(StorageUnavailable, match="No space left on device"):
            await a.start_response(new("r1"))
        await a.ready()
        await outside.execute("DROP FUNCTION full_disk CASCADE")
    finally:
        await outside.close()
    await a.start_response(new("r1"))


async def test_the_log_says_that_a_role_may_not_write_one_table(
    postgres: Postgres, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a minute, however many requests it stops."""
    blank = await postgres.blank()
    await (await open_storage(blank, runner="owner")).close()
    admin = await postgres.connect(make_url(blank).database or "")
    try:
        await admin.execute("CREATE ROLE lesser LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO lesser")
        await admin.execute("REVOKE INSERT ON responses FROM lesser")
        storage = await open_storage(blank.replace("//postgres@", "//lesser@"), runner="lesser")
        caplog.clear()
        for id in ("r1", "r2"):
            with pytest.raises(StorageUnavailable, match="table responses: the role lesser has to own"):
                await storage.start_response(new(id))
        await storage.ready()
        told = [each for each in caplog.records if each.name == "antiphon.storage"]
        assert [each.levelname for each in told] == ["ERROR"]
        assert "permission denied for table responses: the role lesser has to own" in told[0].message
        monkeypatch.setattr(writer, "DENIED_S", 0.0)
        with pytest.raises(StorageUnavailable):
            await storage.start_response(new("r3"))
        assert len([each for each in caplog.records if each.name == "antiphon.storage"]) == 2
        await storage.close()
        await admin.execute("DROP OWNED BY lesser; DROP ROLE lesser")
    finally:
        await admin.close()
        await postgres.drop(blank)


async def test_a_broken_job_takes_nobody_with_it(a: Storage) -> None:
    def broken(conn: Connection) -> None:
        conn.execute(text("SELECT 1/0"))

    results = await gathered(a, lambda conn: note(conn, "k1"), broken, lambda conn: note(conn, "k2"))
    assert [type(result).__name__ for result in results] == ["str", "DBAPIError", "str"]
    assert await notes(a) == ["k1", "k2"]


def test_the_kinds_of_trouble() -> None:
    assert trouble(asyncpg.LockNotAvailableError("x")) is ErrorKind.CONTENDED
    assert trouble(asyncpg.DeadlockDetectedError("x")) is ErrorKind.CONTENDED
    assert trouble(asyncpg.SerializationError("x")) is ErrorKind.CONTENDED
    assert trouble(asyncpg.DiskFullError("x")) is ErrorKind.REFUSED
    assert trouble(asyncpg.ReadOnlySQLTransactionError("x")) is ErrorKind.REFUSED
    assert trouble(asyncpg.InsufficientPrivilegeError("x")) is ErrorKind.REFUSED
    assert trouble(ConnectionLost(OSError("x"))) is trouble(CommitUnknown([], OSError())) is ErrorKind.LOST
    assert trouble(asyncpg.UniqueViolationError("x")) is trouble(NotFound("a", "b")) is None
    assert postgres.sqlstate(OSError()) == ""
