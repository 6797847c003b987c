"""Models that are loaded when they are wanted: engines in processes of their own, which of them are in
memory, and which are asked at all. Several server processes share what one process keeps."""

from __future__ import annotations

from server.loading.breaker import Breaker
from server.loading.child import Child
from server.loading.shelf import Held, Loadable, Shelf, State, too_large
from server.loading.shelf_host import ShelfHost
from server.loading.shelf_line import FarChild, ShelfLine
from server.loading.standing import Standing, standing

__all__ = [
    "Breaker",
    "Child",
    "FarChild",
    "Held",
    "Loadable",
    "Shelf",
    "ShelfHost",
    "ShelfLine",
    "Standing",
    "State",
    "standing",
    "too_large",
]
