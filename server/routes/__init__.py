"""The routes, one module per family of the API."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes import (
    chat,
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

ROUTERS: tuple[APIRouter, ...] = tuple(
    family.router
    for family in (
        *(health, models, responses, conversations, chat, completions, tokenize),
        *(keys, webhooks, sealing, tenants, live_runs),
    )
)

REFERENCE: APIRouter = reference.router
"""The document of the others, where it is wanted."""

__all__ = ["REFERENCE", "ROUTERS"]
