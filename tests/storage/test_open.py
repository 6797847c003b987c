"""Opening: the folder's lock, the schema's revision, what is imported when."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from storage import (
    FolderHeld,
    ForeignDatabase,
    KeyedRequest,
    Limits,
    NewFork,
    NewResponseFork,
    NewStoreFile,
    NewVectorStore,
    NotFound,
    SchemaTooNew,
    Storage,
    StorageUnavailable,
    back_up,
    inspect_database,
    metadata,
    open_storage,
)
from storage.migrate import HEAD, script_location
from tests.support.making import (
    OTHER,
    OWNER,
    RUNNER,
    entry,
    is_sqlite,
    key,
    message,
    new,
    now,
    query,
    tables,
    turn,
    url,
)
from tests.support.postgres import Postgres


def python(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)


async def test_a_second_server_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner=RUNNER)
    second = python(
        """if True:
        import asyncio, sys
        from storage import FolderHeld, open_storage
        try:
            asyncio.run(open_storage(sys.argv[1], runner="second"))
        except FolderHeld as held:
            print(held)
        """,
        url(tmp_path),
    )
    assert f"pid {os.getpid()}" in second.stdout and str(tmp_path) in second.stdout, second.stderr
    with pytest.raises(FolderHeld):
        await open_storage(url(tmp_path), runner="same process")
    await storage.close()
    await (await open_storage(url(tmp_path), runner="next")).close()


async def test_a_killed_holder_leaves_the_folder_free(tmp_path: Path) -> None:
    killed = python(
        """if True:
        import asyncio, os, signal, sys
        from storage import open_storage
        async def main():
            await open_storage(sys.argv[1], runner="first")
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """,
        url(tmp_path),
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    await (await open_storage(url(tmp_path), runner="second")).close()


async def test_a_database_survives_reopening(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER)
    await turn(storage, "r1", message("m1"))
    await storage.close()
    await storage.close()
    storage = await open_storage(database_url, runner=RUNNER)
    assert (await storage.get_response(OWNER, "r1")).status == "completed"
    await storage.close()


async def test_head_is_what_alembic_calls_head() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(script_location()))
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


async def test_a_migrated_database_has_the_tables_of_the_code(storage: Storage) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    def compare(connection: Connection) -> None:
        # Each database has the index of words in its own form, which the code has no table for.
        opts = {
            "compare_type": True,
            "include_name": lambda name, *_: not str(name).startswith("vector_words"),
        }
        context = MigrationContext.configure(connection, opts=opts)
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == HEAD

    await storage._read(compare)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("there", [False, True])
async def test_a_database_of_0002_gets_the_keys_that_seal(blank_url: str, there: bool) -> None:
    await (await open_storage(blank_url, runner=RUNNER)).close()
    back_to_0003(blank_url)
    if not there:
        query(blank_url, "DROP TABLE sealing_keys")
    query(blank_url, "UPDATE alembic_version SET version_num = '0002'")
    storage = await open_storage(blank_url, runner=RUNNER)
    assert await storage.sealing_keys() == ()
    await storage.close()


async def test_what_was_kept_under_0033_is_found_by_metadata(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    labelled, told = {"k": "v", "\N{SNOWMAN}": '"'}, b'"a":"\\"metadata\\":{\\"","metadata":%s,"z":{}'
    for n in range(600):  # more than are read at once
        echo = told % (json.dumps(labelled, ensure_ascii=False).replace(": ", ":").encode() if n else b"{}")
        made = replace(new(f"r{n}"), echo=echo, metadata=labelled if n else {}, hidden=n == 1)
        await storage.start_response(made)
    await storage.delete_response(OWNER, "r2", now())
    for id, its in (("c1", b"{}"), ("c2", b'{"k":"v"}'), ("c3", b'{"k":"v"}')):
        await storage.create_conversation(OWNER, id, now(), its)
    await storage.delete_conversation(OWNER, "c3", now())
    await storage.close()
    every_pair = "SELECT object_id, digest, owner, created_at FROM metadata_pairs ORDER BY object_id, digest"
    before = query(blank_url, every_pair)
    assert len(before) == 597 * 2 + 1
    back_to_0033(blank_url)
    storage = await open_storage(blank_url, runner=RUNNER)
    await storage.close()
    assert query(blank_url, every_pair) == before


INDEXES_OF_0032 = {
    "responses_deleted": "responses (owner, num_bytes) WHERE deleted_at IS NOT NULL",
    "responses_by_fork": "responses (fork_of) WHERE fork_of IS NOT NULL",
    "conversations_by_use": "conversations (used_at)",
    "conversations_by_parent": "conversations (parent_id) WHERE parent_id IS NOT NULL",
    "conversation_items_by_item": "conversation_items (owner, item_id)",
    "conversation_items_deleted": """conversation_items (conversation_id, deleted_at)
        WHERE deleted_at IS NOT NULL""",
    "runs_by_owner": "runs (owner)",
    "upload_parts_by_owner": "upload_parts (owner)",
    "container_files_by_owner": "container_files (owner)",
    "vector_store_files_of_owner": "vector_store_files (owner)",
    "batches_open": "batches (created_at) WHERE ended_at IS NULL",
    "prompt_versions_by_owner": "prompt_versions (owner)",
}
"""Those of which 0033 made others."""


def back_to_0033(database_url: str) -> None:
    """Take away what revisions after 0033 added."""
    query(database_url, "DROP TABLE metadata_pairs")
    query(database_url, "UPDATE alembic_version SET version_num = '0033'")


def back_to_0032(database_url: str) -> None:
    """Take away what revisions after 0032 added, and give back what they took."""
    back_to_0033(database_url)
    added = ["responses_unmeasured", "vector_stores_expiring", "vector_stores_deleted"]
    for table in ("conversations", "files", "upload_parts", "containers", "container_files", "batches"):
        added.append(f"{table}_by_size")
    for table in ("vector_store_files", "vector_store_slices", "chat_completions", "prompts"):
        added.append(f"{table}_by_size")
    for name in (*added, "prompt_versions_by_size"):
        query(database_url, f"DROP INDEX {name}")
    for name, columns in INDEXES_OF_0032.items():
        query(database_url, f"DROP INDEX IF EXISTS {name}")
        query(database_url, f"CREATE INDEX {name} ON {columns}")
    query(database_url, "UPDATE alembic_version SET version_num = '0032'")


def back_to_0031(database_url: str) -> None:
    """Take away what revisions after 0031 added."""
    back_to_0032(database_url)
    query(database_url, "DROP INDEX conversations_archived")
    query(database_url, "UPDATE alembic_version SET version_num = '0031'")


def back_to_0030(database_url: str) -> None:
    """Take away what revisions after 0030 added."""
    back_to_0031(database_url)
    query(database_url, "DROP TABLE identity")
    query(database_url, "UPDATE alembic_version SET version_num = '0030'")


async def test_a_database_has_an_id_that_stays(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    id = await storage.database_id()
    assert id is not None and re.fullmatch(r"[0-9a-f]{32}", id)
    await storage.close()
    assert (await inspect_database(blank_url)).id == id
    back_to_0030(blank_url)
    assert (await inspect_database(blank_url)).id is None
    storage = await open_storage(blank_url, runner=RUNNER)
    assert await storage.database_id() not in (None, id), "a new table makes a new one"
    await storage.close()


def back_to_0029(database_url: str) -> None:
    """Take away what revisions after 0029 added."""
    back_to_0030(database_url)
    for index in ("status", "model", "conversation"):
        query(database_url, f"DROP INDEX responses_by_{index}")
    query(database_url, "CREATE INDEX responses_by_conversation ON responses (conversation_id)")
    query(database_url, "UPDATE alembic_version SET version_num = '0029'")


def back_to_0028(database_url: str) -> None:
    """Take away what revisions after 0028 added."""
    back_to_0029(database_url)
    query(database_url, "DROP INDEX conversations_deleted")
    query(database_url, "UPDATE alembic_version SET version_num = '0028'")


def back_to_0027(database_url: str) -> None:
    """Take away what revisions after 0027 added, and give back what they took."""
    back_to_0028(database_url)
    query(database_url, "DROP TABLE vector_store_slices")
    query(database_url, "ALTER TABLE vector_store_files DROP COLUMN attribute_bytes")
    kind = "BLOB" if is_sqlite(database_url) else "bytea"
    query(database_url, f"ALTER TABLE vector_store_batches ADD COLUMN files {kind}")
    query(database_url, "CREATE INDEX vector_store_batches_to_add ON vector_store_batches (store_id)")
    if is_sqlite(database_url):
        made = "type = 'table' AND name = 'vector_stores'"
        [(table,)] = query(database_url, f"SELECT sql FROM sqlite_master WHERE {made}")
        counting = table.replace(" AUTOINCREMENT", "").replace('"vector_stores"', "uncounted")
        query(database_url, counting)
        query(database_url, "INSERT INTO uncounted SELECT * FROM vector_stores")
        indexes = query(
            database_url, "SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'vector_stores'"
        )
        query(database_url, "DROP TABLE vector_stores")
        query(database_url, "ALTER TABLE uncounted RENAME TO vector_stores")
        for (index,) in indexes:
            query(database_url, index)
    query(database_url, "UPDATE alembic_version SET version_num = '0027'")


async def test_stores_of_0027_count_on_and_take_what_was_still_to_come(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    stores, files = storage.vector_stores, [NewStoreFile("file-0", "0.txt", 800, 400, b'{"a":1}')]
    for id in ("vs_1", "vs_2"):
        await stores.create(NewVectorStore(id, OWNER, now(), "", None, b"{}"), files)
    await stores.create_batch(OWNER, "vs_1", "vsfb_1", [], now())
    before = [(await stores.get(OWNER, id)).number for id in ("vs_1", "vs_2")]
    await storage.close()
    back_to_0027(blank_url)
    told = [
        {"file_id": f"file-{n}", "filename": f"{n}.txt", "chunk_tokens": 800, "chunk_overlap": 400,
         "attributes": '{"n":"\N{SNOWMAN}"}' if n % 2 else None}
        for n in range(1, 252)
    ]  # fmt: skip
    blob = json.dumps(told).encode().hex()
    literal = f"X'{blob}'" if is_sqlite(blank_url) else f"'\\x{blob}'"
    query(blank_url, f"UPDATE vector_store_batches SET files = {literal}, total = 260, added = 1")
    storage = await open_storage(blank_url, runner=RUNNER)
    stores = storage.vector_stores
    assert [(await stores.get(OWNER, id)).number for id in ("vs_1", "vs_2")] == before
    assert (await stores.due(now())).to_add
    while await stores.add_some(now()):
        pass
    page = await stores.list_files(OWNER, "vs_1", limit=300)
    assert {file.file_id: file.attributes for file in page.data} == {"file-0": b'{"a":1}'} | {
        each["file_id"]: each["attributes"] and str(each["attributes"]).encode() for each in told[1:]
    }
    assert (await storage.usage(OWNER)).held == 2 * 7 + 125 * len('{"n":"\N{SNOWMAN}"}'.encode())
    await stores.delete(OWNER, "vs_2", now())
    while await stores.erase():
        pass
    new = await stores.create(NewVectorStore("vs_3", OWNER, now(), "", None, b"{}"))
    assert new.number > max(before)
    await storage.close()


def back_to_0026(database_url: str) -> None:
    """Take away what revisions after 0026 added."""
    back_to_0027(database_url)
    for index in ("idempotency_by_size", "idempotency_by_object"):
        query(database_url, f"DROP INDEX {index}")
    for table, column in (("idempotency", "about"), ("idempotency", "num_bytes"), ("batch_lines", "used")):
        query(database_url, f"ALTER TABLE {table} DROP COLUMN {column}")
    query(database_url, "UPDATE alembic_version SET version_num = '0026'")


async def test_what_was_kept_for_repeats_under_0026_counts(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    request = KeyedRequest(OWNER, "/tokenize", "once", b"hash", now())
    assert await storage.begin_request(request) is None
    await storage.complete_request(request, 200, b"[]", b"x" * 1000)
    await turn(storage, "r1", message("m1"), outputs=[])
    await turn(storage, "r2", message("m1"), previous="r1", outputs=[])
    await storage.delete_response(OWNER, "r1", now())
    await storage.close()
    back_to_0026(blank_url)
    query(blank_url, "UPDATE responses SET num_bytes = 0 WHERE id = 'r1'")  # all its items are elsewhere
    storage = await open_storage(blank_url, runner=RUNNER)
    assert (await storage.usage(OWNER)).held == 1002 + 1
    async for _ in storage.sweep(Limits(request_age=0), now() + 1):
        pass
    assert (await storage.usage(OWNER)).held == 1
    await storage.close()


def back_to_0018(database_url: str) -> None:
    """Take away what revisions after 0018 added."""
    back_to_0026(database_url)
    for table in (
        "chat_completions",
        "chat_completion_metadata",
        "prompts",
        "prompt_versions",
        "person_usage",
    ):
        query(database_url, f"DROP TABLE {table}")
    for table, columns in {
        "conversations": ("title", "archived_at"),
        "conversation_items": ("created_at",),
        "records": ("created_at",),
        "vector_chunks": ("breaks",),
    }.items():
        for column in columns:
            query(database_url, f"ALTER TABLE {table} DROP COLUMN {column}")
    for index in ("responses_by_fork", "conversations_by_parent", "conversation_items_deleted"):
        query(database_url, f"DROP INDEX {index}")
    for table, columns in FORKS.items():
        for column in columns:
            query(database_url, f"ALTER TABLE {table} DROP COLUMN {column}")
    query(database_url, "UPDATE alembic_version SET version_num = '0018'")


FORKS = {
    "responses": ("fork_of", "fork_direction", "fork_position"),
    "conversations": ("parent_id", "parent_head", "parent_item", "epoch"),
}


async def test_what_was_kept_under_0018_can_be_forked(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    await storage.create_conversation(OWNER, "c1", 1, b"{}", [message("m1")])
    await turn(storage, "r1", message("m2"), conversation="c1")
    await storage.close()
    back_to_0018(blank_url)
    storage = await open_storage(blank_url, runner=RUNNER)
    await storage.fork_conversation(OWNER, "c1", NewFork("c2", 2, "m1"))
    await storage.fork_response(OWNER, "r1", NewResponseFork("r2", 2, b"{}", b"", b"{}", "m2"))
    at = [await storage.history(OWNER, conversation_id="c2")]
    at.append(await storage.history(OWNER, previous_response_id="r2"))
    assert [[entry.item.id for entry in items] for items in at] == [["m1"], ["m1", "m2"]]
    await storage.close()


def back_to_0010(database_url: str) -> None:
    """Take away what revisions after 0010 added."""
    back_to_0018(database_url)
    for table in ("containers", "container_files", "files", "uploads", "upload_parts", "blobs", "blob_parts"):
        query(database_url, f"DROP TABLE {table}")
    for table in ("batches", "batch_lines"):
        query(database_url, f"DROP TABLE {table}")
    for table in ("stores", "store_files", "store_batches", "chunks", "words"):
        query(database_url, f"DROP TABLE vector_{table}")
    query(database_url, "ALTER TABLE run_inputs DROP COLUMN private")


def back_to_0009(database_url: str) -> None:
    """Take away what revisions after 0009 added."""
    back_to_0010(database_url)
    query(database_url, "DROP TABLE queue_shares")
    query(database_url, "DROP INDEX runs_queued")
    query(database_url, "ALTER TABLE runs DROP COLUMN cost")
    query(database_url, "UPDATE alembic_version SET version_num = '0009'")


async def test_runs_that_were_queued_under_0009_take_turns(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    for id, owner in (("a1", OWNER), ("a2", OWNER), ("b1", OTHER)):
        queued = new(id, owner=owner, runner=None, status="queued")
        await storage.start_response(replace(queued, cost=500))
    await storage.close()
    back_to_0009(blank_url)
    storage = await open_storage(blank_url, runner=RUNNER)
    assert [claim.response_id for claim in await storage.take(9)] == ["a1", "b1", "a2"]
    await storage.close()


def back_to_0004(database_url: str) -> None:
    """Take away what revisions after 0004 added."""
    back_to_0009(database_url)
    for table in ("usage", "owners", "audit", "audit_head", "quota_state"):
        query(database_url, f"DROP TABLE {table}")
    query(database_url, "DROP INDEX api_keys_by_owner")
    for column in ("scopes", "expires_at", "last_used_at", "replaces", "limits"):
        query(database_url, f"ALTER TABLE api_keys DROP COLUMN {column}")
    query(database_url, "ALTER TABLE runners DROP COLUMN serves")
    query(database_url, "ALTER TABLE items DROP COLUMN private")
    query(database_url, "UPDATE alembic_version SET version_num = '0004'")


async def test_a_key_of_0004_may_do_everything_but_administer(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    made = await storage.create_key(key("k1", scopes=("files.read",), limits=b"{}"), entry=entry())
    await storage.close()
    back_to_0004(blank_url)
    storage = await open_storage(blank_url, runner=RUNNER)
    found = await storage.find_key(b"k1")
    assert found is not None and found.key == replace(made, scopes=("all",), limits=None)
    assert found.owner.name == OWNER and found.owner.created_at == made.created_at
    await storage.revoke_key("k1", now(), entry=entry())
    assert (await storage.examine_audit()).number == 1
    await storage.close()


def back_to_0003(database_url: str) -> None:
    """Take away what revision 0004 added."""
    back_to_0004(database_url)
    for index in ("conversations_by_use", "responses_deleted"):
        query(database_url, f"DROP INDEX {index}")
    for column in ("num_bytes", "used_at"):
        query(database_url, f"ALTER TABLE conversations DROP COLUMN {column}")
    query(database_url, "UPDATE alembic_version SET version_num = '0003'")


@pytest.mark.sampled(2)
async def test_a_database_of_0003_knows_what_its_conversations_take(blank_url: str) -> None:
    storage = await open_storage(blank_url, runner=RUNNER)
    await storage.create_conversation(OWNER, "c1", now(), b"{}", [message("m1"), message("m2")])
    await turn(storage, "r1", message("m3"), conversation="c1")
    await storage.create_conversation(OWNER, "c2", now(), b'{"a":"b"}', [])
    before = await storage.usage(OWNER)
    await storage.close()
    back_to_0003(blank_url)
    storage = await open_storage(blank_url, runner=RUNNER)
    assert await storage.usage(OWNER) == before and before.held > 0
    assert [step async for step in storage.sweep(Limits(conversation_age=3600_000_000), now())] == []
    await storage.close()


async def test_a_newer_schema_is_refused(blank_url: str) -> None:
    await (await open_storage(blank_url, runner=RUNNER)).close()
    query(blank_url, "UPDATE alembic_version SET version_num = '9999'")
    for _ in range(2):  # the lock was given back
        with pytest.raises(SchemaTooNew, match="9999"):
            await open_storage(blank_url, runner=RUNNER)


FOREIGN = (
    ("CREATE TABLE users (id integer)",),
    ("CREATE TABLE alembic_version (version_num text)", "INSERT INTO alembic_version VALUES ('ae1027a6acf')"),
)


@pytest.mark.parametrize("theirs", FOREIGN, ids=("tables", "alembic"))
async def test_the_file_of_another_program_stays_as_it_is(tmp_path: Path, theirs: tuple[str, ...]) -> None:
    for statement in theirs:
        query(url(tmp_path), statement)
    file = tmp_path / "antiphon.db"
    file.chmod(0o644)
    before = file.read_bytes()
    for opens in (
        lambda: open_storage(url(tmp_path), runner=RUNNER),
        lambda: inspect_database(url(tmp_path)),
        lambda: back_up(url(tmp_path), tmp_path / "copy.db", lambda *_: None),
    ):
        with pytest.raises(ForeignDatabase, match=f"{file} belongs to another program.*--db"):
            await opens()
    assert file.read_bytes() == before and file.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [file]


async def test_a_file_that_is_no_database_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "antiphon.db"
    file.write_text("letters to a friend\n" * 100)
    file.chmod(0o644)
    for opens in (
        lambda: open_storage(url(tmp_path), runner=RUNNER),
        lambda: inspect_database(url(tmp_path)),
        lambda: back_up(url(tmp_path), tmp_path / "copy.db", lambda *_: None),
    ):
        with pytest.raises(StorageUnavailable, match=r"can.* be .*: file is not a database"):
            await opens()
    assert file.stat().st_mode & 0o777 == 0o644 and list(tmp_path.iterdir()) == [file]


async def test_a_schema_of_postgresql_is_shared_with_tables_of_other_names(postgres: Postgres) -> None:
    blank_url = await postgres.blank()
    query(blank_url, "CREATE TABLE users (id integer)")
    query(blank_url, "CREATE TABLE files (id integer)")
    for opens in (open_storage(blank_url, runner=RUNNER), inspect_database(blank_url)):
        with pytest.raises(ForeignDatabase, match="whose table 'files' is in it"):
            await opens
    assert tables(blank_url) == ["files", "users"]
    query(blank_url, "DROP TABLE files")
    await (await open_storage(blank_url, runner=RUNNER)).close()
    assert "users" in tables(blank_url)
    await postgres.drop(blank_url)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("table", [1, 5, 10])
async def test_a_migration_that_is_killed_leaves_nothing(blank_url: str, table: int) -> None:
    killed = python(
        """if True:
        import asyncio, os, signal, sys
        from alembic import op
        from storage import open_storage
        left = int(sys.argv[2])
        create = op.create_table
        def deadly(*args, **kwargs):
            global left
            made = create(*args, **kwargs)
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return made
        op.create_table = deadly
        asyncio.run(open_storage(sys.argv[1], runner="first"))
        """,
        blank_url,
        str(table),
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert tables(blank_url) == []
    storage = await open_storage(blank_url, runner=RUNNER)
    await turn(storage, "r1", message("m1"))
    await storage.close()


async def test_what_is_imported_when(database_url: str) -> None:
    await (await open_storage(database_url, runner=RUNNER)).close()
    seen = python(
        """if True:
        import asyncio, sys
        import storage
        def loaded():
            names = ("sqlalchemy", "alembic", "aiosqlite", "asyncpg", "pydantic", "fastapi")
            return [name for name in names if name in sys.modules]
        print(loaded())
        async def main():
            await (await storage.open_storage(sys.argv[1], runner="r")).close()
        asyncio.run(main())
        print(loaded())
        """,
        database_url,
    )
    drivers = [] if is_sqlite(database_url) else ["asyncpg"]
    assert seen.stdout.splitlines() == ["[]", str(["sqlalchemy", *drivers])], seen.stderr


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql+psycopg://host/db",
        "mysql://host/db",
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///:memory:",
        "nonsense",
    ],
)
async def test_other_urls_are_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        await open_storage(bad, runner=RUNNER)


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "antiphon.db").write_bytes(b"something else entirely\n" * 400)
    with pytest.raises(StorageUnavailable):
        await open_storage(url(tmp_path), runner=RUNNER)


async def test_a_closed_storage_says_so(database_url: str) -> None:
    storage = await open_storage(database_url, runner=RUNNER)
    await storage.ready()
    await storage.close()
    for verb in (storage.ready(), storage.get_response(OWNER, "r1"), storage.take(1)):
        with pytest.raises(StorageUnavailable):
            await verb


async def test_readers_cannot_write(storage: Storage) -> None:
    with pytest.raises(StorageUnavailable, match=r"read-?only"):
        await storage._read(lambda conn: conn.execute(text("DELETE FROM runs")))
    if is_sqlite(storage.url):
        assert await storage._read(lambda conn: conn.execute(text("PRAGMA wal_autocheckpoint")).scalar()) == 0
    with pytest.raises(NotFound):
        await storage.get_response(OWNER, "r1")


@pytest.mark.parametrize("umask", [0o000, 0o022])
async def test_no_other_user_can_open_what_is_kept(
    tmp_path: Path, umask: int, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    made = tmp_path / "made" / "data"
    before = os.umask(umask)
    try:
        for folder in (shared, made):
            storage = await open_storage(f"sqlite+aiosqlite:///{folder}/x.db", runner="r")
            await storage.create_conversation("o", "conv_1", 1, b"{}")
            names = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
            await storage.close()
            assert names == dict.fromkeys(("x.db", "x.db-wal", "x.db-shm", "x.db.lock"), 0o600)
    finally:
        os.umask(before)
    assert made.stat().st_mode & 0o777 == made.parent.stat().st_mode & 0o777 == 0o700
    assert not caplog.records


async def test_files_that_others_could_open_are_taken_from_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/x.db"
    await (await open_storage(url, runner="r")).close()
    (tmp_path / "x.db").chmod(0o644)
    (tmp_path / "x.db.lock").chmod(0o664)
    storage = await open_storage(url, runner="r")
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    await storage.close()
    (told,) = caplog.messages
    assert "x.db (0644)" in told and "x.db.lock (0664)" in told
