"""Decides what a run is to do: its plan, the history that it continues, and its next step."""

from __future__ import annotations

from server.runs.planning import steps
from server.runs.planning.compaction import Part, next_part
from server.runs.planning.functions import Functions, enforced
from server.runs.planning.history import Turn, drop_oldest, not_found, replayable, require_readable
from server.runs.planning.pasts import Past, Pasts, read_items
from server.runs.planning.plan import (
    Planned,
    RunPlan,
    count_input,
    fit,
    is_long,
    make_plan,
    planned_model,
    without_secrets,
)
from server.runs.planning.saved_names import SavedNames, kv_folders
from server.runs.planning.spending import spent, spent_so_far, used_by_tool
from server.runs.planning.steps import TERMINAL, Progress, approved_calls, pending_calls
from server.runs.planning.tools import TurnTools, turn_tools

__all__ = [
    "TERMINAL",
    "Functions",
    "Part",
    "Past",
    "Pasts",
    "Planned",
    "Progress",
    "RunPlan",
    "SavedNames",
    "Turn",
    "TurnTools",
    "approved_calls",
    "count_input",
    "drop_oldest",
    "enforced",
    "fit",
    "is_long",
    "kv_folders",
    "make_plan",
    "next_part",
    "not_found",
    "pending_calls",
    "planned_model",
    "read_items",
    "replayable",
    "require_readable",
    "spent",
    "spent_so_far",
    "steps",
    "turn_tools",
    "used_by_tool",
    "without_secrets",
]
