"""Webhooks: the notices of runs and batches, when their delivery is tried, and the signed POST."""

from __future__ import annotations

from server.webhooks.deliveries import (
    EVENT_TYPES,
    Deliveries,
    batch_notice,
    event,
    make_sender,
    notice,
    waiting_notice,
)

__all__ = ["EVENT_TYPES", "Deliveries", "batch_notice", "event", "make_sender", "notice", "waiting_notice"]
