"""What a run has used, as it is counted for its owner."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine import CACHED_TOKEN
from server.clock import now_us
from server.runs.planning.plan import RunPlan
from server.runs.planning.steps import Progress
from server.schema import tier_of
from storage import Account, Counts, Spent

logger = logging.getLogger("antiphon.runs")


def spent(plan: RunPlan, progress: Progress, at: int) -> Spent | None:
    """What a run used that ended at `at` (microseconds), whichever way; None where no generation began."""
    if not progress.generations:
        return None
    counts = Counts(
        requests=1,
        input_tokens=progress.input_tokens,
        cached_tokens=progress.cached_tokens,
        output_tokens=progress.output_tokens,
        reasoning_tokens=progress.reasoning_tokens,
    )
    return Spent(at, _account(plan, plan.model), counts, served=_served(counts) / plan.weight)


def _account(plan: RunPlan, model: str, kind: str = "completions") -> Account:
    return Account(
        plan.owner, plan.key_id, model, tier_of(plan.priority), kind, plan.batch, person=plan.end_user
    )


def _served(counts: Counts) -> float:
    """Tokens as the engine counts them in fair shares."""
    return counts.input_tokens - (1 - CACHED_TOKEN) * counts.cached_tokens + counts.output_tokens


def used_by_tool(plan: RunPlan, kind: str, model: str, at: int) -> Spent:
    """One call of a tool that has a model of its own, as usage of a kind, at `at` (microseconds)."""
    return Spent(at, _account(plan, model, kind), Counts(requests=1))


def spent_so_far(plan: bytes, log: Sequence[tuple[int, bytes | None]]) -> Spent | None:
    """The same of a run that goes now, by its plan and its log as they are stored (`storage.Spending`)."""
    try:
        return spent(RunPlan.load(plan), Progress.of(log), now_us())
    except Exception:  # whoever deletes what cannot be read is not to be kept from that
        logger.exception("what a run has used cannot be told")
        return None
