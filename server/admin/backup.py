"""`antiphon backup`: copies the database to one file, with progress, whether or not a server runs.

The progress is shown on a terminal only.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from server.admin.database_access import AdminError
from server.config import Config
from storage import StorageError, back_up


def run(config: Config, options: argparse.Namespace) -> Iterator[str]:
    """Carry out the command; yields the lines to print. Raises AdminError."""
    target = Path(options.file).absolute()
    # Where nobody watches (no terminal) only the lines at the end are printed.
    with tqdm(desc="backup", unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None) as bar:

        def progress(copied: int, total: int) -> None:
            bar.total = total
            bar.update(copied - bar.n)

        try:
            size = asyncio.run(back_up(config.db, target, progress))
        except StorageError as exc:
            raise AdminError(exc) from None
    yield f"{target} holds the whole database ({size:,} bytes), as it was when the copy began"
    yield f"serve from it with: antiphon serve --db sqlite+aiosqlite:///{target}"
