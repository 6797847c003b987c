"""What administrators ask: `/v1/organization`, in the official shapes, for keys with the scope `admin`."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.organization import admin_keys, audit_logs, limits, project_keys, projects

ROUTERS: tuple[APIRouter, ...] = (
    admin_keys.router,
    projects.router,
    project_keys.router,
    limits.router,
    audit_logs.router,
)

__all__ = ["ROUTERS"]
