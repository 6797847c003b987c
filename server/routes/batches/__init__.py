"""The routes of batches."""

from __future__ import annotations

from server.routes.batches.batches import router

__all__ = ["router"]
