"""Doing what a plan says.

Owns the loop over a run's steps, its task, and taking it up again after the process that ran it has ended.
"""

from __future__ import annotations

from server.runs.execution.loop import Loop
from server.runs.execution.probation import MAX_STRIKES, Probation
from server.runs.execution.restore import Restorer
from server.runs.execution.run import Run, new_items, opening, output_id
from server.runs.execution.tasks import RunTasks

__all__ = [
    "MAX_STRIKES",
    "Loop",
    "Probation",
    "Restorer",
    "Run",
    "RunTasks",
    "new_items",
    "opening",
    "output_id",
]
