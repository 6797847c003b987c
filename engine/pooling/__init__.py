"""Turns whole texts into vectors and scores: embedding models, rerankers and classifiers.

A `PoolingEngine` has a model of its own, on a thread of its own that gives way to whatever generates. What is
done with the hidden states of a text is read from the checkpoint (`recipe`). Decoders of the native families
are computed on the paged KV cache with its prefix cache (`paged`), every other model by transformers
(`encoder`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late
from engine.pooling.values import PoolingConfig, PoolingInfo, PoolingKind, PoolingStats

if TYPE_CHECKING:
    from engine.pooling.engine import PoolingEngine
    from engine.pooling.texts import TextInput, Words
    from engine.pooling.work import Vector
else:
    __getattr__ = late(
        __name__,
        {
            "engine.pooling.engine": ("PoolingEngine",),
            "engine.pooling.texts": ("TextInput", "Words"),
            "engine.pooling.work": ("Vector",),
        },
    )

__all__ = [
    "PoolingConfig",
    "PoolingEngine",
    "PoolingInfo",
    "PoolingKind",
    "PoolingStats",
    "TextInput",
    "Vector",
    "Words",
]
