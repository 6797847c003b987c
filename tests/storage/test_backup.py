"""Backups: one whole file, of one moment, while others write; never over another file."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from storage import NotFound, StorageError, back_up, check_backup, open_storage
from storage import backup as module
from tests.support.making import OWNER, check, message, turn, url
from tests.support.permissions import barred


async def test_a_backup_is_one_moment_of_a_database_that_goes_on_changing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGES_AT_ONCE", 4)  # so that many commits fall between its steps
    target = tmp_path / "copy" / "antiphon.db"
    seen: list[tuple[int, int]] = []
    target.parent.mkdir()
    storage = await open_storage(url(tmp_path), runner="test")
    for number in range(40):
        await turn(storage, f"before{number}", message(f"m{number}", b'"%s"' % (b"x" * 2000)))
    copying, written = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    async def write() -> None:
        await copying.wait()  # which the copy's moment came before
        for number in range(3):
            await turn(storage, f"during{number}", message(f"d{number}", b'"%s"' % (b"y" * 2000)))
        written.set()

    def progress(copied: int, total: int) -> None:
        seen.append((copied, total))
        loop.call_soon_threadsafe(copying.set)
        assert written.wait(60), "nothing can be written during a copy"

    writing = asyncio.create_task(write())
    size = await back_up(url(tmp_path), target, progress)
    await writing
    assert (await storage.get_response(OWNER, "during2")).id == "during2"
    await storage.close()

    assert size == target.stat().st_size
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [file.name for file in target.parent.iterdir()] == ["antiphon.db"]
    copied = [bytes_copied for bytes_copied, _ in seen]
    assert copied == sorted(copied) and len(set(copied)) > 5
    assert len({total for _, total in seen}) == 1, "the copy began anew"
    assert seen[-1] == (size, size)

    check(url(target.parent))
    restored = await open_storage(url(target.parent), runner="test")
    for number in range(40):
        assert (await restored.get_response(OWNER, f"before{number}")).id == f"before{number}"
    for number in range(3):
        with pytest.raises(NotFound):
            await restored.get_response(OWNER, f"during{number}")
    await restored.close()


async def test_a_backup_replaces_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    storage = await open_storage(url(tmp_path), runner="test")
    await storage.close()
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(StorageError, match="exists already"):
        await back_up(url(tmp_path), taken, lambda copied, total: None)
    assert taken.read_text() == "mine"

    def files() -> list[str]:
        """All but what SQLite itself keeps beside a database that somebody has read."""
        return sorted(file.name for file in tmp_path.iterdir() if file.suffix not in (".db-wal", ".db-shm"))

    before = files()
    with pytest.raises(StorageError, match="could not be copied"):
        await back_up(url(tmp_path), tmp_path / "nowhere" / "copy.db", lambda copied, total: None)

    def broken(copied: int, total: int) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(StorageError, match="disk is full"):
        await back_up(url(tmp_path), tmp_path / "copy.db", broken)
    assert files() == before


async def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no database at"):
        await back_up(url(tmp_path), tmp_path / "copy.db", lambda copied, total: None)
    assert list(tmp_path.iterdir()) == []


async def test_postgresql_is_told_its_own_command(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        await back_up(
            "postgresql+asyncpg://antiphon:secret@db-1/chat", tmp_path / "copy", lambda copied, total: None
        )
    assert "pg_dump" in str(caught.value) and "'postgresql://antiphon@db-1/chat'" in str(caught.value)
    assert "secret" not in str(caught.value)


DENIED = r"copy\.db: .*Permission denied|/antiphon\.db cannot be read: .* cannot enter the folder /"


async def test_a_folder_that_may_not_be_entered_is_told(tmp_path: Path) -> None:
    """Be it that of the database, or that of the copy."""
    inner = tmp_path / "inner"
    await (await open_storage(url(tmp_path), runner="test")).close()
    await (await open_storage(url(inner), runner="test")).close()
    for source, target in ((tmp_path, inner / "copy.db"), (inner, tmp_path / "copy.db")):
        await back_up(
            url(source), tmp_path / f"{source.name}.first", lambda *_: None
        )  # imports what it needs
        with barred(inner), pytest.raises(StorageError, match=DENIED):
            check_backup(url(source), target)


async def test_a_backup_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = await open_storage(url(tmp_path), runner="test")
    await storage.close()
    target = tmp_path / "copy" / "antiphon.db"
    target.parent.mkdir()

    async def full(path: Path, partial: Path, progress: object) -> None:
        for suffix in ("", "-journal", "-wal", "-shm"):
            partial.with_name(partial.name + suffix).write_bytes(b"half")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(module, "_copy", full)
    with pytest.raises(StorageError, match="disk is full"):
        await back_up(url(tmp_path), target, lambda copied, total: None)
    assert not list(target.parent.iterdir())
