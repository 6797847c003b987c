"""A model's tokens to reasoning, text and calls.

Owns the incremental parser, stop strings, and one scanner for each format of calls.
"""

from __future__ import annotations

from engine.parsing import gemma_call, python_call, xml_call
from engine.parsing.call_starts import openings
from engine.parsing.coercion import MAX_DEPTH, TEXT, Shapes
from engine.parsing.output_reader import Reader

__all__ = ["MAX_DEPTH", "TEXT", "Reader", "Shapes", "gemma_call", "openings", "python_call", "xml_call"]
