"""Migrations: which revision a database has, and how it is brought to the one that this code is written for.

Alembic is imported only if there is something to do, because that costs 0.1 s at every start.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from storage.drivers import Database, Writing
from storage.records import ForeignDatabase, SchemaTooNew
from storage.tables import metadata

if TYPE_CHECKING:
    from alembic.config import Config

log = logging.getLogger("antiphon.storage")


def script_location() -> Path:
    """The migrations: `alembic/` in a checkout, `storage/migrations/` in an installed wheel."""
    packaged = Path(__file__).parent / "migrations"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[1] / "alembic"


HEAD = max(path.name[:4] for path in (script_location() / "versions").glob("[0-9]*.py"))
"""The revision that this code is written for; the newest, by the names of files, which begin with theirs."""


def revision(database: Database, connection: Connection) -> str | None:
    """The database's revision; None for one in which nothing is in the way of our tables. ForeignDatabase.

    A file is one program's: with any table in it, it is not ours to add to. Programs do share a schema of
    PostgreSQL, most often `public`, so that only tables that have the names of ours are in the way there.
    """
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" in tables:
        found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        if found is not None and re.fullmatch(r"\d{4}", found):
            return found  # other programs that use Alembic have revisions of another form
        names = {"alembic_version"}
    else:
        names = tables & metadata.tables.keys() if database.shared else tables
    if names:
        raise ForeignDatabase(
            f"{database.shown} belongs to another program, whose table {min(names)!r} is in it: give --db a "
            "database of its own"
        )
    return None


def migrated(database: Database, runner: str) -> Writing:
    """The connection that a process writes by, to a database that has our schema. SchemaTooNew,
    ForeignDatabase."""
    writing = database.writing(runner)
    began = time.monotonic()
    found: list[str | None] = []  # more than once where the transaction had to be tried again

    def work(connection: Connection) -> None:
        found.append(migrate(database, connection))

    try:
        writing.migrate(work)
    except BaseException:
        writing.drop()
        raise
    if found[-1] not in {None, HEAD}:
        seconds = time.monotonic() - began
        log.info("the schema was brought from %s to %s in %.1f s", found[-1], HEAD, seconds)
    return writing


def migrate(database: Database, connection: Connection) -> str | None:
    """Brings the database to HEAD, within the caller's transaction: a kill leaves the old schema or the new
    one. Returns the revision that it had; None for none.

    SchemaTooNew if its revision is not among ours; ForeignDatabase.
    """
    present = revision(database, connection)
    if present == HEAD:
        return present
    if present is not None and not is_known(present):
        raise SchemaTooNew(
            f"the database has revision {present}, this version knows {HEAD}: it was written by a newer one"
        )

    from alembic import command

    config = _alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    return present


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
