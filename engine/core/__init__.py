"""Decides what each step computes, and keeps the books of it.

This is the engine thread with its scheduler, the paged KV cache as accounting, the running sequences as
arrays, and speculative decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late

if TYPE_CHECKING:
    from engine.core.fair_share import FairShare
    from engine.core.loop import EngineLoop, build_loop
    from engine.core.messages import Abort, Call, Close, Credit, Inbox, Keep, LetGo, Submit
else:
    __getattr__ = late(
        __name__,
        {
            "engine.core.fair_share": ("FairShare",),
            "engine.core.loop": ("EngineLoop", "build_loop"),
            "engine.core.messages": ("Abort", "Call", "Close", "Credit", "Inbox", "Keep", "LetGo", "Submit"),
        },
    )

__all__ = [
    "Abort",
    "Call",
    "Close",
    "Credit",
    "EngineLoop",
    "FairShare",
    "Inbox",
    "Keep",
    "LetGo",
    "Submit",
    "build_loop",
]
