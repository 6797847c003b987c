"""Text to tokens and back.

Owns the tokenizer, the incremental detokenizer, and chat templates with what they are given.
"""

from __future__ import annotations

from engine.tokenizer.growing_prompts import GrowingPrompts
from engine.tokenizer.message_format import answer_format
from engine.tokenizer.prompt_encoder import Encoder
from engine.tokenizer.renderer import Prompts, open_dialect
from engine.tokenizer.tokenizer import BYTE_ALPHABET, Detokenizer, Tokenizer

__all__ = [
    "BYTE_ALPHABET",
    "Detokenizer",
    "Encoder",
    "GrowingPrompts",
    "Prompts",
    "Tokenizer",
    "answer_format",
    "open_dialect",
]
