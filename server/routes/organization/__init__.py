"""What administrators ask: `/v1/organization`, in the official shapes, for keys with the scope `admin`.

Usage may be asked for with the scope `usage.read` too, of the own project."""

from __future__ import annotations

from fastapi import APIRouter

from server.routes.organization import admin_keys, audit_logs, limits, project_keys, projects, usage

ROUTERS: tuple[APIRouter, ...] = (
    admin_keys.router,
    projects.router,
    project_keys.router,
    limits.router,
    audit_logs.router,
    usage.router,
)

__all__ = ["ROUTERS"]
