"""Constrained decoding: which tokens may come next.

Owns grammars and their token masks, and the way from a JSON Schema, a regex or structural tags to a grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late

if TYPE_CHECKING:
    from engine.structured.close_schema import closed_schema
    from engine.structured.keywords import Unheeded, unheeded
else:
    __getattr__ = late(
        __name__,
        {
            "engine.structured.close_schema": ("closed_schema",),
            "engine.structured.keywords": ("Unheeded", "unheeded"),
        },
    )

__all__ = ["Unheeded", "closed_schema", "unheeded"]
