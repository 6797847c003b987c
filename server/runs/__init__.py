"""Carries out responses: plans them, runs them, records their events, and shows the events to readers."""

from __future__ import annotations

from server.runs.forks import no_events, prepare_fork
from server.runs.planning import spent_so_far
from server.runs.runner import Planning, Runs, Started, require_servers
from server.runs.views import interrupted

__all__ = [
    "Planning",
    "Runs",
    "Started",
    "interrupted",
    "no_events",
    "prepare_fork",
    "require_servers",
    "spent_so_far",
]
