"""A look at a database that changes nothing: which schema it has, who holds it, how many keys there are,
and what owners may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from sqlalchemy import Connection, inspect, select

from storage.drivers import Database, blob_folder, database, look, shared_clock, unavailable
from storage.files import blob_columns
from storage.migrate import HEAD, is_known, revision
from storage.queries import retention, webhooks
from storage.queries.keys import api_keys, owners
from storage.records import DatabaseState
from storage.tables import identity, responses, runs
from storage.tables import owners as owner_rows

T = TypeVar("T")


async def inspect_database(url: str, *, blobs: bool = False, used_before: int | None = None) -> DatabaseState:
    """How the database at `url` stands; nothing is made, migrated or locked. blobs: they are looked for, too.
    used_before: see `DatabaseState.last_used`.

    StorageUnavailable where it cannot be read; ForeignDatabase; ValueError for a URL that names no database.
    """
    return await asyncio.to_thread(_inspect, url, blobs, used_before)


async def unfinished_plans(url: str, limit: int) -> tuple[bytes, ...]:
    """The plans of the responses that have not ended, of all owners, at most `limit`. It raises what
    `inspect_database` does; there are none where the schema is newer."""

    def plans(connection: Connection) -> tuple[bytes, ...]:
        present = revision(looked_at, connection)
        if present is None or (present != HEAD and not is_known(present)):
            return ()
        query = select(responses.c.plan).join(runs, runs.c.response_id == responses.c.id).limit(limit)
        return tuple(connection.execute(query).scalars())

    looked_at = database(url)
    return await asyncio.to_thread(_look, looked_at, plans) or ()


def _inspect(url: str, blobs: bool, used_before: int | None) -> DatabaseState:
    looked_at = database(url)
    state = _look(looked_at, lambda connection: _state(looked_at, connection, blobs, used_before))
    state = state or DatabaseState(looked_at.shown, "absent", 0, None, looked_at.shared, None, HEAD)
    return replace(state, free=looked_at.free_bytes(), barred=state.barred or looked_at.barred())


def _look(looked_at: Database, work: Callable[[Connection], T]) -> T | None:
    """What `work` finds; None where there is no database."""
    try:
        return look(looked_at, work) if looked_at.exists() else None
    except Exception as error:
        if isinstance(error, OSError) or looked_at.trouble(error) is not None:
            told = f"{looked_at.shown} cannot be read"
            raise unavailable(told, error, looked_at.cause(error)) from error
        raise


def _state(
    looked_at: Database, connection: Connection, blobs: bool, used_before: int | None
) -> DatabaseState:
    present = revision(looked_at, connection)

    def state(schema: Literal["absent", "older", "current", "newer"], num_keys: int | None) -> DatabaseState:
        shown, holder = looked_at.shown, looked_at.holder()
        closed = looked_at.closed(connection, complete=schema in ("current", "newer"))
        return DatabaseState(shown, schema, num_keys, holder, looked_at.shared, present, HEAD, barred=closed)

    if present is None:
        return state("absent", 0)
    if present != HEAD and not is_known(present):
        return state("newer", None)
    # Every schema of ours has the columns by which keys are counted; owners, who have limits, came later.
    found = replace(
        state("current" if present == HEAD else "older", api_keys.count(connection)),
        limits=owners.limits(connection) if inspect(connection).has_table(owner_rows.name) else {},
    )
    if present != HEAD:
        return found
    missing = lacking_blobs(looked_at, connection) if blobs else None
    used = [retention.newest(connection, before) for before in (used_before, None)]
    return replace(
        found,
        missing=missing,
        clock=connection.execute(select(shared_clock(connection.dialect.name, 0))).scalar() or None,
        id=database_id(connection),
        last_used=(used[0], used[1]),
        webhooks=webhooks.list_(connection),
    )


def database_id(connection: Connection) -> str | None:
    """What tells a database from every other: 32 hex digits. None where its row was removed."""
    return connection.execute(select(identity.c.id)).scalar()


def lacking_blobs(looked_at: Database, connection: Connection, most: int | None = None) -> str | None:
    """The folder of the blobs of a database that is a file, where it lacks one that a row names. most: of so
    many rows of each table."""
    if looked_at.shared:
        return None
    folder = blob_folder(Path(looked_at.shown))  # what is not shared is a file, and shown by its path
    for column in blob_columns():
        query = select(column).where(column.is_not(None)).distinct().limit(most)
        if not all((folder / digest).exists() for digest in connection.execute(query).scalars()):
            return str(folder)
    return None
