"""The routes, one module per family of the API."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes import (
    chat,
    completions,
    conversations,
    health,
    keys,
    models,
    reference,
    responses,
    sealing,
    tenants,
    tokenize,
    webhooks,
)
from server.routes.organization import ROUTERS as ORGANIZATION

ROUTERS: tuple[APIRouter, ...] = (
    *(
        family.router
        for family in (
            *(health, models, responses, conversations, chat, completions, tokenize),
            *(keys, webhooks, sealing, tenants),
        )
    ),
    *ORGANIZATION,
)

REFERENCE: APIRouter = reference.router
"""The document of the others, where it is wanted."""

__all__ = ["REFERENCE", "ROUTERS"]
