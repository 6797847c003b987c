"""Figures of containers: the memory that clients may ask for, and for how long an unused one is kept."""

from __future__ import annotations

from collections.abc import Mapping

GIB = 1 << 30
MEMORY_LIMITS: Mapping[str, int] = {"1g": GIB, "4g": 4 * GIB, "16g": 16 * GIB, "64g": 64 * GIB}
"""Bytes by what clients write; the operator's limit holds besides."""

SECONDS = 1_000_000
"""Microseconds, which storage counts in."""
LIFETIME = 20 * 60 * SECONDS
"""Of a container that nobody uses, unless its client says otherwise."""
