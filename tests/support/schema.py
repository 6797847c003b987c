"""A new SQLite database that has this version's tables, copied: migrating takes most of a server's start."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path

from storage import open_storage

_template: list[bytes] = []  # of this process; filled by the first who asks
_filling = threading.Lock()  # Alembic migrates one database at a time


async def lay_schema(folder: Path) -> None:
    """Puts a database with all tables, all empty, where a server looks for its own, unless one is there."""
    file = folder / "antiphon.db"
    if file.exists():
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    schema = _template[0] if _template else await asyncio.to_thread(_first)
    file.touch(mode=0o600)
    file.write_bytes(schema)


def _first() -> bytes:
    with _filling:
        if not _template:
            _template.append(asyncio.run(_migrated()))
        return _template[0]


async def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "antiphon.db"
        await (await open_storage(f"sqlite+aiosqlite:///{file}", runner="template")).close()
        wal = file.with_name("antiphon.db-wal")
        assert not wal.exists() or wal.stat().st_size == 0, "a part of it is not in the file"
        return file.read_bytes()
