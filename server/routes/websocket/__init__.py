"""Responses over one WebSocket: lanes, chains of responses that are not stored, limits, and tickets."""

from __future__ import annotations

from server.routes.websocket.routes import ROUTERS

__all__ = ["ROUTERS"]
