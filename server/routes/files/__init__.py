"""The routes of files, and of uploads that become files part by part."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.files import files, uploads

ROUTERS: tuple[APIRouter, ...] = (files.router, uploads.router)

__all__ = ["ROUTERS"]
