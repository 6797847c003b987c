"""Folders that the user of a test may not enter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def barred(folder: Path) -> Iterator[None]:
    """Nobody may enter this folder meanwhile. Nothing bars root, who is another user meanwhile: import before
    what is to be called."""
    user, mode = os.geteuid(), folder.stat().st_mode
    folder.chmod(0)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(mode)
