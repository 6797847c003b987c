"""Migrations: which revision a database has, and how it is brought to the one that this code is written for.

Alembic is imported only if there is something to do, because that costs 0.1 s at every start.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from storage.drivers import Database, Writing
from storage.records import SchemaTooNew

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0030"
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


def migrated(database: Database, runner: str) -> Writing:
    """The connection that a process writes by, to a database that has our schema. SchemaTooNew."""
    writing = database.writing(runner)
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
    present = revision(connection)
    if present == HEAD:
        return
    if present is not None and not is_known(present):
        raise SchemaTooNew(
            f"the database has revision {present}, this version knows {HEAD}: it was written by a newer one"
        )

    from alembic import command

    config = _alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def is_known(revision: str) -> bool:
    """Whether a revision is HEAD or one before it; a newer version wrote every other."""
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_alembic_config())
    return revision in {script.revision for script in scripts.walk_revisions()}


def _alembic_config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    return config
