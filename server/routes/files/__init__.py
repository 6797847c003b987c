"""The routes of files, of uploads that become files part by part, and of containers of code with theirs."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.files import containers, files, uploads

ROUTERS: tuple[APIRouter, ...] = (files.router, uploads.router, containers.router)

__all__ = ["ROUTERS"]
