"""Batches: files of requests that are carried out in the background, within a day."""

from __future__ import annotations

from server.batches.objects import batch_json
from server.batches.worker import BatchWorker

__all__ = ["BatchWorker", "batch_json"]
