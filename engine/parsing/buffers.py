"""Holds the text that the parser has not classified yet, and joins deltas of one kind.

Each Text delta knows the span of the model's text that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from engine.types import CallArgs, Delta, Reasoning, Text

Kind = Literal["text", "preamble", "thought", "arguments"]

_MAKE: dict[Kind, Callable[[str], Delta]] = {
    "text": Text,
    "preamble": lambda text: Text(text, preamble=True),
    "thought": Reasoning,
    "arguments": CallArgs,
}


class Held:
    """Text that was fed and is not yet told apart. at: its offset in all that was fed."""

    __slots__ = ("at", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0

    def drop(self, count: int) -> None:
        """Take characters off the front."""
        self.text = self.text[count:]
        self.at += count

    def put_back(self, text: str) -> None:
        """Undo the drop of a text."""
        self.text = text + self.text
        self.at -= len(text)


class Pieces:
    """The deltas since the last `take`."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._spans: list[tuple[int, int]] = []
        self._kind: Kind | None = None
        self._last: Kind | None = None  # of all that was given out
        self._ended: Kind | None = None
        self._run: list[str] = []
        self._start = self._end = 0

    def add(self, kind: Kind, text: str, start: int) -> None:
        """More of a kind; `start` is the text's offset."""
        if not text:
            return
        if kind != self._kind:
            self._flush()
            self._kind, self._start = kind, start
        if kind == self._ended:
            self._run.append("\n\n")
        self._last, self._ended = kind, None
        self._run.append(text)
        self._end = start + len(text)

    def part(self) -> None:
        """What came last has ended: more of its kind, if that comes next, is another paragraph."""
        self._ended = self._last

    def close(self, delta: Delta) -> None:
        """A delta that stands alone."""
        self._flush()
        self._last = self._ended = None
        self._deltas.append(delta)

    def take(self) -> tuple[list[Delta], list[tuple[int, int]]]:
        """The deltas since the last take, and the span [start, end) behind each of its Texts."""
        self._flush()
        deltas, spans = self._deltas, self._spans
        self._deltas, self._spans = [], []
        return deltas, spans

    def _flush(self) -> None:
        if self._kind is not None:
            self._deltas.append(_MAKE[self._kind]("".join(self._run)))
            if self._kind in ("text", "preamble"):
                self._spans.append((self._start, self._end))
            self._kind, self._run = None, []
