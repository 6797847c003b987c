"""Shapes that the decoder enforces, as token masks (llguidance)."""

from __future__ import annotations


class Matcher:
    stopped: bool

    def allows(self, token_id: int) -> bool: ...

    def advance(self, token_id: int) -> None: ...


class Grammar:
    def matcher(self) -> Matcher: ...


class Grammars:
    def __init__(self, tokenizer: object, dialect: object) -> None: ...
    def compile(self, constraint: object, starts_in: str) -> Grammar: ...
