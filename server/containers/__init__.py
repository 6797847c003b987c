"""Containers of code: which one a tool's calls run in, and cells that are run in them."""

from __future__ import annotations

from server.containers.cells import Cells, cell_limits, new_file
from server.containers.figures import LIFETIME, SECONDS
from server.containers.placing import placed

__all__ = ["LIFETIME", "SECONDS", "Cells", "cell_limits", "new_file", "placed"]
