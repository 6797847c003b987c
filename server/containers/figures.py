"""Figures of containers: the memory that clients may ask for, for how long an unused one is kept, what its
files may be, and what it counts as."""

from __future__ import annotations

from collections.abc import Mapping

from storage import Account, ContainerRoom, Counts, Spent
from tools import CellLimits

GIB = 1 << 30
MEMORY_LIMITS: Mapping[str, int] = {"1g": GIB, "4g": 4 * GIB, "16g": 16 * GIB, "64g": 64 * GIB}
"""Bytes by what clients write; the operator's limit holds besides."""

SECONDS = 1_000_000
"""Microseconds, which storage counts in."""
LIFETIME = 20 * 60 * SECONDS
"""Of a container that nobody uses, unless its client says otherwise."""

CALLED = "code_interpreter_sessions"
"""The kind of usage that a new container counts as."""


def room_of(limits: CellLimits) -> ContainerRoom:
    """What the files of a container may be."""
    return ContainerRoom(limits.files, limits.data_bytes)


def session_of(owner: str, key_id: str | None, at: int) -> Spent:
    """A new container as usage, at `at` (microseconds)."""
    return Spent(at, Account(owner, key_id or None, "", "default", CALLED), Counts(requests=1))
