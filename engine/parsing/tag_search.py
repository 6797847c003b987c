"""Finds tags and stop strings in text that comes in pieces."""

from __future__ import annotations

import re
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

NEVER = re.compile(r"(?!)")


def firsts(strings: tuple[str, ...]) -> re.Pattern[str]:
    """A regex for the characters that one of the strings may begin with."""
    chars = "".join(sorted({string[0] for string in strings}))
    return re.compile(f"[{re.escape(chars)}]") if chars else NEVER


def first_of(text: str, tags: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """Where the first of some tags stands, and which one."""
    found = [(at, tag) for tag in tags if (at := text.find(tag, start)) >= 0]
    return min(found, default=None)


def partial(text: str, tags: tuple[str, ...], start: int = 0) -> int:
    """Where the longest end of `text` that is a proper beginning of a tag stands; its length when there is
    none."""
    longest = max(map(len, tags), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[at:]) and len(tag) > len(text) - at for tag in tags):
            return at
    return len(text)


class Mark(NamedTuple, Generic[T]):
    """A string that interrupts visible text, and what it means. `lead` of its characters are no part of what
    begins with it."""

    string: str
    meaning: T
    stop: bool = False
    lead: int = 0


class Marks(Generic[T]):
    """What may interrupt visible text."""

    def __init__(self, marks: tuple[Mark[T], ...]) -> None:
        self._marks = marks
        strings = tuple(mark.string for mark in marks)
        self.firsts = firsts(strings)  # where one may begin
        self._strings = strings
        self._longest = max(map(len, strings), default=1)

    def find(self, text: str, *, stops_only: bool = False) -> tuple[int, Mark[T]] | None:
        """(start, mark) of what is complete first, as reading one character at a time would find it; of those
        that end together a stop, and then the longest."""
        best: tuple[tuple[int, bool, int], Mark[T]] | None = None
        for mark in self._marks:
            start = text.find(mark.string) if mark.stop or not stops_only else -1
            order = (start + len(mark.string), not mark.stop, start)
            if start >= 0 and (best is None or order < best[0]):
                best = (order, mark)
        return None if best is None else (best[0][2], best[1])

    def ready(self, text: str) -> int:
        """How much of a text without a whole mark cannot be the beginning of one."""
        for match in self.firsts.finditer(text, max(0, len(text) - self._longest + 1)):
            rest = text[match.start() :]
            if any(string.startswith(rest) for string in self._strings):
                return match.start()
        return len(text)
