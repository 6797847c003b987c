"""The Messages API of Anthropic: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.anthropic import messages

ROUTERS: tuple[APIRouter, ...] = (messages.router,)

__all__ = ["ROUTERS"]
