"""What a database's index of words does for a search."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import log1p
from typing import Protocol

from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Counted:
    """The words of a query in a store. num_chunks: that the store has. counts: those that have each word.
    length: the different words of a chunk on average; 0 where the database knows that by itself."""

    num_chunks: int
    counts: Sequence[int]
    length: float = 0.0

    def rarities(self) -> list[float]:
        """How much it says of a chunk that it has each word, as BM25 has it."""
        return [log1p((max(self.num_chunks, n) - n + 0.5) / (n + 0.5)) for n in self.counts]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is looked for in a store: the best `most` chunks, of those that have words. files: keys of files:
    those whose chunks are looked at where `only`, and otherwise those whose are not."""

    store: int
    files: Collection[int]
    only: bool
    most: int


class WordsIndex(Protocol):
    """Words are of letters, digits and spaces: one with spaces is a phrase."""

    def add(self, conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
        """Takes chunks in: ids and texts."""

    def remove(self, conn: Connection, chunks: Sequence[tuple[int, str]]) -> None:
        """Takes chunks out; the texts are those that were taken in."""

    def merge(self, conn: Connection, *, whole: bool = False) -> bool:
        """Merges some of what transactions have added; False when there is nothing to be merged. whole: it
        begins to merge everything, after which nothing is kept of what was taken out; later calls go on with
        that."""

    def count(self, conn: Connection, store: int, words: Sequence[str], most: int) -> Counted:
        """How frequent words are in a store; of those that more than `most` chunks have it is enough to know
        that."""
        ...

    def rank(
        self, conn: Connection, wanted: Wanted, words: Sequence[str], counted: Counted, share: int
    ) -> list[tuple[int, float]]:
        """The chunks that match words best: ids and scores, the highest first. counted: of these words.
        share: chunks that have a word of which no more than so many have to be found."""
        ...

    def words_in(self, conn: Connection, chunks: Sequence[int], words: Sequence[str]) -> dict[int, list[int]]:
        """The places of the words that each of these chunks has."""
        ...
