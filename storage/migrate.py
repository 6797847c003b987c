"""Migrations: the database's revision, and the way to ours.

Owns: HEAD, and when Alembic is imported (only if there is something to do: it costs 0.1 s at every start).
Refuses to know: what a revision changes.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from storage.drivers import Database, Writing
from storage.records import SchemaTooNew

HEAD = "0004"
"""The revision that this code is written for; the newest in `alembic/versions`."""


def script_location() -> Path:
    """The migrations: `alembic/` in a checkout, `storage/migrations/` in an installed wheel."""
    packaged = Path(__file__).parent / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[1] / "alembic"


def revision(connection: Connection) -> str | None:
    """The database's revision; None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


def migrated(database: Database) -> Writing:
    """A connection that writes, to a database that has our schema. SchemaTooNew."""
    writing = database.writing()
    try:
        writing.migrate(migrate)
    except BaseException:
        writing.drop()
        raise
    return writing


def migrate(connection: Connection) -> None:
    """Brings the database to HEAD, within the caller's transaction: a kill leaves the old schema or the new
    one.

    SchemaTooNew if its revision is not among ours.
    """
    found = revision(connection)
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
    command.upgrade(config, "head")
