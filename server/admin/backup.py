"""`antiphon backup`: copies the database to one file, with progress, whether or not a server runs.

A copy that takes long says how far it is.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server.access import OPERATOR, Actor
from server.admin.database_access import AdminError, carry_out
from server.config import Config
from server.progress import Progress
from storage import Storage, StorageError, back_up, blobs_beside, check_backup

PATH = "/admin/backups"


async def note(storage: Storage, by: Actor, file: str) -> dict[str, Any]:
    """Write down that the database is copied to a file."""
    await storage.add_audit(by.did("database.copied", file))
    return {"file": file}


def _note(config: Config, target: Path) -> str | None:
    """Have it written down; why that is not done, where it is not."""
    try:
        body = {"file": str(target)}
        carry_out(config, lambda storage: note(storage, OPERATOR, **body), "POST", PATH, body, makes=False)
    except AdminError as error:
        return str(error)
    return None


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out the command; yields the lines to print. Raises AdminError.

    The audit log tells of it first, so that the copy holds that, too. A database that cannot be written, or
    whose server does not answer, is copied all the same: that is when a copy is needed most.
    """
    target = Path(options.file).absolute()
    with Progress("copying the database", unit="B") as progress:
        try:
            check_backup(config.db, target)
            missed = _note(config, target)
            size = asyncio.run(back_up(config.db, target, progress.reached))
        except StorageError as exc:
            raise AdminError(exc) from None
    blobs = blobs_beside(target)
    whole = f"{target} and the folder {blobs} hold" if blobs.is_dir() else f"{target} holds"
    yield f"{whole} the whole database ({size:,} bytes), as it was when the copy began"
    if missed is not None:
        yield f"the copy is whole; only the audit log has no entry of it, because of this: {missed}"
    names = "antiphon.db and antiphon.db.blobs" if blobs.is_dir() else "antiphon.db"
    yield f"to restore it, put it into an empty FOLDER as {names}: antiphon serve --data FOLDER"
