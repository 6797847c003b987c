"""The routes, one module per family of the API."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes import (
    batches,
    completions,
    conversations,
    health,
    keys,
    live_runs,
    models,
    reference,
    responses,
    sealing,
    tenants,
    tokenize,
    webhooks,
)
from server.routes.files import ROUTERS as FILES
from server.routes.organization import ROUTERS as ORGANIZATION

ROUTERS: tuple[APIRouter, ...] = (
    *(
        family.router
        for family in (
            *(health, models, responses, conversations, completions, batches, tokenize),
            *(keys, webhooks, sealing, tenants, live_runs),
        )
    ),
    *FILES,
    *ORGANIZATION,
)

REFERENCE: APIRouter = reference.router
"""The document of the others, where it is wanted."""

__all__ = ["REFERENCE", "ROUTERS"]
