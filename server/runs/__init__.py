"""Runs: from a plan to durable events, and back to readers. `Runs` is the door; the rest is its inside."""

from __future__ import annotations

from server.runs.runner import Runs, Started, interrupted

__all__ = ["Runs", "Started", "interrupted"]
