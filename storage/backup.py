"""An online backup of an SQLite database, while a server reads and writes it.

The copy is one file, as the database stood at one moment. It is made over aiosqlite, on a connection that
only reads: SQLite's own backup would begin anew at every commit of somebody else, so the connection stays in
one read transaction for as long as the copy takes. The write-ahead log cannot be begun anew during that time,
and grows by what is committed meanwhile.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import aiosqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from storage.records import StorageError

PAGES_AT_ONCE = 2048
"""Database pages (4 KiB each) between two reports of progress."""


async def back_up(url: str, target: Path, progress: Callable[[int, int], None]) -> int:
    """Copy the database of `url` to the file `target`, which must not exist; returns its size in bytes.

    progress: called with the bytes copied so far and the bytes there are. The copy is checked, synced,
    readable by its owner alone, and takes its name when it is whole. Raises StorageError, which says what to
    do instead where the database is PostgreSQL.
    """
    path = check_backup(url, target)
    partial = target.with_name(target.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            await _copy(path, partial, progress)
            _sync(partial)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        _sync(target.parent)
        return target.stat().st_size
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{path} could not be copied to {target}: {error}") from error


def check_backup(url: str, target: Path) -> Path:
    """The file that a backup of `url` to `target` would copy. StorageError for what `back_up` refuses."""
    path = _file(url)
    if target.exists():
        raise StorageError(f"{target} exists already; a backup never replaces a file")
    return path


def _file(url: str) -> Path:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StorageError(f"not a database URL: {error}") from None
    if parsed.get_backend_name() == "postgresql":
        shown = parsed._replace(drivername="postgresql", password=None).render_as_string()
        raise StorageError(
            "a PostgreSQL database is backed up with its own tool: "
            f"pg_dump --format=custom --file=antiphon.dump '{shown}'"
        )
    path = Path(parsed.database or "").absolute()
    if not path.is_file():
        raise StorageError(f"there is no database at {path}")
    return path


async def _copy(path: Path, partial: Path, progress: Callable[[int, int], None]) -> None:
    async with (
        aiosqlite.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None) as source,
        aiosqlite.connect(partial, isolation_level=None) as copy,
    ):
        await source.execute("PRAGMA wal_autocheckpoint=0")
        await source.execute("BEGIN")
        # The snapshot begins with the first read.
        ((page_size, _),) = await source.execute_fetchall(
            "SELECT page_size, (SELECT count(*) FROM sqlite_master) FROM pragma_page_size"
        )

        def copied(_status: int, remaining: int, total: int) -> None:
            progress((total - remaining) * page_size, total * page_size)

        await source.backup(copy, pages=PAGES_AT_ONCE, progress=copied, sleep=0.001)
        # Only a database in WAL mode needs more than one file; a server turns the mode on again.
        await copy.execute_fetchall("PRAGMA journal_mode=DELETE")
        ((verdict,),) = await copy.execute_fetchall("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise StorageError(f"the copy of {path} is not sound: {verdict}")


def _sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
