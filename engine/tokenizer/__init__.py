"""Text to tokens and back.

Owns the tokenizer, the incremental detokenizer, and chat templates with what they are given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.late import late
from engine.tokenizer.growing_prompts import GrowingPrompts
from engine.tokenizer.message_format import answer_format
from engine.tokenizer.prompt_encoder import Encoder
from engine.tokenizer.renderer import TEXT_THREADS, Prompts, open_dialect
from engine.tokenizer.tokenizer import BYTE_ALPHABET, Detokenizer, Tokenizer

if TYPE_CHECKING:
    from engine.tokenizer.banned_texts import BannedTexts
else:  # numpy, only where it is needed
    __getattr__ = late(__name__, {"engine.tokenizer.banned_texts": ("BannedTexts",)})

__all__ = [
    "BYTE_ALPHABET",
    "TEXT_THREADS",
    "BannedTexts",
    "Detokenizer",
    "Encoder",
    "GrowingPrompts",
    "Prompts",
    "Tokenizer",
    "answer_format",
    "open_dialect",
]
