"""The console at `/`, and what no other client of the API asks: which tools a request may have."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.console import pages, tools

PAGES: APIRouter = pages.router
"""The console itself, where it is wanted."""

ROUTERS: tuple[APIRouter, ...] = (tools.router,)

__all__ = ["PAGES", "ROUTERS"]
