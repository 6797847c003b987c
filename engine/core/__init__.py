"""Decides what each step computes, and keeps the books of it.

This is the engine thread with its scheduler, the paged KV cache as accounting, the running sequences as
arrays, and speculative decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late

if TYPE_CHECKING:
    from engine.core.batch_state import Rows
    from engine.core.failures import of_device
    from engine.core.fair_share import FairShare
    from engine.core.kv_cache import KVCache
    from engine.core.loop import EngineLoop, build_loop
    from engine.core.messages import Abort, Call, Close, Credit, Inbox, Keep, LetGo, Submit
    from engine.core.scheduler import Batch, Scheduler
    from engine.core.sequences import Sequence
else:
    __getattr__ = late(
        __name__,
        {
            "engine.core.batch_state": ("Rows",),
            "engine.core.failures": ("of_device",),
            "engine.core.fair_share": ("FairShare",),
            "engine.core.kv_cache": ("KVCache",),
            "engine.core.loop": ("EngineLoop", "build_loop"),
            "engine.core.messages": ("Abort", "Call", "Close", "Credit", "Inbox", "Keep", "LetGo", "Submit"),
            "engine.core.scheduler": ("Batch", "Scheduler"),
            "engine.core.sequences": ("Sequence",),
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
    "Inbox",
    "KVCache",
    "Keep",
    "LetGo",
    "Rows",
    "Scheduler",
    "Sequence",
    "Submit",
    "build_loop",
    "of_device",
]
