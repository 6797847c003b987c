"""Migrations: the database's revision, and the way to ours.

Owns: HEAD, and when Alembic is imported (only if there is something to do: it costs 0.1 s at every start).
Refuses to know: what a revision changes.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import Connection

from .records import SchemaTooNew

HEAD = "0001"
"""The revision that this code is written for; the newest in `alembic/versions`."""


def script_location() -> Path:
    """The migrations: `alembic/` in a checkout, `storage/migrations/` in an installed wheel."""
    packaged = Path(__file__).parent / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[1] / "alembic"


def revision(raw: sqlite3.Connection) -> str | None:
    """The database's revision; None for an empty one."""
    if raw.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone() is None:
        return None
    row = raw.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def migrate(raw: sqlite3.Connection, connection: Connection) -> None:
    """Brings the database to HEAD, in one transaction: a kill leaves the old schema or the new one.

    SchemaTooNew if its revision is not among ours.
    """
    found = revision(raw)
    if found == HEAD:
        return

    from alembic.config import Config
    from alembic.script import ScriptDirectory

    from alembic import command

    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    config.attributes["connection"] = connection
    if found is not None:
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if found not in known:
            raise SchemaTooNew(
                f"the database has revision {found}, this version knows {HEAD}: it was written by a newer one"
            )
    raw.execute("BEGIN IMMEDIATE")
    try:
        command.upgrade(config, "head")
        raw.execute("COMMIT")
    except BaseException:
        if raw.in_transaction:
            raw.execute("ROLLBACK")
        raise
