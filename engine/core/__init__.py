"""Decides what each step computes, and keeps the books of it.

This is the engine thread with its scheduler, the paged KV cache as accounting, the running sequences as
arrays, and speculative decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late

if TYPE_CHECKING:
    from engine.core.batch_state import Rows
    from engine.core.fair_share import FairShare
    from engine.core.kv_cache import KVCache
    from engine.core.loop import EngineLoop, build_loop
    from engine.core.messages import (
        Abort,
        Call,
        Close,
        Credit,
        Forget,
        Inbox,
        Keep,
        LetGo,
        Save,
        Submit,
    )
    from engine.core.scheduler import Batch, Scheduler
    from engine.core.sequences import Sequence
    from engine.core.tiering import Tiering
else:
    __getattr__ = late(
        __name__,
        {
            "engine.core.batch_state": ("Rows",),
            "engine.core.fair_share": ("FairShare",),
            "engine.core.kv_cache": ("KVCache",),
            "engine.core.loop": ("EngineLoop", "build_loop"),
            "engine.core.messages": (
                "Abort",
                "Call",
                "Close",
                "Credit",
                "Forget",
                "Inbox",
                "Keep",
                "LetGo",
                "Save",
                "Submit",
            ),
            "engine.core.scheduler": ("Batch", "Scheduler"),
            "engine.core.sequences": ("Sequence",),
            "engine.core.tiering": ("Tiering",),
        },
    )

__all__ = [
    "Abort",
    "Batch",
    "Call",
    "Close",
    "Credit",
    "EngineLoop",
    "FairShare",
    "Forget",
    "Inbox",
    "KVCache",
    "Keep",
    "LetGo",
    "Rows",
    "Save",
    "Scheduler",
    "Sequence",
    "Submit",
    "Tiering",
    "build_loop",
]
