"""Containers of code: which one a tool's calls run in, and cells that are run in them."""

from __future__ import annotations

from server.containers.cells import Cells, cell_limits, no_cells
from server.containers.figures import (
    LIFETIME,
    SECONDS,
    exceeds,
    memory_limit,
    room_of,
    session_of,
    unkept_memory,
)
from server.containers.files import copied, new_file, path_of, wanted_files
from server.containers.placing import placed

__all__ = [
    "LIFETIME",
    "SECONDS",
    "Cells",
    "cell_limits",
    "copied",
    "exceeds",
    "memory_limit",
    "new_file",
    "no_cells",
    "path_of",
    "placed",
    "room_of",
    "session_of",
    "unkept_memory",
    "wanted_files",
]
