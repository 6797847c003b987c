"""Tokenizers as other tools keep them: Mistral's `tekken.json`, and models of SentencePiece."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend

from engine.tokenizer.foreign.sentencepiece import find_sentencepiece, read_sentencepiece
from engine.tokenizer.foreign.tekken import FILE, NAMES, read_tekken

__all__ = ["NAMES", "read_foreign"]


def read_foreign(folder: Path) -> Backend | None:
    """The tokenizer of a folder that has no `tokenizer.json`; None for one of another kind. Raises LoadError
    for a file that is damaged."""
    if (tekken := folder / FILE).is_file():
        return read_tekken(tekken)
    file = find_sentencepiece(folder)
    return None if file is None else read_sentencepiece(file)
