"""Short ways to make the values that storage takes, and the check that every test of storage ends with."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import Connection, event, text

from storage import (
    AuditEntry,
    Blob,
    Blobs,
    ClosedItem,
    Finish,
    NewItem,
    NewKey,
    NewResponse,
    Record,
    RunAppend,
    RunClaim,
    Storage,
    ToolOutput,
    metadata,
)

OWNER = "tenant-a"
OTHER = "tenant-b"
RUNNER = "runner-1"

_clock = itertools.count(1_700_000_000_000_000)


def now() -> int:
    """A clock that never shows the same microsecond twice."""
    return next(_clock)


def url(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder}/antiphon.db"


def record(first_seq: int, num_events: int = 1, *, tokens: Sequence[int] = ()) -> Record:
    events = b"\n".join(b'{"sequence_number":%d}' % seq for seq in range(first_seq, first_seq + num_events))
    return Record(first_seq, num_events, events, token_ids=tuple(tokens))


def message(id: str, body: bytes | None = None) -> NewItem:
    return NewItem(id, "message", body if body is not None else b'{"id":"%s"}' % id.encode())


def call(id: str, call_id: str, name: str = "look_up") -> NewItem:
    return NewItem(id, "function_call", b'{"call":"%s"}' % call_id.encode(), call_id, name)


def output(call_id: str, text: bytes = b"42") -> ToolOutput:
    body = b'{"call_id":"%s","output":"%s"}' % (call_id.encode(), text)
    return ToolOutput(call_id, body, blake2b(body).digest(), f"fco_{call_id}")


async def put_bytes(blobs: Blobs, data: bytes) -> Blob:
    """A blob of bytes that are in memory."""

    async def stream() -> AsyncIterator[bytes]:
        yield data

    return await blobs.put(stream())


def entry(action: str = "api_key.created", target: str = "k1", **fields: Any) -> AuditEntry:
    """An entry of the audit log with an id of its own."""
    at = now()
    return AuditEntry(f"audit_{at}", at, "operator", action, target, **fields)


def key(id: str, owner: str = OWNER, *, hash: bytes | None = None, **fields: Any) -> NewKey:
    """An API key that may do everything but administer."""
    made = {"name": "laptop", "hint": "abcd", "created_at": now(), "scopes": ("all",), **fields}
    return NewKey(id=id, owner=owner, hash=hash or id.encode(), **made)


def new(
    id: str,
    *items: NewItem,
    owner: str = OWNER,
    previous: str | None = None,
    conversation: str | None = None,
    runner: str | None = RUNNER,
    store: bool = True,
    created_at: int | None = None,
    status: str = "in_progress",
    model: str = "m",
    conversation_head: int | None = None,
) -> NewResponse:
    return NewResponse(
        id=id,
        owner=owner,
        created_at=now() if created_at is None else created_at,
        status=status,
        model=model,
        background=False,
        store=store,
        head=b'{"head":1}',
        echo=b'"echo":1',
        plan=b"plan",
        previous_response_id=previous,
        conversation_id=conversation,
        input_items=items,
        record=record(0, 2) if store else None,
        runner=runner,
        conversation_head=conversation_head,
    )


def finish(status: str = "completed", *, append: bool = False) -> Finish:
    return Finish(status, now(), append)


async def claim_all(storage: Storage) -> tuple[RunClaim, ...]:
    """What the holder of a folder does at its start."""
    await storage.free_all()
    return await storage.take(1000)


async def turn(
    storage: Storage,
    id: str,
    *items: NewItem,
    outputs: Sequence[NewItem] | None = None,
    status: str = "completed",
    owner: str = OWNER,
    previous: str | None = None,
    conversation: str | None = None,
) -> None:
    """A whole run: started, one output message (or those given), ended."""
    claim = await storage.start_response(
        new(id, *items, owner=owner, previous=previous, conversation=conversation)
    )
    closed = [message(f"{id}.out")] if outputs is None else outputs
    refused = await storage.append(
        [
            RunAppend(
                id,
                claim.fence,
                records=(record(2),),
                closed=tuple(ClosedItem(position, item) for position, item in enumerate(closed)),
                head=b'{"head":2}',
                finish=finish(status, append=conversation is not None),
            )
        ]
    )
    assert not refused


# ------------------------------------------------------------------------------------------------------------
# Behind storage's back


def query(where: Path | str, sql: str) -> list[tuple[Any, ...]]:
    """The rows that a statement finds in a database: a URL, or the file of SQLite."""
    return queries(where, [sql])[0]


def queries(where: Path | str, statements: Sequence[str]) -> list[list[tuple[Any, ...]]]:
    """The same for several statements."""
    if not is_sqlite(where):
        with ThreadPoolExecutor(1) as thread:  # this thread's event loop is at work
            return thread.submit(asyncio.run, _ask_postgresql(str(where), statements)).result()
    conn = sqlite3.connect(str(where).removeprefix("sqlite+aiosqlite:///"))
    try:
        found = [conn.execute(sql).fetchall() for sql in statements]
        conn.commit()
        return found
    finally:
        conn.close()


@contextmanager
def instructions(conn: Connection) -> Iterator[list[None]]:
    """Grows by one for each hundred instructions that SQLite carries out meanwhile."""
    hundreds: list[None] = []
    raw: Any = conn.connection.driver_connection
    raw.set_progress_handler(lambda: hundreds.append(None), 100)
    try:
        yield hundreds
    finally:
        raw.set_progress_handler(None, 0)


@contextmanager
def plans(conn: Connection) -> Iterator[list[str]]:
    """Gets, step by step, how SQLite carries out the statements that it is asked meanwhile."""
    steps: list[str] = []

    def explain(_: Any, cursor: Any, statement: str, parameters: Any, *__: Any) -> None:
        raw: Any = conn.connection.driver_connection
        steps.extend(step for *_, step in raw.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))

    event.listen(conn, "before_cursor_execute", explain)
    try:
        yield steps
    finally:
        event.remove(conn, "before_cursor_execute", explain)


def is_sqlite(where: Path | str) -> bool:
    return isinstance(where, Path) or where.startswith("sqlite")


async def _ask_postgresql(url: str, statements: Sequence[str]) -> list[list[tuple[Any, ...]]]:
    conn = await asyncpg.connect(url.replace("+asyncpg", ""))
    try:
        return [[tuple(row) for row in await conn.fetch(sql)] for sql in statements]
    finally:
        await conn.close()


def tables(where: Path | str) -> list[str]:
    """The names of all tables, but for those of the index of words, which each database has in its form, and
    those that SQLite makes for itself."""
    lists = "SELECT name FROM sqlite_master WHERE type = 'table'"
    if not is_sqlite(where):
        lists = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
    names = (name for (name,) in query(where, lists))
    return sorted(
        name for name in names if not name.startswith(("vector_words", "vector_nearest", "sqlite_"))
    )


def counts(where: Path | str) -> dict[str, int]:
    """How many rows each of our tables has, if it has any; a database's own bookkeeping aside."""
    names = [name for name in tables(where) if name not in ("alembic_version", "commits", "identity")]
    found = queries(where, [f"SELECT count(*) FROM {name}" for name in names])
    return {name: size for name, [(size,)] in zip(names, found, strict=True) if size}


async def rows(storage: Storage) -> dict[str, int]:
    """How many rows each table has that has any; what the processes know of each other aside, and what
    nothing ever leaves: the audit log, the sums of usage and the database's id."""

    def count(conn: Connection) -> dict[str, int]:
        names = metadata.tables.keys() - {"commits", "runners", "audit", "audit_head", "usage", "identity"}
        counts = {name: conn.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in names}
        return {name: count for name, count in counts.items() if count}

    return await storage._read(count)


UNSWEPT = "a deleted response that nothing needs"
"""What the end of a server leaves of a deletion that it had not carried out; the next one sweeps it."""


def check(where: Path | str, *, killed: bool = False) -> None:
    """Nothing in the database hangs in the air, and SQLite finds its file sound. killed: its server was, and
    none has taken up what that left."""
    if is_sqlite(where):
        assert query(where, "PRAGMA integrity_check") == [("ok",)]
    for name, rows in zip(_ORPHANS, queries(where, list(_ORPHANS.values())), strict=True):
        assert rows == [] or (killed and name == UNSWEPT), name


_ORPHANS = {
    "a conversation that takes something else than its items": """
        SELECT c.id FROM conversations c WHERE c.num_bytes <> 256 + length(c.metadata)
          + length(coalesce(c.title, '')) + coalesce(
          (SELECT sum(128 + length(i.body) + coalesce(length(i.private), 0)) FROM conversation_items t
           JOIN items i ON i.owner = t.owner AND i.id = t.item_id WHERE t.conversation_id = c.id), 0)
          AND c.deleted_at IS NULL""",
    "an item that nothing lists": """
        SELECT i.owner, i.id FROM items i WHERE NOT EXISTS
          (SELECT 1 FROM response_items r WHERE r.owner = i.owner AND r.item_id = i.id)
          AND NOT EXISTS (SELECT 1 FROM conversation_items c WHERE c.owner = i.owner AND c.item_id = i.id)""",
    "a listed item that is not there": """
        SELECT r.owner, r.item_id FROM (SELECT owner, item_id FROM response_items
          UNION SELECT owner, item_id FROM conversation_items) r
        WHERE NOT EXISTS (SELECT 1 FROM items i WHERE i.owner = r.owner AND i.id = r.item_id)""",
    "items of no response, or of another owner": """
        SELECT r.response_id FROM response_items r LEFT JOIN responses p ON p.id = r.response_id
        WHERE p.id IS NULL OR p.owner <> r.owner""",
    "items of no conversation, or of another owner": """
        SELECT r.position FROM conversation_items r LEFT JOIN conversations p ON p.id = r.conversation_id
        WHERE p.id IS NULL OR p.owner <> r.owner""",
    "a fork of nothing": """
        SELECT id FROM conversations WHERE parent_head > 0 AND parent_id NOT IN (SELECT id FROM conversations)
        UNION SELECT id FROM responses WHERE fork_of NOT IN (SELECT id FROM responses)""",
    "records of no segment": "SELECT 1 FROM records WHERE segment NOT IN (SELECT id FROM segments)",
    "segments of no response": "SELECT 1 FROM segments WHERE response_id NOT IN (SELECT id FROM responses)",
    "a run of no response": "SELECT 1 FROM runs WHERE response_id NOT IN (SELECT id FROM responses)",
    "posted outputs of no response": """
        SELECT 1 FROM run_inputs WHERE response_id NOT IN (SELECT id FROM responses)""",
    "a lock that no run holds": """
        SELECT id FROM conversations WHERE active_response_id IS NOT NULL
          AND active_response_id NOT IN (SELECT response_id FROM runs)""",
    "a run of an ended response": """
        SELECT r.id FROM responses r JOIN runs ON runs.response_id = r.id
        WHERE r.status IN ('completed', 'failed', 'incomplete', 'cancelled')""",
    "an unfinished response without a run": """
        SELECT id FROM responses WHERE status IN ('queued', 'in_progress')
          AND id NOT IN (SELECT response_id FROM runs)""",
    "a position at or above its conversation's head": """
        SELECT 1 FROM conversation_items i JOIN conversations c ON c.id = i.conversation_id
        WHERE i.position >= c.head""",
    "a gap in a log": """
        SELECT * FROM (SELECT s.response_id, r.first_seq - coalesce(lag(r.first_seq + r.num_events)
          OVER (PARTITION BY s.response_id ORDER BY r.first_seq), 0) AS gap
          FROM segments s JOIN records r ON r.segment = s.id) logs WHERE gap <> 0""",
    UNSWEPT: """
        SELECT d.id FROM responses d WHERE d.deleted_at IS NOT NULL
          AND NOT EXISTS (SELECT 1 FROM responses c WHERE c.previous_response_id = d.id)
          AND NOT EXISTS (SELECT 1 FROM responses f WHERE f.fork_of = d.id)""",
    "a notice for no webhook": """
        SELECT 1 FROM deliveries d WHERE NOT EXISTS
          (SELECT 1 FROM webhooks w WHERE w.id = d.webhook_id AND w.owner = d.owner)""",
    "a notice of no response": """
        SELECT 1 FROM deliveries d WHERE NOT EXISTS (SELECT 1 FROM responses r
          WHERE r.id = d.response_id AND r.owner = d.owner AND r.deleted_at IS NULL)""",
}
