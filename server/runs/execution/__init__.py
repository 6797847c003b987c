"""Carries out planned runs, and resumes runs whose process has ended."""

from __future__ import annotations

from server.runs.execution.loop import Loop
from server.runs.execution.recovery_probation import MAX_STRIKES, Probation
from server.runs.execution.recovery_restore import NewerPlan, Restorer
from server.runs.execution.run import Run, Seals, new_items, opening, output_id
from server.runs.execution.tasks import TELLS, RunTasks
from server.runs.execution.unkept import as_it_stands, at_its_end

__all__ = [
    "MAX_STRIKES",
    "TELLS",
    "Loop",
    "NewerPlan",
    "Probation",
    "Restorer",
    "Run",
    "RunTasks",
    "Seals",
    "as_it_stands",
    "at_its_end",
    "new_items",
    "opening",
    "output_id",
]
