"""The way from a URL to a database."""

from __future__ import annotations

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from storage.drivers.interface import Database


def database(url: str) -> Database:
    """The database of a URL. ValueError for one that names none."""
    try:
        parsed = make_url(url)
        name = parsed.get_backend_name()
    except (ArgumentError, ValueError) as error:
        raise ValueError(
            "not a database URL: it begins with sqlite+aiosqlite:/// or postgresql+asyncpg://"
        ) from error
    if name == "sqlite":
        from storage.drivers.sqlite import SQLite

        return SQLite(parsed)
    if name == "postgresql":
        from storage.drivers.postgres import PostgreSQL

        return PostgreSQL(parsed)
    if name == "postgres":
        raise ValueError("write postgresql+asyncpg:// in place of postgres://")
    raise ValueError(f"only sqlite+aiosqlite:///PATH and postgresql+asyncpg:// are supported, not {name}")
