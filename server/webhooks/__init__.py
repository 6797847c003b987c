"""Notices of the ends of runs: when each is tried, and one signed POST."""

from __future__ import annotations

from server.webhooks.deliveries import EVENT_TYPES, Deliveries, event, make_sender, notice

__all__ = ["EVENT_TYPES", "Deliveries", "event", "make_sender", "notice"]
