"""The process: its start, its phases, its end, and the sweep that runs beside it."""

from __future__ import annotations

from server.process.serve import bind, serve, set_up_logging

__all__ = ["bind", "serve", "set_up_logging"]
