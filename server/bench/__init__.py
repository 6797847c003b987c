"""`antiphon bench`: measures how fast an engine in this process is, or any server over HTTP."""

from __future__ import annotations

from server.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
