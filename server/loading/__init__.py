"""Models that are loaded when they are wanted: engines in processes of their own, which of them are in
memory, and which are asked at all."""

from __future__ import annotations

from server.loading.breaker import Breaker
from server.loading.child import Child
from server.loading.shelf import Held, Loadable, Shelf

__all__ = ["Breaker", "Child", "Held", "Loadable", "Shelf"]
