"""The routes under /v1/vector_stores."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.vector_stores import batches, files, stores

ROUTERS: tuple[APIRouter, ...] = (stores.router, files.router, batches.router)

__all__ = ["ROUTERS"]
