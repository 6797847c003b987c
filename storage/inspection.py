"""A look at a database that changes nothing: which schema it has, who holds it, how many keys there are,
and what owners may use."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

from sqlalchemy import Connection

from storage.drivers import Database, database, unavailable
from storage.migrate import HEAD, is_known, revision
from storage.queries.keys import api_keys, owners
from storage.records import DatabaseState


async def inspect_database(url: str) -> DatabaseState:
    """How the database at `url` stands; nothing is made, migrated or locked.

    StorageUnavailable where it cannot be read; ValueError for a URL that names no database.
    """
    return await asyncio.to_thread(_inspect, url)


def _inspect(url: str) -> DatabaseState:
    looked_at = database(url)
    if not looked_at.exists():
        return DatabaseState(looked_at.shown, "absent", None, None, looked_at.shared)
    try:
        reading = looked_at.looking()
        try:
            return reading.read(lambda connection: _state(looked_at, connection))
        finally:
            reading.close()
    except Exception as error:
        if isinstance(error, OSError) or looked_at.trouble(error) is not None:
            raise unavailable(f"{looked_at.shown} cannot be read", error) from error
        raise


def _state(looked_at: Database, connection: Connection) -> DatabaseState:
    def state(schema: Literal["absent", "older", "current", "newer"], num_keys: int | None) -> DatabaseState:
        return DatabaseState(looked_at.shown, schema, num_keys, looked_at.holder(), looked_at.shared)

    present = revision(connection)
    if present is None:
        return state("absent", None)
    if present != HEAD:
        return state("older" if is_known(present) else "newer", None)
    num_keys = sum(key.revoked_at is None for key in api_keys.list_(connection))
    return replace(state("current", num_keys), limits=owners.limits(connection))
