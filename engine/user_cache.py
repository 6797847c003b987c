"""The folder in which the engine keeps what it has made for this user: compiled kernels, assembled models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_path() -> Path:
    """Where the folder is, whether or not it is there. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "antiphon"


def user_cache() -> Path | None:
    """A folder of this user's own, whose contents nobody else can have put there; None: there is none."""
    try:
        folder = cache_path()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_safe = folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022
        return folder if is_safe and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None
