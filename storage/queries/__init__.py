"""The statements, one module a subject; each function runs inside a transaction that its caller holds."""

from __future__ import annotations

from storage.queries import (
    conversations,
    events,
    fleet,
    history,
    idempotency,
    items,
    live_runs,
    queue,
    responses,
    retention,
    runs,
    tenants,
    waiting,
    webhooks,
)

__all__ = [
    "conversations",
    "events",
    "fleet",
    "history",
    "idempotency",
    "items",
    "live_runs",
    "queue",
    "responses",
    "retention",
    "runs",
    "tenants",
    "waiting",
    "webhooks",
]
