"""An online backup of an SQLite database and its blobs, while a server reads and writes them.

The copy of the database is one file, as it stood at one moment. Its blobs lie in a folder beside it; on the
same file system they are links to the server's own, which nobody ever writes to again, and take no room.
Blobs that are there before the copy of the database begins are taken before it, because a sweep may remove
them meanwhile; those that came during it are taken after it, and none of them goes until then.

The copy of the database is made over aiosqlite, on a connection that only reads: SQLite's own backup would
begin anew at every commit of somebody else, so the connection stays in one read transaction for as long as
the copy takes. The write-ahead log cannot be begun anew during that time, and grows by what is committed
meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiosqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from storage.drivers import INCOMING, blob_folder, copied, database, look, sync, unavailable
from storage.files import blob_columns
from storage.migrate import revision
from storage.private_files import make_private_folder
from storage.records import StorageError

PAGES_AT_ONCE = 2048
"""Database pages (4 KiB each) between two reports of progress."""


def blobs_beside(database: Path) -> Path:
    """The folder of the blobs of a database's file, which belongs to it."""
    return blob_folder(database)


async def back_up(url: str, target: Path, progress: Callable[[int, int], None]) -> int:
    """Copy the database of `url` to the file `target`, which must not exist, and its blobs to a folder beside
    that; returns the size of both in bytes.

    progress: called with the bytes of the database copied so far and the bytes there are. The copy is
    checked, synced, readable by its owner alone, and takes its name when it is whole. Raises StorageError,
    which says what to do instead where the database is PostgreSQL.
    """
    path = check_backup(url, target)
    partial, folder = target.with_name(target.name + ".partial"), blob_folder(target)
    blobs = folder.with_name(folder.name + ".partial")
    try:
        _remove(partial, blobs)
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            source = blob_folder(path)
            with copied(source) if source.is_dir() else nullcontext():
                await asyncio.to_thread(_take_blobs, source, blobs)
                await _copy(path, partial, progress)
                size = await asyncio.to_thread(_take_blobs, source, blobs)
            await asyncio.to_thread(_check_blobs, partial, blobs)
            sync(partial)
            if blobs.exists():
                sync(blobs)
                blobs.rename(folder)
            partial.rename(target)
        finally:
            _remove(partial, blobs)
        sync(target.parent)
        return target.stat().st_size + size
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{path} could not be copied to {target}: {error}") from error


def check_backup(url: str, target: Path) -> Path:
    """The file that a backup of `url` to `target` would copy. StorageError for what `back_up` refuses."""
    path = _file(url)
    try:
        source = database(url)
    except ValueError as error:
        raise StorageError(str(error)) from None
    try:
        if not source.exists():
            raise StorageError(f"there is no database at {path}")
        look(source, partial(revision, source))
    except (OSError, DBAPIError) as error:
        raise unavailable(f"{path} cannot be read", error, source.cause(error)) from error
    try:
        taken = [each for each in (target, blob_folder(target)) if each.exists()]
    except OSError as error:
        raise unavailable(f"nothing can be copied to {target}", error) from error
    if taken:
        raise StorageError(f"{taken[0]} exists already; a backup never replaces a file")
    return path


def _remove(file: Path, folder: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):  # SQLite leaves its own where the disk is full
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _take_blobs(source: Path, copy: Path) -> int:
    """Link, or copy, the blobs that `copy` does not have yet; returns the bytes of all that it has then."""
    if not source.is_dir():
        return 0
    make_private_folder(copy)
    for name in os.listdir(source):
        if name.startswith(INCOMING) or (copy / name).exists():
            continue
        try:
            os.link(source / name, copy / name)
        except FileNotFoundError:
            continue  # no row has named it for long
        except OSError:  # another file system, or one without links
            shutil.copyfile(source / name, copy / name)
            (copy / name).chmod(0o600)
            sync(copy / name)
    return sum(entry.stat().st_size for entry in os.scandir(copy))


def _check_blobs(database: Path, blobs: Path) -> None:
    """StorageError where a row of the copy names a blob that was not copied."""
    connection = sqlite3.connect(database)
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        for column in blob_columns():
            if column.table.name not in tables:
                continue  # the database is of an older version
            rows = connection.execute(f"SELECT DISTINCT {column.name} FROM {column.table.name}")
            for (digest,) in rows:
                if digest is not None and not (blobs / digest).exists():
                    raise StorageError(
                        f"a row of {column.table.name} names the blob {digest}, which is missing"
                    )
    finally:
        connection.close()


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
    return Path(parsed.database or "").absolute()


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
