"""The reference of the API, as the server itself tells it: a document, and a page."""

from __future__ import annotations

from server.routes.reference.document import document, router

__all__ = ["document", "router"]
