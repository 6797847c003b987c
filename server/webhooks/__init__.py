"""Webhooks: the notice of each run's end, when its delivery is tried, and the signed POST."""

from __future__ import annotations

from server.webhooks.deliveries import EVENT_TYPES, Deliveries, event, make_sender, notice

__all__ = ["EVENT_TYPES", "Deliveries", "event", "make_sender", "notice"]
