"""Texts of strangers as plain text: nothing in them that is no character to be read."""

from __future__ import annotations

_JOINERS = "\u200c\u200d"
"""Invisible, and needed to write Persian, Hindi and some emoji."""


def printable(text: str) -> str:
    """A text with a space in the place of each control character and of each half of a surrogate pair, line
    breaks aside."""
    kept = (char if char.isprintable() or char == "\n" or char in _JOINERS else " " for char in text)
    return "".join(kept)


def one_line(text: str, most: int) -> str:
    """A text on one line, of at most so many characters; from its beginning, however long it is."""
    return " ".join(printable(text[: 4 * most]).split())[:most]
