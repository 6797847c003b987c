"""Turns reasoning off for answers that are short by their shape, unless the client asks for it."""

from __future__ import annotations

import json

from engine.tokenizer.grammar_lengths import longest_match, longest_text
from engine.types import EFFORT_VARIABLES, RenderInput, Shape

LONGEST = 64  # characters of an answer that is short


def skips_thought(inp: RenderInput) -> bool:
    """Whether the answer is short, and nothing is said about a thought before it, nor tools offered."""
    if inp.answer is None or inp.tools or inp.effort is not None:
        return False
    return not EFFORT_VARIABLES & inp.template_kwargs.keys() and is_brief(inp.answer)


def is_brief(shape: Shape) -> bool:
    """Whether an answer of this shape is one of a few given texts, or at most `LONGEST` characters long.

    True for every choice; for a regex and a grammar without a repetition that has no end, as far as counting
    tells; for a JSON Schema that lists its values, or is of type boolean or null.
    """
    if shape.kind == "choice":
        return True
    if shape.kind == "regex":
        return longest_match(shape.source) <= LONGEST
    if shape.kind == "lark":
        return longest_text(shape.source) <= LONGEST
    if shape.kind != "json":
        return False
    schema = json.loads(shape.source)
    if not isinstance(schema, dict):
        return False
    return "enum" in schema or "const" in schema or schema.get("type") in ("boolean", "null")
