"""How long a caller waits for a database that cannot be reached."""

from __future__ import annotations

from contextvars import ContextVar

PATIENCE_S = 4.0

patience_s: ContextVar[float] = ContextVar("patience_s", default=PATIENCE_S)
"""Seconds after which a read or a write of this task is StorageUnavailable. Whoever can say so to a client
takes less, and whoever carries on what was acknowledged takes more; the default is for work that repeats
itself."""
