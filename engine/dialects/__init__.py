"""How families of models write reasoning, calls and channels, as data.

Owns the table of dialects, what a row of it is made of, and the formats of calls that rows share.
"""

from __future__ import annotations

from engine.dialects.call_formats import NAME
from engine.dialects.spec import CallMarks, ChannelMarks, Dialect, History, ReasoningMarks
from engine.dialects.table import DIALECTS, choose_dialect, dialect_named

__all__ = [
    "DIALECTS",
    "NAME",
    "CallMarks",
    "ChannelMarks",
    "Dialect",
    "History",
    "ReasoningMarks",
    "choose_dialect",
    "dialect_named",
]
