"""The routes, one module per family of the API."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from fastapi import APIRouter

FAMILIES = ("health", "models", "responses", "conversations", "chat", "completions", "tokenize", "keys")


def routers() -> list[APIRouter]:
    """The router of every family."""
    names = [f"server.routes.{family}" for family in FAMILIES]
    return [import_module(name).router for name in names if find_spec(name)]
