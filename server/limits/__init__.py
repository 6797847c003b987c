"""Limits on what keys and owners use: their shape, their arithmetic, and who is refused by them."""

from __future__ import annotations

from server.limits.budgets import PAID_KINDS, Budgets, used_by
from server.limits.caps import Caps
from server.limits.limit_set import (
    DAY,
    MINUTE,
    NONE,
    Canonical,
    LimitSet,
    ModelLimits,
    changed,
    load_limits,
    parse_limits,
    read_limits,
)
from server.limits.limiter import Charge, Limiter, Standing, StoredBytes, Subject, Visit, owner_subject
from server.limits.live_runs import Entrance, LiveRuns
from server.limits.meters import Meters
from server.limits.tier_shape import ServedTier, ServiceShape

__all__ = [
    "DAY",
    "MINUTE",
    "NONE",
    "PAID_KINDS",
    "Budgets",
    "Canonical",
    "Caps",
    "Charge",
    "Entrance",
    "LimitSet",
    "Limiter",
    "LiveRuns",
    "Meters",
    "ModelLimits",
    "ServedTier",
    "ServiceShape",
    "Standing",
    "StoredBytes",
    "Subject",
    "Visit",
    "changed",
    "load_limits",
    "owner_subject",
    "parse_limits",
    "read_limits",
    "used_by",
]
