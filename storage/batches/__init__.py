"""Batches: files of requests that are carried out in the background, line by line.

The values are here at once; the verbs, which need SQLAlchemy, are in the module `verbs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.batches.records import (
    MAX_BATCH_ATTEMPTS,
    BatchCounts,
    BatchEnd,
    BatchEnded,
    BatchLine,
    BatchLost,
    NewBatch,
    OwnerShare,
    StoredBatch,
    TooManyBatches,
)

if TYPE_CHECKING:
    from storage.batches.verbs import Batches

__all__ = [
    "MAX_BATCH_ATTEMPTS",
    "BatchCounts",
    "BatchEnd",
    "BatchEnded",
    "BatchLine",
    "BatchLost",
    "Batches",
    "NewBatch",
    "OwnerShare",
    "StoredBatch",
    "TooManyBatches",
]


def __getattr__(name: str) -> Any:
    if name == "Batches":
        from storage.batches.verbs import Batches

        return Batches
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
