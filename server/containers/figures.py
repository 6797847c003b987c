"""Figures of containers: the memory that clients may ask for, for how long an unused one is kept, what its
files may be, and what it counts as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storage import Account, ContainerRoom, Counts, Spent
from tools import CellLimits

GIB = 1 << 30
MEMORY_LIMITS: Mapping[str, int] = {"1g": GIB, "4g": 4 * GIB, "16g": 16 * GIB, "64g": 64 * GIB}
"""Bytes by what clients write; the operator's limit holds besides."""


def memory_limit(asked: str | None, limits: CellLimits) -> str:
    """The memory of a new container, as it is shown: what is asked for, or as much of it as the operator's
    limit lets it have."""
    fit = [name for name, size in MEMORY_LIMITS.items() if size <= limits.memory_bytes]
    most = fit[-1] if fit else "1g"  # the least that can be shown
    return min(asked or "1g", most, key=MEMORY_LIMITS.__getitem__)


def exceeds(asked: str | None, limits: CellLimits) -> bool:
    """Whether more memory is asked for than the operator's limit lets any container have."""
    return asked is not None and MEMORY_LIMITS[asked] > limits.memory_bytes


def unkept_memory(tool: Mapping[str, Any], limits: CellLimits) -> str | None:
    """Where a tool asks for such memory, as the end of a path; None where it does not."""
    for name in ("container", "environment"):
        asked = tool.get(name)
        if isinstance(asked, Mapping) and exceeds(asked.get("memory_limit"), limits):
            return f"{name}.memory_limit"
    return None


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
