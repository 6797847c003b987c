"""What the commands of `antiphon` ask of a running server: `/admin`, for keys with the scope `admin`."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.operator import keys, live_runs, models, saved_kv, sealing, tenants
from server.routes.operator.limit_changes import read_limit_changes, require_values

ROUTERS: tuple[APIRouter, ...] = (
    keys.router,
    sealing.router,
    tenants.router,
    live_runs.router,
    models.router,
    saved_kv.router,
)

__all__ = ["ROUTERS", "read_limit_changes", "require_values"]
