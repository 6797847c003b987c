"""The routes, one module per family of the API."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes import (
    audio,
    batches,
    completions,
    conversations,
    health,
    models,
    prompts,
    response_events,
    responses,
    stored_completions,
    tokenize,
    webhooks,
)
from server.routes.anthropic import ROUTERS as ANTHROPIC
from server.routes.console import PAGES as CONSOLE
from server.routes.console import ROUTERS as OF_CONSOLE
from server.routes.files import ROUTERS as FILES
from server.routes.operator import ROUTERS as OPERATOR
from server.routes.organization import ROUTERS as ORGANIZATION
from server.routes.pooling import ROUTERS as POOLING
from server.routes.reference import router as REFERENCE_ROUTER
from server.routes.vector_stores import ROUTERS as VECTOR_STORES
from server.routes.websocket import ROUTERS as WEBSOCKET

ROUTERS: tuple[APIRouter, ...] = (
    *(
        family.router
        for family in (
            *(health, models, responses, response_events, conversations, prompts),
            *(completions, stored_completions, batches, tokenize, webhooks, audio),
        )
    ),
    *OF_CONSOLE,
    *ANTHROPIC,
    *OPERATOR,
    *POOLING,
    *FILES,
    *VECTOR_STORES,
    *ORGANIZATION,
    *WEBSOCKET,
)

REFERENCE: APIRouter = REFERENCE_ROUTER
"""The document of the others, where it is wanted."""

__all__ = ["CONSOLE", "REFERENCE", "ROUTERS"]
