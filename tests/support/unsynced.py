"""Import this, and nothing in this process waits for a disk.

Tests kill processes, and what a process has written the kernel keeps. Only the end of a machine loses what no
sync has covered, and that is tried by `tests/chaos/faults.c` in processes that import nothing of this.
"""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from typing import Any


class Unsynced(sqlite3.Connection):
    """A connection that leaves it to the kernel when its pages reach the disk, however it is asked."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """The library's; every other mode of `PRAGMA synchronous` is OFF."""
        if sql.startswith("PRAGMA synchronous="):
            sql = "PRAGMA synchronous=OFF"
        return super().execute(sql, parameters)


def _no_sync(_descriptor: object) -> None:
    pass


sqlite3.connect = partial(sqlite3.connect, factory=Unsynced)
os.fsync = os.fdatasync = _no_sync
